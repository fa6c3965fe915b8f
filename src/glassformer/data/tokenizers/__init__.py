"""Tokenizers: named symbols, characters, bytes, byte-pair encoding."""
