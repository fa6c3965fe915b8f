"""Generate sequences with a model: samplers, decoding, beams, constraints, and the native step."""
