"""Samples: held-out openings, the same draws each time, in the run's folder; only for text."""

import json
import types
from dataclasses import replace

import pytest

from glassformer.data.build_task import build_task
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.artifacts import (
    Sample,
    keep_samples,
    read_samples,
    sample_stepper,
    write_samples,
)
from glassformer.lab.runs.assemble import build_engine
from glassformer.lab.runs.run import Evaluated, TrainingRun
from glassformer.spec.errors import FileError
from glassformer.spec.tasks import DigitsTask
from glassformer.store.rundir import RunDirectory
from tests.lab.runs import sample

SMALL = (
    f"task.path={types.__file__}",
    "task.vocab_size=300",
    "task.length=24",
    "train.steps=4",
    "train.batch_size=4",
    "train.evaluate_every=2",
    "model.decoder.layers.count=1",
)


@pytest.fixture(scope="module")
def spec():
    return recipe("lm", SMALL)


def test_every_evaluation_of_a_text_has_samples(spec, tmp_path):
    run = TrainingRun(spec, tmp_path / "run")
    run.prepare()
    looks = [event for event in run.events() if isinstance(event, Evaluated)]
    files = sorted((tmp_path / "run" / "samples").iterdir())
    assert [file.name for file in files] == ["step-000002.jsonl", "step-000004.jsonl"]
    for look, file in zip(looks, files, strict=True):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(line["opening"], line["text"]) for line in lines] == [
            (one.opening, one.text) for one in look.samples
        ]
        assert len(lines) == 3
        assert all(line["text"] for line in lines)
    first, last = (look.samples for look in looks)
    assert [one.opening for one in first] == [one.opening for one in last]
    held_out = run.task.describe("val", 0)
    assert held_out.startswith(first[0].opening)
    run.prepare(overwrite=True)
    assert not (tmp_path / "run" / "samples").exists()


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_both_engines_write_and_write_the_same_twice(spec, engine):
    task = build_task(spec.task)
    made = [
        write_samples(sample_stepper(build_engine(replace(spec, engine=engine)), task), task)[0]
        for _ in range(2)
    ]
    assert made[0] == made[1]
    assert len(made[0]) == 3


def test_other_tasks_have_none():
    run = sample("torch")
    task = build_task(DigitsTask(examples=100))
    assert write_samples(sample_stepper(build_engine(run), task), task) == [()]


def test_what_was_kept_is_read_and_what_is_damaged_is_told(tmp_path):
    kept = (Sample("so ", "it\ngoes"), Sample("</script>", "\u2028"))
    keep_samples(RunDirectory(tmp_path), 7, kept)
    file = tmp_path / "samples" / "step-000007.jsonl"
    assert read_samples(file) == kept
    for damaged in (
        b'{"opening": "so"',
        b"[1]\n",
        b'{"opening": "so"}\n',
        b"\xff\xfe",
        b"[" * 9999,
    ):
        file.write_bytes(damaged)
        with pytest.raises(FileError, match="samples"):
            read_samples(file)
