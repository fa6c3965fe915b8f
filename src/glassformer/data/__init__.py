"""The data of a model: batches, vocabularies and tasks, in NumPy."""
