"""Measures of a pass, one per file."""
