"""Training: losses, engines, and one loop that yields a record per step."""
