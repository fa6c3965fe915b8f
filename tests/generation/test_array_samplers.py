"""The rules over NumPy arrays give what their twins give over tensors."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.generation import array_samplers as ours
from glassformer.generation import samplers as theirs
from glassformer.generation.choosing import NOTHING
from glassformer.generation.prompts import Prompts
from glassformer.spec.decoding import DecodeSpec
from tests.checks.faults import Fault, planted

RULES = {
    "keep_top_k": (1, 2, 5, 100),
    "keep_top_p": (1e-6, 0.3, 0.5, 0.95, 1.0),
    "keep_min_p": (0.0, 0.05, 0.5, 1.0),
    "keep_typical": (0.1, 0.5, 0.9, 1.0),
}
#: Rows: spread, flat, with equal ones, with dropped ones, nearly one, wider than a first look.
VOCABS = (1, 2, 7, 131, 1_009)


def rows_of(seed, vocab):
    rng = np.random.default_rng(seed)
    spread = rng.normal(0, 3, (5, vocab))
    spread[1] = 0.5
    spread[2] = spread[2].round()
    spread[3, rng.random(vocab) < 0.5] = -np.inf
    spread[3, -1] = 1.0
    spread[4] *= 1e-3
    return spread.astype(np.float32)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_keeps_the_tokens_that_its_twin_keeps(rule, vocab):
    for seed in range(5):
        logits_BV = rows_of(seed, vocab)
        for amount in RULES[rule]:
            made_BV = getattr(ours, rule)(logits_BV, amount)
            wanted_BV = getattr(theirs, rule)(torch.from_numpy(logits_BV), amount).numpy()
            assert made_BV.dtype == np.float32
            np.testing.assert_array_equal(made_BV, wanted_BV, err_msg=f"{rule} {amount} {seed}")


def test_a_penalty_lowers_what_its_twin_lowers():
    logits_BV, seen_BV = rows_of(0, 131), np.random.default_rng(1).random((5, 131)) < 0.3
    for penalty in (0.5, 1.3, 7.0):
        wanted = theirs.penalise_repetition(*map(torch.from_numpy, (logits_BV, seen_BV)), penalty)
        made_BV = ours.penalise_repetition(logits_BV, seen_BV, penalty)
        np.testing.assert_array_equal(made_BV, wanted.numpy())


@pytest.mark.parametrize("penalty", [1e-300, 1e-44, 1e300])
def test_a_penalty_of_any_size_leaves_numbers(penalty):
    """Also a logit of 0, which times infinity would be none; a dropped token stays dropped."""
    logits_BV, seen_BV = rows_of(0, 131), np.ones((5, 131), dtype=np.bool_)
    logits_BV[0, :3] = (0.0, -0.0, -np.inf)
    wanted = theirs.penalise_repetition(*map(torch.from_numpy, (logits_BV, seen_BV)), penalty)
    made_BV = ours.penalise_repetition(logits_BV, seen_BV, penalty)
    np.testing.assert_array_equal(made_BV, wanted.numpy())
    np.testing.assert_array_equal(np.isfinite(made_BV), np.isfinite(logits_BV))


def test_logits_that_are_not_numbers_choose_nothing_and_warn_of_nothing():
    for value in (np.nan, np.inf, -np.inf):
        logits_BV = np.full((1, 5), value, np.float32)
        for temperature in (0.0, 1.0):
            chooser = ours.SamplingChooser(
                DecodeSpec(temperature=temperature, repetition_penalty=1.5),
                Prompts.of([[1]]),
                vocab_size=5,
                logprobs=True,
                array=np.asarray,
            )
            chosen = chooser.choose(logits_BV, step=0, rows=[0], allow_BV=None)
            assert chosen.fetch()[0] == [NOTHING]


@pytest.mark.parametrize("vocab", VOCABS)
def test_shares_fall_on_the_same_tokens(vocab):
    rng = np.random.default_rng(vocab)
    for seed in range(20):
        logits_BV = rows_of(seed, vocab)
        share_B = [*rng.random(3), 0.0, float(np.nextafter(1.0, 0.0))]
        wanted = theirs.draw_at(
            torch.from_numpy(logits_BV), torch.tensor(share_B)[:, None].double()
        )
        assert ours.draw_at(logits_BV, share_B).tolist() == wanted.tolist()


AMOUNTS = {
    "temperature": st.sampled_from((0.0, 0.3, 1.0, 2.5, 1e30)),
    "top_k": st.sampled_from((None, 1, 5)),
    "top_p": st.sampled_from((1.0, 0.9, 0.2)),
    "min_p": st.sampled_from((0.0, 0.1)),
    "typical_p": st.sampled_from((1.0, 0.6)),
    "repetition_penalty": st.sampled_from((1.0, 1.5)),
    "forbidden": st.sampled_from(((), (3, 5))),
    "forced": st.sampled_from(((), (2,))),
    "min_new_tokens": st.sampled_from((0, 2)),
    "seed": st.integers(0, 5),
}
SPECS = st.builds(DecodeSpec, max_new_tokens=st.just(3), eos=st.just((1,)), **AMOUNTS)


def test_every_option_of_decoding_is_known_here():
    """A new option needs its rule over arrays, or what runs without torch would ignore it."""
    rules = {*AMOUNTS, "max_new_tokens", "eos"}
    by_the_loop = {"stop"}  # what ends a text, whoever chose its tokens
    assert {field.name for field in fields(DecodeSpec)} == rules | by_the_loop


@settings(max_examples=150, deadline=None)
@given(spec=SPECS, seed=st.integers(0, 1000), allows=st.booleans())
def test_a_chooser_chooses_what_the_one_over_tensors_chooses(spec, seed, allows):
    vocab, prompts = 131, Prompts.of([[1, 2, 3], [7, 8, 9], [4, 4, 4], [5, 6, 7], [1, 1, 1]])
    rng = np.random.default_rng(seed)
    two = (
        ours.SamplingChooser(spec, prompts, vocab_size=vocab, logprobs=True, array=np.asarray),
        theirs.TorchChooser(spec, prompts, vocab_size=vocab, logprobs=True, count=0),
    )
    rows = [3, 1, 4, 0, 5]
    for step in range(3):
        logits_BV = rows_of(seed + step, vocab)[: len(rows)]
        allow_BV = rng.random(logits_BV.shape) < 0.5 if allows else None
        found = []
        for chooser, as_own in zip(two, (np.asarray, torch.from_numpy), strict=True):
            made = chooser.choose(as_own(logits_BV), step=step, rows=rows, allow_BV=allow_BV)
            tokens, values, _ = made.fetch()
            chooser.note(np.asarray(made.tokens_B).tolist())
            found.append((tokens, values))
        assert found[0][0] == found[1][0]
        np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5, atol=2e-6)
        if step == 0:  # the second row has ended
            stay = np.array([0, 2, 3, 4])
            rows = [rows[line] for line in stay]
            two[0].keep(stay)
            two[1].keep(torch.from_numpy(stay))


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_choose_nothing(fill, temperature):
    spec = DecodeSpec(max_new_tokens=1, temperature=temperature, top_p=0.9, forbidden=(0,))
    logits_BV = np.full((1, 5), fill, dtype=np.float32)
    prompts = Prompts.of([[1]])
    chooser = ours.SamplingChooser(spec, prompts, vocab_size=5, logprobs=False, array=np.asarray)
    tokens, _, _ = chooser.choose(logits_BV, step=0, rows=[0], allow_BV=None).fetch()
    assert tokens == [NOTHING]
    twin = theirs.make_sampler(spec)(torch.from_numpy(logits_BV), step=0, rows=[0])
    assert twin.tolist() == [NOTHING]


# --- planted faults -------------------------------------------------------------------------------

RULE = "generation.array_samplers:"
FAULTS = (
    Fault("a nucleus without its last", RULE + "keep_top_p", "- chance_BK\n", "\n", "keep_top_p"),
    Fault("one more", RULE + "keep_top_k", "logits_BV, k)[", "logits_BV, k + 1)[", "keep_top_k"),
    Fault("a share of all", RULE + "keep_min_p", "math.log(p)", "p", "keep_min_p"),
    Fault("nats as they are", RULE + "keep_typical", "-logprob_BV - ent", "-ent", "keep_typical"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises(AssertionError):
        test_each_rule_keeps_the_tokens_that_its_twin_keeps(fault.caught_by, 131)
    test_each_rule_keeps_the_tokens_that_its_twin_keeps(fault.caught_by, 131)
