"""`TrainSpec` and `RunSpec`: refused where they make no sense, the same after JSON and TOML."""

import math
import tomllib
from dataclasses import fields, is_dataclass, replace
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.lab.recipes import RECIPES, recipe
from glassformer.lab.runs.record import spec_hash, to_toml
from glassformer.spec import presets
from glassformer.spec.errors import InputError
from glassformer.spec.presets import PRESETS
from glassformer.spec.serialize import from_dict, from_json, override, to_dict, to_json
from glassformer.spec.tasks import DigitsTask, FsmTask, SequenceTask, TextTask, TranslationTask
from glassformer.spec.train import (
    SGD,
    AdamW,
    ConstantSchedule,
    CosineSchedule,
    HeadWeight,
    InverseSqrtSchedule,
    Muon,
    RunSpec,
    TrainSpec,
)
from tests.planting import Binary, catches

DIGITS = RunSpec(model=presets.digits(), task=DigitsTask())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps 0 is below 1"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"accumulate": 0}, "accumulate 0"),
        ({"evaluate_every": 0}, "evaluate_every 0"),
        ({"checkpoint_every": 0}, "checkpoint_every 0"),
        ({"evaluate_examples": 0}, "evaluate_examples 0"),
        ({"keep": 1}, "keep 1 is below 2"),
        ({"patience": -1}, "patience -1"),
        ({"seed": -1}, "seed -1 is below 0"),
        ({"seed": 1 << 64}, "more than 64 bits"),
        (
            {"head_weights": (HeadWeight(head="a", weight=1.0), HeadWeight(head="a", weight=2.0))},
            "names a head twice",
        ),
        ({"lr": 0.0}, "lr 0.0"),
        ({"lr": float("nan")}, "lr nan"),
        ({"lr": float("inf")}, "lr inf"),
        ({"clip": -1.0}, "clip -1.0"),
        ({"clip": float("inf")}, "clip inf"),
        ({"label_smoothing": 1.0}, "label_smoothing 1.0"),
        ({"precision": "fp16"}, "precision 'fp16'"),
        ({"steps": 3.0}, "not a whole number"),
    ],
)
def test_bad_training_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        TrainSpec(**change)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(momentum=1.0),
        lambda: AdamW(beta1=1.0),
        lambda: AdamW(beta2=-0.1),
        lambda: AdamW(eps=0.0),
        lambda: AdamW(weight_decay=-0.1),
        lambda: AdamW(weight_decay=float("nan")),
        lambda: Muon(weight_decay=-0.1),
        lambda: Muon(weight_decay=float("inf")),
        lambda: HeadWeight(head="next", weight=-1.0),
        lambda: HeadWeight(head="next", weight=float("nan")),
        lambda: Muon(lr_matrix=0.0),
        lambda: Muon(momentum=1.0),
    ],
)
def test_bad_optimizers_are_refused(make):
    with pytest.raises(InputError):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["engine=jax"], "engine"),
        (["engine=numpy", "train.precision=bf16"], "the NumPy engine has no train.precision=bf16"),
        (["engine=numpy", "train.compile=true"], "the NumPy engine has no train.compile=on"),
        (
            ["engine=native", "train.gradient_checkpointing=true"],
            "the native engine has no train.gradient_checkpointing=True",
        ),
        (
            ["engine=native", "train.precision=float64"],
            "the native engine has no train.precision=float64",
        ),
        (['train.head_weights=[{"head": "nxt", "weight": 1.0}]'], "nxt"),
    ],
)
def test_bad_runs_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        override(DIGITS, change)


def test_a_weight_is_one_unless_said_otherwise():
    train = TrainSpec(head_weights=(HeadWeight(head="state", weight=0.25),))
    assert train.head_weight("state") == 0.25
    assert train.head_weight("next") == 1.0


TRAINS = (
    TrainSpec(),
    TrainSpec(optimizer=SGD(momentum=0.9), schedule=ConstantSchedule(warmup=3), clip=0.0),
    TrainSpec(optimizer=Muon(), schedule=InverseSqrtSchedule(warmup=9), precision="bf16"),
    TrainSpec(
        lr=1 / 3,
        optimizer=AdamW(eps=1e-9, weight_decay=0.1),
        schedule=CosineSchedule(warmup=1, floor=1e-30),
        label_smoothing=0.1,
        head_weights=(HeadWeight(head="answer", weight=0.1 + 0.2),),
        patience=5,
        compile="on",
    ),
)
TASKS = (
    DigitsTask(operations=("SUM", "MAX")),
    SequenceTask(operation="sort"),
    FsmTask(machine='regex:(a|b)*"', order="uniform"),
    TextTask(path="a\\b/ü.txt"),
    TranslationTask(languages=("fr", "es")),
)


@pytest.mark.parametrize("train", TRAINS, ids=lambda train: type(train.optimizer).__name__)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_round_trips_lose_nothing(train, task):
    run = RunSpec(model=presets.digits(), task=task, train=train)
    assert from_dict(RunSpec, to_dict(run)) == run
    assert from_json(RunSpec, to_json(run)) == run
    assert from_dict(RunSpec, tomllib.loads(to_toml(run))) == run


@pytest.mark.parametrize("name", PRESETS)
def test_toml_holds_every_preset(name):
    run = RunSpec(model=PRESETS[name](), task=DigitsTask())
    assert from_dict(RunSpec, tomllib.loads(to_toml(run))) == run


def spec_classes(cls):
    yield cls
    pending = [get_type_hints(cls)[field.name] for field in fields(cls)]
    while pending:
        hint = pending.pop()
        if isinstance(hint, type) and is_dataclass(hint):
            yield from spec_classes(hint)
        pending += get_args(hint)


def test_what_toml_leaves_out_is_none_by_default():
    """TOML has no word for nothing, so a field that may be None must be None when left out."""
    for cls in set(spec_classes(RunSpec)):
        hints = get_type_hints(cls)
        for field in fields(cls):
            if type(None) in get_args(hints[field.name]):
                assert field.default is None, f"{cls.__name__}.{field.name}"


@pytest.mark.parametrize(
    "name", [name for name, (task, *_) in RECIPES.items() if not isinstance(task, TextTask)]
)
def test_recipes_round_trip(name):
    small = ["task.examples=100"]
    run = recipe(name, small)
    assert from_dict(RunSpec, tomllib.loads(to_toml(run))) == run


def test_every_problem_of_a_config_is_told_at_once():
    data = to_dict(DIGITS)
    data["train"]["stepz"] = 3
    data["train"]["lr"] = "fast"
    data["task"]["min_length"] = 1
    data["model"]["heads"][0]["kind"] = "AnserHead"
    with pytest.raises(InputError) as caught:
        from_dict(RunSpec, data)
    told = str(caught.value)
    assert "4 problems" in told
    for part in ("train.stepz", "did you mean 'steps'?", "train.lr", "min_length", "AnswerHead"):
        assert part in told


def test_every_bad_override_is_told_at_once():
    with pytest.raises(InputError) as caught:
        override(DIGITS, ["train.stepz=3", "train.lr=0.1", "engin=torch", "train.lr.x=1", "x"])
    told = str(caught.value)
    assert "4 problems" in told
    for part in ("did you mean 'steps'?", "did you mean 'engine'?", "train.lr.x", "'x' is not an"):
        assert part in told


def test_the_hash_of_a_spec_forgets_only_how_long():
    longer = replace(DIGITS, train=replace(DIGITS.train, steps=7))
    assert spec_hash(longer) == spec_hash(DIGITS)
    for other in ("train.lr=0.1", "train.seed=1", "task.seed=1", "model.d_model=32"):
        assert spec_hash(override(DIGITS, [other])) != spec_hash(DIGITS)


# --- learning rates against their closed forms ----------------------------------------------------

STEPS = 40


@catches("warmup starts at 0", "spec.train:_warm", Binary("+"), to="{left}")
def test_warmup_is_a_line_from_the_first_step():
    """Step 0 already moves: (step + 1) / warmup, and the full rate at the last warm step."""
    for schedule in (ConstantSchedule(warmup=7), CosineSchedule(warmup=7)):
        assert [schedule.share(step, STEPS) for step in range(7)] == [
            (step + 1) / 7 for step in range(7)
        ]


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


def test_cosine_ends_at_its_floor():
    for floor in (0.0, 0.1):
        schedule = CosineSchedule(warmup=10, floor=floor)
        assert schedule.share(10, STEPS) == 1.0
        assert schedule.share(STEPS - 1, STEPS) == pytest.approx(floor, abs=1e-15)
        for step in range(10, STEPS):
            angle = math.pi * (step - 10) / (STEPS - 11)
            want = floor + (1 - floor) * math.cos(angle / 2) ** 2
            assert schedule.share(step, STEPS) == pytest.approx(want, abs=1e-15)


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
