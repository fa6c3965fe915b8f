"""The budget solver: from a number of parameters to the dimensions of a model."""
