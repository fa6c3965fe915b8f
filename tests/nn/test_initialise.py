"""What is drawn is what the rules say, measured; the same seed draws the same."""

import math

import pytest
import torch

from glassformer.models.model import build
from glassformer.spec.init import Constant, Gaussian, Uniform
from glassformer.spec.manifest import manifest, stored
from glassformer.spec.model import HeInit, Learned, NormalInit, XavierInit
from tests.tiny import tiny

WIDE = {"d_model": 96, "vocab_size": 101, "position": Learned(), "attention": {"d_head": 32}}
INITS = [XavierInit(), NormalInit(std=0.02, scale_residual=True), HeInit()]


def weights(spec, seed=3):
    model = build(spec, generator=torch.Generator().manual_seed(seed))
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("init", INITS, ids=lambda init: type(init).__name__)
def test_spread_and_bounds_are_the_rules(init):
    spec = tiny(init=init, **WIDE)
    own, names = weights(spec), stored(spec)
    assert own.keys() == names.keys()
    for name, parameter in names.items():
        x = own[name].double()
        wobble = 5 / math.sqrt(x.numel())  # five standard errors, of a mean or of a spread
        match parameter.init:
            case Constant(value=value):
                assert (x == value).all()
            case Uniform(bound=bound):
                assert x.abs().max() <= bound
                assert x.abs().max() >= bound * (1 - 20 / x.numel())
                assert abs(x.mean()) <= wobble * bound
                assert abs(x.std() * math.sqrt(3) / bound - 1) <= wobble
            case Gaussian(std=std):
                assert abs(x.mean()) <= wobble * std
                assert abs(x.std() / std - 1) <= wobble


@pytest.mark.parametrize("init", INITS, ids=lambda init: type(init).__name__)
def test_same_seed_same_weights(init):
    spec = tiny(init=init)
    first, again, other = weights(spec, 3), weights(spec, 3), weights(spec, 4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_drawing_from_a_generator_leaves_torchs_own_alone():
    before = torch.get_rng_state()
    weights(tiny())
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_generator_torchs_own_is_used():
    spec = tiny()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = build(spec)
        torch.manual_seed(3)
        again = build(spec)
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_on_meta_nothing_is_allocated():
    model = build(tiny(**WIDE), device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert all(b.is_meta for b in model.buffers())
    assert [tuple(p.shape) for p in model.parameters()] == [
        p.shape for p in manifest(model.spec) if p.tied_to is None
    ]
