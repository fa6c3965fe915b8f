"""The budget language model: every name of its document's `models/lm.py`.

`ModelConfig` holds a parameter budget, `compute_model_dims` solves it, and `LanguageModel` is the
model: pre-norm, SwiGLU, no biases in projections, learned positions, tied head. Rounding one
dimension after the other misses the target by 2.7 % at the defaults, so the dimensions come from
the budget solver; an untied head counts as embedding, in the ratio and in the table. Labels are
aligned with the logits: shifting is done by the data (`shift_for_lm`).

A `LanguageModel` is a model as `gf.build` returns it; only its call is the document's.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.adapters.native import CustomTransformerAdapter
from glassformer.budget.answer import Answer
from glassformer.budget.design import solve
from glassformer.budget.question import Budget
from glassformer.costs.parameter_table import allocate
from glassformer.lab.api import result_of, train
from glassformer.models.model import build
from glassformer.named import masks
from glassformer.nn import attention, block, ffn
from glassformer.nn.initialise import initialise
from glassformer.nn.mask import Mask
from glassformer.spec import manifest
from glassformer.spec import model as spec
from glassformer.spec.checks import divides, probability
from glassformer.spec.errors import InputError
from glassformer.spec.init import NormalInit
from glassformer.spec.train import RunSpec

__all__ = [
    "IGNORED",
    "Drift",
    "LanguageModel",
    "ModelConfig",
    "ModelDims",
    "MultiHeadAttention",
    "RelaxedTarget",
    "SwiGLU",
    "TransformerBlock",
    "causal_mask",
    "compute_model_dims",
    "count_parameters",
    "print_param_table",
    "run_experiment",
    "shift_for_lm",
]

#: A label of this value is left out of the loss.
IGNORED = -100
#: The actual number of parameters is at most this far from the target.
TOLERANCE = 0.005
#: A warning says if the embedding ratio is farther than two points from the requested one, or the
#: GLU expansion than a tenth; less is what whole dimensions cost.
NEAR_RATIO, NEAR_EXPANSION = 0.02, 0.1


# --- the budget -----------------------------------------------------------------------------------


class RelaxedTarget(UserWarning):
    """A requested embedding ratio or GLU expansion that no design of this budget comes near."""


class Drift(NamedTuple):
    """How far a design is from what was requested.

    total_params and glu_expansion: relative, 0.01 is 1 % more. embedding_ratio: a difference of
    ratios, 0.01 is one point more.
    """

    total_params: float = 0.0
    embedding_ratio: float = 0.0
    glu_expansion: float = 0.0


class _Sizes(NamedTuple):
    d_model: int
    d_ff: int
    n_layers: int


class ModelDims(_Sizes):
    """The dimensions that the budget decides, a tuple of three; `drift` from what was requested."""

    drift = Drift()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A parameter budget. One that breaks a rule is refused here, an infeasible one when solved.

    vocab_size       tokens (16,000)
    total_params     parameters, met within 0.5 % (10,000,000)
    embedding_ratio  share of them in token embedding and untied head, 0 to 1 (0.35)
    glu_expansion    d_ff / d_model (2.66)
    n_heads          heads; d_model is a multiple of it (8)
    tied_lm_head     the head is the embedding, transposed (True)
    max_seq_length   longest sequence, and learned positions (512)
    dropout          of attention weights, residuals and inner activations, in training (0.0)

    The total and the vocabulary decide what ratios there are, so ratio and expansion are targets:
    `compute_model_dims(config).drift` has how far they are missed, and a `RelaxedTarget` warning
    says so where that is more than two points of ratio, or a tenth of the expansion.
    """

    vocab_size: int = 16_000
    total_params: int = 10_000_000
    embedding_ratio: float = 0.35
    glu_expansion: float = 2.66
    n_heads: int = 8
    tied_lm_head: bool = True
    max_seq_length: int = 512
    dropout: float = 0.0

    def __post_init__(self) -> None:
        probability("dropout", self.dropout)
        if not isinstance(self.tied_lm_head, bool):
            raise InputError(f"tied_lm_head={self.tied_lm_head!r}", hint="True or False")
        self.budget()

    def budget(self) -> Budget:
        """Return the budget as options of the solver."""
        return Budget(
            vocab=self.vocab_size,
            params=self.total_params,
            tolerance=TOLERANCE,
            heads=self.n_heads,
            tied=self.tied_lm_head,
            length=self.max_seq_length,
            shape="classic",  # learned positions, LayerNorm
            bias="none",
            embedding_ratio=self.embedding_ratio,
            glu_expansion=self.glu_expansion,
        )

    def answer(self) -> Answer:
        """Return the solver's answer, within 0.5 % of `total_params`."""
        return solve(self.budget(), alternatives=False)

    def spec(self) -> spec.ModelSpec:
        """Return the model spec of the best design, with dropout; warn of relaxed targets."""
        answer = self.answer()
        _warn_if_relaxed(answer)
        model = answer.spec
        rates = spec.Dropout.from_number(self.dropout)
        return replace(model, decoder=replace(model.decoder, dropout=rates))


def compute_model_dims(config: ModelConfig) -> ModelDims:
    """Return d_model, d_ff and n_layers for the budget; warn of targets that are not met."""
    answer = config.answer()
    _warn_if_relaxed(answer)
    sizes, best = answer.best.sizes, answer.best
    dims = ModelDims(sizes.d_model, sizes.d_ff, sizes.n_layers)
    dims.drift = Drift(best.error, best.ratio_drift or 0.0, best.glu_drift or 0.0)
    return dims


def _warn_if_relaxed(answer: Answer) -> None:
    best, budget = answer.best, answer.budget
    far = []
    if budget.ratio is not None and abs(best.ratio_drift or 0.0) > NEAR_RATIO:
        far.append(
            f"embedding_ratio {budget.ratio.value:g} is out of reach of {budget.params:,} "
            f"parameters with a vocabulary of {budget.vocab:,}: {best.embedding_ratio:.4f}"
        )
    if budget.expansion is not None and abs(best.glu_drift or 0.0) > NEAR_EXPANSION:
        far.append(
            f"glu_expansion {budget.expansion.value:g} is out of reach of whole dimensions: "
            f"{best.glu_expansion:.3f}"
        )
    if far:
        warnings.warn("; ".join(far), RelaxedTarget, stacklevel=3)


# --- parts ----------------------------------------------------------------------------------------


def causal_mask(length: int) -> Tensor:
    """Return (T, T) bool, True = may attend: the lower triangle with its diagonal."""
    return masks.causal(length)


class SwiGLU(ffn.SwiGLU):
    """down(silu(gate(x)) * up(x)): 3 * d_model * d_ff parameters, no biases.

    The document writes (x W_gate) * sigmoid(x W_up); the name means silu of the gate, and the
    number of parameters is the same.
    """

    def __init__(self, d_model: int, d_ff: int, *, dropout: float = 0.0) -> None:
        described = spec.SwiGLU(d_ff=d_ff)
        super().__init__(described, d_model, dropout=dropout)
        self.d_model = d_model
        rules = manifest.ffn_parameters(described, "", d_model, init=NormalInit())
        initialise(self, tuple(rules))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(masks.wide("x", x, self.d_model))


def _block(d_model: int, n_heads: int, d_ff: int = 1) -> spec.Block:
    divides("d_model", d_model, "n_heads", n_heads)
    return spec.Block(
        mixer=spec.Attention(n_heads=n_heads),
        ffn=spec.SwiGLU(d_ff=d_ff),
        norm=spec.LayerNorm(),
    )


def _mask(allow: Tensor | None, x: Tensor, d_model: int, heads: int) -> Mask:
    masks.vectors("x", x, d_model)
    if allow is None:
        return Mask(causal=True)
    B, T = x.shape[:2]
    if isinstance(allow, masks.PaddingMask):
        raise InputError(
            "a padding mask alone, where a mask replaces the causal one",
            hint=f"causal_mask({T}) & padding_mask(lengths)",
        )
    return masks.attention_mask(allow, batch=B, heads=heads, queries=T, keys=T)


class MultiHeadAttention(attention.MultiHeadAttention):
    """Causal self-attention, no biases, 4 * d_model^2 parameters; a mask replaces the triangle.

    forward(x, mask=None): x and result [batch, seq, d_model]; a mask is bool, True = may attend:
    `causal_mask(T)`, [seq, seq], [batch, seq, seq] or [batch, heads, seq, seq].
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
    ) -> None:
        described = _block(d_model, n_heads).attention
        super().__init__(described, d_model, dropout=attention_dropout)
        self.d_model, self.n_heads, self.output_dropout = d_model, n_heads, output_dropout
        rules = manifest.attention_parameters(described, "", d_model, init=NormalInit())
        initialise(self, tuple(rules))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        out = super().forward(x, mask=_mask(mask, x, self.d_model, self.n_heads))
        return F.dropout(out, self.output_dropout, self.training)


class TransformerBlock(block.TransformerBlock):
    """x + attention(norm(x)), then x + swiglu(norm(x)); masks as `MultiHeadAttention` takes."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int, *, dropout: float = 0.0) -> None:
        described = _block(d_model, n_heads, d_ff)
        super().__init__(described, d_model, dropout=spec.Dropout.from_number(dropout))
        self.d_model, self.n_heads = d_model, n_heads
        rules = manifest.block_parameters(described, "", d_model, init=NormalInit())
        initialise(self, tuple(rules))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, mask=_mask(mask, x, self.d_model, self.n_heads))


# --- the model ------------------------------------------------------------------------------------


class LanguageModel(CustomTransformerAdapter):
    """model(ids) -> (logits, None); model(ids, labels=...) -> (logits, mean cross-entropy).

    Of a `ModelConfig`, or of any decoder's `ModelSpec`. Where every label is IGNORED, the loss is 0
    and so are its gradients.
    """

    def __init__(
        self, config: ModelConfig | spec.ModelSpec, *, generator: torch.Generator | None = None
    ) -> None:
        described = config.spec() if isinstance(config, ModelConfig) else config
        super().__init__(build(described, generator=generator).train())
        self.config = config if isinstance(config, ModelConfig) else None
        if self.config is not None:
            drift = count_parameters(self) / self.config.total_params - 1
            assert abs(drift) <= TOLERANCE, f"{drift:+.2%} off the target"

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.model(input_ids)["next"]
        if labels is None:
            return logits, None
        if labels.shape != input_ids.shape:
            shape = tuple(input_ids.shape)
            raise InputError(f"labels have shape {tuple(labels.shape)}, the ids {shape}")
        whole = not (labels.is_floating_point() or labels.is_complex())
        if not whole or labels.dtype == torch.bool:
            raise InputError(f"labels of dtype {labels.dtype}", hint="token ids, torch.long")
        labels = labels.to(logits.device, torch.int64)
        masks.token_ids(labels[labels != IGNORED], logits.shape[-1], name="label")
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return logits, total / (labels != IGNORED).sum().clamp(min=1)


def shift_for_lm(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and aligned labels of next-token prediction: ids[:, :-1] and ids[:, 1:]."""
    return ids[:, :-1], ids[:, 1:]


# --- accounting -----------------------------------------------------------------------------------


def count_parameters(model: nn.Module) -> int:
    """Count the trainable parameters; tied ones count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def print_param_table(model: LanguageModel) -> None:
    """Print the parameter table; lines add up, and percentages are of the actual total.

    The configuration has what was requested, and in brackets what whole dimensions gave.
    """
    described, config = model.spec, model.config
    found = allocate(described)
    first = described.decoder.block()
    assert isinstance(first.ffn, spec.SwiGLU)

    def line(name: str, count: int, total: int | None = found.total) -> str:
        share = "" if total is None else f"{count / total:>14.2%}"
        return f"{name:<28}{count:>17,}{share}"

    ratio = f"{(found.token + found.head) / found.total:.2%}"
    expansion = f"{first.ffn.d_ff / described.d_model:.2f}x"
    if config is not None:
        ratio = _wished(f"{config.embedding_ratio:.2%}", ratio)
        expansion = _wished(f"{config.glu_expansion:.2f}x", expansion)
    thick, thin = "=" * 80, "-" * 80
    lines = [thick, "Parameter Allocation Table", thick]
    lines += [f"{'Component':<28}{'Parameters':>17}{'Percentage':>14}", thin]
    lines += [line("Token Embedding", found.token), line("Position Embedding", found.position)]
    lines += [line("LM Head (output)", found.head), f"  (tied={found.tied})", thin]
    lines += [
        line("Transformer Backbone:", found.backbone),
        line("  Attention (per layer)", found.per_layer["attention"], None),
        line("  FFN/SwiGLU (per layer)", found.per_layer["ffn"], None),
        line("  LayerNorm (per layer)", found.per_layer["norm"], None),
        line("  Num layers", found.n_layers, None),
        line("Final LayerNorm", found.final_norm),
        thin,
        line("TOTAL", found.total),
        thick,
        "",
        "Model Configuration:",
        f"  d_model: {described.d_model}",
        f"  d_ff: {first.ffn.d_ff}",
        f"  n_layers: {found.n_layers}",
        f"  n_heads: {first.attention.n_heads}",
        f"  vocab_size: {described.vocab_size}",
        f"  embedding_ratio: {ratio}",
        f"  glu_expansion: {expansion}",
        f"  tied_lm_head: {found.tied}",
    ]
    if config is not None:
        away = found.total - config.total_params
        lines += [
            "",
            f"Target params: {config.total_params:,}",
            f"Actual params: {found.total:,}",
            f"Difference: {away:+,} ({away / config.total_params:+.2%})",
        ]
    print("\n".join([*lines, thick]))


def _wished(wish: str, actual: str) -> str:
    return wish if wish == actual else f"{wish} (actual {actual})"


def run_experiment(config: RunSpec, folder: str | Path) -> dict[str, Any]:
    """Train a complete run in a folder and return its results."""
    path = Path(folder)
    return result_of(train(config, name=path.name, runs=path.parent))
