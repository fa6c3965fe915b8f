"""Hypothesis strategies over specs: every variant with every other, in tiny sizes."""

from typing import get_args

from hypothesis import strategies as st

from glassformer.spec.block import Placement
from glassformer.spec.model import (
    MLP,
    ALiBi,
    AnswerHead,
    Attention,
    Block,
    Clamp,
    ClassHead,
    Dropout,
    FactorizedEmbedding,
    HeInit,
    LayerNorm,
    Layers,
    Learned,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    NextHead,
    NoPosition,
    NormalInit,
    PlainEmbedding,
    RelativeBias,
    RMSNorm,
    Rotary,
    ScaledEmbedding,
    Sinusoidal,
    Stack,
    StateHead,
    SwiGLU,
    XavierInit,
    YarnScaling,
)

rates = st.sampled_from([0.0, 0.1, 0.25])
norms = st.one_of(
    st.builds(LayerNorm, eps=st.sampled_from([1e-5, 1e-6]), bias=st.booleans()),
    st.builds(RMSNorm, eps=st.sampled_from([1e-5, 1e-6]), offset=st.booleans()),
)
embeddings = st.one_of(
    st.builds(PlainEmbedding),
    st.builds(ScaledEmbedding, factor=st.sampled_from([None, 3.0])),
    st.builds(FactorizedEmbedding, rank=st.integers(1, 5), l1=st.sampled_from([0.0, 1e-3])),
)
scalings = st.one_of(
    st.none(),
    st.builds(LinearScaling, factor=st.sampled_from([2.0, 4.0])),
    st.builds(Llama3Scaling, factor=st.just(8.0), original_max_seq_len=st.integers(8, 64)),
    st.builds(
        YarnScaling,
        factor=st.just(4.0),
        original_max_seq_len=st.integers(8, 64),
        attention_factor=st.one_of(st.none(), st.just(1.25)),
        truncate=st.booleans(),
    ),
)
positions = st.one_of(
    st.builds(NoPosition),
    st.builds(Sinusoidal, base=st.sampled_from([100.0, 10_000.0])),
    st.builds(Learned),
    st.builds(ALiBi, max_bias=st.sampled_from([8.0, 3.0]), scaled=st.booleans()),
    st.builds(RelativeBias, buckets=st.sampled_from([4, 6]), max_distance=st.integers(4, 7)),
    st.builds(Rotary, base=st.sampled_from([100.0, 10_000.0]), scaling=scalings),
)
ffns = st.one_of(
    st.builds(
        MLP,
        d_ff=st.integers(1, 9),
        activation=st.sampled_from(["relu", "gelu", "gelu_tanh", "relu2"]),
        bias=st.booleans(),
    ),
    st.builds(
        SwiGLU,
        d_ff=st.integers(1, 9),
        bias=st.booleans(),
        activation=st.sampled_from(["silu", "gelu", "gelu_tanh"]),
    ),
    st.builds(
        SwiGLU,
        d_ff=st.integers(1, 9),
        bias=st.booleans(),
        clamp=st.builds(Clamp, limit=st.sampled_from([0.3, 7.0])),
    ),
)
dropouts = st.builds(Dropout, embedding=rates, attention=rates, residual=rates, ffn=rates)
inits = st.one_of(
    st.builds(XavierInit),
    st.builds(NormalInit, std=st.sampled_from([0.02, 0.5]), scale_residual=st.booleans()),
    st.builds(HeInit),
)


@st.composite
def attentions(draw: st.DrawFn, *, d_model: int, causal: bool, crossing: bool = False) -> Attention:
    """Head counts that fit d_model, or a d_head of its own; always even, so that rotary fits."""
    n_kv_heads = draw(st.sampled_from([1, 2]))
    n_heads = n_kv_heads * draw(st.sampled_from([1, 2]))
    fits = d_model % (2 * n_heads) == 0
    over = draw(st.sampled_from(["head", "head", "all"]))
    return Attention(
        n_heads=n_heads,
        n_kv_heads=draw(st.sampled_from([None, n_kv_heads])),
        d_head=None if fits and draw(st.booleans()) else draw(st.sampled_from([2, 6])),
        bias=draw(st.sampled_from(["none", "qkv", "all", "no_key", "out"])),
        qk_norm=draw(st.one_of(st.none(), norms)),
        causal=causal,
        window=None if crossing else draw(st.sampled_from([None, 1, 3])),
        scale=draw(st.sampled_from([None, None, 0.4])),
        softcap=draw(st.sampled_from([None, None, 1.5])),
        qk_norm_over=over,
        qk_norm_last=over == "head" and draw(st.booleans()),
        sinks=not crossing and draw(st.booleans()),
    )


@st.composite
def stacks(draw: st.DrawFn, *, d_model: int, causal: bool, crossed: bool) -> Stack:
    """One or two runs, whose blocks may differ."""
    runs = []
    placements = ["pre", "post"] if crossed else get_args(Placement)
    for _ in range(draw(st.integers(1, 2))):
        cross = attentions(d_model=d_model, causal=False, crossing=True) if crossed else st.none()
        block = Block(
            attention=draw(attentions(d_model=d_model, causal=causal)),
            ffn=draw(ffns),
            norm=draw(norms),
            placement=(placement := draw(st.sampled_from(placements))),
            cross=draw(cross),
            residual_scale=draw(st.sampled_from([1.0, 0.3])) if placement == "pre" else 1.0,
        )
        runs.append(Layers(count=draw(st.integers(1, 2)), block=block))
    final_norm = draw(st.one_of(st.none(), norms))
    return Stack(layers=tuple(runs), final_norm=final_norm, dropout=draw(dropouts))


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    """Any valid model: one stack or two, every variant of every part."""
    d_model = draw(st.integers(2, 9))
    two = draw(st.booleans())
    causal = two or draw(st.booleans())
    choices = [
        ClassHead(num_classes=draw(st.integers(1, 5)), bias=draw(st.booleans())),
        StateHead(num_states=draw(st.integers(1, 5)), bias=draw(st.booleans())),
        AnswerHead(
            readout=draw(st.sampled_from(["last", "first", "mean"])), bias=draw(st.booleans())
        ),
    ]
    if causal:
        choices.append(
            NextHead(
                tied=draw(st.booleans()),
                bias=draw(st.booleans()),
                scale=draw(st.sampled_from([1.0, 0.5])),
                softcap=draw(st.sampled_from([None, 2.0])),
            )
        )
    shared = two and draw(st.booleans())
    decoder = draw(stacks(d_model=d_model, causal=causal, crossed=two))
    encoder = draw(stacks(d_model=d_model, causal=False, crossed=False)) if two else None
    position = draw(positions)
    if any(len({b.attention.n_heads for b in s.blocks()}) > 1 for s in (decoder, encoder) if s):
        position = ALiBi() if isinstance(position, RelativeBias) else position  # layers share it
    return ModelSpec(
        vocab_size=draw(st.integers(2, 11)),
        d_model=d_model,
        max_seq_len=draw(st.integers(5, 13)),
        decoder=decoder,
        encoder=encoder,
        embedding=draw(embeddings),
        position=position,
        heads=tuple(draw(st.permutations(choices))[: draw(st.integers(1, len(choices)))]),
        init=draw(inits),
        source_vocab_size=draw(st.integers(2, 11)) if two and not shared else None,
        share_embedding=shared,
    )
