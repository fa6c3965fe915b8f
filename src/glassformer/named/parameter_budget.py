"""Source 001's accounting: `ModelConfig`, `compute_model_dims`, `count_parameters`, the table.

The source's own five steps miss its tolerance at its own default, by 2.7 %; the dimensions here are
the budget solver's. An untied head counts as embedding, in the ratio and in the table.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import nn

from glassformer.budget.design import solve
from glassformer.budget.question import Answer, Budget, Target
from glassformer.costs.parameter_table import allocate
from glassformer.spec.checks import probability
from glassformer.spec.model import Dropout, ModelSpec


class ModelDims(NamedTuple):
    """What the budget decides."""

    d_model: int
    d_ff: int
    n_layers: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The source's fields and defaults. A budget without an answer is refused when it is asked."""

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
        """The same question in the house's words."""
        return Budget(
            vocab_size=self.vocab_size,
            total=self.total_params,
            n_heads=self.n_heads,
            tied=self.tied_lm_head,
            max_seq_len=self.max_seq_length,
            embedding_ratio=Target(value=self.embedding_ratio),
            glu_expansion=Target(value=self.glu_expansion),
        )

    def answer(self) -> Answer:
        """The solver's answer, within 0.5 % of `total_params`."""
        return solve(self.budget(), alternatives=False)

    def spec(self) -> ModelSpec:
        """The model that answers."""
        model = self.answer().spec
        rates = Dropout.from_number(self.dropout)
        return replace(model, decoder=replace(model.decoder, dropout=rates))


class Configured(Protocol):
    """A built model with the configuration and the spec that it was built from."""

    config: ModelConfig | None
    described: ModelSpec


def compute_model_dims(config: ModelConfig) -> ModelDims:
    """d_model, d_ff and n_layers for the budget."""
    sizes = config.answer().best.sizes
    return ModelDims(sizes.d_model, sizes.d_ff, sizes.n_layers)


def count_parameters(model: nn.Module) -> int:
    """Trainable numbers; what is tied counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def print_param_table(model: Configured) -> None:
    """The source's table: every line adds up, and percentages are of the actual total."""
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
    share = (found.token + found.head) / found.total
    print(f"d_model: {spec.d_model}\nd_ff: {block.ffn.d_ff}\nn_layers: {found.n_layers}")
    print(f"n_heads: {block.attention.n_heads}\nvocab_size: {spec.vocab_size}")
    print(f"embedding_ratio: {share:.2%}\nglu_expansion: {block.ffn.d_ff / spec.d_model:.2f}x")
    print(f"tied_lm_head: {found.tied}")
    if model.config is not None:
        target = model.config.total_params
        print(f"Target params: {target:,}\nActual params: {found.total:,}")
        print(f"Difference: {found.total - target:+,} ({found.total / target - 1:+.2%})")
