"""Routines that multiply by quantized weights, and the choice between them."""
