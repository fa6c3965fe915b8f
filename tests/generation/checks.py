"""Small models of every variant that a step treats in its own way; steps held to uncached ones."""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import torch

from glassformer.generation.stepper import NaiveStepper, TorchStepper
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.model import Model
from glassformer.models.prompts import Prompts
from glassformer.spec import presets
from glassformer.spec.decoding import KVCache
from glassformer.spec.model import (
    MLP,
    ALiBi,
    FactorizedEmbedding,
    LayerNorm,
    Learned,
    ModelSpec,
    MoE,
    NextHead,
    NoPosition,
    RMSNorm,
    Rotary,
    ScaledEmbedding,
    Sinusoidal,
    SwiGLU,
)
from tests.tiny import VOCAB, built, tiny

GROUPED = {"n_heads": 4, "n_kv_heads": 2}
KV_CACHES: tuple[KVCache, ...] = get_args(KVCache)

#: Every variant that a step treats in its own way.
SPECS: dict[str, ModelSpec] = {
    "none": tiny(position=NoPosition(), placement="post"),
    "learned": tiny(position=Learned(), final_norm=LayerNorm()),
    "sinusoidal": tiny(position=Sinusoidal(), embedding=ScaledEmbedding()),
    "rotary": tiny(
        position=Rotary(),
        attention=GROUPED | {"qk_norm": RMSNorm(), "bias": "none"},
        ffn=SwiGLU(d_ff=17),
        norm=RMSNorm(),
        heads=(NextHead(tied=True),),
    ),
    "window": tiny(
        position=Rotary(),
        attention=GROUPED | {"window": 3, "bias": "qkv", "qk_norm": LayerNorm()},
        ffn=SwiGLU(d_ff=17, bias=True),
    ),
    "factorized": tiny(
        embedding=FactorizedEmbedding(rank=5), heads=(NextHead(tied=True, bias=True),)
    ),
    "encoder": tiny(encoder=True, position=Sinusoidal(), placement="post"),
    "encoder-pre": tiny(
        encoder=True,
        position=Rotary(),
        attention=GROUPED | {"qk_norm": RMSNorm()},
        source_vocab_size=23,
    ),
    "alibi": tiny(position=ALiBi(), attention=GROUPED),
    "alibi-window": tiny(position=ALiBi(scaled=True), attention=GROUPED | {"window": 3}),
    "alibi-encoder": tiny(encoder=True, position=ALiBi(max_bias=4.0)),
    "moe": tiny(
        position=Rotary(),
        ffn=MoE(n_experts=5, experts_per_token=2, expert=SwiGLU(d_ff=7), shared=SwiGLU(d_ff=5)),
        norm=RMSNorm(),
    ),
    "moe-gated": tiny(
        ffn=MoE(
            n_experts=3,
            experts_per_token=1,
            expert=MLP(d_ff=7),
            normalize=False,
            shared=MLP(d_ff=5),
            shared_gate=True,
        ),
    ),
}
PROMPTS = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3))
SOURCES = ((2, 7), (1, 8, 2, 8, 1, 8), (2, 8, 4))
STEPPERS = {
    "fixed": TorchStepper,
    "growing": lambda model: TorchStepper(model, cache="growing"),
    "derived": RecordedStepper,
}


def prompts_for(model: Model, count: int = 3) -> Prompts:
    """Prompts of different lengths, with sources where the model has an encoder."""
    sources = None if model.spec.encoder is None else SOURCES[:count]
    return Prompts(PROMPTS[:count], sources)


def paired_logits(
    make, model: Model, prompts: Prompts, *, steps: int, kv_cache: KVCache = "float"
) -> Iterator[float]:
    """The largest difference from the uncached logits, at every step, through two reorders."""
    ours, naive = make(model), NaiveStepper(model, kv_cache=kv_cache)
    a_BV, past = ours.start(prompts, room=steps)
    b_BV, rows = naive.start(prompts, room=steps)
    orders = {1: [len(prompts) - 1, 0, 0, 0], 3: [1, 0]}
    for place in range(steps):
        assert a_BV.shape == b_BV.shape
        yield float((a_BV - b_BV).abs().max())
        tokens_B = b_BV.argmax(-1)
        assert torch.equal(a_BV.argmax(-1), tokens_B)
        if place in orders:
            past.reorder(orders[place])
            rows.reorder(orders[place])
            tokens_B = tokens_B[orders[place]]
        a_BV, b_BV = ours.step(tokens_B, past=past), naive.step(tokens_B, past=rows)


def _with_block(made: ModelSpec, **fields) -> ModelSpec:
    layers = tuple(replace(run, block=replace(run.block, **fields)) for run in made.decoder.layers)
    return replace(made, decoder=replace(made.decoder, layers=layers))


#: More of what the native step has in C, each with something that no other has.
NATIVE_SPECS = SPECS | {
    "gemma": presets.gemma(
        vocab_size=VOCAB, d_model=12, n_heads=2, n_kv_heads=1, d_head=6, d_ff=17, window=3
    ),
    "neox": presets.neox(vocab_size=VOCAB, d_model=16, n_heads=2, d_ff=17, n_layers=2),
    "parallel-shared": tiny(
        position=Rotary(), placement="parallel_shared", ffn=MLP(d_ff=9, activation="relu2")
    ),
    "pre-ffn": tiny(position=Rotary(), placement="pre_ffn", attention={"bias": "out"}),
    "output": tiny(
        position=Rotary(),
        placement="output",
        attention=GROUPED | {"qk_norm": RMSNorm(), "qk_norm_over": "all"},
        heads=(NextHead(tied=True, scale=0.25),),
    ),
    "scaled": _with_block(
        tiny(
            position=Rotary(),
            attention=GROUPED | {"qk_norm": LayerNorm(), "qk_norm_last": True, "sinks": True},
            embedding=ScaledEmbedding(factor=3.0),
        ),
        residual_scale=0.3,
    ),
    "moe-post": tiny(
        ffn=MoE(
            n_experts=4, experts_per_token=3, expert=MLP(d_ff=7), router_bias=True, normalize=False
        ),
        placement="post",
    ),
    "moe-output": tiny(
        position=Learned(offset=2),
        ffn=MoE(n_experts=4, experts_per_token=2, expert=SwiGLU(d_ff=7), shared=MLP(d_ff=5)),
        norm=LayerNorm(bias=False),
        placement="output",
    ),
}


def _halved(model: Model) -> Model:
    """The model in float32, with activations of unit scale, where 1e-5 is rounding."""
    with torch.no_grad():
        for parameter in model.float().parameters():
            parameter.mul_(0.5)
    return model


def single(name: str) -> Model:
    """A small model for the native step."""
    return _halved(built(NATIVE_SPECS[name]))


# --- keys and values in 8 bits --------------------------------------------------------------------

TOKENS, HEADS_OF = 70, (6, 2)


# --- beams --------------------------------------------------------------------------------------
