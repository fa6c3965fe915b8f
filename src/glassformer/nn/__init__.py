"""The parts of a transformer in plain PyTorch: small modules, each built from a part of a spec."""
