"""Looking inside a model: what its taps show, as values and as pictures."""
