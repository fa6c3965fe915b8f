"""The encoder-decoder of the 2017 paper: every deliverable of its document, by milestone.

    1  scaled_dot_product_attention, padding_mask, causal_mask
    2  MultiHeadAttention, split_heads, concat_heads
    3  FeedForward, TokenEmbedding, PositionalEncoding, TransformerEmbedding
    4  EncoderLayer, DecoderLayer, Encoder, Decoder, gradient_flow
    5  Transformer, masked_cross_entropy, WarmupSchedule
    6  greedy_decode, sample_decode, beam_search, KVCache

Defaults are the paper's: d_model 512, N 6, heads 8, post-norm, dropout 0.1, embeddings times
sqrt(d_model), which modern models leave out (`scale_embedding=False`). `pre_norm=True` gives the
variant that is more stable to train when deep. Masks are bool: True = real token, True = may
attend. A `Transformer` is a model as `gf.build` returns it; only its call is the document's.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.adapters.generate import evaluating
from glassformer.adapters.native import CustomTransformerAdapter
from glassformer.generation.beam import Hypothesis
from glassformer.generation.beam import beam_search as search
from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.models.inputs import Inputs
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.named import masks
from glassformer.named.masks import token_ids, vectors
from glassformer.nn import attention, block, embedding, ffn
from glassformer.nn.cache import FixedCache as KVCache
from glassformer.nn.initialise import initialise
from glassformer.nn.mask import Mask, build_mask
from glassformer.nn.norm import build_norm
from glassformer.nn.position import SinusoidalPosition
from glassformer.nn.taps import Taps, TapsAt
from glassformer.spec import manifest, presets
from glassformer.spec import model as spec
from glassformer.spec.attention_shapes import check_heads
from glassformer.spec.checks import divides
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError
from glassformer.spec.init import XavierInit
from glassformer.spec.position import Sinusoidal
from glassformer.spec.train import InverseSqrtSchedule as WarmupSchedule

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "KVCache",
    "MultiHeadAttention",
    "PositionalEncoding",
    "TokenEmbedding",
    "Transformer",
    "TransformerEmbedding",
    "WarmupSchedule",
    "beam_search",
    "causal_mask",
    "concat_heads",
    "gradient_flow",
    "greedy_decode",
    "masked_cross_entropy",
    "padding_mask",
    "sample_decode",
    "scaled_dot_product_attention",
    "split_heads",
]

# B batch, T query length, S key length, D d_model, N heads

Rows = Tensor | Sequence[Sequence[int]]


# --- 1: scaled dot-product attention --------------------------------------------------------------


def padding_mask(lengths: Tensor | Sequence[int], *, max_length: int | None = None) -> Tensor:
    """Return (B, S) bool from sequence lengths, True = real token.

    Attention takes it as it is, and `causal_mask(T) & padding_mask(lengths)` is (B, T, T): both
    know their axes, so this holds where batch = seq too. A mask of your own is
    `(tokens != pad)[:, None]`.
    """
    return masks.padding(lengths, max_length=max_length)


def causal_mask(length: int) -> Tensor:
    """Return (T, T) bool, True = may attend: the lower triangle with its diagonal."""
    return masks.causal(length)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(d_k)) v and the weights.

    q [batch, seq, d_k], or with heads [batch, h, seq, d_k]. A mask is True where attention is
    allowed: `causal_mask`, `padding_mask`, both joined by `&`, or [seq, seq], [batch, seq, seq],
    [batch, h, seq, seq], where 1 stands for all. The scale keeps the scores of random vectors near
    1; the softmax subtracts the largest score, so none overflows.
    """
    check_heads(*(tuple(x.shape) for x in (q, k, v)))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise InputError(
            f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}", hint="one of floating point"
        )
    taps, one_head = Taps(read="weights"), q.ndim == 3
    if one_head:
        q, k, v = q[:, None], k[:, None], v[:, None]
    (batch, heads, queries), keys = q.shape[:3], k.shape[2]
    allow = masks.attention_mask(mask, batch=batch, heads=heads, queries=queries, keys=keys)
    out = attention.attend(q, k, v, mask=allow, taps=TapsAt(taps, ""))
    weights = taps.seen["weights"]
    return (out[:, 0], weights[:, 0]) if one_head else (out, weights)


# --- 2: multi-head attention ----------------------------------------------------------------------


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, seq, d_model] -> [batch, h, seq, d_k], d_k = d_model / h."""
    divides("d_model", x.shape[-1], "heads", heads)
    return attention.split_heads(x, x.shape[-1] // heads)


def concat_heads(x: Tensor) -> Tensor:
    """[batch, h, seq, d_k] -> [batch, seq, d_model]."""
    return attention.join_heads(x)


class MultiHeadAttention(attention.MultiHeadAttention):
    """concat(head_1, ..., head_h) W_O; all heads in one batched product.

    forward(x, memory=None, mask=None): queries of x, keys and values of memory, or of x itself;
    masks as `scaled_dot_product_attention` takes them, of memory's length where there is one.
    """

    def __init__(self, d_model: int = 512, heads: int = 8, *, dropout: float = 0.0) -> None:
        divides("d_model", d_model, "heads", heads)
        described = spec.Attention(n_heads=heads, bias="all", causal=False)
        super().__init__(described, d_model, dropout=dropout)
        self.d_model, self.heads = d_model, heads
        rules = manifest.attention_parameters(described, "", d_model, init=XavierInit())
        initialise(self, tuple(rules))

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        vectors("x", x, self.d_model)
        if memory is not None:
            vectors("memory", memory, self.d_model, like=x)
        allow = masks.attention_mask(
            mask,
            batch=len(x),
            heads=self.heads,
            queries=x.shape[1],
            keys=(x if memory is None else memory).shape[1],
        )
        return super().forward(x, mask=allow, context_BSD=memory)


# --- 3: feed-forward, embeddings, positions -------------------------------------------------------


class FeedForward(ffn.MLP):
    """W2 act(W1 x + b1) + b2 with dropout between; the inner width is 4 * d_model by default."""

    def __init__(
        self,
        d_model: int = 512,
        d_ff: int | None = None,
        *,
        dropout: float = 0.1,
        activation: str = "relu",
    ) -> None:
        whole = presets.seq2seq(d_model=d_model, n_heads=1, d_ff=d_ff, activation=activation)
        described = whole.decoder.block().ffn
        assert isinstance(described, spec.MLP)
        super().__init__(described, d_model, dropout=dropout)
        self.d_model = d_model
        rules = manifest.ffn_parameters(described, "", d_model, init=XavierInit())
        initialise(self, tuple(rules))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(masks.wide("x", x, self.d_model))


class TokenEmbedding(embedding.TokenEmbedding):
    """weight[token], times sqrt(d_model) as in the paper; scale=False leaves the factor out."""

    def __init__(self, vocab_size: int, d_model: int = 512, *, scale: bool = True) -> None:
        super().__init__(vocab_size, d_model, scale=d_model**0.5 if scale else None)
        nn.init.xavier_uniform_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        token_ids(tokens, len(self.weight))
        return super().forward(tokens)


class PositionalEncoding(SinusoidalPosition):
    """x + PE for positions from 0: a buffer, not a parameter."""

    def __init__(self, d_model: int = 512, *, max_seq_len: int = 512) -> None:
        super().__init__(max_seq_len, d_model, kind=Sinusoidal())

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        vectors("x", x, self.table.shape[-1])
        if x.shape[1] > self.max_seq_len:
            raise InputError(f"length {x.shape[1]} exceeds max_seq_len {self.max_seq_len}")
        return super().forward(x, slice(0, x.shape[1]))


class TransformerEmbedding(nn.Module):
    """dropout(token embedding * sqrt(d_model) + positional encoding)."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 512,
        *,
        max_seq_len: int = 512,
        dropout: float = 0.1,
        scale: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(vocab_size, d_model, scale=scale)
        self.positions = PositionalEncoding(d_model, max_seq_len=max_seq_len)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        return F.dropout(self.positions(self.tokens(tokens)), self.dropout, self.training)


# --- 4: layers and stacks -------------------------------------------------------------------------


class _Layer(block.TransformerBlock):
    """One block of the preset's encoder or decoder."""

    side: str

    def __init__(
        self,
        d_model: int = 512,
        heads: int = 8,
        d_ff: int | None = None,
        *,
        dropout: float = 0.1,
        pre_norm: bool = False,
    ) -> None:
        whole = presets.seq2seq(
            d_model=d_model, n_heads=heads, d_ff=d_ff, n_layers=1, pre_norm=pre_norm
        )
        described = getattr(whole, self.side).layers[0].block
        rates = spec.Dropout(attention=dropout, residual=dropout, ffn=dropout)
        super().__init__(described, d_model, dropout=rates)
        self.d_model = d_model
        rules = manifest.block_parameters(described, "", d_model, init=XavierInit())
        initialise(self, tuple(rules))


class EncoderLayer(_Layer):
    """Self-attention and feed-forward, each with residual and norm; valid True = real token."""

    side = "encoder"

    def forward(  # type: ignore[override]
        self, x: Tensor, valid: Tensor | None = None
    ) -> Tensor:
        vectors("x", x, self.d_model)
        B, T = x.shape[:2]
        valid = masks.token_mask(valid, batch=B, length=T)
        mask = build_mask(T, T, causal=False, valid_q_BT=valid, valid_k_BS=valid)
        return super().forward(x, mask=mask)


class DecoderLayer(_Layer):
    """Masked self-attention, cross-attention to `memory`, feed-forward."""

    side = "decoder"

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, memory_valid: Tensor | None = None
    ) -> Tensor:
        vectors("x", x, self.d_model)
        vectors("memory", memory, self.d_model, like=x)
        B, S = memory.shape[:2]
        valid = masks.token_mask(memory_valid, batch=B, length=S, name="memory_valid")
        reads = build_mask(x.shape[1], S, causal=False, valid_k_BS=valid)
        return super().forward(x, mask=Mask(causal=True), memory_BSD=memory, memory_mask=reads)


class _Layers(nn.Module):
    """N equal layers, and a last norm after pre-norm ones."""

    layer: type[_Layer]

    def __init__(
        self,
        N: int = 6,
        d_model: int = 512,
        heads: int = 8,
        d_ff: int | None = None,
        *,
        dropout: float = 0.1,
        pre_norm: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            self.layer(d_model, heads, d_ff, dropout=dropout, pre_norm=pre_norm) for _ in range(N)
        )
        self.norm = None
        if pre_norm:
            self.norm = build_norm(spec.LayerNorm(), d_model)
            initialise(self.norm, tuple(manifest.norm_parameters(spec.LayerNorm(), "", d_model)))

    def _run(self, x: Tensor, *given: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, *given)
        return x if self.norm is None else self.norm(x)


class Encoder(_Layers):
    """N encoder layers in turn: vectors [batch, seq, d_model] in, memory of the same shape out."""

    layer = EncoderLayer

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self._run(x, valid)


class Decoder(_Layers):
    """N decoder layers in turn; each of them reads the encoder's output."""

    layer = DecoderLayer

    def forward(self, x: Tensor, memory: Tensor, memory_valid: Tensor | None = None) -> Tensor:
        return self._run(x, memory, memory_valid)


def gradient_flow(model: nn.Module) -> dict[str, float]:
    """Return the largest gradient of every parameter by name, after `loss.backward()`.

    A parameter without a gradient is 0. Biases of the keys are 0 by theory: they add the same to
    all scores of a row, which the softmax ignores.
    """
    return {
        name: 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
        for name, parameter in model.named_parameters()
    }


# --- 5: the model and its loss --------------------------------------------------------------------


class Transformer(CustomTransformerAdapter):
    """forward(source, target, source_valid, target_valid) -> logits (B, T, vocab)."""

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        *,
        d_model: int = 512,
        N: int = 6,
        heads: int = 8,
        d_ff: int | None = None,
        dropout: float = 0.1,
        max_seq_len: int = 512,
        pre_norm: bool = False,
        scale_embedding: bool = True,
        activation: str = "relu",
        generator: torch.Generator | None = None,
    ) -> None:
        described = presets.seq2seq(
            vocab_size=target_vocab,
            source_vocab_size=source_vocab,
            d_model=d_model,
            n_heads=heads,
            d_ff=d_ff,
            n_layers=N,
            max_seq_len=max_seq_len,
            dropout=dropout,
            pre_norm=pre_norm,
            activation=activation,
            scaled=scale_embedding,
        )
        super().__init__(build(described, generator=generator).train())

    def forward(  # type: ignore[override]
        self,
        source: Tensor,
        target: Tensor,
        source_valid: Tensor | None = None,
        target_valid: Tensor | None = None,
    ) -> Tensor:
        inputs = Inputs(
            target,
            masks.mask_of("target_valid", target_valid, target),
            None,
            source,
            masks.mask_of("source_valid", source_valid, source),
        )
        return cast(Tensor, self.model(inputs)["next"])


def masked_cross_entropy(
    logits: Tensor, targets: Tensor, valid: Tensor | None = None, *, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy over real tokens; padding has no part in it.

    logits [batch, seq, vocab], targets [batch, seq], valid as `padding_mask` gives it.
    """
    if logits.ndim != 3 or targets.shape != logits.shape[:2]:
        raise InputError(
            f"logits have shape {tuple(logits.shape)}, targets {tuple(targets.shape)}",
            hint="[batch, seq, vocab] and [batch, seq]",
        )
    counted = masks.token_mask(valid, batch=len(targets), length=targets.shape[1])
    if counted is not None:  # what padding holds need not be a token
        targets = targets.masked_fill(~counted, 0)
    token_ids(targets, logits.shape[-1], name="target")
    loss = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten().long(),
        reduction="none",
        label_smoothing=label_smoothing,
    )
    if counted is None:
        return loss.mean()
    real = counted.flatten()
    return loss[real].sum() / real.sum().clamp(min=1)


# --- 6: inference ---------------------------------------------------------------------------------


def greedy_decode(
    model: Transformer,
    source: Rows,
    *,
    bos: int,
    eos: int,
    max_length: int = 100,
    source_valid: Tensor | None = None,
    cached: bool = True,
) -> list[tuple[int, ...]]:
    """Return the argmax token at each step until EOS, max_length or the model's max_seq_len.

    One result for each source; `gf.generate` also returns why it ended. The encoder runs once;
    with the cache each step computes the new token alone.
    """
    return sample_decode(
        model,
        source,
        bos=bos,
        eos=eos,
        max_length=max_length,
        temperature=0.0,
        source_valid=source_valid,
        cached=cached,
    )


def sample_decode(
    model: Transformer,
    source: Rows,
    *,
    bos: int,
    eos: int,
    max_length: int = 100,
    temperature: float = 1.0,
    seed: int = 0,
    source_valid: Tensor | None = None,
    cached: bool = True,
) -> list[tuple[int, ...]]:
    """Return tokens sampled at a temperature, for each source; 0 is greedy decoding."""
    prompts = _prompts(source, source_valid, bos)
    decoding = DecodeSpec(max_new_tokens=max_length, temperature=temperature, eos=(eos,), seed=seed)
    with evaluating(model):
        made = generate_batch(_stepper(model, cached=cached), prompts, spec=decoding)
    return [row.tokens for row in made]


def beam_search(
    model: Transformer,
    source: Rows,
    *,
    bos: int,
    eos: int,
    beam_width: int = 4,
    max_length: int = 100,
    length_penalty: float = 0.6,
    top_k: int | None = None,
    source_valid: Tensor | None = None,
    cached: bool = True,
) -> list[tuple[Hypothesis, ...]]:
    """Return the best sequences of each source, best first, each with its score.

    A sequence is complete at EOS, or cut off at max_length with finish "length". The score is its
    log-probability / ((5 + length) / 6) ** length_penalty.
    """
    prompts = _prompts(source, source_valid, bos)
    rules = BeamSpec(
        width=beam_width, n_best=top_k, alpha=length_penalty, max_new_tokens=max_length, eos=(eos,)
    )
    with evaluating(model):
        found = search(_stepper(model, cached=cached), prompts, spec=rules)
    return [one.hypotheses for one in found]


def _prompts(source: Rows, valid: Tensor | None, bos: int) -> Prompts:
    if valid is not None:
        valid = masks.mask_of("source_valid", valid, torch.as_tensor(source))
    rows = source.tolist() if isinstance(source, Tensor) and valid is None else source
    return Prompts.of([[bos]] * len(rows), sources=rows, source_valid=valid)


def _stepper(model: Transformer, *, cached: bool) -> Stepper:
    return TorchStepper(model.model) if cached else NaiveStepper(model.model)
