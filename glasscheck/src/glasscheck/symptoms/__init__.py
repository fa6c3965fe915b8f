"""The twenty examinations of `doctor`, by what they look at."""
