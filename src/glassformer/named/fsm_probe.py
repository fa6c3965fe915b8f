"""The probe of finite-state machines: `ModelConfig` and `SingleLayerTransformer`.

Embedding -> add positions -> one pre-norm block -> heads, without a final norm. Masks are bool,
True where a token is valid; PAD neither attends nor is attended to, and its logits are left to the
loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from glassformer.models.inputs import Inputs
from glassformer.models.model import build
from glassformer.nn.position import sinusoids
from glassformer.nn.taps import Taps, trace
from glassformer.spec.checks import at_least, divides, probability
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import ModelSpec
from glassformer.spec.presets import fsm_probe


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The document's fields; num_states 0 leaves the state head out."""

    vocab_size: int
    num_classes: int
    num_states: int = 0
    d_model: int = 128
    n_heads: int = 4
    d_mlp: int = 512
    dropout: float = 0.0
    max_seq_len: int = 256
    tie_weights: bool = True
    factorized_embedding: bool = False
    factor_rank: int | None = None
    l1_u: float = 0.0
    positional_type: Literal["sin", "none"] = "sin"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_classes", "d_model", "n_heads", "d_mlp", "max_seq_len"):
            at_least(name, getattr(self, name))
        at_least("num_states", self.num_states, 0)
        divides("d_model", self.d_model, "n_heads", self.n_heads)
        probability("dropout", self.dropout)
        if self.positional_type not in ("sin", "none"):
            hint = nearest(str(self.positional_type), ("sin", "none"))
            raise InputError(f"positional_type '{self.positional_type}'", hint=hint)
        if self.factorized_embedding != (self.factor_rank is not None):
            raise InputError(
                f"factorized_embedding={self.factorized_embedding}, factor_rank={self.factor_rank}",
                hint="give both or neither",
            )

    def spec(self) -> ModelSpec:
        """Return the same model as a `ModelSpec`."""
        return fsm_probe(
            vocab_size=self.vocab_size,
            num_classes=self.num_classes,
            num_states=self.num_states,
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_ff=self.d_mlp,
            max_seq_len=self.max_seq_len,
            dropout=self.dropout,
            tied=self.tie_weights,
            rank=self.factor_rank,
            l1=self.l1_u,
            sinusoidal=self.positional_type == "sin",
        )


class SingleLayerTransformer(nn.Module):
    """forward(...) -> {next_logits, class_logits, state_logits?, attn?}."""

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.model = build(config.spec(), generator=generator)

    def forward(
        self, tokens_bxt: Tensor, attn_mask_bxt: Tensor | None = None, return_attn: bool = False
    ) -> dict[str, Tensor]:
        taps = Taps(read="blocks.0.attn.weights") if return_attn else self.model.scoped_taps
        answers = self.model(Inputs(tokens_bxt, attn_mask_bxt), taps=taps)
        result = {f"{head}_logits": logits for head, logits in answers.items()}
        if return_attn:
            assert taps is not None
            result["attn"] = taps.seen["blocks.0.attn.weights"]
        return result

    def l1_penalty(self) -> Tensor:
        """Return l1_u * sum |U|, to be added to the loss; 0 without the factorized embedding."""
        return self.model.penalty()

    def output_weight(self) -> tuple[Tensor, ...]:
        """Return the weight of the next-token head: the embedding's own tensors when tied."""
        if self.config.tie_weights:
            return tuple(self.model.output_embedding().parameters())
        return (cast(Tensor, self.model.heads["next"].weight),)


def add_positional(x_btd: Tensor) -> Tensor:
    """Return x plus the sinusoidal encoding of its positions; nothing is learned."""
    T, D = x_btd.shape[-2:]
    return x_btd + sinusoids(T, D).to(x_btd)


@contextmanager
def capture(model: SingleLayerTransformer) -> Iterator[dict[str, Tensor]]:
    """Within the block, every forward fills the dict: attention per head, hidden states."""
    names = ["blocks.0.attn.weights", "blocks.0.resid_pre", "blocks.0.resid_post"]
    with trace(model.model, read=names) as seen:
        yield seen
