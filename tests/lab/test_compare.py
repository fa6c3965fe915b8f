"""`gf.runs` and `gf.compare`: rows of runs, and differences with an honest error."""

import json
import math
import time

import pytest
from typer.testing import CliRunner

import glassformer as gf
from glassformer.cli.main import app
from glassformer.lab.runs import table
from glassformer.lab.sweeps.ranking import t_quantile
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.serialize import override, to_json
from glassformer.store.rundir import RunDirectory
from tests.training.samples import digits


def write_run(folder, name, *changes, loss=0.5, status="finished", step=8):
    """A run's folder as training leaves it, without the training."""
    spec = override(digits(), changes)
    place = folder / name
    place.mkdir(parents=True)
    (place / "config.json").write_text(to_json(spec))
    record = {
        "status": status,
        "step": step,
        "steps": spec.train.steps,
        "task": "digits",
        "val": {"loss": loss, "accuracy": 1 - loss, "oracle": {}},
        "clock": {"at": time.time(), "seconds": 61.2},
    }
    (place / "run.json").write_text(json.dumps(record))
    return place


@pytest.fixture
def runs(tmp_path):
    for seed, (narrow, wide) in enumerate([(0.50, 0.40), (0.60, 0.49), (0.55, 0.46)]):
        write_run(tmp_path, f"narrow-{seed}", f"train.seed={seed}", loss=narrow)
        write_run(tmp_path, f"wide-{seed}", f"train.seed={seed}", "train.lr=0.5", loss=wide)
    return tmp_path


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.7062), (2, 4.30265), (30, 2.04227)])
def test_students_t(freedom, t):
    """Values of the table in every textbook."""
    assert t_quantile(freedom) == pytest.approx(t, rel=1e-5)


def test_pairs_of_seeds_give_an_interval(runs):
    names = [f"{kind}-{seed}" for kind in ("narrow", "wide") for seed in range(3)]
    found = gf.compare(*names, runs=runs)
    assert set(found.settings) == {"train.lr", "train.seed"}
    assert [len(group) for group in found.groups] == [3, 3]
    (loss,) = (one for one in found.differences if one.score == "val_loss")
    # differences -0.10, -0.11, -0.09: mean -0.1, standard error 0.01 / sqrt(3)
    margin = 4.302652730 * 0.01 / math.sqrt(3)
    assert (loss.how, loss.seeds) == ("paired", 3) and loss.is_clear
    assert loss.mean == pytest.approx(-0.1)
    assert (loss.low, loss.high) == pytest.approx((-0.1 - margin, -0.1 + margin))
    assert "a clear difference" in found.text()


def test_seeds_that_do_not_pair_give_a_wider_one(runs):
    write_run(runs, "late-7", "train.seed=7", "train.lr=0.25", loss=0.40)
    write_run(runs, "late-8", "train.seed=8", "train.lr=0.25", loss=0.50)
    found = gf.compare("narrow-0", "narrow-1", "late-7", "late-8", runs=runs)
    loss = found.differences[0]
    # Welch: both variances 0.005, so 2 degrees of freedom and an error of sqrt(0.005)
    assert (loss.how, loss.mean) == ("unpaired", pytest.approx(-0.1))
    assert loss.high == pytest.approx(-0.1 + 4.302652730 * math.sqrt(0.005))
    assert not loss.is_clear and "no difference seen" in loss.text()


def test_one_seed_a_side_has_no_error(runs):
    loss = gf.compare("narrow-0", "wide-0", runs=runs).differences[0]
    assert (loss.how, loss.low, loss.high) == ("single", None, None)
    assert "its error is unknown" in loss.text()


@pytest.mark.parametrize("ending", ["html", "csv", "json"])
def test_the_command_writes_the_comparison(runs, tmp_path, ending):
    out = tmp_path / f"x.{ending}"
    words = ["compare", "narrow-0", "wide-0", "--runs", str(runs), "-o", str(out)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "narrow-0" in out.read_text() and "train.lr" in out.read_text()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fit_the_width(runs, width):
    found = gf.compare(*gf.runs(runs).names, runs=runs)
    assert max(map(len, found.text(width=width).splitlines())) <= width
    assert max(map(len, gf.runs(runs).text(width=width).splitlines())) <= width


def test_what_cannot_be_compared_is_told(runs):
    with pytest.raises(InputError, match="two runs"):
        gf.compare("narrow-0", runs=runs)
    with pytest.raises(InputError, match="no run wide-9"):
        gf.compare("narrow-0", "wide-9", runs=runs)


# --- the table of runs ----------------------------------------------------------------------------


def test_rows_are_sorted_and_filtered(runs):
    assert gf.runs(runs, sort="val_loss").names[:2] == ["wide-0", "wide-2"]
    assert gf.runs(runs, sort="train.lr", reverse=True).names[0].startswith("wide")
    assert gf.runs(runs, where=["run=wide-*", "val_loss<0.45"]).names == ["wide-0"]
    assert len(gf.runs(runs, where=["seed=1"])) == len(gf.runs(runs, where=["train.seed=1"])) == 2
    with pytest.raises(InputError, match="no column or setting"):
        gf.runs(runs, sort="nothing")
    with pytest.raises(InputError, match="no condition"):
        gf.runs(runs, where=["nothing"])
    row = gf.runs(runs)[0]
    assert row["parameters"] == gf.count_parameters(digits().model) and row["seconds"] == 61.2
    assert "1 min 01 s" in gf.runs(runs).text(width=200)


def test_the_newest_run_comes_first_and_a_running_one_tells_its_step(runs):
    place = write_run(runs, "live", status="running", step=0)
    (place / "metrics.jsonl").write_text('{"step": 200, "loss": 1.0, "seconds": 0.1}\n')
    with RunDirectory(place).locked():
        row = gf.runs(runs)[0]
        assert (row["id"], row["status"], row["step"]) == ("live", "running", 200)
        with pytest.raises(MachineError, match="another process"):
            table.delete_runs(["live"], folder=runs)
    assert gf.runs(runs)[0]["status"] == "stalled"


def test_runs_are_renamed_tagged_and_deleted(runs):
    def glass(*words):
        return CliRunner().invoke(app, ["runs", "--runs", str(runs), *words])

    assert glass("rename", "wide-0", "best").exit_code == 0
    assert glass("tag", "best", "paper", "figure-2").stdout == "best: paper figure-2\n"
    assert gf.runs(runs, where=["tags=paper"]).names == ["best"]
    assert glass("tag", "best", "paper", "--remove").stdout == "best: figure-2\n"
    assert isinstance(glass("delete", "best").exception, InputError)  # no terminal, no --yes
    assert glass("delete", "best", "wide-1", "--yes").exit_code == 0
    assert not (runs / "best").exists() and len(gf.runs(runs)) == 4
    for wrong in (("rename", "none", "x"), ("rename", "wide-2", "narrow-0"), ("tag", "wide-2", "")):
        assert isinstance(glass(*wrong).exception, InputError), wrong
    (runs / "link").symlink_to(runs / "narrow-0")
    assert isinstance(glass("delete", "link", "--yes").exception, InputError)
