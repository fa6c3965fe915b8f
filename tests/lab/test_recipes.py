"""Configs as values: loaded, trained, swept side by side; the history of a run as rows."""

import sys
from dataclasses import replace

import pytest

import glassformer as gf
from glassformer.lab.recipes import recipe
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.serialize import to_json

TINY = [
    "task.examples=200",
    "model.d_model=8",
    "model.decoder.layers.block.attention.n_heads=2",
    "model.decoder.layers.block.ffn.d_ff=8",
    "model.decoder.layers.count=1",
    "train.steps=4",
    "train.batch_size=8",
    "train.evaluate_every=2",
    "train.schedule.warmup=1",
]


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Two designs in files, and a run of the first."""
    folder = tmp_path_factory.mktemp("configs")
    first = recipe("digits", TINY)
    second = gf.override(first, "model.decoder.layers.block.ffn.d_ff=16")
    for name, spec in (("one", first), ("two", second)):
        (folder / f"{name}.json").write_text(to_json(spec))
    gf.train(first, name="run", runs=folder, progress=False)
    return folder


def test_a_config_is_loaded_from_a_file_or_a_run(configs):
    spec = gf.load_config(configs / "one.json")
    assert spec == recipe("digits", TINY)
    assert gf.load_config(configs / "run") == gf.load_config(str(configs / "run/config.toml"))
    changed = gf.load_config(configs / "one.json", "train.steps=9", ["train.seed=3"])
    assert changed == replace(spec, train=replace(spec.train, steps=9, seed=3))


@pytest.mark.parametrize(
    ("name", "message"),
    [("digits", "is no config"), ("nosuch.toml", "cannot be read as TOML")],
)
def test_what_is_no_config_is_refused(name, message):
    with pytest.raises(InputError, match=message):
        gf.load_config(name)


def test_two_configs_are_swept_side_by_side(configs, tmp_path):
    paths = [configs / "one.json", configs / "two.json"]
    found = gf.sweep(
        paths, seeds=1, overrides=["train.steps=2"], sweeps=tmp_path, jobs=1, progress=False
    )
    assert {row.name for row in found.ranking.rows} == {"one", "two"}
    assert {cell.spec.train.steps for cell in found.plan.cells} == {2}
    again = gf.sweep(found.path, jobs=1, progress=False)
    assert again.ranking == found.ranking


def test_several_configs_are_not_varied(configs, tmp_path):
    paths = [configs / "one.json", configs / "two.json"]
    with pytest.raises(InputError, match=r"train\.lr has several values"):
        gf.sweep(paths, vary={"train.lr": [1e-3, 1e-2]}, sweeps=tmp_path)
    with pytest.raises(InputError, match="params has several values"):
        gf.sweep(paths, design={"params": ["1M"]}, sweeps=tmp_path)
    with pytest.raises(InputError, match="two configs are called one"):
        gf.sweep([configs / "one.json"] * 2, sweeps=tmp_path)


def test_the_history_of_a_run_is_rows(configs):
    history = gf.history(configs / "run")
    rows = history.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["loss"] > 0 for row in rows)
    assert [row["step"] for row in rows if row["val.loss"] is not None] == [2, 4]
    assert history["val.loss"].value.tolist() == [rows[1]["val.loss"], rows[3]["val.loss"]]


def test_the_history_is_a_data_frame_where_pandas_is(configs, monkeypatch):
    history = gf.history(configs / "run")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MachineError, match="needs pandas") as caught:
        history.frame()
    assert "pip install pandas" in caught.value.hint and "rows()" in caught.value.hint


def test_a_trained_run_has_its_history(tmp_path):
    run = gf.train("digits", overrides=TINY, runs=tmp_path, progress=False)
    assert run.history.rows() == gf.history(run.path).rows()
    assert len(run.history["loss"]) == 4
