"""What a transformer is, described with the standard library alone."""
