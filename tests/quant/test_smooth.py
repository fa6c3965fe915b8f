"""Smoothing moves outliers into weights, changes no bit of a float model, and helps rounding."""

import copy

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.data.batch import Batch
from glassformer.lab.measure.precision import layer_errors
from glassformer.models.inputs import Inputs
from glassformer.models.model import build
from glassformer.quant.convert import plan, quantize_in_turn, quantize_model
from glassformer.quant.schemes import dequantize, quantize_tensor
from glassformer.quant.smooth import (
    Link,
    apply,
    inputs_of_layers,
    links,
    outliers,
    quantize_on,
    smooth,
    smoothed_alike,
)
from glassformer.spec import presets
from glassformer.spec.errors import InputError
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int4, Int8
from tests.quant.models import logits, model, noise, tokens


def with_outliers(name: str = "qwen", channels: tuple[int, ...] = (3, 17)):
    """A model whose norms make some channels 64 times too large, and whose readers undo it."""
    made = model(name)
    with torch.no_grad():
        for block in made.blocks:
            gate = [block.ffn.gate_proj] if hasattr(block.ffn, "gate_proj") else []
            for norm, readers in (
                (block.attn_norm, (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj)),
                (block.ffn_norm, (*gate, block.ffn.up_proj)),
            ):
                for channel in channels:
                    norm.weight[channel] *= 64.0
                    if hasattr(norm, "bias"):
                        norm.bias[channel] *= 64.0
                    for reader in readers:
                        reader.weight[:, channel] /= 64.0
    return made


def schemes_of(of, spec):
    return {path: scheme for path, (_, scheme) in plan(of, spec).items()}


@pytest.mark.parametrize("name", ["qwen", "core"])
def test_not_a_bit_of_the_float_model_changes(name):
    full = with_outliers(name)
    before = logits(full)
    done = smooth(full, [tokens(full)], schemes_of(full, QuantSpec(scheme=Int4(group=32))))
    assert done and all(one.after < one.before and one.exponent > 0 for one in done)
    assert torch.equal(logits(full), before)


def test_links_are_those_that_are_exact():
    by_name = {}
    for name in ("qwen", "core", "seq2seq"):
        made = build(presets.preset(name), generator=torch.Generator().manual_seed(0))
        inputs = tokens(made)
        if made.spec.encoder is not None:
            inputs = Inputs(inputs, source_BS=inputs)
        by_name[name] = {link.source: link.readers for link in links(made, inputs)}
    attn = tuple(f"blocks.0.attn.{leaf}_proj" for leaf in "qkv")
    assert by_name["qwen"]["blocks.0.attn_norm"] == attn
    assert by_name["qwen"]["blocks.0.ffn.up_proj"] == ("blocks.0.ffn.down_proj",)
    assert by_name["core"]["blocks.0.attn.v_proj"] == ("blocks.0.attn.o_proj",)
    # Behind a norm that follows its part, the residual stream reads the norm too.
    assert by_name["seq2seq"] and not any("norm" in source for source in by_name["seq2seq"])


def test_outliers_are_named_and_smoothing_makes_up_for_them():
    full = with_outliers()
    batch = tokens(full, 8, 16)
    found = outliers(inputs_of_layers(full, [batch]))
    assert {one.channel for one in found} == {3, 17}
    assert {one.layer.rpartition(".")[2] for one in found} == {"q_proj", "gate_proj"}
    assert len(found) == 4 * len(full.blocks)
    assert found[0].times > 20
    spec = QuantSpec(scheme=Int8(), tied="skip")
    rough = quantize_model(copy.deepcopy(full), spec)
    smoothed = copy.deepcopy(full)
    smooth(smoothed, [batch], schemes_of(full, spec))
    fine = quantize_model(smoothed, spec)
    exact = logits(full)
    twin = smoothed_alike(full, fine, batch)
    assert twin is not full and torch.equal(logits(twin), exact)
    assert max(error for _, error in layer_errors(twin, fine, Inputs(batch))) < 0.02
    assert smoothed_alike(twin, fine, batch) is twin
    errors = [float((logits(one) - exact).norm()) for one in (rough, fine)]
    assert errors[1] < 0.5 * errors[0], errors


def test_padding_is_not_counted():
    full = model()
    ids = tokens(full, 2, 6).numpy()
    valid = np.ones_like(ids, dtype=bool)
    valid[1, 3:] = False
    other = np.where(valid, ids, 1)
    found = [
        inputs_of_layers(full, [Batch(tokens=t, valid=valid, targets={})])["blocks.0.attn.q_proj"]
        for t in (ids, other)
    ]
    assert len(found[0].rows_MI) == 9
    assert torch.equal(found[0].rms_I, found[1].rms_I)
    with pytest.raises(InputError, match="nothing to calibrate on"):
        inputs_of_layers(full, [])
    spec = QuantSpec(scheme=Int4(group=32), method="gptq")
    made = [
        quantize_in_turn(copy.deepcopy(full), [Batch(tokens=t, valid=valid, targets={})], spec)
        for t in (ids, other)
    ]
    assert torch.equal(logits(made[0]), logits(made[1]))
    assert not made[0]._forward_pre_hooks


def test_heads_that_share_values_share_their_scale():
    made = build(presets.preset("qwen", n_heads=4, n_kv_heads=2))
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(generator=torch.Generator().manual_seed(1))
    before = logits(made)
    (link,) = [one for one in links(made, tokens(made)) if one.source == "blocks.0.attn.v_proj"]
    assert isinstance(link, Link) and len(link.channel_I) == 2 * len(link.made[0])
    with torch.no_grad():
        apply(made, link, 2.0 ** torch.randint(-3, 4, (len(link.made[0]),)).float())
    assert torch.equal(logits(made), before)


def test_samples_are_those_of_the_smoothed_model():
    full = with_outliers()
    batch = tokens(full, 8, 16)
    samples = inputs_of_layers(full, [batch])
    assert smooth(full, [batch], schemes_of(full, QuantSpec(scheme=Int4())), samples=samples)
    again = inputs_of_layers(full, [batch])
    for path, sample in samples.items():
        assert torch.equal(sample.rms_I, again[path].rms_I), path
        assert torch.equal(sample.rows_MI, again[path].rows_MI), path


def test_a_grid_is_chosen_by_what_errors_are_multiplied_with():
    weight, sizes = noise(24, 128), torch.ones(128)
    sizes[::16] = 20.0
    x = noise(300, 128, seed=2) * sizes
    exact = x @ weight.T
    errors = [
        float((x @ dequantize(tensor).T - exact).norm() / exact.norm())
        for tensor in (
            quantize_tensor(weight, Int4(), method="mse"),
            quantize_tensor(weight, Int4(), method="mse", inputs_I=sizes),
        )
    ]
    assert errors[1] < 0.8 * errors[0], errors


def test_the_function_does_what_the_command_does():
    full = with_outliers()
    batch = tokens(full, 8, 16)
    spec = QuantSpec(scheme=Int4(), method="mse")
    expected, done = quantize_on(copy.deepcopy(full), [batch], spec)
    found = gf.quantize(full, bits=4, method="mse", calibrate=[batch])
    assert done and torch.equal(logits(found), logits(expected))
    plain = gf.quantize(full, bits=4, method="mse", calibrate=[batch], smooth=False)
    exact = logits(full)
    made = (found, plain, gf.quantize(full, bits=4))
    errors = [float((logits(one) - exact).norm()) for one in made]
    assert errors[0] < 0.8 * errors[1] and errors[0] < 0.8 * errors[2], errors
