"""Tokenizers as model folders store them."""
