"""Measurements of a trained model: evaluation, precision, suites, machine rates."""
