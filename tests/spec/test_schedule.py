"""Learning rates against their closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.spec.errors import InputError
from glassformer.spec.train import ConstantSchedule, CosineSchedule, InverseSqrtSchedule, TrainSpec

STEPS = 40


def warmup_is_a_line_from_the_first_step():
    """Step 0 already moves: (step + 1) / warmup, and the full rate at the last warm step."""
    for schedule in (ConstantSchedule(warmup=7), CosineSchedule(warmup=7)):
        assert [schedule.share(step, STEPS) for step in range(7)] == [
            (step + 1) / 7 for step in range(7)
        ]


def test_warmup_is_a_line_from_the_first_step():
    warmup_is_a_line_from_the_first_step()


@given(st.integers(0, 500), st.integers(0, 60))
def test_constant_is_one_after_its_warmup(step, warmup):
    assert ConstantSchedule(warmup=warmup).share(step + warmup, 1) == 1.0


@given(st.integers(0, 5_000), st.integers(1, 300))
def test_inverse_sqrt_is_the_papers_formula_with_its_peak_at_one(step, warmup):
    s, d_model = step + 1, 512
    paper = d_model**-0.5 * min(s**-0.5, s * warmup**-1.5)
    peak = d_model**-0.5 * warmup**-0.5
    share = InverseSqrtSchedule(warmup=warmup).share(step, 1)
    assert share == pytest.approx(paper / peak, rel=1e-12)
    assert share <= 1.0
    assert InverseSqrtSchedule(warmup=warmup).share(warmup - 1, 1) == 1.0


def cosine_ends_at_its_floor():
    for floor in (0.0, 0.1):
        schedule = CosineSchedule(warmup=10, floor=floor)
        assert schedule.share(10, STEPS) == 1.0
        assert schedule.share(STEPS - 1, STEPS) == pytest.approx(floor, abs=1e-15)
        for step in range(10, STEPS):
            angle = math.pi * (step - 10) / (STEPS - 11)
            want = floor + (1 - floor) * math.cos(angle / 2) ** 2
            assert schedule.share(step, STEPS) == pytest.approx(want, abs=1e-15)


def test_cosine_ends_at_its_floor():
    cosine_ends_at_its_floor()


@given(st.integers(0, 80), st.integers(0, 60), st.integers(1, 60), st.floats(0, 1))
def test_cosine_stays_between_floor_and_one_even_past_the_end(step, warmup, steps, floor):
    share = CosineSchedule(warmup=warmup, floor=floor).share(step, steps)
    assert 0.0 < share <= 1.0 or share == pytest.approx(floor, abs=1e-15)
    if step >= max(steps - 1, warmup + 1):
        assert share == pytest.approx(floor, abs=1e-15)


def test_the_rate_is_the_share_of_lr():
    train = TrainSpec(steps=STEPS, lr=0.25, schedule=CosineSchedule(warmup=4, floor=0.2))
    assert train.learning_rate(0) == 0.25 / 4
    assert train.learning_rate(3) == 0.25
    assert train.learning_rate(STEPS - 1) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantSchedule(warmup=-1), "warmup -1 is below 0"),
        (lambda: InverseSqrtSchedule(warmup=0), "warmup 0 is below 1"),
        (lambda: CosineSchedule(warmup=-2), "warmup -2 is below 0"),
        (lambda: CosineSchedule(floor=1.5), "floor 1.5 is outside"),
        (lambda: CosineSchedule(floor=float("nan")), "floor nan is outside"),
    ],
)
def test_bad_schedules_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
