"""`glass convert` and `glass verify` on folders that others wrote."""

import json

import pytest
import torch
from typer.testing import CliRunner

import glassformer as gf
from glassformer.cli.main import app
from tests.adapters.checkpoints import change, folder_of

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def glass(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_there_and_back_is_the_same_folder(tmp_path):
    first = folder_of("qwen3 yarn", tmp_path, sharded=True)
    there = glass("convert", first, tmp_path / "native", "--to", "native", "--json")
    assert there.exit_code == 0, there.output
    found = json.loads(there.stdout)
    assert found["architecture"] == "qwen"
    assert found["parameters"] == gf.load(first).get_num_parameters()
    back = glass("convert", tmp_path / "native", tmp_path / "again", "--to", "hf", "--json")
    assert json.loads(back.stdout)["model_type"] == "qwen3"
    for path in first.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_people_get_a_line(tmp_path):
    result = glass("convert", folder_of("llama", tmp_path), tmp_path / "a", "--to", "native")
    assert result.exit_code == 0
    assert result.stdout.strip().endswith("parameters, float32")
    assert "30 tensors loaded" in result.stderr


@pytest.mark.parametrize("to", ["gguff", ""])
def test_an_unknown_format_is_refused(to, tmp_path):
    result = glass("convert", folder_of("llama", tmp_path), tmp_path / "a", "--to", to)
    assert result.exit_code != 0
    assert "--to" in result.exception.what


def test_what_has_no_form_there_is_refused(tmp_path):
    gf.save(gf.build(gf.preset("fsm-probe")), tmp_path / "fsm")
    result = glass("convert", tmp_path / "fsm", tmp_path / "out", "--to", "hf")
    assert "no Hugging Face architecture" in result.exception.what
    assert not (tmp_path / "out").exists()


def test_verify_takes_a_hugging_face_folder(tmp_path):
    folder = folder_of("qwen2 window", tmp_path)
    assert glass("verify", folder, "--only", "causality").exit_code == 0
    result = glass("verify", folder, "--only", "reference", "--deep", "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["checks"]
    assert row["verdict"] == "passed"
    assert row["worst"] <= 1e-5
    change(folder, model_type="mamba")
    assert glass("verify", folder).exception.exit_code == 3


def test_a_model_that_others_changed_is_found_out(tmp_path):
    """One number of one tensor, and the module that it was made of disagrees."""
    adapter = gf.load(folder_of("llama", tmp_path), reference=True)
    with torch.no_grad():
        adapter.model.final_norm.weight[3] += 1.0
    assert gf.verify(adapter, only="reference").failed == 1
