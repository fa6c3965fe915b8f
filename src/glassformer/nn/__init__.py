"""The parts of a transformer in plain PyTorch: small modules that take numbers, not specs."""
