"""Complete runs: training with evaluation and saving, results measured against the truth."""
