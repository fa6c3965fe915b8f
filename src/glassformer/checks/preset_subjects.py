"""Models to check when none is given: every preset, with weights that hide no mistake."""

import math
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from glasscheck.measure import seeded
from glasscheck.subject import Subject
from glassformer.checks.subject import subject_of_model
from glassformer.models.model import build
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.spec import presets
from glassformer.spec.model import ModelSpec

AnyModule = TypeVar("AnyModule", bound=nn.Module)

#: Narrow stand-ins of the presets whose claims do not depend on width; `deep` takes the full ones.
NARROW: dict[str, ModelSpec] = {
    "budget-lm": presets.budget_lm(vocab_size=211, d_model=48, d_ff=128, n_layers=3),
    "modern-lm": presets.modern_lm(
        vocab_size=211, d_model=48, d_ff=128, n_layers=3, n_heads=6, n_kv_heads=2
    ),
    "alibi-lm": presets.alibi_lm(vocab_size=211, d_model=48, d_ff=96, n_layers=2, n_heads=6),
    "seq2seq": presets.seq2seq(vocab_size=101, d_model=48, n_heads=4, n_layers=2),
    "seq2seq-pre": presets.seq2seq(
        vocab_size=101, d_model=48, n_heads=4, n_layers=2, pre_norm=True
    ),
}


def perturb(module: AnyModule, *, dtype: torch.dtype, seed: int) -> AnyModule:
    """Set random values everywhere, with activations of unit scale.

    Fresh weights would hide half of the mistakes: biases are 0, gains are 1, and attention with
    weights of 0.02 is nearly uniform.
    """
    generator = seeded(seed)
    module.to(dtype)
    gains = {id(part.weight) for part in module.modules() if isinstance(part, (LayerNorm, RMSNorm))}
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = 1 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.3
            parameter.copy_(noise * scale + (1.0 if id(parameter) in gains else 0.0))
    return module


def sample_subject(name: str, *, deep: bool = False) -> Subject:
    """Return a subject for one preset."""
    spec = presets.preset(name) if deep or name not in NARROW else NARROW[name]
    model = build(spec, generator=seeded(0))
    perturb(model, dtype=torch.float32, seed=86)
    return subject_of_model(model, name=name)


def sample_subjects(*, deep: bool = False) -> Iterator[Subject]:
    """Return a subject for each preset."""
    for name in presets.PRESETS:
        yield sample_subject(name, deep=deep)
