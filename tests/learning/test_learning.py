"""Small real cases of what the recipes learn; `python -m bench learning` has the whole ones."""

import argparse
import json
import math
import shutil
import types

import numpy as np
import pytest

from glassformer.generation.stepper import TorchStepper
from glassformer.lab.measure.evaluate import evaluate
from glassformer.lab.measure.scores import decode_split
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.run import Evaluated, TrainingRun
from glassformer.nn.taps import Taps
from glassformer.training.fit import StepRecord


def trained(tmp_path, name, *overrides):
    run = TrainingRun(recipe(name, overrides), tmp_path / "run")
    run.prepare()
    for _ in run.events():
        pass
    return run


def learned(tmp_path, name, *overrides):
    run = trained(tmp_path, name, *overrides)
    return evaluate(run.engine, run.task)


@pytest.mark.parametrize("name", ["reverse", "copy"])
def test_sequences_are_learned_within_a_thousand_steps(tmp_path, name):
    """Source 004's bar: an unsmoothed loss below 0.1; here on short sequences, in fewer steps.

    Decoded from the source alone, greedily and with beams, at least 90 % come out whole.
    """
    run = trained(
        tmp_path,
        name,
        "task.vocab_size=10",
        "task.min_length=2",
        "task.max_length=4",
        "task.examples=1200",
        "train.steps=250",
        "train.batch_size=32",
        "train.evaluate_every=250",
        "train.checkpoint_every=250",
        "engine=torch",
    )
    found = evaluate(run.engine, run.task)
    assert found.loss < 0.1
    assert found.exact_match > 0.95
    for beams in (None, 4):
        assert decode_split(TorchStepper(run.engine.model), run.task, beams=beams).exact_match > 0.9


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_operations_are_learned_by_both_engines(tmp_path, engine):
    found = learned(
        tmp_path,
        "digits",
        'task.operations=["FIRST","LAST","MAX"]',
        "task.max_length=3",
        "task.examples=1500",
        "train.steps=350",
        "train.batch_size=48",
        "train.evaluate_every=350",
        "train.checkpoint_every=350",
        f"engine={engine}",
    )
    assert found.accuracy > 0.95, found.by


def test_a_machine_is_learned_to_its_entropy(tmp_path):
    found = learned(
        tmp_path,
        "brackets",
        "task.machine=mod-2",
        "task.max_length=10",
        "task.examples=2000",
        "train.steps=400",
        "train.batch_size=32",
        "train.evaluate_every=400",
        "train.checkpoint_every=400",
        "model.decoder.layers.count=2",
    )
    assert found.oracle["excess"] < 0.15
    assert found.oracle["legal"] > 0.99


def test_text_is_learned_and_the_curve_is_the_same_twice(tmp_path):
    curves = []
    for place in ("a", "b"):
        spec = recipe(
            "text",
            [
                f"task.path={types.__file__}",
                "task.vocab_size=300",
                "task.length=32",
                "train.steps=40",
                "train.batch_size=8",
                "train.evaluate_every=20",
            ],
        )
        run = TrainingRun(spec, tmp_path / place)
        run.prepare()
        events = list(run.events())
        curves.append([event.loss for event in events if isinstance(event, StepRecord)])
        looks = [event.evaluation for event in events if isinstance(event, Evaluated)]
        assert looks[-1].oracle["bits_per_byte"] < looks[0].oracle["bits_per_byte"]
    assert curves[0] == curves[1]


def test_a_language_model_learns_a_text_and_its_tokens_are_cheaper_than_by_count(tmp_path):
    """The recipe on one file: held-out bits per byte below those of its tokens' frequencies."""
    spec = recipe(
        "lm",
        [
            f"task.path={argparse.__file__}",
            "task.vocab_size=400",
            "task.length=32",
            "train.steps=200",
            "train.batch_size=8",
            "train.evaluate_every=100",
            "model.decoder.layers.count=2",
        ],
    )
    run = TrainingRun(spec, tmp_path / "run")
    run.prepare()
    for _ in run.events():
        pass
    found = evaluate(run.engine, run.task)
    ids = {
        split: run.task.batch(split, np.arange(size)).targets["next"].ravel()
        for split, size in run.task.sizes().items()
    }
    counts = np.bincount(ids["train"], minlength=400) + 1.0
    unigram = -np.log(counts / counts.sum())[ids["val"]].mean()
    assert found.loss < 0.8 * unigram
    width = run.facts["bytes_per_token"]["val"]
    assert found.oracle["bits_per_byte"] == pytest.approx(found.loss / math.log(2) / width)


def test_a_mixture_of_experts_learns_text(tmp_path):
    """The held-out loss falls, the objective has the balance loss beside it, no expert is idle."""
    folder = tmp_path / "texts"
    folder.mkdir()
    shutil.copy(types.__file__, folder / "types.txt")
    run = TrainingRun(
        recipe(
            "lm-moe",
            [
                f"task.path={folder}",
                "task.vocab_size=300",
                "task.length=32",
                "model.decoder.layers.count=2",
                "engine=torch",
                "train.steps=60",
                "train.batch_size=8",
                "train.schedule.warmup=5",
                "train.evaluate_every=60",
                "train.checkpoint_every=60",
            ],
        ),
        tmp_path / "run",
    )
    run.prepare()
    before = evaluate(run.engine, run.task).loss
    records = [event for event in run.events() if isinstance(event, StepRecord)]
    assert before == pytest.approx(math.log(300), abs=0.2)
    assert evaluate(run.engine, run.task).loss < before - 1.0
    assert all(record.objective > record.loss for record in records)
    assert 2.0 <= records[-1].balance < 2.5
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [list(json.loads(line))[:4] for line in lines[:2]] == [
        ["step", "loss", "objective", "balance"]
    ] * 2
    taps = Taps(read="*.ffn.routing")
    run.engine.model.hidden(run.engine.model.inputs(run.task.batch("val", np.arange(8))), taps=taps)
    for routing_BTE in taps.seen.values():
        assert (routing_BTE != 0).any(1).any(0).all()
