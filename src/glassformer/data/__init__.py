"""What a model is fed: batches, vocabularies and tasks, in NumPy."""
