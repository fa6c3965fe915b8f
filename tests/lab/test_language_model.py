"""The language-model recipes: any folder of text, one set of token files, data that changed."""

import json
import shutil
import types
from pathlib import Path

import numpy as np
import pytest

import glassformer as gf
from glassformer.lab.api import result_of
from glassformer.lab.recipes import recipe
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import RMSNorm, Rotary
from glassformer.store.rundir import RunDirectory

TINY = (
    "task.vocab_size=300",
    "task.length=24",
    "train.batch_size=4",
    "train.evaluate_every=3",
    "model.decoder.layers.count=1",
)


@pytest.fixture
def folder(tmp_path):
    """Two files of text, one of them one long line."""
    place = tmp_path / "texts"
    place.mkdir()
    shutil.copy(types.__file__, place / "a.txt")
    (place / "b.txt").write_text("words and words without an end " * 300)
    return place


def trained(folder, runs, *more):
    overrides = [f"task.path={folder}", *TINY, *more]
    return gf.train("lm", steps=3, runs=runs, overrides=overrides, overwrite=True)


def test_any_folder_of_text_is_learned_from(folder, tmp_path):
    run = trained(folder, tmp_path / "runs")
    assert run.facts["documents"] == 2
    assert isinstance(run.task._parts["train"].ids, np.memmap)
    found = gf.evaluate(tmp_path / "runs" / "lm")
    assert found.oracle["bits_per_byte"] > 0
    record = RunDirectory(tmp_path / "runs" / "lm").read_json("run.json")
    assert record["val"]["oracle"]["bits_per_byte"] == pytest.approx(found.oracle["bits_per_byte"])


def test_tokens_are_made_once_for_all_runs_of_a_folder(folder, tmp_path):
    first = trained(folder, tmp_path / "runs")
    (stored,) = (tmp_path / "runs" / ".cache").iterdir()
    before = {file.name: file.stat().st_mtime_ns for file in stored.iterdir()}
    again = trained(folder, tmp_path / "runs")
    (same,) = (tmp_path / "runs" / ".cache").iterdir()
    assert {file.name: file.stat().st_mtime_ns for file in same.iterdir()} == before
    assert set(before) == {"tokenizer.json", "train.npy", "val.npy"}
    assert again.progress.val == first.progress.val


def test_evaluating_makes_no_cache(folder, tmp_path):
    trained(folder, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / ".cache")
    gf.evaluate(tmp_path / "runs" / "lm")
    assert not (tmp_path / "runs" / ".cache").exists()


def test_a_text_that_changed_is_noticed(folder, tmp_path):
    trained(folder, tmp_path / "runs")
    (folder / "c.txt").write_text("entirely other things stand here now\n" * 200)
    with pytest.raises(InputError, match="not what the run was trained on"):
        gf.evaluate(tmp_path / "runs" / "lm")


def test_a_folder_that_cannot_be_written_is_told(folder, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".cache").write_text("in the way")
    with pytest.raises(MachineError, match="could not write the tokens"):
        trained(folder, tmp_path / "runs")


def test_a_vocabulary_that_the_text_cannot_fill_is_told(folder, tmp_path):
    run = trained(folder, tmp_path / "runs", "task.vocab_size=30000")
    assert run.spec.model.vocab_size == run.task.tokenizer.vocab_size < 30_000
    assert ["too short for 30,000 different pieces" in note for note in run.notes] == [True]
    assert trained(folder, tmp_path / "runs").notes == []


def test_the_recipes_have_the_sizes_that_they_are_named_for(tmp_path):
    """The 10 M one on the manuals, whose pieces are 16,000; the small ones 0.3 M."""
    cache = tmp_path / "cache"
    small, modern, large = (recipe(name, cache=cache) for name in ("lm", "lm-modern", "lm-10m"))
    assert (small.model.vocab_size, large.model.vocab_size) == (2_000, 16_000)
    assert count_parameters(small.model) == pytest.approx(0.3e6, rel=0.1)
    assert count_parameters(modern.model) == pytest.approx(0.3e6, rel=0.1)
    assert count_parameters(large.model) == pytest.approx(10e6, rel=0.02)
    assert isinstance(modern.model.position, Rotary)
    assert isinstance(modern.model.decoder.final_norm, RMSNorm)
    attention = next(modern.model.decoder.blocks()).attention
    assert (attention.n_heads, attention.n_kv_heads) == (4, 2)


def test_the_result_tells_bits_per_byte(folder, tmp_path):
    run = trained(folder, tmp_path / "runs")
    result = json.loads(json.dumps(result_of(run)))
    assert result["bits_per_byte"] == run.progress.val["oracle"]["bits_per_byte"]
    assert Path(tmp_path / "runs" / "lm" / "samples" / "step-000003.jsonl").is_file()
