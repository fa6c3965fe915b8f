"""Dimensions from a parameter budget: `ModelConfig`, `compute_model_dims`, the parameter table.

The names are those of the budget language model that `docs/design.md` describes. Rounding one
dimension after the other misses the target by 2.7 % at these defaults, so the dimensions come from
the budget solver. An untied head counts as embedding, in the ratio and in the table.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import nn

from glassformer.budget.answer import Answer
from glassformer.budget.design import solve
from glassformer.budget.question import Budget
from glassformer.costs.parameter_table import allocate
from glassformer.spec.checks import probability
from glassformer.spec.model import Dropout, ModelSpec, SwiGLU


class ModelDims(NamedTuple):
    """The dimensions that the budget decides."""

    d_model: int
    d_ff: int
    n_layers: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A parameter budget. One that breaks a rule is refused here, an infeasible one when solved."""

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
        self.budget()

    def budget(self) -> Budget:
        """Return the budget as options of the solver."""
        return Budget(
            vocab=self.vocab_size,
            params=self.total_params,
            heads=self.n_heads,
            tied=self.tied_lm_head,
            length=self.max_seq_length,
            embedding_ratio=self.embedding_ratio,
            glu_expansion=self.glu_expansion,
        )

    def answer(self) -> Answer:
        """Return the solver's answer, within 0.5 % of `total_params`."""
        return solve(self.budget(), alternatives=False)

    def spec(self) -> ModelSpec:
        """Return the model spec of the best design, with dropout."""
        model = self.answer().spec
        rates = Dropout.from_number(self.dropout)
        return replace(model, decoder=replace(model.decoder, dropout=rates))


class Configured(Protocol):
    """A built model with the configuration and the spec that it was built from."""

    config: ModelConfig | None
    described: ModelSpec


def compute_model_dims(config: ModelConfig) -> ModelDims:
    """Return d_model, d_ff and n_layers for the budget."""
    sizes = config.answer().best.sizes
    return ModelDims(sizes.d_model, sizes.d_ff, sizes.n_layers)


def count_parameters(model: nn.Module) -> int:
    """Count the trainable parameters; tied ones count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def print_param_table(model: Configured) -> None:
    """Print the parameter table; lines add up, and percentages are of the actual total."""
    found, spec = allocate(model.described), model.described
    line, rule = "{:<28}{:>14,}{:>13.2%}", "-" * 55
    rows = {"Token Embedding": found.token, "Position Embedding": found.position}
    rows |= {"LM Head (output)": found.head, "Transformer Backbone": found.backbone}
    rows |= {"Final LayerNorm": found.final_norm}
    print(f"{'Component':<28}{'Parameters':>14}{'Percentage':>13}\n{rule}")
    for name, count in rows.items():
        print(line.format(name, count, count / found.total))
        if name.startswith("Transformer"):
            for label, part in (("Attention", "attention"), ("FFN/SwiGLU", "ffn")):
                print(f"  {label + ' (per layer)':<26}{found.per_layer[part]:>14,}")
            print(f"  {'LayerNorm (per layer)':<26}{found.per_layer['norm']:>14,}")
            print(f"  {'Num layers':<26}{found.n_layers:>14}")
    print(f"{rule}\n{line.format('TOTAL', found.total, 1.0)}\n")
    block = next(spec.decoder.blocks())
    assert isinstance(block.ffn, SwiGLU)
    share = (found.token + found.head) / found.total
    print(f"d_model: {spec.d_model}\nd_ff: {block.ffn.d_ff}\nn_layers: {found.n_layers}")
    print(f"n_heads: {block.attention.n_heads}\nvocab_size: {spec.vocab_size}")
    print(f"embedding_ratio: {share:.2%}\nglu_expansion: {block.ffn.d_ff / spec.d_model:.2f}x")
    print(f"tied_lm_head: {found.tied}")
    if model.config is not None:
        target = model.config.total_params
        print(f"Target params: {target:,}\nActual params: {found.total:,}")
        print(f"Difference: {found.total - target:+,} ({found.total / target - 1:+.2%})")
