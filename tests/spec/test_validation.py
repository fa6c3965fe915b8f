"""Every rule of a spec: the message names the value, the rule and the nearest valid value."""

import dataclasses

import pytest

from glassformer.byhand.model import Model as HandModel
from glassformer.models.model import build
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.model import (
    MLP,
    AnswerHead,
    Attention,
    Block,
    ClassHead,
    Dropout,
    FactorizedEmbedding,
    LayerNorm,
    Layers,
    LinearScaling,
    Llama3Scaling,
    NextHead,
    NormalInit,
    RMSNorm,
    Rotary,
    Sinusoidal,
    Stack,
    StateHead,
    SwiGLU,
    YarnScaling,
)
from glassformer.spec.train import TrainSpec
from tests.tiny import tiny

CAUSAL = Attention(n_heads=2)
BLIND = Attention(n_heads=2, causal=False)


def block(**changes):
    return Block(**{"attention": CAUSAL, "ffn": MLP(d_ff=3), "norm": LayerNorm()} | changes)


def stack(**changes):
    return Stack(layers=(Layers(count=1, block=block(**changes)),))


# What is wrong, and every word that the message must hold.
CASES = {
    "d_model not divisible": (
        lambda: tiny(d_model=13, decoder=stack(attention=Attention(n_heads=5))),
        ["d_model 13", "n_heads 5", "10 or 15"],
    ),
    "d_model below n_heads": (
        lambda: tiny(d_model=2, decoder=stack(attention=Attention(n_heads=5))),
        ["d_model 2", "n_heads 5", "is 5"],
    ),
    "cross not divisible": (
        lambda: tiny(
            encoder=True,
            d_model=14,
            decoder=stack(cross=Attention(n_heads=4, causal=False)),
        ),
        ["d_model 14", "n_heads 4", "12 or 16"],
    ),
    "groups": (
        lambda: Attention(n_heads=6, n_kv_heads=4),
        ["n_heads 6", "n_kv_heads 4", "4 or 8"],
    ),
    "vocab below 1": (lambda: tiny(vocab_size=0), ["vocab_size 0", "below 1", "is 1"]),
    "d_model below 1": (lambda: tiny(d_model=-3), ["d_model -3", "below 1", "is 1"]),
    "length below 1": (lambda: tiny(max_seq_len=0), ["max_seq_len 0", "below 1", "is 1"]),
    "heads below 1": (lambda: Attention(n_heads=0), ["n_heads 0", "below 1"]),
    "kv heads below 1": (lambda: Attention(n_heads=2, n_kv_heads=0), ["n_kv_heads 0", "below 1"]),
    "d_head below 1": (lambda: Attention(n_heads=2, d_head=0), ["d_head 0", "below 1"]),
    "window below 1": (lambda: Attention(n_heads=2, window=0), ["window 0", "below 1"]),
    "d_ff below 1": (lambda: MLP(d_ff=0), ["d_ff 0", "below 1"]),
    "swiglu below 1": (lambda: SwiGLU(d_ff=0), ["d_ff 0", "below 1"]),
    "count below 1": (lambda: Layers(count=0, block=block()), ["count 0", "below 1"]),
    "rank below 1": (lambda: FactorizedEmbedding(rank=0), ["rank 0", "below 1"]),
    "classes below 1": (lambda: ClassHead(num_classes=0), ["num_classes 0", "below 1"]),
    "states below 1": (lambda: StateHead(num_states=0), ["num_states 0", "below 1"]),
    "not whole": (lambda: MLP(d_ff=2.5), ["d_ff 2.5", "whole number", "1 or more"]),
    "a bool is no number": (lambda: MLP(d_ff=True), ["d_ff True", "whole number"]),
    "dropout of 1": (lambda: Dropout(ffn=1.0), ["dropout.ffn 1.0", "[0, 1)", "0.9"]),
    "dropout below 0": (lambda: Dropout(residual=-0.1), ["dropout.residual -0.1", "[0, 1)", "0.0"]),
    "dropout nan": (lambda: Dropout(embedding=float("nan")), ["dropout.embedding nan", "[0, 1)"]),
    "eps": (lambda: LayerNorm(eps=0.0), ["eps 0.0", "positive"]),
    "rms eps": (lambda: RMSNorm(eps=-1.0), ["eps -1.0", "positive"]),
    "base": (lambda: Sinusoidal(base=float("inf")), ["base inf", "positive"]),
    "std": (lambda: NormalInit(std=0.0), ["std 0.0", "positive"]),
    "linear factor": (lambda: LinearScaling(factor=0.0), ["factor 0.0", "positive"]),
    "llama3 order": (
        lambda: Llama3Scaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0),
        ["low_freq_factor 4.0", "high_freq_factor 4.0", "1 and 4"],
    ),
    "yarn order": (
        lambda: YarnScaling(factor=4.0, original_max_seq_len=8, beta_slow=40.0),
        ["beta_slow 40.0", "beta_fast 32.0", "1 and 32"],
    ),
    "l1": (lambda: FactorizedEmbedding(rank=2, l1=-1.0), ["l1 -1.0", "negative", "0"]),
    "odd rotary": (
        lambda: tiny(position=Rotary(), attention={"d_head": 5}),
        ["d_head 5", "odd", "is 6"],
    ),
    "no layers": (lambda: Stack(layers=()), ["no layers", "at least one"]),
    "no heads": (lambda: tiny(heads=()), ["at least one head", "NextHead"]),
    "two heads of a name": (lambda: tiny(heads=(NextHead(), NextHead())), ["next, next"]),
    "next head sees all": (lambda: tiny(attention={"causal": False}), ["bidirectional", "causal"]),
    "causal cross": (lambda: block(cross=CAUSAL), ["cross-attention", "cross.causal=false"]),
    "windowed cross": (
        lambda: block(cross=Attention(n_heads=2, causal=False, window=3)),
        ["cross-attention", "cross.window"],
    ),
    "cross without encoder": (
        lambda: tiny(d_model=14, decoder=stack(cross=BLIND)),
        ["without an encoder"],
    ),
    "source vocab without encoder": (lambda: tiny(source_vocab_size=5), ["need an encoder"]),
    "shared without encoder": (lambda: tiny(share_embedding=True), ["need an encoder"]),
    "decoder layer without cross": (
        lambda: tiny(encoder=True, d_model=14, decoder=stack()),
        ["decoder layer 0", "cross"],
    ),
    "encoder with cross": (
        lambda: dataclasses.replace(
            tiny(encoder=True, d_model=14), encoder=stack(attention=BLIND, cross=BLIND)
        ),
        ["encoder block has cross-attention"],
    ),
    "causal encoder": (
        lambda: dataclasses.replace(tiny(encoder=True, d_model=14), encoder=stack()),
        ["encoder block is causal", "attention.causal=false"],
    ),
    "shared, unequal": (
        lambda: tiny(encoder=True, share_embedding=True, source_vocab_size=5),
        ["share_embedding", "5", "19"],
    ),
    "placement": (lambda: block(placement="Pre"), ["placement 'Pre'", "'pre'"]),
    "bias": (lambda: Attention(n_heads=2, bias="qvk"), ["bias 'qvk'", "'qkv'"]),
    "activation": (lambda: MLP(d_ff=2, activation="gleu"), ["activation 'gleu'", "'gelu'"]),
    "readout": (lambda: AnswerHead(readout="lsat"), ["readout 'lsat'", "'last'"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_rule_is_named_with_its_value(case):
    make, words = CASES[case]
    with pytest.raises(InputError) as caught:
        make()
    message = str(caught.value)
    assert len(message.splitlines()) <= 3
    for word in words:
        assert word in message


def test_specs_are_frozen_keyword_only_values():
    spec = tiny()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.d_model = 5
    with pytest.raises(TypeError):
        Attention(2)
    assert tiny() == spec
    assert hash(tiny()) == hash(spec)
    assert tiny(layers=3) != spec


def test_layers_may_differ_and_are_counted():
    narrow, wide = block(ffn=MLP(d_ff=3)), block(ffn=MLP(d_ff=5))
    decoder = Stack(layers=(Layers(count=2, block=narrow), Layers(count=3, block=wide)))
    spec = tiny(d_model=14, decoder=decoder)
    assert spec.n_layers == 5
    assert [b.ffn.d_ff for b in decoder.blocks()] == [3, 3, 5, 5, 5]


def test_an_unknown_head_is_named():
    with pytest.raises(InputError, match=r"no head 'answer'(.|\n)*next"):
        tiny().head_size("answer")


@pytest.mark.parametrize("size", [1 << 31, 10**20, 10**400])
@pytest.mark.parametrize("name", ["d_model", "vocab_size", "max_seq_len"])
def test_sizes_that_cannot_be_are_refused(name, size):
    with pytest.raises(InputError, match=f"{name}.* above 2,147,483,647"):
        tiny(**{name: size})


def test_stacks_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="above 10,000"):
        Layers(count=10_001, block=block())


@pytest.mark.parametrize(
    "changes",
    [
        {"d_model": 1 << 30},
        {"vocab_size": (1 << 31) - 1, "d_model": 1 << 12},
        {"max_seq_len": (1 << 31) - 1, "d_model": 1 << 12, "position": Sinusoidal()},
        {"max_seq_len": (1 << 31) - 1, "d_model": 1 << 12, "position": Rotary()},
    ],
)
@pytest.mark.parametrize("make", [build, HandModel])
def test_what_exceeds_the_memory_is_refused_before_it_is_built(make, changes):
    with pytest.raises(MachineError, match=r"needs .* of memory, and this machine has") as caught:
        make(tiny(**changes))
    assert "max_seq_len" in caught.value.hint and caught.value.exit_code == 5


@pytest.mark.parametrize("name", ["steps", "batch_size", "accumulate"])
def test_trainings_that_cannot_be_are_refused(name):
    with pytest.raises(InputError, match=f"{name} of about 21 digits is above"):
        TrainSpec(**{name: 10**20})
