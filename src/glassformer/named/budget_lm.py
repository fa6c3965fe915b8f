"""`LanguageModel`: (logits, loss) of a decoder of any spec.

Labels are aligned with the logits: shifting is done by the data. `presets.budget_lm` is the
document's model (learned positions, LayerNorm); `presets.modern_lm` has rotary positions, RMSNorm
and grouped keys and values behind the same interface.

The budget language model: `SwiGLU`, `MultiHeadAttention`, `TransformerBlock`, `LanguageModel`.

Pre-norm, SwiGLU, no biases in projections, learned positions, tied head. The complete model and its
loss are in `language_model`.
"""

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.lab.api import result_of, train
from glassformer.models.model import build
from glassformer.named.parameter_budget import (
    ModelConfig,
    compute_model_dims,
    count_parameters,
    print_param_table,
)
from glassformer.nn import attention, block, ffn
from glassformer.nn.init import initialised
from glassformer.nn.mask import Mask, mask_from_allow
from glassformer.spec import manifest
from glassformer.spec import model as spec
from glassformer.spec.checks import divides
from glassformer.spec.errors import InputError
from glassformer.spec.init import NormalInit
from glassformer.spec.train import RunSpec

#: A label of this value is left out of the loss.
IGNORED = -100


class LanguageModel(nn.Module):
    """model(ids) -> (logits, None); model(ids, labels=...) -> (logits, mean cross-entropy).

    Where every label is IGNORED, the loss is 0 and so are its gradients.
    """

    def __init__(
        self,
        described: spec.ModelSpec | ModelConfig,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.config = described if isinstance(described, ModelConfig) else None
        self.described = described.spec() if isinstance(described, ModelConfig) else described
        self.model = build(self.described, generator=generator)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.model(ids)["next"]
        if labels is None:
            return logits, None
        if labels.shape != ids.shape:
            raise InputError(f"labels have shape {tuple(labels.shape)}, the ids {tuple(ids.shape)}")
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return logits, total / (labels != IGNORED).sum().clamp(min=1)


def shift_for_lm(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and aligned labels of next-token prediction: ids[:, :-1] and ids[:, 1:]."""
    return ids[:, :-1], ids[:, 1:]


def run_experiment(config: RunSpec, folder: str | Path) -> dict[str, Any]:
    """Train a complete run in a folder and return its results."""
    path = Path(folder)
    return result_of(train(config, name=path.name, runs=path.parent))


__all__ = [
    "IGNORED",
    "LanguageModel",
    "ModelConfig",
    "MultiHeadAttention",
    "SwiGLU",
    "TransformerBlock",
    "compute_model_dims",
    "count_parameters",
    "print_param_table",
    "run_experiment",
    "shift_for_lm",
]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): 3 * d_model * d_ff parameters, no biases."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        described = spec.SwiGLU(d_ff=d_ff)
        rules = manifest.ffn_parameters(described, "", d_model, init=NormalInit())
        self.part = initialised(ffn.SwiGLU(described, d_model), rules)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.part(x))


def _described(d_model: int, n_heads: int, d_ff: int) -> spec.Block:
    divides("d_model", d_model, "n_heads", n_heads)
    return spec.Block(
        attention=spec.Attention(n_heads=n_heads),
        ffn=spec.SwiGLU(d_ff=d_ff),
        norm=spec.LayerNorm(),
    )


def _mask(allow: Tensor | None) -> Mask:
    return Mask(causal=True) if allow is None else mask_from_allow(allow)


class MultiHeadAttention(nn.Module):
    """Causal self-attention, no biases, 4 * d_model^2 parameters; `allow` replaces the triangle."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        described = _described(d_model, n_heads, 1).attention
        self.output_dropout = output_dropout
        rules = manifest.attention_parameters(described, "", d_model, init=NormalInit())
        self.part = initialised(
            attention.MultiHeadAttention(described, d_model, dropout=attention_dropout), rules
        )

    def forward(self, x: Tensor, allow: Tensor | None = None) -> Tensor:
        return F.dropout(self.part(x, mask=_mask(allow)), self.output_dropout, self.training)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x)); `allow` replaces the triangle."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        described = _described(d_model, n_heads, d_ff)
        rates = spec.Dropout.from_number(dropout)
        rules = manifest.block_parameters(described, "", d_model, init=NormalInit())
        self.part = initialised(block.TransformerBlock(described, d_model, dropout=rates), rules)

    def forward(self, x: Tensor, allow: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.part(x, mask=_mask(allow)))
