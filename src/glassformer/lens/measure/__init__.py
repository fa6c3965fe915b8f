"""Measurements of a model: attention, logit lens, norms, ablation, patching, roles."""
