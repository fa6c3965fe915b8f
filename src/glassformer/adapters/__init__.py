"""Models from disk, whoever wrote them, behind one door."""
