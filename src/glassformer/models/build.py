"""`build(spec)`: the only place where models are constructed."""

import torch

from glassformer.models.model import DecoderLM, EncoderDecoder
from glassformer.nn.init import initialise
from glassformer.spec.checks import check_tree
from glassformer.spec.manifest import manifest
from glassformer.spec.model import ModelSpec


def build(
    spec: ModelSpec,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> DecoderLM | EncoderDecoder:
    """Build a model with weights sampled by the spec's rules, in eval mode.

    Without a generator torch's own is used. On the device "meta" nothing is allocated or sampled.
    """
    check_tree(spec)
    target = torch.device(device or "cpu")
    with torch.device("meta" if target.type == "meta" else "cpu"):
        model = DecoderLM(spec) if spec.encoder is None else EncoderDecoder(spec)
    if target.type != "meta":
        # Sampled on the CPU, so that a seed gives the same weights on every device.
        initialise(model, manifest(spec), generator=generator)
        model.to(target)
    return model.eval()
