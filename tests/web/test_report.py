"""The one-file report: its numbers are Python's own, its strings inert, what is missing is said."""

import html
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from glassformer.adapters.load import load
from glassformer.checks.catalogue import Finding
from glassformer.checks.report import Report, verify
from glassformer.costs.parameter_table import parameter_table
from glassformer.lab.api import opened, train
from glassformer.lab.measure.evaluate import evaluate
from glassformer.lab.plots.curves import curve_chart, panels
from glassformer.lab.runs.curves import read_curves
from glassformer.lab.runs.run import TrainingRun
from glassformer.lens.measure.roles import head_roles
from glassformer.lens.show.chart import ticks
from glassformer.lens.show.chart_figure import figure_bytes
from glassformer.lens.show.chart_svg import chart_svg
from glassformer.lens.show.report_page import POLICY
from glassformer.spec.errors import FileError, InputError
from glassformer.store.checkpoint import verify_folder
from glassformer.web.report.document import SECTIONS, report_html, spread
from tests.browser.hostile import HOSTILE
from tests.training.samples import RUNS

#: No certificate: the tests that are not about it are quicker so.
NO_CHECKS = Report(())
BOOK = "it goes </script><script>alert(1)</script> & \"so\" 'it' goes. " * 60


class Read(HTMLParser):
    """What a browser would see: tags, attributes, tables, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside = False
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside &= tag not in ("td", "th")

    def handle_data(self, data):
        self.words.append(data)
        if self.inside:
            self.cells[-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.words)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Hardly trained runs of each kind, and a text full of markup with 2 layers x 8 heads."""
    place = tmp_path_factory.mktemp("report") / "runs"
    for name, spec in RUNS.items():
        run = TrainingRun(spec("train.evaluate_every=10"), place / name)
        run.prepare()
        for _ in run.events():
            pass
    book = place.parent / "book.txt"
    book.write_text(BOOK, encoding="utf-8")
    train("text", name="text", runs=place, steps=4, overrides=(
        f"task.path={book}", "task.tokenizer=characters", "task.length=128", "train.batch_size=4",
        "train.evaluate_every=2", "model.d_model=32", "model.decoder.layers.0.count=2",
        "model.decoder.layers.0.block.attention.n_heads=8",
    ))  # fmt: skip
    return place


def test_a_verdict_has_its_own_colour_and_its_reason(runs):
    row = Finding("a", "left padding", "run", "float32", "V9", 1.2, 1e-5, "limit", "give ids", 0.0)
    verdicts = ("passed", "bug", "rounding", "limit", "unclear", "error", "not offered")
    report = Report(tuple(replace(row, name=f"row {v}", verdict=v) for v in verdicts))
    text = report_html(str(runs / "digits"), certificate=report)
    kinds = re.findall(r'<td class="text (\w+)">(\w+)</td>', text)
    assert [kind for kind in kinds if kind[1] in verdicts] == [
        ("passed", "passed"),
        ("failed", "bug"),
        *(("warned", verdict) for verdict in verdicts[2:5]),
    ]
    seen = Read(text).text
    assert "1 checks passed, 2 failed, 3 with a warning" in seen
    assert "row limit (limit): give ids" in seen
    assert "Could not run, and counted as failed" in seen


def test_the_numbers_are_those_of_the_other_commands(runs):
    text = report_html(str(runs / "digits"))
    seen = Read(text)
    adapter = load(runs / "digits").eval()
    engine, task = opened(runs / "digits")
    found = evaluate(engine, task)
    assert f"loss {found.loss:.4f} nats, accuracy {found.accuracy:.2%}" in seen.text
    for group, labels in found.by.items():
        for label, share in labels.items():
            assert [label, f"{share:.1%}", f"{found.counts[group][label]:,}"] in seen.cells
    for row in parameter_table(adapter.spec):
        assert [row.component, f"{row.parameters:,}", f"{row.share:.2%}"] in seen.cells
    (again,) = re.findall(r"glass train (\S+) --name again", seen.text)
    assert again == "runs/digits/config.json" and (runs.parent / again).is_file()
    certificate = verify(adapter)
    assert f"{certificate.passed} checks passed, {certificate.failed} failed" in seen.text
    hashes = {line[-1] for line in seen.cells}
    (step,) = re.findall(r"the checkpoint of step (\d+)\.", seen.text)
    folder = runs / "digits" / "checkpoints" / f"step-{int(step):06d}"
    assert {entry["sha256"] for entry in verify_folder(folder)["files"].values()} <= hashes
    rows = np.arange(6)
    groups = task.groups("val", rows)["operation"]
    roles = head_roles(adapter.model, task.batch("val", rows), groups=groups, at="last")
    for line in roles.rows():
        assert any(cells[:2] == [line["head"], line["role"]] for cells in seen.cells)


@pytest.mark.parametrize("name", ["digits", "reverse", "machine", "text"])
def test_each_kind_of_run_has_a_report_that_asks_for_nothing(runs, name):
    told: list[str] = []
    text = report_html(str(runs / name), certificate=NO_CHECKS, progress=told.append)
    assert told == [title for _, title, _ in SECTIONS] + ["Verify"]
    seen = Read(text)
    assert len(text.encode()) < 5_000_000
    tags = [tag for tag, _ in seen.tags]
    assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & set(tags)
    policy = next(a["content"] for t, a in seen.tags if a.get("http-equiv"))
    assert policy == POLICY
    for tag, attributes in seen.tags:
        assert not any(key.startswith("on") for key in attributes), tag
        for key in ("src", "href"):
            value = attributes.get(key)
            assert value is None or value.startswith(("#", "data:image/png;base64,"))
    assert "url(" not in text
    ids = [a["id"] for _, a in seen.tags if "id" in a]
    assert len(ids) == len(set(ids))
    titles = {"What was trained", "Curves", "Errors", "Right and wrong", "Attention", "Logit lens"}
    assert titles <= set(seen.words)
    assert str(runs) not in text  # no absolute path
    assert "Not available" not in seen.text
    assert report_html(str(runs / name), certificate=NO_CHECKS) == text


def test_the_wrong_answers_come_first_all_of_a_few(runs):
    engine, task = opened(runs / "digits")
    found = evaluate(engine, task)
    assert 0 < found.wrong <= 12
    text = report_html(str(runs / "digits"), certificate=NO_CHECKS)
    seen = Read(text)
    assert f"{found.wrong:,} of {found.examples:,} examples of 'test' are wrong." in seen.text
    listed = {tuple(cells[1:4]) for cells in seen.cells if len(cells) == 5}
    for error in found.errors[:12]:
        assert (error["input"], *error["target"], *error["predicted"]) in listed
    assert f"wrong: all {found.wrong}" in text
    assert text.index("wrong: all") < text.index("No prediction is right")
    assert re.search(r"It trained for [\d.]+ s, until \d{4}-\d\d-\d\d \d\d:\d\d\.", seen.text)
    assert "no colour is 0, the strongest 1" in text


def test_what_a_run_does_not_have_is_said(runs):
    assert "has no confusion matrix" in report_html(str(runs / "machine"), certificate=NO_CHECKS)
    places = report_html(str(runs / "reverse"), certificate=NO_CHECKS)
    assert "by position in the answer" in places and "tokens confused most often" in places
    shutil.copytree(runs / "digits", runs / "bare")
    shutil.rmtree(runs / "bare" / "probes")
    (runs / "bare" / "metrics.jsonl").write_text("")
    text = report_html(str(runs / "bare"), certificate=NO_CHECKS)
    assert "This run has no probes" in text
    assert "Not available: nothing was measured yet in bare" in text
    assert "What it writes" in report_html(str(runs / "text"), certificate=NO_CHECKS)
    assert "What it writes" not in text


def test_hostile_strings_are_inert(runs):
    name = "<img src=x onerror=alert(1)>"
    shutil.copytree(runs / "text", runs / name)
    lines = [{"step": 1, "kind": word, "message": word} for word in HOSTILE[:20]]
    (runs / name / "alerts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    text = report_html(str(runs / name), certificate=NO_CHECKS)
    seen = Read(text)
    assert "<script" not in text
    assert not [a for _, a in seen.tags if any(key.startswith("on") for key in a)]
    plain = Read(report_html(str(runs / "text"), certificate=NO_CHECKS))
    ours = {tag for tag, _ in plain.tags} | {"path"}
    assert {tag for tag, _ in seen.tags} <= ours
    assert html.escape(HOSTILE[0], quote=True) in text
    assert name in seen.text


def test_a_damaged_checkpoint_is_no_report(runs, tmp_path):
    with pytest.raises(InputError, match="not a run"):
        report_html(str(tmp_path))
    shutil.copytree(runs / "digits", runs / "damaged")
    for file in (runs / "damaged" / "checkpoints").glob("step-*/model.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    with pytest.raises(FileError, match="SHA-256"):
        report_html(str(runs / "damaged"))


def test_the_attention_of_the_probes_can_be_stepped_through(runs):
    seen = Read(report_html(str(runs / "digits"), certificate=NO_CHECKS))
    radios = [a for tag, a in seen.tags if tag == "input"]
    assert [a["id"] for a in radios] == ["at-10", "at-20", "at-30"]
    assert ["checked" in a for a in radios] == [False, False, True]
    assert len([a for tag, a in seen.tags if tag == "img"]) == 3 * 2  # two heads, three steps


def test_chosen_steps_are_the_first_the_last_and_some_between():
    files = {step: step for step in range(100, 10_100, 100)}
    kept = list(spread(files, most=6))
    assert (kept[0], kept[-1]) == (100, 10_000)
    assert len(kept) <= 6
    assert list(spread(dict.fromkeys([1, 2]), most=6)) == [1, 2]


@pytest.mark.parametrize(
    "record",
    [
        {"val": [1], "fingerprint": "x", "data": 5},
        {"val": {"loss": "x", "accuracy": {"a": 1}, "exact_match": 10**400}},
    ],
)
def test_a_record_of_wrong_types_is_no_reason_to_stop(runs, tmp_path, record):
    run = shutil.copytree(runs / "digits", tmp_path / "run")
    whole = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(json.dumps(whole | record), encoding="utf-8")
    assert "Last validation: none." in report_html(str(run), certificate=NO_CHECKS)


@pytest.mark.parametrize(
    "points",
    [
        [(1, "1e308"), (2, "-1e308"), (3, "Infinity")],
        [(1, "9e299"), (2, "-9e299")],
        [(2**62 - 1, "1")],
        [(1, "100"), (2, "0.01"), (3, "0")],
    ],
)
def test_extreme_curves_are_drawn(runs, tmp_path, points):
    run = shutil.copytree(runs / "digits", tmp_path / "run")
    lines = (f'{{"step": {step}, "loss": {value}}}\n' for step, value in points)
    (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    made = report_html(str(run), certificate=NO_CHECKS)
    for scale in (True, False):
        (chart, *_) = panels([read_curves(run)], log=scale)
        made += chart_svg(chart).svg()
        figure_bytes(curve_chart([read_curves(run)], log=scale), "png")
    assert "curve of loss" in made and "nan" not in made


def test_a_run_without_a_checkpoint_says_what_it_has(runs, tmp_path):
    run = shutil.copytree(runs / "digits", tmp_path / "young")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match="young has no checkpoint") as caught:
        report_html(str(run))
    assert "--curves" in caught.value.hint


def test_ticks_are_round_and_inside():
    for low, high in ((0.0, 1.0), (1.0, 600.0), (0.0013, 0.0017), (-3.0, 7e5)):
        found = ticks(low, high, most=6)
        assert 2 <= len(found) <= 7
        assert low - 1e-9 <= found[0]
        assert found[-1] <= high + 1e-9
