"""The report of a run as one self-contained HTML file."""
