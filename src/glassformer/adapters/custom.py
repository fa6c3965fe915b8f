"""`CustomTransformerAdapter`: our own checkpoints, runs and presets."""

from glassformer.adapters.native import NativeAdapter


class CustomTransformerAdapter(NativeAdapter):
    """Any `Model` of ours: the five presets, and whatever else a `ModelSpec` says."""

    architecture_type = "custom-transformer"
