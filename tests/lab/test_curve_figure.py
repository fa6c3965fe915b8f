"""Figures of curves: deterministic bytes, the raw line below the smoothed, names that touch not."""

import json

import numpy as np
import pytest

from glassformer.lab.plots.curves import alerts_text, curve_chart, panels, smoothing_text
from glassformer.lab.runs.curves import read_curves
from glassformer.lens.show.chart import GAP, apart
from glassformer.lens.show.chart_figure import chart_figure, figure_bytes
from glassformer.spec.errors import InputError


def made(folder, *, seed=0, steps=200):
    folder.mkdir()
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(1, steps + 1):
        lines.append({"step": step, "loss": float(3 / step + 0.01 * rng.random()), "tokens": 64})
        if step % 40 == 0:
            val = {"loss": 3 / step, "accuracy": step / steps, "exact_match": 0.5}
            lines.append({"step": step, "val": val})
    lines.append({"step": steps + 1, "loss": "nan", "tokens": 64})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    alerts = [{"step": s, "kind": "spike", "message": "loss"} for s in (50, steps + 1)]
    (folder / "alerts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in alerts))
    return read_curves(folder)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_curves_give_the_same_bytes(tmp_path, kind):
    curves = made(tmp_path / "a")
    first = figure_bytes(curve_chart([curves]), kind)
    assert first == figure_bytes(curve_chart([curves]), kind)
    assert first.startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_a_panel_shows_raw_and_smooth_alerts_and_names(tmp_path):
    curves = made(tmp_path / "a")
    figure = chart_figure(curve_chart([curves]))
    loss, accuracy = figure.axes
    raw, smooth, *rest = loss.get_lines()
    assert raw.get_alpha() < 0.5
    assert len(raw.get_xdata()) == len(smooth.get_xdata()) == 201
    marks = [line for line in rest if line.get_marker() == "v"]
    assert [line.get_xdata()[0] for line in marks] == [50, 201]
    assert {text.get_text() for text in loss.texts} == {"loss", "val.loss"}
    assert {text.get_text() for text in accuracy.texts} == {"val.accuracy", "val.exact_match"}
    assert loss.get_yscale() == "log"
    assert accuracy.get_yscale() == "linear"
    assert "centred mean over 4 points" in figure.get_suptitle()
    assert "2 x spike" in figure.get_suptitle()


def test_runs_differ_by_dash_and_name_as_well_as_colour(tmp_path):
    curves = [made(tmp_path / name, seed=seed) for seed, name in enumerate(("a$x$", "b_1", "c"))]
    figure = chart_figure(curve_chart(curves, axis="tokens"))
    for axes in figure.axes:
        assert {text.get_text() for text in axes.texts} == {"a$x$", "b_1", "c"}
    bold = [line for line in figure.axes[0].get_lines() if line.get_linewidth() > 1.5]
    looks = {(line.get_color(), str(line._unscaled_dash_pattern)) for line in bold}
    assert len({colour for colour, _ in looks}) == len({dash for _, dash in looks}) == 3
    assert figure.axes[0].get_lines()[0].get_xdata()[-1] == 201 * 64
    assert b"a$x$" in figure_bytes(figure, "svg")  # no formula is made of it


def test_what_is_drawn_is_decided_once(tmp_path):
    one = made(tmp_path / "a")
    assert [panel.title for panel in panels([one])] == ["loss", "accuracy"]
    assert [panel.title for panel in panels([one, one])] == ["loss", "val.loss", "val.accuracy"]
    (only,) = panels([one], names=["val.accuracy"], log=True)
    assert only.log_y
    assert only.share
    assert only.lines[0].raw is None
    assert smoothing_text([only]) == ""
    assert alerts_text([one, one]) == "4 x spike"
    loss = panels([one], names=["loss"])
    assert smoothing_text(loss) == "smoothed: centred mean over 4 points"
    (plain,) = panels([one], names=["loss"], span=1)
    assert plain.lines[0].raw is None
    assert smoothing_text([plain], 1) == ""
    with pytest.raises(InputError, match="no curve 'accuracy'"):
        panels([one], names=["accuracy"])
    with pytest.raises(InputError, match="cannot be written"):
        figure_bytes(curve_chart([one]), "gif")


@pytest.mark.parametrize(("points", "smoothed"), [(99, False), (100, True)])
def test_few_points_are_drawn_as_they_are_unless_asked_otherwise(tmp_path, points, smoothed):
    lines = (f'{{"step": {step}, "loss": {3 + step % 2}}}\n' for step in range(1, points + 1))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    few = read_curves(tmp_path)
    assert (panels([few])[0].lines[0].raw is not None) == smoothed
    assert panels([few], span=3)[0].lines[0].raw is not None
    assert smoothing_text(panels([few], span=3), 3) == "smoothed: centred mean over 3 points"


def test_a_run_that_has_measured_nothing_says_so(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match="nothing was measured yet"):
        panels([read_curves(tmp_path)])


def test_labels_are_moved_apart_and_stay_inside():
    heights = [share for share, _ in apart([(1.0, i) for i in range(5)])]
    assert max(heights) <= 1.0
    assert min(np.diff(sorted(heights))) >= GAP - 1e-12
    assert apart([(0.2, 0), (0.8, 1)]) == [(0.2, 0), (0.8, 1)]
