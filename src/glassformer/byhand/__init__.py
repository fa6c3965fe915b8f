"""The same specs in NumPy, every gradient derived by hand: the witness for the other engines."""
