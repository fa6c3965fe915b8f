"""`gf.show` and `glass show`: the settings of anything, without training it."""

import json
import tomllib
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import glassformer as gf
from glassformer.cli.main import app
from glassformer.lab.recipes import FINETUNE, RECIPES, recipe
from glassformer.lab.show import training_lines
from glassformer.spec.errors import InputError
from glassformer.spec.own import OwnOptimizer
from glassformer.spec.presets import PRESETS
from glassformer.spec.serialize import from_dict
from glassformer.spec.tasks import TASK_SUMMARIES
from glassformer.spec.train import RunSpec
from tests.command import glass

RUN = "tests/fixtures/older-run"


def test_every_task_has_a_line_of_its_own():
    assert set(TASK_SUMMARIES) == {*RECIPES, FINETUNE}
    assert len(set(TASK_SUMMARIES.values())) == len(TASK_SUMMARIES)


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in RECIPES])
def test_a_preset_shows_its_spec(name):
    shown = gf.show(name)
    assert shown.kind == "preset" and shown.model == gf.preset(name)
    assert f"{gf.count_parameters(shown.model):,} parameters" in repr(shown)
    assert tomllib.loads(shown.text())["model"]["d_model"] == shown.model.d_model


def test_the_settings_of_a_task_can_be_pasted():
    shown = gf.show("parity", overrides=["train.lr=0.5", "task.examples=50"])
    assert shown.kind == "task" and shown.sizes is not None
    pasted = from_dict(RunSpec, tomllib.loads(shown.text()))
    assert pasted == shown.run == recipe("parity", ["train.lr=0.5", "task.examples=50"])


def test_a_run_and_a_folder(tmp_path):
    shown = gf.show(RUN)
    assert shown.kind == "run" and "finished at step 8" in shown.about
    gf.save(gf.build(gf.preset("digits")), tmp_path / "mine")
    assert gf.show(tmp_path / "mine").model == gf.preset("digits")
    assert gf.show("mine", runs=tmp_path).kind == "model"
    folder = gf.export(gf.build(gf.preset("qwen")), tmp_path / "hf", to="hf")
    assert "qwen3" in gf.show(tmp_path / "hf").about, folder
    gf.export(gf.build(gf.preset("qwen")), tmp_path / "a.gguf", to="gguf")
    assert gf.show(tmp_path / "a.gguf").parameters == gf.show("qwen").parameters
    with pytest.raises(InputError, match="keeps its settings"):
        gf.show(tmp_path / "mine", overrides=["d_model=3"])


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="no task, preset") as caught:
        gf.show("qwenn")
    assert "'qwen'" in caught.value.hint


def test_the_command_writes_a_file_to_train_from(tmp_path):
    out = tmp_path / "x.toml"
    done = CliRunner().invoke(app, ["show", RUN, "train.seed=7", "-o", str(out)])
    assert done.exit_code == 0 and done.stdout == ""
    assert from_dict(RunSpec, tomllib.loads(out.read_text())).train.seed == 7
    found = json.loads(CliRunner().invoke(app, ["show", RUN, "--json"]).stdout)
    assert found["kind"] == "run" and found["settings"]["train"]["seed"] == 1


def test_the_program_is_listed_and_complete_as_json() -> None:
    shown = gf.show("qwen")
    assert "blocks.1 to 2: as blocks.0" in shown.operations()
    assert "blocks.1 to 2" not in shown.operations(every_block=True)
    found = json.loads(shown.operations_json())
    assert [op["kind"] for op in found["operations"][:3]] == ["Embed", "Norm", "Linear"]
    assert found["outputs"] == {"next": "heads.next"}
    assert found["values"]["blocks.0.attn.q"] == {"width": 256, "rows": "target"}
    alibi = json.loads(gf.show("alibi-lm").operations_json())
    assert alibi["operations"][1]["settings"]["form"] == {
        "kind": "ALiBi",
        "max_bias": 8.0,
        "scaled": False,
    }


@pytest.mark.parametrize("other", [["--diagram"], ["--narrow"], ["-o", "qwen.svg"]])
def test_a_program_is_one_way_to_show_a_model(other: list[str]) -> None:
    done = glass("show", "qwen", "--program", *other)
    assert done.returncode == 2
    assert f"--program and {other[0]}" in done.stderr


def test_an_optimizer_of_ones_own_goes_by_its_class():
    own = OwnOptimizer(source="my_lion.py:Lion", sha256="0" * 64)
    run = recipe("reverse")
    run = replace(run, train=replace(run.train, optimizer=own))
    assert "examples, Lion, learning rate" in training_lines(run)[0]
