"""Models from disk in any known format, behind one interface."""
