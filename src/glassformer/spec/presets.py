"""Presets: well-known kinds of transformer as functions that return a spec.

Sizes are arguments with small defaults; what makes the kind (norm placement, biases, positions,
initialisation) is fixed here.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from glassformer.spec.errors import InputError, nearest
from glassformer.spec.init import HeInit, NormalInit, XavierInit
from glassformer.spec.model import (
    MLP,
    ALiBi,
    AnswerHead,
    Attention,
    Block,
    ClassHead,
    Dropout,
    Embedding,
    FactorizedEmbedding,
    Head,
    LayerNorm,
    Layers,
    Learned,
    ModelSpec,
    MoE,
    NextHead,
    NoPosition,
    PlainEmbedding,
    RMSNorm,
    Rotary,
    ScaledEmbedding,
    Sinusoidal,
    Stack,
    StateHead,
    SwiGLU,
)


def stack(block: Block, count: int, *, dropout: float = 0.0, final: bool = True) -> Stack:
    """Return equal blocks, a final norm of their kind, and one dropout rate everywhere."""
    return Stack(
        layers=(Layers(count=count, block=block),),
        final_norm=block.norm if final else None,
        dropout=Dropout.from_number(dropout),
    )


def budget_lm(
    *,
    vocab_size: int = 16_000,
    d_model: int = 216,
    d_ff: int = 607,
    n_layers: int = 11,
    n_heads: int = 8,
    max_seq_len: int = 512,
    tied: bool = True,
    dropout: float = 0.0,
    scale_residual: bool = False,
) -> ModelSpec:
    """A language model for parameter budgets: pre-norm SwiGLU, no biases, learned positions, tied.

    `scale_residual` divides the initial std of the projections that write into the residual stream
    by the square root of their number, as GPT-2 does.
    """
    block = Block(mixer=Attention(n_heads=n_heads), ffn=SwiGLU(d_ff=d_ff), norm=LayerNorm())
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=Learned(),
        decoder=stack(block, n_layers, dropout=dropout),
        heads=(NextHead(tied=tied),),
        init=NormalInit(std=0.02, scale_residual=scale_residual),
    )


def modern_lm(
    *,
    vocab_size: int = 16_000,
    d_model: int = 216,
    d_ff: int = 648,
    n_layers: int = 12,
    n_heads: int = 12,
    n_kv_heads: int = 4,
    max_seq_len: int = 512,
    tied: bool = True,
    dropout: float = 0.0,
) -> ModelSpec:
    """The budget model in today's parts: rotary positions, RMSNorm, grouped keys and values."""
    block = Block(
        mixer=Attention(n_heads=n_heads, n_kv_heads=n_kv_heads),
        ffn=SwiGLU(d_ff=d_ff),
        norm=RMSNorm(),
    )
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=Rotary(),
        decoder=stack(block, n_layers, dropout=dropout),
        heads=(NextHead(tied=tied),),
        init=NormalInit(std=0.02, scale_residual=True),
    )


def alibi_lm(
    *,
    vocab_size: int = 16_000,
    d_model: int = 216,
    d_ff: int = 864,
    n_layers: int = 12,
    n_heads: int = 12,
    max_seq_len: int = 512,
    tied: bool = True,
    dropout: float = 0.0,
) -> ModelSpec:
    """A language model with linear biases for positions, and Bloom's other parts.

    LayerNorm before each part, GELU by tanh, biases everywhere, a tied head. Bloom also normalises
    the embedding; this model does not.
    """
    block = Block(
        mixer=Attention(n_heads=n_heads, bias="all"),
        ffn=MLP(d_ff=d_ff, activation="gelu_tanh"),
        norm=LayerNorm(),
    )
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=ALiBi(),
        decoder=stack(block, n_layers, dropout=dropout),
        heads=(NextHead(tied=tied),),
        init=NormalInit(std=0.02, scale_residual=True),
    )


def digits(
    *,
    vocab_size: int = 20,
    d_model: int = 64,
    n_heads: int = 4,
    n_layers: int = 2,
    d_ff: int = 256,
    max_seq_len: int = 64,
) -> ModelSpec:
    """A small post-norm model with ReLU and sinusoids that reads one answer at the last token."""
    block = Block(
        mixer=Attention(n_heads=n_heads, bias="all", causal=False),
        ffn=MLP(d_ff=d_ff, activation="relu"),
        norm=LayerNorm(),
        placement="post",
    )
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=Sinusoidal(),
        decoder=stack(block, n_layers, final=False),
        heads=(AnswerHead(),),
        init=HeInit(),
    )


def fsm_probe(
    *,
    vocab_size: int = 8,
    num_classes: int = 2,
    num_states: int = 4,
    d_model: int = 64,
    n_heads: int = 4,
    d_ff: int = 256,
    n_layers: int = 1,
    max_seq_len: int = 64,
    dropout: float = 0.0,
    tied: bool = True,
    rank: int | None = None,
    l1: float = 0.0,
    sinusoidal: bool = True,
) -> ModelSpec:
    """One pre-norm block without final norm, three heads; with `rank` a factorized embedding."""
    block = Block(
        mixer=Attention(n_heads=n_heads, bias="all"), ffn=MLP(d_ff=d_ff), norm=LayerNorm()
    )
    embedding: Embedding = PlainEmbedding()
    if rank is not None:
        embedding = FactorizedEmbedding(rank=rank, l1=l1)
    heads: tuple[Head, ...] = (NextHead(tied=tied, bias=True), ClassHead(num_classes=num_classes))
    if num_states:
        heads += (StateHead(num_states=num_states),)
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        embedding=embedding,
        position=Sinusoidal() if sinusoidal else NoPosition(),
        decoder=Stack(
            layers=(Layers(count=n_layers, block=block),),
            dropout=Dropout(attention=dropout, residual=dropout, ffn=dropout),
        ),
        heads=heads,
        init=XavierInit(),
    )


def core(
    *,
    vocab_size: int = 1_000,
    d_model: int = 128,
    n_heads: int = 4,
    d_ff: int = 512,
    n_layers: int = 2,
    max_seq_len: int = 256,
    dropout: float = 0.0,
) -> ModelSpec:
    """A decoder like GPT-2: pre-norm, GELU, learned positions; its head has weights of its own."""
    block = Block(
        mixer=Attention(n_heads=n_heads, bias="all"), ffn=MLP(d_ff=d_ff), norm=LayerNorm()
    )
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=Learned(),
        decoder=stack(block, n_layers, dropout=dropout),
        heads=(NextHead(tied=False),),
        init=NormalInit(std=0.02),
    )


def qwen(
    *,
    vocab_size: int = 1_000,
    d_model: int = 128,
    n_heads: int = 8,
    n_kv_heads: int = 2,
    d_head: int = 32,
    d_ff: int = 384,
    n_layers: int = 3,
    max_seq_len: int = 256,
    window: int | None = None,
    qk_norm: bool = True,
) -> ModelSpec:
    """A small Qwen: Qwen3 by default, Qwen2's biases with qk_norm=False."""
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        bias="none" if qk_norm else "qkv",
        qk_norm=RMSNorm() if qk_norm else None,
    )
    block = Block(mixer=attention, ffn=SwiGLU(d_ff=d_ff), norm=RMSNorm())
    layers: tuple[Layers, ...] = (Layers(count=n_layers, block=block),)
    if window is not None:
        sliding = replace(block, mixer=replace(attention, window=window))
        first = min((n_layers + 1) // 2, n_layers - 1)
        runs = ((first, block), (n_layers - first, sliding))
        layers = tuple(Layers(count=count, block=one) for count, one in runs if count)
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=Rotary(base=1_000_000.0),
        decoder=Stack(layers=layers, final_norm=RMSNorm()),
        heads=(NextHead(tied=True),),
        init=NormalInit(std=0.02),
    )


def moe(
    *,
    vocab_size: int = 1_000,
    d_model: int = 96,
    n_heads: int = 6,
    n_kv_heads: int = 2,
    n_experts: int = 8,
    experts_per_token: int = 2,
    d_ff: int = 128,
    shared_d_ff: int | None = 128,
    shared_gate: bool = True,
    normalize: bool = True,
    balance: float = 0.01,
    n_layers: int = 3,
    max_seq_len: int = 256,
    tied: bool = True,
    dropout: float = 0.0,
) -> ModelSpec:
    """A mixture of experts in the parts of Qwen's: SwiGLU experts, one shared behind a gate.

    Without `shared_d_ff` and `shared_gate` it is Mixtral's feed-forward; with normalize=False
    OLMoE's.
    """
    block = Block(
        mixer=Attention(n_heads=n_heads, n_kv_heads=n_kv_heads),
        ffn=MoE(
            n_experts=n_experts,
            experts_per_token=experts_per_token,
            expert=SwiGLU(d_ff=d_ff),
            normalize=normalize,
            shared=None if shared_d_ff is None else SwiGLU(d_ff=shared_d_ff),
            shared_gate=shared_gate,
            balance=balance,
        ),
        norm=RMSNorm(),
    )
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=Rotary(),
        decoder=stack(block, n_layers, dropout=dropout),
        heads=(NextHead(tied=tied),),
        init=NormalInit(std=0.02, scale_residual=True),
    )


def gemma(
    *,
    vocab_size: int = 1_000,
    d_model: int = 96,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    d_head: int = 32,
    d_ff: int = 256,
    n_layers: int = 3,
    max_seq_len: int = 256,
    window: int = 5,
) -> ModelSpec:
    """The parts of Gemma 2 and 3: norms around each part, GeGLU, caps, windows, two rotary bases.

    Of three layers the last attends to everything, with the model's rotary base; the others have a
    window and a base of their own. Scores and logits are capped low, so that caps matter here.
    """
    norm = RMSNorm(offset=True)
    whole = Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        qk_norm=norm,
        scale=1 / d_head,
        softcap=5.0,
    )
    near = replace(whole, window=window, position=Rotary())
    ffn = SwiGLU(d_ff=d_ff, activation="gelu_tanh")
    blocks = {
        attention: Block(mixer=attention, ffn=ffn, norm=norm, placement="sandwich")
        for attention in (near, whole)
    }
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        embedding=ScaledEmbedding(),
        position=Rotary(base=1_000_000.0),
        decoder=Stack(
            layers=tuple(
                Layers(count=1, block=blocks[near if layer % 3 < 2 else whole])
                for layer in range(n_layers)
            ),
            final_norm=norm,
        ),
        heads=(NextHead(tied=True, softcap=8.0),),
        init=NormalInit(std=0.02),
    )


def neox(
    *,
    vocab_size: int = 1_000,
    d_model: int = 96,
    n_heads: int = 4,
    d_ff: int = 256,
    n_layers: int = 3,
    max_seq_len: int = 256,
) -> ModelSpec:
    """The parts of GPT-NeoX and Pythia: attention and feed-forward side by side, partial rotary."""
    block = Block(
        mixer=Attention(n_heads=n_heads, bias="all"),
        ffn=MLP(d_ff=d_ff),
        norm=LayerNorm(),
        placement="parallel",
    )
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=Rotary(share=0.5),
        decoder=stack(block, n_layers),
        heads=(NextHead(tied=False),),
        init=NormalInit(std=0.02),
    )


def seq2seq(
    *,
    vocab_size: int = 1_000,
    source_vocab_size: int | None = None,
    d_model: int = 512,
    n_heads: int = 8,
    d_ff: int | None = None,
    n_layers: int = 6,
    max_seq_len: int = 512,
    dropout: float = 0.1,
    pre_norm: bool = False,
    activation: str = "relu",
    scaled: bool = True,
) -> ModelSpec:
    """The 2017 encoder-decoder; `pre_norm` trains more stably when deep."""
    if activation not in ("relu", "gelu"):
        raise InputError(
            f"unknown activation '{activation}'", hint=nearest(activation, ("relu", "gelu"))
        )
    ffn = MLP(
        d_ff=4 * d_model if d_ff is None else d_ff,
        activation="relu" if activation == "relu" else "gelu",
    )
    both = Attention(n_heads=n_heads, bias="all", causal=False)
    encoder = Block(mixer=both, ffn=ffn, norm=LayerNorm(), placement="pre" if pre_norm else "post")
    decoder = replace(encoder, mixer=replace(both, causal=True), cross=both)
    return ModelSpec(
        vocab_size=vocab_size,
        source_vocab_size=source_vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        embedding=ScaledEmbedding() if scaled else PlainEmbedding(),
        position=Sinusoidal(),
        encoder=stack(encoder, n_layers, dropout=dropout, final=pre_norm),
        decoder=stack(decoder, n_layers, dropout=dropout, final=pre_norm),
        heads=(NextHead(tied=False, bias=True),),
        init=XavierInit(),
    )


PRESETS: dict[str, Callable[..., ModelSpec]] = {
    "digits": digits,
    "fsm-probe": fsm_probe,
    "fsm-factorized": partial(fsm_probe, rank=5, l1=1e-4),
    "budget-lm": budget_lm,
    "modern-lm": modern_lm,
    "alibi-lm": alibi_lm,
    "core": core,
    "qwen": qwen,
    "qwen-sliding": partial(qwen, window=5, qk_norm=False),
    "moe": moe,
    "gemma": gemma,
    "neox": neox,
    "seq2seq": seq2seq,
    "seq2seq-pre": partial(seq2seq, pre_norm=True),
}


#: Each preset in a line, for lists.
PRESET_SUMMARIES: dict[str, str] = {
    "digits": "post-norm, ReLU, sinusoids; one answer a sequence",
    "fsm-probe": "one pre-norm block with next, class and state heads",
    "fsm-factorized": "the same with a factorized embedding, L1 on it",
    "budget-lm": "pre-norm SwiGLU, learned positions; 10 M parameters",
    "modern-lm": "the same with rotary positions and RMSNorm",
    "alibi-lm": "Bloom's parts: linear biases, GELU, LayerNorm",
    "core": "GPT-2's parts, with an output head of its own",
    "qwen": "Qwen3's parts: grouped keys, q/k-norm, rotary",
    "qwen-sliding": "Qwen2's parts with a sliding window",
    "moe": "Qwen's mixture of experts, one expert shared",
    "gemma": "Gemma's parts: norms around each part, caps, GeGLU",
    "neox": "GPT-NeoX's parts: attention and ffn in parallel",
    "seq2seq": "the encoder-decoder of 2017, post-norm",
    "seq2seq-pre": "the same, pre-norm: steadier when deep",
}


def preset(name: str, **sizes: Any) -> ModelSpec:
    """Return the spec of that name, with other sizes if given: `preset("qwen", d_model=256)`."""
    if name not in PRESETS:
        raise InputError(f"no preset '{name}'", hint=nearest(name, PRESETS))
    known = inspect.signature(PRESETS[name]).parameters
    for size in sizes:
        if size not in known:
            raise InputError(f"the preset '{name}' has no size '{size}'", hint=nearest(size, known))
    return PRESETS[name](**sizes)
