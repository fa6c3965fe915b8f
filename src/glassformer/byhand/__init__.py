"""The same specs in NumPy, with every gradient derived by hand: the witness for every other engine."""
