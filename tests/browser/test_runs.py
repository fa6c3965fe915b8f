"""The page Runs in a real browser: curves, table, links, keys; and a real training, live."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from glassformer.lab.runs.curves import read_curves
from glassformer.lab.runs.table import runs
from glassformer.store.rundir import RunDirectory
from tests.browser.conftest import FORMS, Opener, Site, Watch

SEEDS = "digits-seed1,digits-seed2,digits-seed3"


def drawn(page: Page) -> None:
    """Wait for a curve."""
    page.wait_for_selector("glass-curves path.line")


def short(value: float) -> str:
    """A number as the page writes it: three figures."""
    size = abs(value)
    return f"{value:.{3 if size < 1 else 2 if size < 100 else 0}f}"


@pytest.mark.parametrize(("width", "theme"), FORMS)
def test_it_is_accessible(
    open_page: Opener, axe: Callable, shoot: Callable, width: int, theme: str
) -> None:
    page = open_page("runs", width=width, theme=theme)
    drawn(page)
    axe(page)
    shoot(page, f"runs-{width}-{theme}")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width, "nothing makes the whole page scroll sideways"


def test_the_numbers_are_pythons(open_page: Opener, site: Site) -> None:
    page = open_page("runs?runs=digits,reverse&y=val.loss")
    drawn(page)
    for name in ("digits", "reverse", "text"):
        record = json.loads((site.runs / name / "run.json").read_text(encoding="utf-8"))
        row = page.locator(f'tr[data-run="{name}"]')
        shown = {
            "status": "finished",
            "val_loss": f"{record['val']['loss']:.4f}",
            "val_accuracy": f"{100 * record['val']['accuracy']:.2f} %",
            "seed": str(record["seed"]),
            "task": record["task"],
        }
        for key, text in shown.items():
            expect(row.locator(f'[data-key="{key}"]')).to_have_text(text)
    series = read_curves(site.runs / "digits")["val.loss"]
    page.locator(".chart").focus()
    page.keyboard.press("Home")
    for step, value in zip(series.step.tolist(), series.value.tolist(), strict=True):
        expect(page.locator(".readout")).to_contain_text(f"digits step {step}: {short(value)}")
        page.keyboard.press("ArrowRight")
    summary = page.locator(".chart svg").get_attribute("aria-label")
    assert f"digits {short(series.value[-1])} at step {series.step[-1]}" in summary


def test_a_smoothed_line_lies_on_the_raw_one(open_page: Opener) -> None:
    page = open_page("runs?runs=digits&smooth=16")
    drawn(page)
    assert page.locator("path.line.raw").count() == page.locator("path.line.smooth").count() == 1
    page.get_by_label("smoothing").press("Home")
    expect(page.locator("path.line.smooth")).to_have_count(0)
    expect(page.locator("path.line.raw")).to_have_count(0)
    expect(page.locator("path.line")).to_have_count(1)
    assert "smooth=1" in page.url


def test_training_and_validation_are_in_one_chart(open_page: Opener, site: Site) -> None:
    series = read_curves(site.runs / "digits")["val.loss"]
    page = open_page("runs?runs=digits")
    drawn(page)
    expect(page.locator("path.line.beside")).to_have_count(0)
    page.get_by_label("with validation").check()
    expect(page.locator("path.line.beside")).to_have_count(1)
    expect(page.locator("circle.ring")).to_have_count(len(series))
    assert page.locator("path.line.smooth").count() == 1
    assert "val=1" in page.url
    page.locator(".chart").focus()
    page.keyboard.press("End")
    told = f"validation at step {series.step[-1]}: {short(series.value[-1])}"
    expect(page.locator(".readout")).to_contain_text(told)
    page.locator('[data-copy="cli"]').click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "--series loss --series val.loss" in copied
    page.get_by_label("y", exact=True).select_option("val.loss")
    expect(page.get_by_label("with validation")).to_be_hidden()
    expect(page.locator("path.line.beside")).to_have_count(0)


def test_axes_can_be_logarithmic_and_of_three_kinds(open_page: Opener, site: Site) -> None:
    page = open_page("runs?runs=digits")
    drawn(page)
    before = page.locator("path.line.smooth").get_attribute("d")
    page.get_by_label("log y").check()
    expect(page.locator(".chart")).to_contain_text("loss, nats (log)")
    assert page.locator("path.line.smooth").get_attribute("d") != before
    page.get_by_label("log x").check()
    expect(page.locator(".chart")).to_contain_text("step (log)")
    for axis, name in (("tokens", "tokens"), ("time", "seconds of training")):
        page.get_by_label("x", exact=True).select_option(axis)
        expect(page.locator(".chart")).to_contain_text(name)
    page.go_back()
    page.go_back()
    expect(page.locator(".chart")).to_contain_text("step (log)")


def test_seeds_become_one_band(open_page: Opener, shoot: Callable) -> None:
    page = open_page(f"runs?runs={SEEDS},digits&y=val.loss")
    drawn(page)
    expect(page.locator("path.band")).to_have_count(0)
    page.get_by_label("group seeds").check()
    expect(page.locator("path.band")).to_have_count(1)
    expect(page.locator(".alerts")).to_contain_text(f"mean of {SEEDS.replace(',', ', ')}")
    expect(page.locator("path.line.raw")).to_have_count(3)
    shoot(page, "runs-seeds")


def test_a_group_is_named_and_its_runs_are_not(open_page: Opener) -> None:
    page = open_page(f"runs?runs={SEEDS}&group=seed")
    page.wait_for_selector("path.band")
    expect(page.locator("text.end")).to_have_text(["digits × 3"])


def test_the_table_sorts_by_any_column(open_page: Opener, site: Site) -> None:
    page = open_page("runs")
    drawn(page)
    listed = runs(site.runs)
    ids = "[...document.querySelectorAll('tr[data-run]')].map(row => row.dataset.run)"
    newest = sorted(listed, key=lambda row: (-row["written"], row["id"]))
    assert page.evaluate(ids) == [row["id"] for row in newest]
    for key, head in (("val_loss", "val loss"), ("parameters", "parameters"), ("id", "run")):
        button = page.get_by_role("button", name=head, exact=True)
        button.click()
        way = "ascending" if key == "id" else "descending"
        expect(page.locator(f"th[aria-sort={way}]")).to_have_text(head)
        wanted = sorted(listed, key=lambda row: row["id"])
        wanted.sort(key=lambda row: row[key], reverse=key != "id")
        assert page.evaluate(ids) == [row["id"] for row in wanted]
        button.click()
        wanted = sorted(listed, key=lambda row: row["id"])
        wanted.sort(key=lambda row: row[key], reverse=key == "id")
        assert page.evaluate(ids) == [row["id"] for row in wanted]
    assert "sort=-id" in page.url
    page.reload()
    drawn(page)
    assert page.evaluate(ids) == [row["id"] for row in wanted]


def test_all_that_are_listed_are_ticked_at_once(open_page: Opener) -> None:
    page = open_page("runs?runs=digits")
    drawn(page)
    page.get_by_label("Filter").fill("seed")
    page.get_by_label("draw all that are listed").check()
    expect(page.locator("text.end")).to_have_count(3)
    page.get_by_label("draw all that are listed").uncheck()
    expect(page.locator("text.end")).to_have_count(0)
    expect(page.locator(".note").last).to_contain_text("Tick a run to draw its curve")


def test_the_first_view_is_of_one_task_and_two_are_warned_of(open_page: Opener) -> None:
    page = open_page("runs")
    drawn(page)
    tasks = "[...document.querySelectorAll('tr.picked [data-key=task]')].map(c => c.textContent)"
    assert len(set(page.evaluate(tasks))) == 1
    expect(page.locator(".alerts .warn")).to_have_count(0)
    page.goto(page.url.partition("#")[0] + "#/runs?runs=digits,reverse")
    expect(page.locator(".alerts .warn")).to_contain_text("their losses do not compare")


def test_without_a_curve_there_are_no_axes(open_page: Opener) -> None:
    page = open_page("runs?runs=")
    expect(page.locator(".chart")).to_have_text("Tick a run in the table to draw its curve.")
    assert page.locator(".chart svg").count() == 0
    page.locator(".chart").hover()
    expect(page.locator(".readout")).to_have_text("")
    page.get_by_role("row", name="digits-seed1").get_by_role("checkbox").check()
    drawn(page)


def test_only_the_settings_that_differ(open_page: Opener) -> None:
    page = open_page(f"runs?runs={SEEDS}")
    drawn(page)
    expect(page.locator('tr[data-run="digits-seed2"] .chip')).to_have_text(["train.seed 2"])
    expect(page.locator('tr[data-run="reverse"] .chip')).to_have_count(0)


def test_picking_is_a_view_that_back_undoes(open_page: Opener) -> None:
    page = open_page("runs?runs=digits")
    drawn(page)
    page.get_by_label("draw reverse").check()
    expect(page.locator("text.end")).to_have_text(["digits", "reverse"])
    assert "runs=digits%2Creverse" in page.url
    page.get_by_label("draw digits", exact=True).uncheck()
    expect(page.locator("text.end")).to_have_text(["reverse"])
    page.go_back()
    expect(page.locator("text.end")).to_have_text(["digits", "reverse"])
    expect(page.get_by_label("draw digits", exact=True)).to_be_checked()
    page.go_back()
    expect(page.locator("text.end")).to_have_text(["digits"])
    page.get_by_label("draw digits", exact=True).uncheck()
    expect(page.locator("text.end")).to_have_count(0)


def test_a_link_restores_the_view(open_page: Opener) -> None:
    page = open_page(f"runs?runs={SEEDS}&y=val.loss&x=tokens&smooth=4&logx=1&logy=1&group=seed")
    drawn(page)
    expect(page.get_by_label("y", exact=True)).to_have_value("val.loss")
    expect(page.get_by_label("x", exact=True)).to_have_value("tokens")
    expect(page.get_by_label("smoothing")).to_have_value("2")
    for name in ("log x", "log y", "group seeds", "draw digits-seed3"):
        expect(page.get_by_label(name)).to_be_checked()
    expect(page.get_by_label("draw digits", exact=True)).not_to_be_checked()
    expect(page.locator("path.band")).to_have_count(1)


def test_a_point_opens_inspect_at_the_nearest_checkpoint(open_page: Opener, site: Site) -> None:
    steps = RunDirectory(site.runs / "digits").steps()
    page = open_page("runs?runs=digits&smooth=1")
    drawn(page)
    page.locator(".chart").focus()
    page.keyboard.press("Home")
    expect(page.locator(".readout")).to_contain_text(f"opens checkpoint {steps[0]}")
    for _ in range(2, steps[-1] - 10, 20):
        page.keyboard.press("PageDown")
    expect(page.locator(".readout")).to_contain_text(f"opens checkpoint {steps[-1]}")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(rf"#/inspect\?run=digits&step={steps[-1]}"))
    page.go_back()
    drawn(page)
    assert "#/runs?runs=digits" in page.url
    box = page.locator(".chart").bounding_box()
    page.mouse.click(box["x"] + 60, box["y"] + 100)
    page.wait_for_url(re.compile(rf"#/inspect\?run=digits&step={steps[0]}"))


def test_a_filter_and_copies(open_page: Opener) -> None:
    page = open_page("runs?runs=digits&y=val.loss&smooth=4")
    drawn(page)
    page.get_by_label("Filter").fill("SEED2")
    expect(page.locator("tr[data-run]:visible")).to_have_count(1)
    page.locator('[data-copy="python"]').click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert 'read_curves(Path("runs") / "digits")["val.loss"].smoothed(4)' in copied
    page.locator('[data-copy="cli"]').click()
    command = "glass report digits --curves --series val.loss --smooth 4 --linear"
    assert page.evaluate("navigator.clipboard.readText()") == command


def test_nothing_is_asked_while_nobody_looks(open_page: Opener, watch: Watch) -> None:
    page = open_page("runs?runs=digits")
    drawn(page)
    page.evaluate("Object.defineProperty(document, 'visibilityState', {value: 'hidden'})")
    page.wait_for_timeout(300)
    before = len(watch.requests)
    page.wait_for_timeout(2300)
    assert len(watch.requests) == before


@pytest.fixture
def hostile(site: Site) -> Iterator[str]:
    """A run sent by somebody: its settings and alerts are markup."""
    run = site.runs / "sent"
    shutil.copytree(site.runs / "digits", run)
    markup = "<img src=x onerror=alert(1)></script><b>bold</b>"
    alert = {"step": 100, "kind": markup, "message": markup}
    (run / "alerts.jsonl").write_text(json.dumps(alert) + "\n", encoding="utf-8")
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    config["train"]["precision"] = markup
    config["train"][markup] = 1
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(json.dumps({**record, "status": markup[:40]}), encoding="utf-8")
    yield markup
    shutil.rmtree(run)


def test_hostile_text_is_text(open_page: Opener, hostile: str) -> None:
    page = open_page("runs?runs=digits,sent")
    drawn(page)
    expect(page.locator(".alerts li")).to_contain_text(hostile)
    expect(page.locator("path.alert-mark")).to_have_count(1)
    expect(page.locator('tr[data-run="sent"]')).to_contain_text("precision " + hostile)
    assert page.locator("main img, main b:has-text('bold') > b, main script").count() == 0


def test_the_pure_parts(open_page: Opener) -> None:
    page = open_page("runs")
    drawn(page)
    found = page.evaluate(
        """async () => {
          const s = await import("/static/js/scale.js");
          const { four } = await import("/static/js/format.js");
          const x = s.axis([1, 1000], { start: 0, end: 300, log: true, pad: 0 });
          return {
            ticks: s.ticks(0, 1, 5), log: s.logTicks(0.001, 10, 5),
            at: [1, 10, 100, 1000, 0, -1].map((v) => x.at(v)), from: x.from(100),
            flat: Number.isFinite(s.axis([2, 2], { start: 0, end: 9 }).at(2)),
            empty: s.axis([], { start: 0, end: 9 }).ticks.length > 0,
            nearest: [0, 4, 5, 6, 99].map((v) => s.nearest([1, 4, 6], v)),
            broken: s.path([1, 2, 3], [1, null, 3], { at: (v) => v }, { at: (v) => v }),
            apart: s.apart([10, 10, 11], 5, 0, 100),
            four: [0.25, 0.00005, 0.00003, 0].map(four),
          };
        }"""
    )
    assert found["ticks"] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert found["log"] == pytest.approx([0.001, 0.01, 0.1, 1, 10])
    assert found["at"][:4] == pytest.approx([0, 100, 200, 300])
    assert found["at"][4:] == [None, None] or all(v != v for v in found["at"][4:])
    assert found["from"] == pytest.approx(10)
    assert found["flat"]
    assert found["empty"]
    assert found["nearest"] == [0, 1, 1, 2, 2]
    assert found["broken"] == "M1.0 1.0M3.0 3.0"
    assert found["apart"] == [10, 15, 20]
    assert found["four"] == ["0.2500", "0.0001", "3.0e-5", "0"], "only 0 is 0"


# --- live -----------------------------------------------------------------------------------------


@pytest.fixture
def training(site: Site) -> Iterator[subprocess.Popen]:
    """A real training that takes longer than anyone will look."""
    command = [
        sys.executable, "-m", "glassformer", "train", "digits", "--name", "live",
        "--runs", str(site.runs), "--steps", "1000000", "task.examples=400", "model.d_model=16",
        "train.batch_size=4", "train.evaluate_every=40", "train.evaluate_examples=20",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    yield process
    process.kill()
    process.wait()
    shutil.rmtree(site.runs / "live", ignore_errors=True)


def test_a_live_run_grows_and_a_killed_one_is_stalled(
    open_page: Opener, site: Site, training: subprocess.Popen, shoot: Callable
) -> None:
    page = open_page("runs?runs=live&smooth=1")
    row = page.locator('tr[data-run="live"]')
    row.wait_for(timeout=60_000)
    expect(row.locator("td").first).to_have_text("running", timeout=30_000)
    expect(page.locator(".live")).to_contain_text("live: 1 running")
    drawn(page)
    seen = [points(page)]
    for _ in range(2):
        page.wait_for_function(
            "before => document.querySelector('glass-curves path.line')"
            ".getAttribute('d').match(/[ML]/g).length > before",
            arg=seen[-1],
            timeout=30_000,
        )
        seen.append(points(page))
    assert seen == sorted(set(seen)), "the curve grows while one looks"
    shoot(page, "runs-live")
    training.send_signal(signal.SIGKILL)
    training.wait()
    expect(row.locator("td").first).to_contain_text("stalled", timeout=10_000)
    expect(row.locator("td").first).to_contain_text("its process is gone")
    expect(page.locator(".live")).to_have_text("nothing is running")
    shoot(page, "runs-stalled")
    written = read_curves(Path(site.runs) / "live")["loss"]
    page.locator(".chart").focus()
    page.keyboard.press("End")
    last = f"live step {written.step[-1]:,}: {short(written.value[-1])}"
    expect(page.locator(".readout")).to_contain_text(last)


def points(page: Page) -> int:
    """How many points the curve has."""
    return len(re.findall("[ML]", page.locator("path.line").first.get_attribute("d")))
