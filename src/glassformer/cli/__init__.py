"""The command `glass`."""
