"""Weights as whole numbers: schemes, layers, backends, calibration, and the way back."""
