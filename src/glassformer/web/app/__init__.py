"""The server of the explorer: routing, limits, protection, shared state."""
