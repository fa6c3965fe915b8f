"""Bits between 4 and 8: chosen by what layers do to predictions, within the mean that was given."""

import copy
import math

import pytest
import torch

import glassformer as gf
from glassformer.quant.contents import quantized_arrays, restored_model
from glassformer.quant.convert import (
    prepare_model_for_quantization,
    quantize_model,
    quantized_layers,
)
from glassformer.quant.mixed import Harm, harms, within
from glassformer.quant.smooth import quantize_on
from glassformer.spec.errors import InputError
from glassformer.spec.quantization import QuantSpec, quant_spec
from glassformer.spec.schemes import Int4, Int8
from tests.quant.models import logits, model, tokens


def mean_bits(of) -> float:
    inner = [layer for _, layer in quantized_layers(of) if not layer.head]
    sizes = [math.prod(layer.shape) for layer in inner]
    bits = [layer.scheme.bits * size for layer, size in zip(inner, sizes, strict=True)]
    return sum(bits) / sum(sizes)


def divergence(full, small, ids) -> float:
    with torch.no_grad():
        p, q = (each(ids)["next"].double().log_softmax(-1) for each in (full, small))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("bits", [4.5, 5.0, 6.5])
def test_the_mean_is_kept_and_more_bits_diverge_less(bits):
    full = model()
    ids = tokens(full, 16, 24)
    four, mixed = (
        quantize_on(copy.deepcopy(full), [ids], quant_spec(bits=each), backend="float")[0]
        for each in (4, bits)
    )
    assert bits - 0.3 < mean_bits(mixed) <= bits
    assert divergence(full, mixed, ids) < divergence(full, four, ids)
    again = restored_model(full.spec, *quantized_arrays(mixed), backend="float")
    assert torch.equal(logits(again), logits(mixed))


def test_gptq_rounds_mixed_layers_too():
    full = model("core")
    ids = tokens(full, 16, 16)
    spec = quant_spec(bits=4.5, method="gptq")
    small, _ = quantize_on(copy.deepcopy(full), list(ids.chunk(2)), spec)
    assert 4 < mean_bits(small) <= 4.5
    assert {layer.method for _, layer in quantized_layers(small)} == {"gptq"}


def test_a_tuple_of_harms_is_chosen_by_what_a_weight_is_worth():
    found = {"a": Harm(1.0, 100), "b": Harm(0.9, 10), "c": Harm(0.5, 200), "d": Harm(0.1, 30)}
    assert within(found, 4 * 110, more=4) == ("b", "a")
    assert within(found, 4 * 45, more=4) == ("b", "d")  # a and c do not fit, d does
    assert within(found, 0.0, more=4) == ()


def test_parameters_train_on_afterwards_and_no_hook_stays():
    full = model()
    full.blocks[0].attn.q_proj.weight.requires_grad_(False)
    trained = [p.requires_grad for p in full.parameters()]
    before = logits(full)
    harms(full, [tokens(full)], {"blocks.0.ffn.up_proj": Int4()})
    assert [p.requires_grad for p in full.parameters()] == trained
    assert not full.blocks[0].ffn.up_proj._forward_hooks and torch.equal(logits(full), before)
    assert all(p.grad is None for p in full.parameters())


def test_a_mean_needs_batches_and_room():
    for call in (quantize_model, prepare_model_for_quantization):
        with pytest.raises(InputError, match="shared out by what layers do to a text"):
            call(model(), quant_spec(bits=4.5))
    with pytest.raises(InputError, match="shared out"):
        gf.quantize(model(), bits=4.5)
    with pytest.raises(InputError, match="leaves no layer of this model 8 bits"):
        quantize_on(model(), [tokens(model())], quant_spec(bits=4.001))
    narrow = gf.build(gf.preset("core", d_model=48, d_ff=64), seed=0).model
    with pytest.raises(InputError, match=r"less than the 7\.20 of this model") as error:
        quantize_on(narrow, [tokens(narrow)], quant_spec(bits=4.5))
    assert error.value.hint == "7.2 bits or more, or 4"
    with pytest.raises(InputError, match="nothing to calibrate on"):
        harms(model(), [], {"blocks.0.ffn.up_proj": Int4()})
    for scheme, mean in ((Int8(), 4.5), (Int4(), 4.0), (Int4(), 9.0)):
        with pytest.raises(InputError, match="a mean of"):
            QuantSpec(scheme=scheme, mean_bits=mean)
