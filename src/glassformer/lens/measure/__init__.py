"""What is computed from a pass: one file per measure."""
