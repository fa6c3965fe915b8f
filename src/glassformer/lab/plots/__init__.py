"""Figures of runs and designs, for files and for the terminal."""
