"""Code that all verbs share: terminal, process, model references, progress, output."""
