"""Sweeps: many runs, planned, executed, ranked and shown."""
