"""A run's probes: the same examples at each evaluation, thinned and bounded, and left by a resumed
run as by one that never stopped.
"""

import itertools
import json
import types
from dataclasses import replace

import numpy as np
import pytest

from glassformer.data.build_task import build_task
from glassformer.lab.recipes import recipe
from glassformer.lab.runs import artifacts
from glassformer.lab.runs.artifacts import (
    Sample,
    keep_samples,
    kept_steps,
    probe_files,
    read_samples,
    sample_stepper,
    write_samples,
)
from glassformer.lab.runs.assemble import build_engine
from glassformer.lab.runs.record import load_run_spec, spec_hash
from glassformer.lab.runs.run import Evaluated, TrainingRun
from glassformer.lens.measure.probes import read_probes
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.serialize import from_dict, override, to_dict
from glassformer.spec.tasks import DigitsTask
from glassformer.spec.train import RunSpec
from glassformer.store.rundir import RunDirectory
from tests.lab.runs import KEPT, killed_after, outcome, resumed, sample, trained
from tests.training.samples import ENGINES, RUNS


def found_in(folder):
    return {step: read_probes(file) for step, file in probe_files(RunDirectory(folder)).items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", RUNS)
def test_every_evaluation_leaves_probes(name, engine, tmp_path):
    run = trained(RUNS[name](f"engine={engine}", "train.steps=9"), tmp_path / "run")
    found = found_in(tmp_path / "run")
    assert list(found) == [7, 9]
    for step, probes in found.items():
        assert probes.step == step
        assert len(probes.words) == min(8, run.task.sizes()["val"])
        assert probes.loss is not None
    left = [path.name for path in (tmp_path / "run" / "probes").iterdir()]
    assert sorted(left) == ["step-000007.safetensors", "step-000009.safetensors"], "nothing beside"


def test_the_examples_are_fixed_and_held_out(tmp_path):
    run = trained(sample("torch", "train.steps=21", "task.examples=200"), tmp_path / "run")
    found = list(found_in(tmp_path / "run").values())
    assert len(found) == 3
    assert len({(probes.examples, probes.words) for probes in found}) == 1
    first = found[0]
    for row, words in zip(first.examples, first.words, strict=True):
        assert run.task.describe("val", row).startswith(" ".join(words))
    assert len({probes.losses_BT.tobytes() for probes in found}) == 3, "the model learns"
    # the last step's are those of the model as it ended
    again = artifacts.take_probes(run.engine, run.task, examples=8, step=21)
    assert again.to_bytes() == found[-1].to_bytes()


def test_they_can_be_fewer_or_none_and_change_nothing_else(tmp_path):
    trained(sample(), tmp_path / "all")
    trained(sample("torch", "train.probes=3"), tmp_path / "three")
    trained(sample("torch", "train.probes=0"), tmp_path / "none")
    assert not (tmp_path / "none" / "probes").exists()
    assert {len(p.words) for p in found_in(tmp_path / "three").values()} == {3}
    ends = [outcome(tmp_path / name) for name in ("all", "three", "none")]
    for part in ("weights", "optimizer", "metrics", "steps", "run"):
        assert ends[0][part] == ends[1][part] == ends[2][part], part
    with pytest.raises(InputError):
        sample("torch", "train.probes=9")
    with pytest.raises(InputError):
        sample("torch", "train.probes=-1")


def test_a_config_from_before_there_were_probes_is_read_and_resumed(tmp_path):
    spec = sample()
    old = to_dict(spec)
    del old["train"]["probes"]
    assert from_dict(RunSpec, old) == spec
    assert spec_hash(override(spec, ["train.probes=0"])) == spec_hash(spec)
    assert spec_hash(override(spec, ["train.lr=0.5"])) != spec_hash(spec)
    trained(spec, tmp_path / "run", stop_at=10)
    other = override(load_run_spec(RunDirectory(tmp_path / "run")), ["train.probes=0"])
    _, notes = resumed(tmp_path / "run", spec=other)
    assert notes == ["resuming at step 10"]


def test_overwriting_removes_them(tmp_path):
    run = trained(sample("torch", "train.steps=8"), tmp_path / "run")
    assert found_in(tmp_path / "run")
    run.prepare(overwrite=True)
    assert not (tmp_path / "run" / "probes").exists()


def test_a_resumed_run_leaves_the_same(tmp_path):
    trained(sample("torch", KEPT), tmp_path / "whole")
    want = outcome(tmp_path / "whole")["probes"]
    assert len(want) == 5
    for step in (3, 15, 27):
        copy = killed_after(tmp_path / "whole", step, to=tmp_path / f"from-{step}")
        run = TrainingRun(load_run_spec(RunDirectory(copy)), copy)
        run.resume()
        assert all(left <= step for left in found_in(copy)), "it will see the later ones again"
        for _ in run.events():
            pass
        assert outcome(copy)["probes"] == want


def test_a_resumed_run_that_thins_leaves_the_same(tmp_path, monkeypatch):
    """Room for five of fifteen: files that were thinned out before the kill are not missed."""
    size = len(trained(sample(), tmp_path / "size") and _first(tmp_path / "size"))
    monkeypatch.setattr(artifacts, "max_bytes", lambda probes, vocab_size: size)
    monkeypatch.setattr(artifacts, "CAP", 5 * size)
    often = "train.evaluate_every=2"
    trained(sample("torch", KEPT, often), tmp_path / "whole")
    want = outcome(tmp_path / "whole")["probes"]
    assert len(want) == 5
    assert list(found_in(tmp_path / "whole")) == [2, 4, 8, 16, 30]
    for step in (3, 12, 20, 27):
        copy = killed_after(tmp_path / "whole", step, to=tmp_path / f"from-{step}")
        resumed(copy)
        assert outcome(copy)["probes"] == want, step


def _first(folder):
    return next(iter(probe_files(RunDirectory(folder)).values())).read_bytes()


def test_what_stays_is_bounded_nested_and_even_by_logarithm():
    for most in (2, 5, 9, 40):
        before = set()
        for number in range(1, 300):
            stay = kept_steps(7 * number, every=7, most=most)
            assert len(stay) <= most or most <= number.bit_length()
            assert 7 * number in stay
            assert stay <= before | {7 * number}, "what was thinned out is not asked for again"
            before = stay
            if most >= number:
                assert stay == {7 * n for n in range(1, number + 1)}
    assert kept_steps(7 * 256, every=7, most=9) == {7 << n for n in range(9)} - {7 << 8} | {7 * 256}
    assert kept_steps(45, every=10, most=99) == {10, 20, 30, 40, 45}, "a last one between"
    assert kept_steps(5, every=10, most=99) == {5}, "a run shorter than its first evaluation"
    steps = sorted(kept_steps(10_000, every=1, most=64))
    assert len(steps) > 32, "the room is used"
    gaps = [later / earlier for earlier, later in itertools.pairwise(steps[16:])]
    assert max(gaps) <= 1.5


def test_numbers_that_are_not_finite_are_not_kept(tmp_path):
    run = trained(sample("torch", "train.steps=7"), tmp_path / "run")
    seen = artifacts.take_probes(run.engine, run.task, examples=8, step=14)
    seen.norms_BRT[0, 0, 0] = np.inf
    artifacts.keep_probes(run.directory, seen, every=7, vocab_size=20)
    assert list(found_in(tmp_path / "run")) == [7]


# --- samples --------------------------------------------------------------------------------------

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
        write_samples(sample_stepper(build_engine(replace(spec, engine=engine)), task), task)
        for _ in range(2)
    ]
    assert made[0] == made[1]
    assert len(made[0]) == 3


def test_other_tasks_have_none():
    run = sample("torch")
    task = build_task(DigitsTask(examples=100))
    assert write_samples(sample_stepper(build_engine(run), task), task) == ()


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
