"""Rotation: what it refuses, by name, and what becomes of it in a quantized model."""

import copy

import pytest
import torch

import glassformer as gf
from glassformer.models.model import build
from glassformer.nn.lora import apply_lora
from glassformer.quant.contents import quantization_report
from glassformer.quant.rotate import rotate, why_not_stream
from glassformer.spec import presets
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import override
from glassformer.spec.train import LoRA
from tests.quant.checks import logits, model, tokens

REFUSED = {
    "core": "blocks.0.attn_norm is a LayerNorm, which subtracts the mean",
    "gemma": "a norm follows its parts",
    "seq2seq": "an encoder-decoder has two",
    "fsm-factorized": "the embedding is factorized",
    "digits": "positions are added that are no weights",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_stream_that_cannot_be_rotated_is_refused_by_name(name):
    made = build(presets.preset(name), generator=torch.Generator().manual_seed(0))
    before = [p.clone() for p in made.parameters()]
    with pytest.raises(InputError, match=REFUSED[name]):
        rotate(made, "all")
    assert all(map(torch.equal, made.parameters(), before))


def test_values_are_rotated_where_the_stream_cannot_be():
    made = model("gemma").double().eval()
    before = logits(made)
    assert why_not_stream(made)
    assert rotate(made, "values").values == len(made.blocks)
    assert float((logits(made) - before).abs().max()) < 1e-10 * float(before.abs().max())


def test_layers_that_are_not_plain_are_refused():
    made = model()
    apply_lora(made, LoRA(), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="not a plain linear layer"):
        rotate(made, "all")
    with pytest.raises(InputError, match="cannot be rotated"):
        rotate(gf.quantize(model(), bits=8), "values")


def test_one_gain_for_all_channels_leaves_a_head_tied():
    made = model().double().eval()
    with torch.no_grad():
        made.final_norm.weight.fill_(1.5)
    before = logits(made)
    assert not rotate(made, "all").untied and made.spec.heads[0].tied
    assert float((logits(made) - before).abs().max()) < 1e-10 * float(before.abs().max())


def test_quantize_rotates_a_copy():
    full = model(override(presets.preset("qwen"), "heads.0.tied=false"))
    before = copy.deepcopy(full.state_dict())
    small = gf.quantize(full, bits=8, rotate="all", calibrate=[tokens(full, 8, 16)])
    assert quantization_report(small).bits == 8
    assert all(torch.equal(value, before[name]) for name, value in full.state_dict().items())
    exact = logits(full)
    assert float((logits(small) - exact).norm()) < 0.02 * float(exact.norm())
    with pytest.raises(InputError, match="rotate"):
        gf.quantize(full, bits=8, rotate="heads")
