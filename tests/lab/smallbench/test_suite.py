"""The suite: random models at chance, intervals that hold, rows for what is not offered."""

import json
import math

import numpy as np
import pytest

from glassformer.data.tokenizers.vocab import Bytes, Characters, Vocab
from glassformer.lab.smallbench import suite as module
from glassformer.lab.smallbench.suite import BITS, EXAMS, exams, interval, smallbench
from glassformer.spec.errors import InputError
from tests.lab.smallbench.readers import random_model, uniform

TEXT = "some words to be told, and some more of them\n" * 20


def covers(score):
    return score.low - 1e-12 <= score.chance <= score.high + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_a_random_model_is_at_chance_on_every_exam(seed):
    result = smallbench(random_model(seed), items=160, confidence=0.999, only=list(EXAMS))
    assert [score.exam for score in result.scores if not covers(score)] == []
    assert len(result.scores) == len(EXAMS)


def test_rows_say_what_was_seen():
    result = smallbench(uniform(Bytes()), items=32, text=TEXT)
    assert [score.exam for score in result.scores] == [BITS, *EXAMS]
    bits, *rest = result.scores
    assert bits.score == pytest.approx(8.0)
    assert bits.chance == 8.0
    assert bits.oracle is None
    for score in rest:
        assert score.score == pytest.approx(score.chance)
        assert score.oracle == 1.0
        assert covers(score)
        assert score.questions >= 32
        assert (score.exact is None) == (score.exam in ("brackets", "agreement"))


def test_the_same_seed_gives_the_same_rows_and_another_others():
    def rows(seed):
        only = ["recall", "arithmetic"]
        return smallbench(random_model(0, loud=True), items=32, seed=seed, only=only).scores

    assert rows(0) == rows(0) != rows(4)


def test_what_is_not_offered_has_no_score():
    letters = Characters.of(["abcdefghijklmnopqrstuvwxyz "])
    result = smallbench(uniform(letters), items=16, text="plain words " * 9)
    offered = {score.exam for score in result.scores if score.score is not None}
    assert offered == {BITS, "induction", "agreement"}
    for score in result.scores:
        if score.exam not in offered:
            assert "cannot read" in score.not_offered
            assert (score.low, score.chance, score.oracle, score.exact) == (None,) * 4
    assert "not offered: its tokenizer cannot read" in result.table()
    none = smallbench(uniform(Vocab(("PAD", "0", "1"))), items=16, text="plain words")
    assert all(score.score is None for score in none.scores)


def test_the_table_and_the_json():
    result = smallbench(random_model(2), items=16, text=TEXT)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["suite"] == "smallbench"
    assert data["text"]["bytes"] == len(TEXT)
    assert [row["exam"] for row in data["scores"]] == [BITS, *EXAMS]
    lines = result.table().splitlines()
    assert "95.0% interval" in lines[0]
    assert "unknown" in lines[1]
    assert lines[-1].endswith(f"bz2 needs {data['text']['bz2']:.3f}")
    assert len(lines) == 1 + len(data["scores"]) + 1


def test_bad_wishes():
    with pytest.raises(InputError, match="the nearest valid items is 1"):
        smallbench(uniform(Bytes()), items=0)
    with pytest.raises(InputError, match="has no exam 'cpoy'"):
        smallbench(uniform(Bytes()), only=["cpoy"])
    with pytest.raises(InputError, match="outside"):
        smallbench(uniform(Bytes()), confidence=1.0)
    assert exams(["fsm", BITS]) == [BITS, "fsm"]


# --- intervals ------------------------------------------------------------------------------------


def test_intervals_hold(monkeypatch):
    """About 95 in 100 intervals hold the truth, of 400 samples of a dozen groups."""
    monkeypatch.setattr(module, "RESAMPLES", 1_000)
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(400):
        points = rng.normal(3.0, 1.0, size=12)
        low, high = interval(points, np.full(12, 4.0), seed=0, confidence=0.95)
        inside += low <= 0.75 <= high
    assert 0.92 < inside / 400 < 0.98, inside


def test_few_groups_are_uncertain() -> None:
    """Half the width is what Student's t says of the same numbers."""
    points = np.random.default_rng(0).normal(size=10)
    low, high = interval(points, np.ones(10), seed=0, confidence=0.95)
    expected = 2.262 * points.std(ddof=1) / math.sqrt(10)
    assert (high - low) / 2 == pytest.approx(expected, rel=0.05)


def test_sizes_weigh():
    """A ratio of sums: a group of 90 questions counts for more than one of 10."""
    sizes = np.array([90, 10, 30, 1])
    assert interval(sizes * 1.0, sizes, seed=0, confidence=0.95) == (1.0, 1.0)
    equal = interval(np.full(9, 2.0), np.full(9, 8), seed=0, confidence=0.999)
    assert equal == (0.25, 0.25)
    assert interval(np.array([1.0]), np.array([2]), seed=0, confidence=0.95) == (None, None)


def test_kinds_of_groups_are_drawn_whole():
    """Brackets: six kinds, however many questions; the interval stays as wide as they differ."""
    few, many = (
        smallbench(random_model(3), items=items, only=["brackets"]).scores[0]
        for items in (320, 480)
    )
    assert few.groups == many.groups == 6
    assert (few.questions, many.questions) == (320, 480)
    assert not math.isnan(many.low)
