"""Runs on prepared corpora: trained, evaluated, resumed to the same bits, and what they refuse."""

import hashlib
import json

import pytest

import glassformer as gf
from glassformer.lab.recipes import plan_run
from glassformer.lab.runs.record import spec_hash
from glassformer.spec import presets
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.serialize import override, to_dict
from glassformer.spec.tasks import TextTask
from glassformer.spec.train import RunSpec, TrainSpec
from tests.command import glass
from tests.data.test_corpus import DOCUMENTS, bits, lines
from tests.lab.runs import KEPT, assert_same, killed_after, outcome, resumed, trained
from tests.training.samples import ENGINES

TINY = (
    "task.length=24",
    "train.steps=8",
    "train.batch_size=4",
    "train.evaluate_every=4",
    "train.checkpoint_every=3",
    "train.evaluate_examples=8",
    "model.decoder.layers.count=1",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "a.jsonl").write_bytes(lines())
    (folder / "b.jsonl").write_bytes(lines([text.upper() for text in DOCUMENTS]))
    gf.prepare(folder / "a.jsonl", folder / "a", vocab_size=300, held_out=0.2, shard_size=6_000)
    gf.prepare(folder / "b.jsonl", folder / "b", tokenizer=folder / "a", held_out=0.2)
    return folder


def planned(root, *more):
    mixture = json.dumps([f"{root / 'a'}=2", f"{root / 'b'}=1"])
    return plan_run("text", [f"task.mixture={mixture}", *TINY, KEPT, *more]).spec


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_training_on_a_mixture_goes_on_to_the_same_bits(root, tmp_path, engine):
    trained(planned(root, f"engine={engine}"), tmp_path / "whole")
    whole = outcome(tmp_path / "whole")
    for step in (3, 6):
        copy = killed_after(tmp_path / "whole", step, to=tmp_path / f"from-{step}")
        resumed(copy)
        assert_same(outcome(copy), whole)


def test_a_corpus_is_trained_on_evaluated_and_generated_from(root, tmp_path):
    run = gf.train("text", runs=tmp_path, overrides=[f"task.path={root / 'a'}", *TINY])
    assert run.facts["packing"] == "apart"
    found = gf.evaluate(run)
    assert 0 < found.oracle["bits_per_byte"] < 20
    model = gf.load(run.path)
    assert model.tokenizer.eos == 0
    assert model.generate("document", max_new_tokens=4) is not None
    # the same text from its own file: prepared in the runs' cache, and found there again
    direct = gf.train(
        "text",
        name="direct",
        runs=tmp_path,
        overrides=[f"task.path={root / 'a.jsonl'}", "task.vocab_size=300", *TINY],
    )
    (cached,) = (tmp_path / ".cache").glob("corpus-*")
    before = bits(cached)
    assert gf.evaluate(direct).loss > 0
    assert bits(cached) == before
    damaged = bytearray((cached / "val-00000.bin").read_bytes())
    damaged[7] ^= 1
    (cached / "val-00000.bin").write_bytes(damaged)
    with pytest.raises(FileError, match=r"(?s)SHA-256 differs.*val-00000\.bin"):
        gf.evaluate(direct)


def test_other_tokens_than_the_model_s_are_refused(root, tmp_path):
    run = gf.train("text", runs=tmp_path, overrides=[f"task.path={root / 'a'}", *TINY])
    gf.prepare(root / "b.jsonl", tmp_path / "other", vocab_size=280)
    task = TextTask(path=str(tmp_path / "other"), length=24)
    with pytest.raises(InputError, match="another tokenizer than the model's"):
        gf.evaluate(run.model, task)
    gf.prepare(root / "b.jsonl", tmp_path / "same", tokenizer=run.path)
    assert gf.evaluate(run.model, TextTask(path=str(tmp_path / "same"), length=24)).loss > 0


def test_a_run_from_before_corpora_keeps_its_hash():
    """Fields that a text had not yet are no part of the hash while they have their defaults."""
    model = presets.budget_lm(vocab_size=300, d_model=8, d_ff=8, n_layers=1, n_heads=1)
    spec = RunSpec(model=model, task=TextTask(), train=TrainSpec(steps=1))
    old = to_dict(spec)
    for name in ("mixture", "packing", "text_field"):
        del old["task"][name]
    del old["train"]["probes"]
    old["train"]["compile"] = False
    text = json.dumps(old, indent=2) + "\n"
    assert spec_hash(spec) == hashlib.sha256(text.encode()).hexdigest()
    assert spec_hash(override(spec, "task.packing=joined")) != spec_hash(spec)


def test_the_command_prepares_and_verifies(root, tmp_path):
    words = ("prepare", str(root / "a.jsonl"), "-o", "corpus", "--vocab-size", "300")
    done = glass(*words, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["documents"]["train"] + found["documents"]["val"] == len(DOCUMENTS)
    again = glass(*words, folder=tmp_path)
    assert again.returncode == 0
    assert "glass train lm task.path=corpus" in again.stderr
    assert "as it was written" in glass("prepare", "corpus", "--verify", folder=tmp_path).stdout
    (tmp_path / "corpus" / "train-00000.bin").write_bytes(b"x")
    broken = glass("prepare", "corpus", "--verify", folder=tmp_path)
    assert broken.returncode == 3
    assert "train-00000.bin" in broken.stderr
    nowhere = glass("prepare", str(root / "a.jsonl"), folder=tmp_path)
    assert nowhere.returncode == 2
    assert "-o FOLDER" in nowhere.stderr
