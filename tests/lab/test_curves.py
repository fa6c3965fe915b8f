"""Curves are what the lines say: torn ends wait, resumed steps replace, thinning keeps extremes."""

import json
import math

import numpy as np
import pytest

from glassformer.lab.runs.curves import MOST, AlertMark, extremes, read_curves, smooth
from glassformer.spec.errors import FileError, InputError
from tests.lab.runs import sample, trained
from tests.planting import Binary, Call, catches


def line(step, loss, **more):
    return {"step": step, "loss": loss, "nll": {"next": loss}, "lr": 0.1, "tokens": 10} | more


def write(folder, *lines, end=""):
    text = "".join(json.dumps(one) + "\n" for one in lines) + end
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def test_the_curves_of_a_real_run_are_its_lines(tmp_path):
    trained(sample("torch", "train.evaluate_every=10"), tmp_path / "run")
    lines = [json.loads(one) for one in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [one for one in lines if "val" not in one]
    found = read_curves(tmp_path / "run")
    assert found.run == "run"
    assert found["loss"].value.tolist() == [one["loss"] for one in steps]
    assert found["loss"].step.tolist() == list(range(1, 31))
    assert found["loss"].tokens.tolist() == np.cumsum([one["tokens"] for one in steps]).tolist()
    assert found["loss"].x("time")[-1] == pytest.approx(sum(one["seconds"] for one in steps))
    vals = [one["val"] for one in lines if "val" in one]
    assert found["val.loss"].value.tolist() == [val["loss"] for val in vals]
    assert found["val.loss"].step.tolist() == [10, 20, 30]
    assert found["val.by.operation.MAX"].value.tolist() == [
        v["by"]["operation"]["MAX"] for v in vals
    ]
    assert found.last_step == 30
    rows = found.rows()
    assert len(rows) == 30
    assert rows[9]["val.loss"] == vals[0]["loss"]
    assert rows[8]["val.loss"] is None
    assert len({tuple(row) for row in rows}) == 1  # every row has every column


def several(step, loss, **more):
    return line(step, loss, nll={"next": loss, "class": 0.5, "state": 2.0}) | more


def test_of_several_heads_the_loss_is_the_first_ones_also_in_old_runs(tmp_path):
    write(
        tmp_path,
        several(1, 8.0, nll={"next": 3.0, "class": 0.5, "state": 2.0}),  # as it once was written
        several(2, 7.0, nll={"next": 2.5, "class": 0.5, "state": 2.0}),
        several(3, 1.0, objective=6.0),
        several(4, "nan", nll={"next": "nan", "class": 1, "state": 1}),
        {"step": 4, "val": {"loss": 0.9, "heads": {"next": {"loss": 0.9}, "class": {"loss": 1.0}}}},
    )
    found = read_curves(tmp_path)
    assert found["loss"].value.tolist()[:3] == [3.0, 2.5, 1.0]
    assert found["objective"].value.tolist()[:3] == [8.0, 7.0, 6.0]
    assert math.isnan(found["loss"].value[3]) and math.isnan(found["objective"].value[3])
    assert found["nll.next"].value.tolist()[:3] == [3.0, 2.5, 1.0]
    assert found["val.heads.class.loss"].value.tolist() == [1.0]
    write(tmp_path, line(1, 3.0, nll={"next": 2.0}))  # one head, smoothed: as it is
    assert found.run and set(read_curves(tmp_path).series) >= {"loss", "nll.next"}
    assert read_curves(tmp_path)["loss"].value.tolist() == [3.0]
    assert "objective" not in read_curves(tmp_path).series


@catches("a torn line is read", "lab.runs.curves:read_curves", Binary("+"), to="len(data)")
def test_a_torn_last_line_waits_for_the_next_reading(tmp_path):
    write(tmp_path, line(1, 3.0), end='{"step": 2, "lo')
    first = read_curves(tmp_path)
    assert first["loss"].step.tolist() == [1]
    write(tmp_path, line(1, 3.0), line(2, 2.0), line(3, 1.0))
    more = read_curves(tmp_path, start=first.next, spent=first.spent)
    assert more["loss"].step.tolist() == [2, 3]
    assert more["loss"].tokens.tolist() == [20, 30]
    assert not more.restarted
    assert read_curves(tmp_path, start=more.next).series == {}


def test_a_log_that_was_cut_back_is_read_anew(tmp_path):
    write(tmp_path, *(line(step, 1.0) for step in range(1, 9)))
    end = read_curves(tmp_path).next
    write(tmp_path, line(1, 5.0))
    again = read_curves(tmp_path, start=end)
    assert again.restarted
    assert again["loss"].value.tolist() == [5.0]


def test_a_step_that_comes_again_replaces_what_it_was(tmp_path):
    write(tmp_path, line(1, 4.0), line(2, 3.0), line(3, 9.0), line(2, 2.0))
    found = read_curves(tmp_path)["loss"]
    assert (found.step.tolist(), found.value.tolist()) == ([1, 2], [4.0, 2.0])


@catches("NaN becomes 0", "lab.runs.curves:_number", Call("get"), to="0.0")
def test_what_is_not_finite_is_read_as_such(tmp_path):
    write(tmp_path, line(1, "nan"), line(2, "inf"), line(3, 1.0))
    values = read_curves(tmp_path)["loss"].value
    assert math.isnan(values[0])
    assert values[1:].tolist() == [math.inf, 1.0]


def test_alerts_are_read_whole(tmp_path):
    write(tmp_path, line(1, 1.0))
    text = json.dumps({"step": 1, "kind": "spike", "message": "loss 9"}) + '\n{"step": 2, "ki'
    (tmp_path / "alerts.jsonl").write_text(text)
    assert read_curves(tmp_path).alerts == (AlertMark(1, "spike", "loss 9"),)


@pytest.mark.parametrize(
    "text",
    [
        "[]\n",
        "{}\n",
        '{"step": true}\n',
        '{"step": -1}\n',
        '{"step": 1e99}\n',
        "\xff\n",
        "[" * 9999,
    ],
)
def test_a_damaged_line_is_named(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n' + text.rstrip("\n") + "\n")
    with pytest.raises(FileError, match="line 2"):
        read_curves(tmp_path)


def test_hostile_amounts_overflow_nothing(tmp_path):
    write(tmp_path, line(1, 1.0, tokens=1e300, seconds="inf"), line(2, 10**400), line(3, "x" * 99))
    deep: dict = {"step": 4, "loss": 1.0}
    inside = deep
    for _ in range(300):
        inside["val"] = {"a": 1.0}
        inside = inside["val"]
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(deep) + "\n")
    found = read_curves(tmp_path)
    assert found["loss"].tokens.tolist()[0] == 0
    assert found["loss"].step.tolist() == [1, 4]
    assert max(name.count(".") for name in found.series) <= 9


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a run"):
        read_curves(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    assert read_curves(tmp_path).series == {}
    with pytest.raises(InputError, match="no curve 'los'"):
        read_curves(tmp_path)["los"]


# --- smoothing and thinning -----------------------------------------------------------------------


def centred(values, half):
    """What `smooth` does twice, by its definition: a mean where the window fits, else a line."""
    last = len(values) - 1
    half = min(half, last // 2)
    made = []
    for i in range(len(values)):
        at = min(max(i, half), last - half)
        window, places = values[at - half : at + half + 1], np.arange(at - half, at + half + 1)
        mean = float(np.mean(window))
        if at != i:
            slope, start = np.polyfit(places, window, 1)
            mean = float(np.clip(start + slope * i, window.min(), window.max()))
        made.append(mean)
    return made


@pytest.mark.parametrize("count", [1, 2, 7, 50, 53])
@pytest.mark.parametrize("span", [2.0, 7.0, 16.0, 1e6])
def test_the_mean_is_taken_twice_over_windows_that_are_centred(count, span):
    values = np.random.default_rng(count).normal(size=count)
    half = int(span / 2)
    expected = centred(np.array(centred(values, half)), half)
    assert smooth(values, span=span) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("span", [3.0, 16.0, 32.0])
def test_a_line_stays_where_it_is_and_nothing_lags(span):
    steps = np.arange(300.0)
    assert smooth(5 - 0.01 * steps, span=span) == pytest.approx(5 - 0.01 * steps, abs=1e-12)
    noise = 0.1 * np.random.default_rng(0).normal(size=300)
    falling = 3 * np.exp(-steps / 60) + noise
    above = smooth(falling, span=span) > falling
    runs = np.diff(np.flatnonzero(np.diff(above.astype(int))), prepend=0, append=299)
    assert 0.35 < above.mean() < 0.65 and runs.max() < 20, "raw points lie on both sides of it"


@pytest.mark.parametrize("end", [0, -1])
@pytest.mark.parametrize("span", [8.0, 16.0, 50.0])
def test_the_end_of_a_curve_does_not_follow_its_last_point(end, span):
    noise = 0.1 * np.random.default_rng(3).normal(size=300)
    level = smooth(3.0 + noise, span=span)
    bent = noise.copy()
    bent[end] += 1.0
    moved = smooth(3.0 + bent, span=span) - level
    assert abs(moved[end]) < 0.45, "a point is at most about 4 of the window's points"
    assert abs(level[end] - 3.0) < 0.1


def test_no_end_leaves_the_range_of_its_values():
    accuracy = np.minimum(1.0, np.linspace(0.2, 1.1, 60))
    assert smooth(accuracy, span=16.0).max() <= 1.0


def test_a_spike_spoils_only_its_own_window():
    values = np.full(500, 0.125)
    values[250] = 1e30
    far = np.abs(np.arange(500) - 250) > 2 * 8
    assert (smooth(values, span=16.0)[far] == 0.125).all()


def test_a_span_of_one_changes_nothing_and_nan_is_passed_over():
    values = np.array([3.0, math.nan, 5.0, 10.0])
    assert smooth(values, span=1.0).tolist()[::2] == [3.0, 5.0]
    bent = smooth(values, span=4.0)
    assert math.isnan(bent[1])
    # the line of 3, 5, 10 is 2.5, 6, 9.5, and begins no lower than 3; that of 3, 6, 9.5 once more
    assert bent[0] == 3.0
    assert bent[2] == pytest.approx((3 + 6 + 9.5) / 3)
    assert bent[3] == pytest.approx((3 + 6 + 9.5) / 3 + 3.25)
    with pytest.raises(InputError):
        smooth(values, span=0.5)


def test_thinning_keeps_the_extremes_of_every_bucket():
    values = np.random.default_rng(1).normal(size=100_003)
    values[50_000], values[70_001] = 99.0, -99.0
    values[5] = math.nan
    kept = extremes(values)
    assert len(kept) <= MOST
    assert {0, 50_000, 70_001, 100_002} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert extremes(values[:100]).tolist() == list(range(100))
    for most in (4, 5, 100):
        assert len(extremes(values, most=most)) <= most


def test_a_value_that_no_axis_can_hold_is_infinite(tmp_path):
    write(tmp_path, line(1, 1e308), line(2, -1e301), line(3, 9e299), line(4, 0.0))
    assert read_curves(tmp_path)["loss"].value.tolist() == [math.inf, -math.inf, 9e299, 0.0]
