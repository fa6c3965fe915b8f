"""What a run leaves on disk: written whole or not at all, checked when read, never a pickle."""
