"""Training: losses, engines, and one loop that yields a record a step."""
