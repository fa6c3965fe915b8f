"""Signatures and help of the verbs; nothing here imports torch."""
