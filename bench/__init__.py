"""Comparisons with peers, in one run, as ratios. `python -m bench NAME [--json]`."""
