"""Runs and checkpoints on disk: written atomically, checked when read, never a pickle."""
