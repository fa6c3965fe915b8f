"""Quantization of weights: schemes, layers, backends, calibration, dequantization."""
