"""The functions of the front door: the same results as the commands, from Python."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import glassformer as gf
from glassformer.cli.main import app
from glassformer.data.build_task import build_task
from glassformer.data.tokenizers.vocab import Bytes
from glassformer.spec.errors import InputError
from tests.lab.runs import sample, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    trained(sample("torch", "train.steps=4"), folder)
    return folder


def test_evaluate_writes_what_the_command_writes(run):
    plain = gf.evaluate(run)
    assert not (run / "eval" / "test.json").exists(), "without `write` nothing is written"
    assert gf.evaluate(run, write=True).to_json() == plain.to_json()
    files = {path.name: path.read_bytes() for path in (run / "eval").iterdir()}
    assert {"test.json", "test-errors.jsonl"} < files.keys()
    for path in (run / "eval").iterdir():
        path.unlink()
    result = CliRunner().invoke(app, ["evaluate", str(run), "--json"])
    assert json.loads(result.stdout) == json.loads(plain.to_json())
    assert {path.name: path.read_bytes() for path in (run / "eval").iterdir()} == files


def test_evaluate_takes_a_model_and_a_task(run):
    spec = sample("torch", "train.steps=4")
    own = gf.evaluate(run)
    for task in (spec.task, build_task(spec.task)):
        for model in (gf.load(run), gf.load(run).model, run):
            assert gf.evaluate(model, task).to_json() == own.to_json()


def test_a_finished_run_tells_its_results(tmp_path, capsys):
    spec = sample("torch", "train.steps=4")
    run = gf.train(spec, runs=tmp_path, name="here")
    assert capsys.readouterr() == ("", ""), "nobody watches"
    assert run.path == tmp_path / "here"
    assert (run.loss, run.val_loss) == (run.progress.loss, run.progress.val["loss"])
    assert run.metrics["accuracy"] == run.val_accuracy
    assert repr(run).splitlines()[0] == "run here: 4 of 4 steps"
    assert f"{run.val_loss:.4g} nats" in repr(run) and str(run.path) in repr(run)
    weights = gf.load(run.path).state_dict()
    assert all((weights[name] == each).all() for name, each in run.model.state_dict().items())
    assert gf.evaluate(run).to_json() == gf.evaluate(run.path).to_json()
    with pytest.raises(InputError, match="overwrite=True starts anew"):
        gf.train(spec, runs=tmp_path, name="here")
    gf.train(spec, runs=tmp_path, name="here", overwrite=True, progress=True)
    assert "step=4/4 loss=" in capsys.readouterr().err
    longer = gf.train(spec, steps=6, runs=tmp_path, name="here", resume=True, progress=False)
    assert longer.progress.step == 6 and capsys.readouterr().err == ""


def test_evaluate_refuses_what_it_cannot_measure(run):
    model = gf.load(run)
    with pytest.raises(InputError, match="measured on a task"):
        gf.evaluate(model)
    with pytest.raises(InputError, match="no task 'digitz'"):
        gf.evaluate(model, "digitz")
    with pytest.raises(InputError, match="only a run has a folder"):
        gf.evaluate(model, "digits", write=True)
    other = gf.build(replace(gf.preset("digits"), vocab_size=7))
    with pytest.raises(InputError, match="vocabulary of 7"):
        gf.evaluate(other, "digits")


def test_train_takes_a_config_file_and_resumes(run, tmp_path):
    config = run / "config.json"
    for steps, resume in ((2, False), (4, True)):
        made = gf.train(config, steps=steps, name="again", runs=tmp_path, resume=resume)
    assert made.progress.step == 4
    ours, theirs = gf.load(run), gf.load(tmp_path / "again")
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.equal(other)
    with pytest.raises(InputError, match="a resumed run keeps its spec"):
        gf.train(config, seed=9, name="again", runs=tmp_path, resume=True)


def test_finetune_is_the_recipe_with_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_head": 8, "d_ff": 24, "n_layers": 1}
    gf.build(gf.preset("qwen", vocab_size=256, **sizes), seed=0, tokenizer=Bytes()).save("base")
    lines = (json.dumps({"prompt": f"{i}+1=", "completion": f"{i + 1}."}) for i in range(12))
    Path("sums.jsonl").write_text("\n".join(lines))
    spelled = ["base=base", "data=sums.jsonl", "lora=4"]
    by_hand = gf.train("finetune", steps=2, name="by-hand", overrides=spelled)
    made = gf.finetune("base", "sums.jsonl", lora=4, steps=2)
    exact = gf.finetune("base", "sums.jsonl", lora=gf.LoRA(rank=4, alpha=8.0), steps=2, name="c")
    assert made.spec == by_hand.spec == exact.spec
    assert made.progress.loss == by_hand.progress.loss
    assert gf.finetune("base", "sums.jsonl", steps=1, name="all").spec.tuning.lora is None


def test_lr_find_suggests_what_the_command_suggests(run):
    found = gf.lr_find(run / "config.json")
    words = ["lr-find", str(run / "config.json"), "--json"]
    shown = json.loads(CliRunner().invoke(app, words).stdout)
    assert shown["lr"] == float(f"{found.suggestion:.1e}")


def test_report_is_written_into_the_run(run):
    path = gf.report(run, verify=False)
    assert path == run / "report.html"
    assert path.read_text().startswith("<!doctype html>")
