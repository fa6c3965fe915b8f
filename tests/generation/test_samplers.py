"""Samplers: their definitions, what they never do, and the chain of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.generation import choosing, samplers
from glassformer.generation.samplers import make_sampler
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.spec.decoding import DecodeSpec
from tests.generation import checks, definitions
from tests.tiny import VOCAB, built, noise

seeds = st.integers(0, 10_000)


@given(seed=seeds, k=st.integers(1, 15))
def test_top_k(seed, k):
    definitions.top_k_is_its_definition(seed=seed, k=k)


@given(seed=seeds, p=st.floats(1e-6, 1.0))
def test_top_p(seed, p):
    definitions.top_p_is_its_definition(seed=seed, p=p)


@given(seed=seeds, p=st.floats(1e-6, 1.0))
def test_min_p(seed, p):
    definitions.min_p_is_its_definition(seed=seed, p=p)


@given(seed=seeds, p=st.floats(1e-6, 1.0))
def test_typical(seed, p):
    definitions.typical_is_its_definition(seed=seed, p=p)


@given(seed=seeds, p=st.floats(0.05, 0.99))
def test_typical_is_that_of_transformers(seed, p):
    from transformers import TypicalLogitsWarper

    logits_BV = noise(5, 29, seed=seed, dtype=torch.float64) * 3
    want_BV = TypicalLogitsWarper(mass=p)(torch.zeros(5, 1, dtype=torch.long), logits_BV)
    assert torch.equal(samplers.keep_typical(logits_BV, p), want_BV)


def test_typical_drops_what_is_too_likely():
    """Surprises 0.11, 3, 3.4 and an entropy of 0.42: a peak is nearest; flat rows keep all ties."""
    peak_BV = torch.tensor([[0.9, 0.05, 0.03, 0.02]]).log()
    assert definitions.kept(samplers.keep_typical(peak_BV, 0.5)[0]) == {0}
    spread_BV = torch.tensor([[0.4, *[0.03] * 20]]).log()
    assert 0 not in definitions.kept(samplers.keep_typical(spread_BV, 0.5)[0])
    assert definitions.kept(samplers.keep_typical(torch.zeros(1, 7), 0.1)[0]) == set(range(7))
    assert samplers.keep_typical(spread_BV, 1.0) is spread_BV


@given(seed=seeds, temperature=st.sampled_from([0.0, 1e-30, 1e-5, 0.3, 1.0, 4.0]))
def test_temperature(seed, temperature):
    definitions.temperature_is_its_definition(seed=seed, temperature=temperature)


@given(seed=seeds, penalty=st.floats(0.5, 3.0))
def test_repetition_penalty(seed, penalty):
    definitions.repetition_is_its_definition(seed=seed, penalty=penalty)


def test_draws_follow_the_softmax():
    definitions.draws_follow_the_softmax()


def test_draws_do_not_depend_on_the_batch():
    definitions.draws_are_independent()


def test_the_chain_is_in_order():
    definitions.the_chain_is_in_order()


def test_forbidden_and_forced():
    logits_BV = definitions.sample_logits(0)
    assert definitions.kept(samplers.forbid(logits_BV, (1, 5))[1]) == set(range(13)) - {1, 5}
    assert samplers.forbid(logits_BV, ()) is logits_BV
    assert definitions.kept(samplers.force(logits_BV, 3)[0]) == {3}


@given(
    seed=seeds,
    top_k=st.none() | st.integers(1, 3),
    top_p=st.floats(1e-9, 1.0),
    min_p=st.floats(0.0, 1.0),
    typical_p=st.floats(1e-9, 1.0),
    temperature=st.floats(0.0, 50.0) | st.sampled_from([1e-4, 1e39, 1e300]),
)
def test_something_is_always_kept(seed, temperature, **rules):
    spec = DecodeSpec(temperature=temperature, seed=seed, **rules)
    logits_BV = definitions.sample_logits(seed)
    tokens = make_sampler(spec)(logits_BV, step=0, rows=(0, 1, 2, 3)).tolist()
    for row, token in zip(logits_BV, tokens, strict=True):
        assert 0 <= token < 13
        assert row[token] > -math.inf


def test_half_precision_is_sampled_in_float32():
    logits_BV = definitions.sample_logits(3)
    sample = make_sampler(DecodeSpec(temperature=1.0, top_p=0.9, seed=2))
    wide = sample(logits_BV.bfloat16().float(), step=0, rows=(0, 1, 2, 3))
    assert torch.equal(sample(logits_BV.bfloat16(), step=0, rows=(0, 1, 2, 3)), wide)


@pytest.mark.parametrize("name", ["rotary", "encoder"])
def test_top_k_of_everything_is_plain_sampling(name):
    model = built(checks.SPECS[name])
    stepper, prompts = TorchStepper(model), checks.prompts_for(model)
    rules = {"max_new_tokens": 15, "temperature": 1.3, "seed": 3}
    plain = generate_batch(stepper, prompts, spec=DecodeSpec(**rules))
    for more in ({"top_k": VOCAB}, {"top_k": 10 * VOCAB}, {"top_p": 1.0}, {"min_p": 0.0}):
        other = generate_batch(stepper, prompts, spec=DecodeSpec(**rules, **more))
        assert [g.tokens for g in other] == [g.tokens for g in plain]
    for more in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        cold = generate_batch(stepper, prompts, spec=DecodeSpec(**rules, **more))
        greedy = generate_batch(stepper, prompts, spec=DecodeSpec(max_new_tokens=15))
        assert [g.tokens for g in cold] == [g.tokens for g in greedy]


def test_random_numbers_of_many_rows_are_those_of_each():
    of = [(0, 0, 0), (1, 2, 3), (2**63 - 1, 5, 10_000), (2**70 + 1, 0, 7)]
    assert choosing.uniforms(*zip(*of, strict=True)) == [choosing.uniform(*one) for one in of]
