"""Corpora of any size: files to documents, documents to token shards, shards to batches."""
