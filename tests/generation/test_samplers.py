"""Samplers: their definitions, what they never do, and the chain of them; over arrays, tensors."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.generation import choosing, samplers
from glassformer.generation.choosing import NOTHING, uniform
from glassformer.generation.samplers import draw, make_sampler
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.models.prompts import Prompts
from glassformer.spec.decoding import DecodeSpec
from tests.generation import checks
from tests.planting import Call, Constant, Name, catches
from tests.tiny import VOCAB, built, noise


def sample_logits(seed: int, *, rows: int = 4, vocab: int = 13) -> torch.Tensor:
    """Rows with ties, large values and a token that is left out already."""
    logits_BV = noise(rows, vocab, seed=seed, dtype=torch.float32).mul(3).round(decimals=1)
    logits_BV[0, :3] = logits_BV[0].max()
    logits_BV[1, 5] = 80.0
    logits_BV[2, 0] = -math.inf
    return logits_BV


def chances(row: torch.Tensor) -> list[float]:
    """softmax, in Python."""
    values = row.tolist()
    top = max(values)
    weights = [math.exp(value - top) for value in values]
    return [weight / sum(weights) for weight in weights]


def kept(row: torch.Tensor) -> set[int]:
    """Tokens that are not left out."""
    return {token for token, value in enumerate(row.tolist()) if value > -math.inf}


def before_and_after(rule, logits_BV, *options):
    """Each row before and after a rule that leaves tokens out, values untouched."""
    ruled_BV = rule(logits_BV, *options)
    for before, after in zip(logits_BV, ruled_BV, strict=True):
        assert all(after[token] == before[token] for token in kept(after))
        yield before, kept(after)


def _chain_with(typical_p: float) -> None:
    spec = DecodeSpec(
        temperature=0.7,
        top_k=6,
        top_p=0.9,
        min_p=0.05,
        typical_p=typical_p,
        repetition_penalty=1.3,
        forbidden=(1,),
        forced=(4,),
        eos=(2,),
        min_new_tokens=3,
        seed=11,
    )
    sample, rows = make_sampler(spec), (0, 1, 2, 3)
    for seed in range(5):
        logits_BV = sample_logits(seed)
        seen_BV = noise(*logits_BV.shape, seed=seed + 50) > 0
        allow_BV = noise(*logits_BV.shape, seed=seed + 90) > -1.0
        allow_BV[:, 7] = True
        for step in range(5):
            got = sample(logits_BV, step=step, rows=rows, seen_BV=seen_BV, allow_BV=allow_BV)
            if step == 0:
                assert got.tolist() == [4] * 4
                continue
            x_BV = samplers.penalise_repetition(logits_BV, seen_BV, 1.3)
            x_BV = samplers.forbid(x_BV, (1, 2) if step < 2 else (1,))
            x_BV = x_BV.masked_fill(~allow_BV, -math.inf) / 0.7
            x_BV = samplers.keep_min_p(samplers.keep_top_p(samplers.keep_top_k(x_BV, 6), 0.9), 0.05)
            x_BV = samplers.keep_typical(x_BV, typical_p)
            assert got.tolist() == draw(x_BV, seed=11, rows=rows, step=step).tolist()


seeds = st.integers(0, 10_000)


@catches(
    "top-k one too many", "generation.samplers:keep_top_k", Call("_largest"), arg=1, to="{it} + 1"
)
@given(seed=seeds, k=st.integers(1, 15))
def test_top_k(seed: int, k: int) -> None:
    """Kept: those that fewer than k others beat."""
    for row, tokens in before_and_after(samplers.keep_top_k, sample_logits(seed), k):
        values = row.tolist()
        beaten_by = [sum(other > value for other in values) for value in values]
        assert tokens == {t for t, n in enumerate(beaten_by) if n < k} & kept(row)


@catches("top-p drops the first token", "generation.samplers:keep_top_p", Constant(0.0), to="1.0")
@given(seed=seeds, p=st.floats(1e-6, 1.0))
def test_top_p(seed: int, p: float) -> None:
    """Kept: those whose likelier ones have less than p together."""
    for row, tokens in before_and_after(samplers.keep_top_p, sample_logits(seed), p):
        values, chance = row.tolist(), chances(row)
        for token, value in enumerate(values):
            before = sum(c for other, c in zip(values, chance, strict=True) if other > value)
            if abs(before - p) > 1e-9 and value > -math.inf:
                assert (token in tokens) == (before < p or p >= 1.0)
        assert row.argmax().item() in tokens


@given(seed=seeds, p=st.floats(1e-6, 1.0))
def test_min_p(seed: int, p: float) -> None:
    """Kept: those at least p times as likely as the likeliest."""
    for row, tokens in before_and_after(samplers.keep_min_p, sample_logits(seed), p):
        chance = chances(row)
        for token, value in enumerate(chance):
            if abs(value - p * max(chance)) > 1e-6 * max(chance):
                assert (token in tokens) == (value > p * max(chance))


@given(seed=seeds, p=st.floats(1e-6, 1.0))
def test_typical(seed: int, p: float) -> None:
    """Kept: those with less than p among the tokens strictly nearer to the entropy, in surprise."""
    for row, tokens in before_and_after(samplers.keep_typical, sample_logits(seed), p):
        chance = chances(row)
        entropy = sum(-c * math.log(c) for c in chance if c > 0)
        distance = [abs(-math.log(c) - entropy) if c > 0 else math.inf for c in chance]
        for token in kept(row):
            nearer = [c for c, d in zip(chance, distance, strict=True) if d < distance[token]]
            close = any(0 < abs(d - distance[token]) < 1e-9 for d in distance)
            if not close and abs(sum(nearer) - p) > 1e-9:
                assert (token in tokens) == (sum(nearer) < p or p >= 1.0)
        assert tokens


@given(seed=seeds, p=st.floats(0.05, 0.99))
def test_typical_is_that_of_transformers(seed, p):
    from transformers import TypicalLogitsWarper

    logits_BV = noise(5, 29, seed=seed, dtype=torch.float64) * 3
    want_BV = TypicalLogitsWarper(mass=p)(torch.zeros(5, 1, dtype=torch.long), logits_BV)
    assert torch.equal(samplers.keep_typical(logits_BV, p), want_BV)


def test_typical_drops_what_is_too_likely():
    """Surprises 0.11, 3, 3.4 and an entropy of 0.42: a peak is nearest; flat rows keep all ties."""
    peak_BV = torch.tensor([[0.9, 0.05, 0.03, 0.02]]).log()
    assert kept(samplers.keep_typical(peak_BV, 0.5)[0]) == {0}
    spread_BV = torch.tensor([[0.4, *[0.03] * 20]]).log()
    assert 0 not in kept(samplers.keep_typical(spread_BV, 0.5)[0])
    assert kept(samplers.keep_typical(torch.zeros(1, 7), 0.1)[0]) == set(range(7))
    assert samplers.keep_typical(spread_BV, 1.0) is spread_BV


@given(seed=seeds, temperature=st.sampled_from([0.0, 1e-30, 1e-5, 0.3, 1.0, 4.0]))
def test_temperature(seed: int, temperature: float) -> None:
    """p(token) is proportional to p^(1 / temperature); at 1e-5 and below, one token is left."""
    logits_BV = sample_logits(seed)
    scaled_BV = samplers.scale_by_temperature(logits_BV, temperature)
    for row, scaled in zip(logits_BV, scaled_BV, strict=True):
        if temperature <= 1e-5:
            assert kept(scaled) == {int(row.argmax())}
            continue
        powers = [c ** (1 / temperature) for c in chances(row)]
        for got, want in zip(chances(scaled), powers, strict=True):
            assert math.isclose(got, want / sum(powers), rel_tol=1e-3, abs_tol=1e-6)


@given(seed=seeds, penalty=st.floats(0.5, 3.0))
def test_repetition_penalty(seed: int, penalty: float) -> None:
    """A seen token never gets likelier with a penalty above 1; others keep their logits."""
    logits_BV = sample_logits(seed)
    seen_BV = noise(*logits_BV.shape, seed=seed + 1) > 0
    got_BV = samplers.penalise_repetition(logits_BV, seen_BV, penalty)
    for value, seen, got in zip(
        logits_BV.flatten().tolist(),
        seen_BV.flatten().tolist(),
        got_BV.flatten().tolist(),
        strict=True,
    ):
        want = value if not seen else value / penalty if value > 0 else value * penalty
        assert got == want or math.isclose(got, want, rel_tol=1e-6)


def test_draws_follow_the_softmax() -> None:
    """20,000 draws, frequencies within four standard deviations; what is left out never comes."""
    logits_V = torch.tensor([0.3, -1.0, 2.0, -math.inf, 0.5, -6.0])
    count = 20_000
    drawn = draw(logits_V.expand(count, -1), seed=1, rows=range(count), step=3)
    for token, chance in enumerate(chances(logits_V)):
        off = abs(int((drawn == token).sum()) - chance * count)
        assert off <= 4 * math.sqrt(chance * (1 - chance) * count), (token, off)
    assert 3 not in drawn.tolist()


@catches("the same draw at every step", "generation.samplers:draw", Name("step"), to="0")
def test_draws_do_not_depend_on_the_batch() -> None:
    """Draw from the batch, differently for each seed, row and step."""
    logits_BV = torch.zeros(50, 97)
    whole = draw(logits_BV, seed=7, rows=range(50), step=2).tolist()
    for row in range(50):
        (alone,) = draw(logits_BV[:1], seed=7, rows=(row,), step=2).tolist()
        assert alone == whole[row]
    turned = draw(logits_BV, seed=7, rows=range(49, -1, -1), step=2).tolist()
    assert turned == whole[::-1]
    others = [draw(logits_BV, seed=8, rows=range(50), step=2).tolist()]
    others.append(draw(logits_BV, seed=7, rows=range(50), step=3).tolist())
    others.append(draw(logits_BV, seed=7, rows=range(50, 100), step=2).tolist())
    for other in others:
        assert sum(a == b for a, b in zip(whole, other, strict=True)) < 10
    numbers = {uniform(s, r, t) for s in range(10) for r in range(10) for t in range(10)}
    assert len(numbers) == 1_000
    assert all(0.0 <= number < 1.0 for number in numbers)


@catches(
    "top-p before temperature",
    "generation.samplers:_kept",
    Name("x_BV"),
    to="keep_top_p({it}, spec.top_p)",
)
def test_the_chain_is_in_order() -> None:
    """forced, repetition, forbidden, eos, permission, temperature, then the rules in order."""
    for typical_p in (1.0, 0.8):
        _chain_with(typical_p)


def test_forbidden_and_forced():
    logits_BV = sample_logits(0)
    assert kept(samplers.forbid(logits_BV, (1, 5))[1]) == set(range(13)) - {1, 5}
    assert samplers.forbid(logits_BV, ()) is logits_BV
    assert kept(samplers.force(logits_BV, 3)[0]) == {3}


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
    logits_BV = sample_logits(seed)
    tokens = make_sampler(spec)(logits_BV, step=0, rows=(0, 1, 2, 3)).tolist()
    for row, token in zip(logits_BV, tokens, strict=True):
        assert 0 <= token < 13
        assert row[token] > -math.inf


def test_half_precision_is_sampled_in_float32():
    logits_BV = sample_logits(3)
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


# --- arrays and tensors ---------------------------------------------------------------------------

RULES = {
    "scale_by_temperature": (0.0, 1e-4, 0.7, 1e300),
    "keep_top_k": (1, 2, 5, 100),
    "keep_top_p": (1e-6, 0.3, 0.5, 0.95, 1.0),
    "keep_min_p": (0.0, 0.05, 0.5, 1.0),
    "keep_typical": (0.1, 0.5, 0.9, 1.0),
    "forbid": ((), (0,)),
    "force": (0,),
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
def test_a_rule_keeps_the_same_tokens_over_arrays_and_tensors(rule, vocab):
    for seed in range(5):
        logits_BV = rows_of(seed, vocab)
        before_BV = logits_BV.copy()
        for amount in RULES[rule]:
            made_BV = getattr(samplers, rule)(logits_BV, amount)
            wanted_BV = getattr(samplers, rule)(torch.from_numpy(logits_BV), amount)
            assert made_BV.dtype == np.float32 and wanted_BV.dtype == torch.float32
            np.testing.assert_array_equal(made_BV, wanted_BV, err_msg=f"{rule} {amount} {seed}")
        np.testing.assert_array_equal(logits_BV, before_BV, err_msg=f"{rule} writes into its input")


@pytest.mark.parametrize("penalty", [1e-300, 1e-44, 0.5, 1.3, 7.0, 1e300])
def test_a_penalty_of_any_size_leaves_numbers(penalty):
    """Also a logit of 0, which times infinity would be none; a dropped token stays dropped."""
    logits_BV, seen_BV = rows_of(0, 131), np.random.default_rng(1).random((5, 131)) < 0.3
    logits_BV[0, :3] = (0.0, -0.0, -np.inf)
    seen_BV[0, :3] = True
    wanted = samplers.penalise_repetition(torch.from_numpy(logits_BV), seen_BV, penalty)
    made_BV = samplers.penalise_repetition(logits_BV, seen_BV, penalty)
    np.testing.assert_array_equal(made_BV, wanted)
    np.testing.assert_array_equal(np.isfinite(made_BV), np.isfinite(logits_BV))


@pytest.mark.parametrize("vocab", VOCABS)
def test_shares_fall_on_the_same_tokens(vocab):
    rng = np.random.default_rng(vocab)
    for seed in range(20):
        logits_BV = rows_of(seed, vocab)
        share_B1 = np.array([[*rng.random(3), 0.0, np.nextafter(1.0, 0.0)]]).T
        wanted = samplers.draw_at(torch.from_numpy(logits_BV), torch.from_numpy(share_B1))
        assert samplers.draw_at(logits_BV, share_B1).tolist() == wanted.tolist()


def test_the_likeliest_are_listed_best_first_and_the_first_of_equal_ones():
    logits_BV = np.array([[0.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, -np.inf]], np.float32)
    for kind in (np.asarray, torch.from_numpy, lambda x_BV: torch.from_numpy(x_BV).bfloat16()):
        first, second = samplers.likeliest_of(kind(logits_BV), 3)
        assert [token for token, _ in first] == [1, 3, 2]
        assert [token for token, _ in second] == [0, 1, 2]
        assert second[0][1] == pytest.approx(-math.log(3), abs=1e-12)
        one, other = samplers.logprobs_of(kind(logits_BV), [1, 2]).tolist()
        assert (one, other) == pytest.approx((first[0][1], second[2][1]), abs=1e-7)


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
    """A new option is drawn in the next test, over arrays and over tensors."""
    rules = {*AMOUNTS, "max_new_tokens", "eos"}
    by_the_loop = {"stop"}  # what ends a text, whoever chose its tokens
    assert {field.name for field in fields(DecodeSpec)} == rules | by_the_loop


def chooser_of(spec, prompts, *, vocab, array=np.asarray, logprobs=True):
    return samplers.SamplingChooser(
        spec, prompts, vocab_size=vocab, logprobs=logprobs, count=0, array=array
    )


@settings(max_examples=150, deadline=None)
@given(spec=SPECS, seed=st.integers(0, 1000), allows=st.booleans())
def test_a_chooser_chooses_the_same_over_arrays_and_tensors(spec, seed, allows):
    """The chooser of arrays, that of tensors, and the sampler itself over tensors."""
    vocab, prompts = 131, Prompts.of([[1, 2, 3], [7, 8, 9], [4, 4, 4], [5, 6, 7], [1, 1, 1]])
    rng = np.random.default_rng(seed)
    kinds = (np.asarray, torch.from_numpy)
    two = [chooser_of(spec, prompts, vocab=vocab, array=kind) for kind in kinds]
    sample, seen_BV = make_sampler(spec), samplers.seen_in(prompts, vocab)
    rows = [3, 1, 4, 0, 5]
    for step in range(3):
        logits_BV = rows_of(seed + step, vocab)[: len(rows)]
        allow_BV = rng.random(logits_BV.shape) < 0.5 if allows else None
        found = []
        for chooser, as_own in zip(two, kinds, strict=True):
            made = chooser.choose(as_own(logits_BV), step=step, rows=rows, allow_BV=allow_BV)
            tokens, values, _ = made.fetch()
            assert type(made.tokens_B) is type(as_own(logits_BV))
            chooser.note(tokens)
            found.append((tokens, values))
        wanted_B = sample(
            torch.from_numpy(logits_BV), step=step, rows=rows, seen_BV=seen_BV, allow_BV=allow_BV
        )
        assert found[0] == found[1]
        assert found[0][0] == wanted_B.tolist()
        seen_BV[np.arange(len(rows)), wanted_B] = True
        if step == 0:  # the second row has ended
            stay = np.array([0, 2, 3, 4])
            rows, seen_BV = [rows[line] for line in stay], seen_BV[stay]
            for chooser, as_own in zip(two, kinds, strict=True):
                chooser.keep(as_own(stay))


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_choose_nothing_and_warn_of_nothing(fill, temperature):
    spec = DecodeSpec(
        temperature=temperature, top_p=0.9, typical_p=0.9, repetition_penalty=1.5, forbidden=(0,)
    )
    logits_BV = np.full((1, 5), fill, dtype=np.float32)
    chooser = chooser_of(spec, Prompts.of([[1]]), vocab=5)
    tokens, _, _ = chooser.choose(logits_BV, step=0, rows=[0], allow_BV=None).fetch()
    assert tokens == [NOTHING]
    twin = make_sampler(spec)(torch.from_numpy(logits_BV), step=0, rows=[0])
    assert twin.tolist() == [NOTHING]
