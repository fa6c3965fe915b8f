"""The statistics of a ranking: against SciPy, against cases worked by hand, against simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from glassformer.lab.sweeps import ranking
from glassformer.lab.sweeps.ranking import (
    cell_spread,
    crossings,
    holm,
    main_effects,
    rank,
    seeds_needed,
)


@pytest.mark.parametrize(("before", "freedom"), [(3.0, 4), (12.0, 4), (60.0, 9)])
def test_the_prior_is_found_in_drawn_variances(before, freedom):
    """Variances of Smyth's model: scaled inverse chi-square, each seen through a chi-square."""
    rng = np.random.default_rng(0)
    true = 0.04 * before / rng.chisquare(before, 40_000)
    found, typical = ranking._prior(true * rng.chisquare(freedom, 40_000) / freedom, freedom)
    assert found == pytest.approx(before, rel=0.15) and typical == pytest.approx(0.04, rel=0.03)


def test_equal_variances_are_pooled():
    assert ranking._prior(np.full(5, 0.3), 4)[0] == math.inf


def test_holm_by_hand():
    adjusted = holm(np.array([0.01, 0.04, 0.03, 0.005]))
    np.testing.assert_allclose(adjusted, [0.03, 0.06, 0.06, 0.02])
    assert (holm(np.array([0.5, 0.9])) == [1.0, 1.0]).all()


def test_two_cells_are_the_paired_t_test():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 7)) + 3 * rng.standard_normal(7)
    made = rank(["a", "b"], values)
    expected = stats.ttest_rel(values[0], values[1])
    found = made.rows[1].best
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6)
    low, high = expected.confidence_interval()
    sign = 1 if made.rows[1].cell == 0 else -1
    ends = sorted([sign * low, sign * high])
    assert [found.low, found.high] == pytest.approx(ends, rel=1e-6)


def test_a_cells_interval_is_students():
    values = np.random.default_rng(1).standard_normal((3, 5))
    for row in rank(list("abc"), values).rows:
        expected = stats.t.interval(0.95, 4, loc=np.mean(row.seeds), scale=stats.sem(row.seeds))
        assert (row.low, row.high) == pytest.approx(expected, rel=1e-6)


def test_a_seed_that_is_hard_for_all_cells_does_not_count():
    rng = np.random.default_rng(2)
    values = rng.standard_normal((6, 5)) * 0.01 + np.linspace(0, 0.2, 6)[:, None]
    shifted = values + 10 * rng.standard_normal(5)
    np.testing.assert_allclose(cell_spread(values).variance, cell_spread(shifted).variance)
    plain, moved = rank(list("abcdef"), values), rank(list("abcdef"), shifted)
    assert [row.best.p for row in plain.rows[1:]] == pytest.approx(
        [row.best.p for row in moved.rows[1:]]
    )


def test_the_order_of_cells_changes_nothing():
    values = np.random.default_rng(3).standard_normal((7, 5)) + np.arange(7)[:, None]
    names = [f"c{i}" for i in range(7)]
    turn = [3, 0, 6, 1, 5, 2, 4]
    one, two = rank(names, values), rank([names[i] for i in turn], values[turn])
    assert [(r.name, r.rank, r.group, r.best and round(r.best.p, 12)) for r in one.rows] == [
        (r.name, r.rank, r.group, r.best and round(r.best.p, 12)) for r in two.rows
    ]


def test_larger_is_better_turns_the_order():
    values = np.array([[0.1, 0.2, 0.15], [0.8, 0.9, 0.85]])
    assert [r.name for r in rank(["low", "high"], values).rows] == ["low", "high"]
    turned = rank(["low", "high"], values, smaller_is_better=False)
    assert [r.name for r in turned.rows] == ["high", "low"]


def test_a_clear_gap_makes_two_groups_and_a_tie_says_what_it_needs():
    rng = np.random.default_rng(4)
    noise = rng.standard_normal((6, 5)) * 0.02
    values = noise + np.array([1, 1, 1, 2, 2, 2.0])[:, None]
    made = rank(list("abcdef"), values, unit="bits", baseline=5)
    assert [(group.first, group.last) for group in made.groups] == [(1, 3), (4, 6)]
    text = made.group_text(made.groups[0])
    assert text.startswith("1-3: no difference seen with 5 seeds; about ")
    assert text.endswith("seeds would be needed to see 0.01 bits")
    by_name = {row.name: row for row in made.rows}
    assert all(by_name[name].baseline.is_clear for name in "abc")
    assert not any(by_name[name].baseline.is_clear for name in "de")
    assert by_name["f"].baseline is None
    assert made.baseline == "f"


def test_seeds_needed_is_what_a_simulation_needs():
    variance, difference = 2 * 0.02**2, 0.02
    seeds = seeds_needed(variance, difference, comparisons=1, freedom_per_seed=1)
    rng = np.random.default_rng(5)
    gaps = difference + math.sqrt(variance) * rng.standard_normal((4000, seeds))
    p = stats.ttest_1samp(gaps, 0.0, axis=1).pvalue
    assert 0.77 < (p <= 0.05).mean() < 0.9
    assert seeds_needed(1.0, 1e-4, comparisons=3, freedom_per_seed=2) is None


def test_one_seed_and_no_spread_claim_nothing():
    one = rank(list("ab"), np.array([[1.0], [2.0]]))
    assert one.rows[0].low is None
    assert "one seed" in one.group_text(one.groups[0])
    flat = rank(list("abc"), np.array([[1.0] * 4, [2.0] * 4, [3.0] * 4]))
    assert all(not row.best.is_clear for row in flat.rows[1:])
    assert "one cell" in rank(["a"], np.array([[1.0, 2.0]])).group_text(
        rank(["a"], np.array([[1.0, 2.0]])).groups[0]
    )


def simulate(kind, cells, seeds, rng):
    plain = rng.standard_normal((cells, seeds))
    match kind:
        case "skewed":
            plain = (rng.gamma(4, size=(cells, seeds)) - 4) / 2
        case "unequal":
            plain = plain * np.linspace(0.5, 2, cells)[:, None]
    return plain + rng.standard_normal(seeds)


@pytest.mark.parametrize("kind", ["normal", "skewed", "unequal"])
def test_wrong_claims_are_rare(kind):
    """A quick look at what `python -m bench ranking` measures with 2,000 sweeps."""
    rng = np.random.default_rng(6)
    wrong = 0
    for _ in range(120):
        made = rank([str(i) for i in range(8)], simulate(kind, 8, 5, rng))
        wrong += any(row.best.is_clear for row in made.rows[1:])
    assert wrong <= 12  # 5 % of 120 is 6: more than 12 has a probability below 1 %


def test_main_effects_of_an_additive_grid():
    settings = [{"a": a, "b": b} for a in "xy" for b in "pqr"]
    effect = {"x": -1.0, "y": 1.0, "p": 0.0, "q": 0.3, "r": -0.3}
    seeds = np.array([0.0, 5.0, -2.0])
    values = np.array([[effect[s["a"]] + effect[s["b"]] + e for e in seeds] for s in settings])
    found = {(e.factor, e.value): e for e in main_effects(settings, values, ["a", "b"])}
    assert found["a", "x"].effect == pytest.approx(-1.0)
    assert found["b", "q"].effect == pytest.approx(0.3)
    assert found["b", "q"].low == pytest.approx(0.3)  # without noise it is exact
    assert main_effects(settings[:-1], values[:-1], ["a", "b"]) == ()


def test_a_crossing_is_the_last_time_that_another_was_ahead():
    made = rank(list("ab"), np.array([[1.0, 1.1], [2.0, 2.1]]))
    curves = {0: {10: 5.0, 20: 3.0, 30: 1.0}, 1: {10: 4.0, 20: 2.5, 30: 2.0}}
    (found,) = crossings(made, curves, most=5)
    assert (found.ahead, found.step) == ("b", 20)
    assert crossings(made, {0: {10: 1.0, 20: 1.0}, 1: {10: 2.0, 20: 2.0}}, most=5) == ()
