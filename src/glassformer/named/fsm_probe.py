"""The probe of finite-state machines: every name of its document's `src/model/`.

    config.py           ModelConfig
    embedding.py        TokenEmbedding, FactorizedEmbedding
    positional.py       PositionalEncoding, add_positional
    attention.py        CausalSelfAttention
    mlp.py              MLP
    transformer.py      TransformerBlock, SingleLayerTransformer
    heads.py            NextTokenHead, ClassHead, StateHead
    instrumentation.py  capture

Embedding -> add positions -> one pre-norm block -> heads, without a final norm. Masks are bool,
True where a token is valid; PAD neither attends nor is attended to, and its logits are left to the
loss. Parts stand alone, for tests and for reading; the model is built from the same ones, and is a
model as `gf.build` returns it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from glassformer.adapters.native import CustomTransformerAdapter
from glassformer.models.inputs import Inputs
from glassformer.models.model import build
from glassformer.named import masks
from glassformer.nn import attention, block, embedding, ffn
from glassformer.nn.initialise import initialise
from glassformer.nn.linear import Linear
from glassformer.nn.mask import Mask, build_mask
from glassformer.nn.position import SinusoidalPosition, sinusoids
from glassformer.nn.taps import Taps, TapsAt, scope
from glassformer.spec import manifest
from glassformer.spec import model as spec
from glassformer.spec.checks import at_least, divides, probability
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.init import XavierInit
from glassformer.spec.position import Sinusoidal
from glassformer.spec.presets import fsm_probe

__all__ = [
    "MLP",
    "CausalSelfAttention",
    "ClassHead",
    "FactorizedEmbedding",
    "ModelConfig",
    "NextTokenHead",
    "PositionalEncoding",
    "SingleLayerTransformer",
    "StateHead",
    "TokenEmbedding",
    "TransformerBlock",
    "add_positional",
    "capture",
]

# B batch, T length, D d_model, V vocabulary, R rank


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The document's fields, checked when it is made; a value that breaks a rule raises an error.

    vocab_size            tokens; ids run from 0 to vocab_size - 1
    num_classes           classes of the class head, at every position
    num_states            states of the state head; 0 (default) leaves it out
    d_model               width of the residual stream, a multiple of n_heads (128)
    n_heads               heads of d_model / n_heads each (4)
    d_mlp                 inner width of the MLP (512)
    dropout               share of attention weights, residual and inner activations dropped in
                          training, 0 <= dropout < 1 (0.0)
    max_seq_len           longest sequence; a longer one raises an error (256)
    tie_weights           next-token head shares the embedding's weight, and has a bias (True)
    factorized_embedding  embedding U V of rank factor_rank in place of one table (False)
    factor_rank           rank of U (vocab_size, rank) and V (rank, d_model); None without factors
    l1_u                  factor of sum |U| in `l1_penalty()`, 0 or more, with factors only (0.0)
    positional_type       "sin" adds sinusoids, "none" adds nothing ("sin")
    """

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
        for name in ("tie_weights", "factorized_embedding"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r}", hint="True or False")
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
        if self.factor_rank is not None:
            at_least("factor_rank", self.factor_rank)
        number = isinstance(self.l1_u, int | float) and not isinstance(self.l1_u, bool)
        if not number or not 0.0 <= self.l1_u < math.inf:
            raise InputError(f"l1_u {self.l1_u!r}", hint="a number of 0 or more")
        if self.l1_u and self.factor_rank is None:
            raise InputError(
                f"l1_u={self.l1_u} without U",
                hint="factorized_embedding=True, factor_rank=..., or leave l1_u out",
            )

    def spec(self) -> spec.ModelSpec:
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


# --- embeddings and positions ---------------------------------------------------------------------


class TokenEmbedding(embedding.TokenEmbedding):
    """weight[token]: (B, T) -> (B, T, d_model), Xavier uniform."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__(vocab_size, d_model)
        _xavier(self.weight)

    def forward(self, tokens_bxt: Tensor) -> Tensor:
        masks.token_ids(tokens_bxt, len(self.weight))
        return super().forward(tokens_bxt)


class FactorizedEmbedding(embedding.FactorizedTokenEmbedding):
    """U[token] @ V with U (vocab, rank), V (rank, d_model); `penalty()` is l1_u * sum |U|.

    The document writes U @ V[index]; the index is a token, so it picks a row of U.
    """

    def __init__(self, vocab_size: int, d_model: int, rank: int, *, l1_u: float = 0.0) -> None:
        super().__init__(vocab_size, d_model, rank=rank, l1=l1_u)
        _xavier(self.u)
        _xavier(self.v)

    def forward(self, tokens_bxt: Tensor) -> Tensor:
        masks.token_ids(tokens_bxt, len(self.u))
        return super().forward(tokens_bxt)


def _xavier(weight: Tensor) -> None:
    torch.nn.init.xavier_uniform_(weight)


class PositionalEncoding(SinusoidalPosition):
    """x + PE for positions from 0, from a table of max_seq_len rows; nothing is learned."""

    def __init__(self, d_model: int, max_seq_len: int = 256) -> None:
        super().__init__(max_seq_len, d_model, kind=Sinusoidal())

    def forward(self, x_btd: Tensor) -> Tensor:  # type: ignore[override]
        """(B, T, d_model) -> the same shape and dtype; T is at most max_seq_len."""
        masks.vectors("x_btd", x_btd, self.table.shape[-1])
        T = x_btd.shape[-2]
        if self.max_seq_len < T:
            raise InputError(f"length {T} exceeds max_seq_len {self.max_seq_len}")
        return super().forward(x_btd, slice(0, T))


def add_positional(x_btd: Tensor) -> Tensor:
    """Return x plus the sinusoidal encoding of its positions; nothing is learned."""
    T, D = x_btd.shape[-2:]
    return x_btd + sinusoids(T, D).to(x_btd)


# --- the block ------------------------------------------------------------------------------------


def _described(d_model: int, n_heads: int, d_mlp: int = 1) -> spec.Block:
    divides("d_model", d_model, "n_heads", n_heads)
    return spec.Block(
        mixer=spec.Attention(n_heads=n_heads, bias="all"),
        ffn=spec.MLP(d_ff=d_mlp),
        norm=spec.LayerNorm(),
    )


def _mask(x_btd: Tensor, d_model: int, attn_mask_bxt: Tensor | None) -> Mask:
    masks.vectors("x_btd", x_btd, d_model)
    B, T = x_btd.shape[:2]
    valid = masks.token_mask(attn_mask_bxt, batch=B, length=T, name="attn_mask_bxt")
    return build_mask(T, T, causal=True, valid_q_BT=valid, valid_k_BS=valid)


class CausalSelfAttention(attention.MultiHeadAttention):
    """Scaled dot-product attention to positions up to one's own; PAD is left out both ways.

    forward(x_btd, attn_mask_bxt) -> (B, T, d_model), and with return_attn also (B, n_heads, T, T).
    """

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        described = _described(d_model, n_heads).attention
        super().__init__(described, d_model, dropout=dropout)
        self.d_model = d_model
        rules = manifest.attention_parameters(described, "", d_model, init=XavierInit())
        initialise(self, tuple(rules))

    def forward(  # type: ignore[override]
        self, x_btd: Tensor, attn_mask_bxt: Tensor | None = None, return_attn: bool = False
    ) -> "Tensor | tuple[Tensor, Tensor]":
        """Attend: x_btd (B, T, d_model), attn_mask_bxt (B, T) bool, True = valid; None = all are.

        The result has x's shape and dtype. With return_attn, also the weights (B, n_heads, T, T).
        """
        mask = _mask(x_btd, self.d_model, attn_mask_bxt)
        if not return_attn:
            return super().forward(x_btd, mask=mask)
        taps = Taps(read="weights")
        out = super().forward(x_btd, mask=mask, taps=TapsAt(taps, ""))
        return out, taps.seen["weights"]


class MLP(ffn.MLP):
    """Linear(d_model -> d_mlp) -> GELU -> Dropout -> Linear(d_mlp -> d_model): (B, T, d_model)."""

    def __init__(self, d_model: int, d_mlp: int, dropout: float = 0.0) -> None:
        described = spec.MLP(d_ff=d_mlp)
        super().__init__(described, d_model, dropout=dropout)
        self.d_model = d_model
        rules = manifest.ffn_parameters(described, "", d_model, init=XavierInit())
        initialise(self, tuple(rules))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(masks.wide("x", x, self.d_model))


class TransformerBlock(block.TransformerBlock):
    """x = x + Attn(LN(x)); x = x + MLP(LN(x)); forward(x_btd, attn_mask_bxt) -> (B, T, d_model)."""

    def __init__(self, d_model: int, n_heads: int, d_mlp: int, dropout: float = 0.0) -> None:
        described = _described(d_model, n_heads, d_mlp)
        rates = spec.Dropout(attention=dropout, residual=dropout, ffn=dropout)
        super().__init__(described, d_model, dropout=rates)
        self.d_model = d_model
        rules = manifest.block_parameters(described, "", d_model, init=XavierInit())
        initialise(self, tuple(rules))

    def forward(  # type: ignore[override]
        self, x_btd: Tensor, attn_mask_bxt: Tensor | None = None
    ) -> Tensor:
        """(B, T, d_model) -> the same shape and dtype; attn_mask_bxt (B, T) bool, True = valid."""
        mask = _mask(x_btd, self.d_model, attn_mask_bxt)
        return super().forward(x_btd, mask=mask)


# --- heads ----------------------------------------------------------------------------------------


class NextTokenHead(Linear):
    """Linear(d_model -> vocab_size): (B, T, vocab_size); `tied` shares an embedding's weight."""

    def __init__(
        self, d_model: int, vocab_size: int, *, tied: embedding.TokenEmbedding | None = None
    ) -> None:
        super().__init__(d_model, vocab_size, bias=True)
        _fill(self)
        if tied is not None:
            if tied.weight.shape != self.weight.shape:
                raise InputError(
                    f"a head of {tuple(self.weight.shape)} tied to a table of "
                    f"{tuple(tied.weight.shape)}"
                )
            self.weight = tied.weight


class ClassHead(Linear):
    """Linear(d_model -> num_classes), at every position: (B, T, num_classes)."""

    def __init__(self, d_model: int, num_classes: int) -> None:
        super().__init__(d_model, num_classes, bias=True)
        _fill(self)


class StateHead(Linear):
    """Linear(d_model -> num_states), at every position: (B, T, num_states)."""

    def __init__(self, d_model: int, num_states: int) -> None:
        super().__init__(d_model, num_states, bias=True)
        _fill(self)


def _fill(head: Linear) -> None:
    shape = (head.d_out, head.d_in)
    initialise(
        head,
        tuple(manifest.linear_parameters("", shape, role="head", init=XavierInit(), bias=True)),
    )


# --- the model ------------------------------------------------------------------------------------


class SingleLayerTransformer(CustomTransformerAdapter):
    """Embedding, positions, one pre-norm block, heads; see `forward` and `ModelConfig`."""

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__(build(config.spec(), generator=generator).train())
        self.config = config

    def forward(  # type: ignore[override]
        self, tokens_bxt: Tensor, attn_mask_bxt: Tensor | None = None, return_attn: bool = False
    ) -> dict[str, Tensor]:
        """Return {next_logits, class_logits, state_logits?, attn?}.

        tokens_bxt (B, T) of whole numbers below vocab_size, T at most max_seq_len; attn_mask_bxt
        (B, T) bool, True = valid, None = all are. Logits are (B, T, vocab_size), (B, T,
        num_classes), (B, T, num_states) in the parameters' dtype, PAD's included, which the loss
        leaves out. attn, with return_attn, is (B, n_heads, T, T): 0 after the diagonal, and in
        PAD's rows and columns.
        """
        valid = masks.mask_of("attn_mask_bxt", attn_mask_bxt, tokens_bxt)
        inputs = Inputs(tokens_bxt, valid)
        if not return_attn:
            return _by_name(self.model(inputs))
        taps = Taps(read=WEIGHTS)
        return _by_name(self.model(inputs, taps=taps)) | {"attn": taps.seen[WEIGHTS]}

    def l1_penalty(self) -> Tensor:
        """Return l1_u * sum |U|, to be added to the loss; 0 without the factorized embedding."""
        return self.model.penalty()

    def output_weight(self) -> tuple[Tensor, ...]:
        """Return the weight of the next-token head: the embedding's own tensors when tied."""
        if self.config.tie_weights:
            return tuple(self.model.output_embedding().parameters())
        return (cast(Tensor, self.model.heads["next"].weight),)


def _by_name(answers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{head}_logits": logits for head, logits in answers.items()}


WEIGHTS = "blocks.0.attn.weights"
#: What `capture` calls the taps that it keeps.
CAPTURED = {
    WEIGHTS: "attn",
    "blocks.0.resid_pre": "hidden_pre",
    "blocks.0.resid_post": "hidden_post",
}


@contextmanager
def capture(model: SingleLayerTransformer) -> Iterator[dict[str, Tensor]]:
    """Within the block, every forward fills the dict; outside of it nothing is computed for it.

    `attn` (B, n_heads, T, T); `hidden_pre` and `hidden_post` (B, T, d_model), before and after the
    block. `gf.trace` captures any other activation; blocks within each other each see every call.
    """
    with scope(model, Taps(read=tuple(CAPTURED), names=CAPTURED)) as kept:
        yield kept
