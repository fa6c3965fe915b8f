"""From a model to sequences: samplers, decoding, beams, constraints, and the fast steps."""
