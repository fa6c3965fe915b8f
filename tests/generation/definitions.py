"""Samplers against their definitions, token by token; as plain functions, for tests and faults."""

import math

import torch

from glassformer.generation import samplers
from glassformer.generation.choosing import uniform
from glassformer.generation.samplers import draw, make_sampler
from glassformer.spec.decoding import DecodeSpec
from tests.tiny import noise


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


def rows_of(rule, logits_BV, *options):
    """Each row before and after a rule that leaves tokens out, values untouched."""
    ruled_BV = rule(logits_BV, *options)
    for before, after in zip(logits_BV, ruled_BV, strict=True):
        assert all(after[token] == before[token] for token in kept(after))
        yield before, kept(after)


def top_k_is_its_definition(*, seed: int = 0, k: int = 3) -> None:
    """Kept: those that fewer than k others beat."""
    for row, tokens in rows_of(samplers.keep_top_k, sample_logits(seed), k):
        values = row.tolist()
        beaten_by = [sum(other > value for other in values) for value in values]
        assert tokens == {t for t, n in enumerate(beaten_by) if n < k} & kept(row)


def top_p_is_its_definition(*, seed: int = 0, p: float = 0.7) -> None:
    """Kept: those whose likelier ones have less than p together."""
    for row, tokens in rows_of(samplers.keep_top_p, sample_logits(seed), p):
        values, chance = row.tolist(), chances(row)
        for token, value in enumerate(values):
            before = sum(c for other, c in zip(values, chance, strict=True) if other > value)
            if abs(before - p) > 1e-9 and value > -math.inf:
                assert (token in tokens) == (before < p or p >= 1.0)
        assert row.argmax().item() in tokens


def min_p_is_its_definition(*, seed: int = 0, p: float = 0.2) -> None:
    """Kept: those at least p times as likely as the likeliest."""
    for row, tokens in rows_of(samplers.keep_min_p, sample_logits(seed), p):
        chance = chances(row)
        for token, value in enumerate(chance):
            if abs(value - p * max(chance)) > 1e-6 * max(chance):
                assert (token in tokens) == (value > p * max(chance))


def typical_is_its_definition(*, seed: int = 0, p: float = 0.4) -> None:
    """Kept: those with less than p among the tokens strictly nearer to the entropy, in surprise."""
    for row, tokens in rows_of(samplers.keep_typical, sample_logits(seed), p):
        chance = chances(row)
        entropy = sum(-c * math.log(c) for c in chance if c > 0)
        distance = [abs(-math.log(c) - entropy) if c > 0 else math.inf for c in chance]
        for token in kept(row):
            nearer = [c for c, d in zip(chance, distance, strict=True) if d < distance[token]]
            close = any(0 < abs(d - distance[token]) < 1e-9 for d in distance)
            if not close and abs(sum(nearer) - p) > 1e-9:
                assert (token in tokens) == (sum(nearer) < p or p >= 1.0)
        assert tokens


def temperature_is_its_definition(*, seed: int = 0, temperature: float = 0.5) -> None:
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


def repetition_is_its_definition(*, seed: int = 0, penalty: float = 1.5) -> None:
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


def draws_follow_the_softmax() -> None:
    """20,000 draws, frequencies within four standard deviations; what is left out never comes."""
    logits_V = torch.tensor([0.3, -1.0, 2.0, -math.inf, 0.5, -6.0])
    count = 20_000
    drawn = draw(logits_V.expand(count, -1), seed=1, rows=range(count), step=3)
    for token, chance in enumerate(chances(logits_V)):
        off = abs(int((drawn == token).sum()) - chance * count)
        assert off <= 4 * math.sqrt(chance * (1 - chance) * count), (token, off)
    assert 3 not in drawn.tolist()


def draws_are_independent() -> None:
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


def the_chain_is_in_order() -> None:
    """forced, repetition, forbidden, eos, permission, temperature, then the rules in order."""
    for typical_p in (1.0, 0.8):
        _chain_with(typical_p)


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
