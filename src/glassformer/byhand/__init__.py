"""The same specs in NumPy, with every gradient derived by hand: a check of the torch engine."""
