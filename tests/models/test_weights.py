"""Weights out of a model, onto disk, and back: the same bits, or an error that names the tensor."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from glassformer.models.model import build
from glassformer.models.weights import load_weights, weights_of
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import stored
from glassformer.spec.model import FactorizedEmbedding, NextHead, Rotary
from glassformer.store.checkpoint import load_checkpoint, save_checkpoint
from tests.strategies import model_specs
from tests.tiny import B, T, tiny, token_ids

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_save_and_load_give_the_same_bits(tmp_path, dtype):
    spec = tiny(
        position=Rotary(), embedding=FactorizedEmbedding(rank=5), heads=(NextHead(tied=True),)
    )
    model = build(spec).to(dtype)
    save_checkpoint(tmp_path / "c", spec, weights_of(model))
    again_spec, arrays = load_checkpoint(tmp_path / "c")
    assert again_spec == spec
    again = build(again_spec).to(dtype)
    load_weights(again, arrays)
    for (name, p), (other, q) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == other
        assert p.dtype == q.dtype == dtype
        assert torch.equal(p, q)
    tokens = token_ids(B, T)
    assert torch.equal(model(tokens)["next"], again(tokens)["next"])


@given(model_specs())
@settings(max_examples=25)
def test_weights_are_the_stored_manifest_for_every_spec(spec):
    model = build(spec)
    arrays = weights_of(model)
    assert {name: a.shape for name, a in arrays.items()} == {
        name: p.shape for name, p in stored(spec).items()
    }
    again = build(spec)
    load_weights(again, arrays)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_arrays_are_copies():
    model = build(tiny())
    arrays = weights_of(model)
    arrays["embed.weight"][:] = 7
    assert not (model.embed.weight == 7).any()


def test_a_misfit_names_every_tensor_and_changes_nothing():
    model = build(tiny())
    before = weights_of(model)
    arrays = dict(before)
    del arrays["embed.weight"], arrays["blocks.0.ffn_norm.bias"]
    arrays["blocks.9.extra"] = np.zeros(3, dtype=np.float32)
    arrays["heads.next.bias"] = np.zeros(5, dtype=np.float32)
    with pytest.raises(InputError) as caught:
        load_weights(model, arrays, where="somewhere")
    message = str(caught.value)
    assert "missing: embed.weight, blocks.0.ffn_norm.bias" in message
    assert "unexpected: blocks.9.extra" in message
    assert "misshapen: heads.next.bias (5,) instead of (19,)" in message
    assert "somewhere" in message
    after = weights_of(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)
