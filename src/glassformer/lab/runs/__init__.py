"""Training runs: assembling, recording, resuming, reading back."""
