"""Finite-state machines: construction, regular expressions, random walks."""
