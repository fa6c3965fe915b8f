"""Ids, never paths: what a name may be, where it may lead, what is kept in memory."""

import gc
import json
import os
import shutil
import threading
import weakref
from pathlib import Path
from urllib.parse import quote

import pytest

from glassformer.lab.runs.curves import read_curves
from glassformer.spec.errors import InputError
from glassformer.web.app import limits
from glassformer.web.app.query import Busy, Refused, Unknown
from glassformer.web.app.workspace import CurveReader, Workspace, id_for, written_at
from tests.planting import If, Unary, catches
from tests.web.conftest import Client, Opener

TRAVERSALS = (
    "..",
    "../runs",
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "%2e%2e%2fsecret",
    "....//secret",
    "..\\secret",
    "..%5csecret",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "digits-0/../../secret",
    "digits-0%00.txt",
    ".",
    ".hidden",
    "~root",
    "digits-0@best",
    "file:%2f%2f%2fetc%2fpasswd",
)
PLACES = (
    "/api/runs/{}",
    "/api/runs/{}/errors",
    "/api/curves?runs={}",
    "/api/settings?runs={}",
)

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "'; DROP TABLE runs; --",
    "${7*7}",
    "{{7*7}}",
    "{0.__class__.__mro__}",
    "%s%s%s%n",
    "$(touch /tmp/owned)",
    "`id`",
    "; rm -rf /",
    "| cat /etc/passwd",
    "\x00",
    "a\x00b",
    "\r\nSet-Cookie: a=b",
    "\n\n<html>",
    "\x1b[31mred",
    "\x7f",
    "\u202eevil",
    "\u200b",
    "\ufeff",
    "\u2028",
    "\ud7ff",
    "\U0001f4a9" * 20,
    "é" * 300,
    "e" + "\u0301" * 200,
    "א" * 30,
    "ﷺ" * 30,
    "Ⅷ",
    "٣",
    "\uff11\uff12",
    "-1",
    "--help",
    "-rf",
    "a" * 65,
    "a" * 5000,
    " ",
    "\t",
    "con",
    "nul.txt",
    "a:b",
    "a;b",
    "a?b#c",
    "a&b=c",
    "*",
    "[a-z]",
    "__import__('os').system('id')",
    "os.system",
    "javascript:alert(1)",
    "data:text/html,<script>",
    "http://evil.example/",
    "\\\\evil\\share",
    "true",
    "null",
    "NaN",
    "1e999",
    "[]",
)


def test_there_are_fifty_hostile_strings() -> None:
    assert len(set(HOSTILE)) >= 50
    assert len(set(TRAVERSALS)) >= 12


@catches(
    "any name", "web.app.workspace:Workspace.folder", Unary("not"), to="False", case="../secret"
)
@pytest.mark.parametrize("name", TRAVERSALS)
def test_no_name_leads_out(runs: Path, client: Client, name: str) -> None:
    secret = runs.parent / "secret"
    secret.mkdir(exist_ok=True)
    (secret / "run.json").write_text('{"status": "the secret"}', encoding="utf-8")
    for place in PLACES:
        answer = client.ask(place.format(name))
        assert answer.status in (400, 403, 404), (place, answer.body)
        assert b"the secret" not in answer.body
        assert b"root:" not in answer.body
    assert client.ask(f"/static/{name}").status == 404
    assert client.ask(f"/static/js/{name}").status == 404


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused_and_inert(client: Client, name: str) -> None:
    written = quote(name, safe="")
    for place in PLACES:
        answer = client.ask(place.format(written))
        assert answer.status in (400, 403, 404, 413), (place, answer.body)
        assert answer.headers["content-type"] == "application/json"
        assert all(byte < 128 for byte in answer.body)
        assert answer.json["error"]["what"]
        assert not any("\n" in value or "\r" in value for value in answer.headers.values())
    for option in ("from", "max", "series", "split", "step", "x", "smooth", "group", "seen"):
        for place in ("/api/runs/digits-0/errors", "/api/curves"):
            answer = client.ask(f"{place}?{option}={written}")
            assert answer.status in (200, 400, 404, 413)
    for body in ({"run": name, "text": "a"}, {"run": "digits-0", "step": name, "text": "a"}):
        assert client.post("/api/inspect", body).status in (400, 404, 413)


@catches("links lead out", "web.app.workspace:Workspace.folder", If("_inside"), to="False")
def test_a_run_that_is_a_link_out_is_refused(runs: Path, tmp_path: Path, open_app: Opener) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    (root / "out").symlink_to(runs / "digits-0")
    (root / "loop").symlink_to(root / "loop")
    (root / "in").mkdir()
    os.link(runs / "digits-0" / "run.json", root / "in" / "run.json")
    (root / "alias").symlink_to(root / "in")
    client = open_app(root)
    listed = [run["id"] for run in client.get("/api/runs")["runs"]]
    assert listed == ["alias", "in"]
    refused = client.ask("/api/runs/out")
    assert refused.status == 403
    assert "link" in refused.what
    assert client.ask("/api/runs/loop").status == 404


@pytest.mark.parametrize("name", ["run.json", "config.json", "metrics.jsonl", "alerts.jsonl"])
def test_a_file_that_is_a_link_out_is_refused(
    name: str, runs: Path, tmp_path: Path, open_app: Opener
) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"status": "the secret", "step": 1}\n', encoding="utf-8")
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    for file in ("run.json", "config.json", "metrics.jsonl"):
        (run / file).write_bytes((runs / "digits-0" / file).read_bytes())
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    client = open_app(tmp_path / "runs")
    targets = ("/api/runs", "/api/runs/run", "/api/curves?runs=run", "/api/settings?runs=run")
    found = [client.ask(target) for target in targets]
    assert all(b"the secret" not in answer.body for answer in found)
    assert any(answer.status == 403 for answer in found) or "link" in found[0].body.decode()


def test_a_pipe_in_a_files_place_holds_nobody_up(tmp_path: Path, open_app: Opener) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"status": "running"}', encoding="utf-8")
    for name in ("metrics.jsonl", "lock", "config.json"):
        os.mkfifo(run / name)
    client = open_app(tmp_path)
    assert client.get("/api/runs")["runs"][0]["status"] == "stalled"
    assert client.ask("/api/runs/run").status == 400


def test_what_a_folder_is(runs: Path, tmp_path: Path) -> None:
    everything = Workspace(runs)
    assert [name for name, _, _ in everything.folders()] == ["digits-0", "digits-1", "quick"]
    alone = Workspace(runs / "digits-0")
    assert [(name, kind) for name, _, kind in alone.folders()] == [("digits-0", "run")]
    with pytest.raises(Unknown):
        alone.folder("digits-1")
    model = Workspace(alone.checkpoint("digits-0"))
    assert [kind for _, _, kind in model.folders()] == ["model"]
    with pytest.raises(InputError, match="no curves"):
        model.run(model.folders()[0][0])
    assert Workspace(tmp_path / "nothing").folders() == []
    assert id_for(tmp_path / "a model (v2)") == "a-model--v2-"


def test_steps_are_names_too(runs: Path) -> None:
    lab = Workspace(runs)
    assert lab.checkpoint("digits-0", "8").name == "step-000008"
    assert lab.checkpoint("digits-0", "last").name == "step-000012"
    with pytest.raises(Unknown, match="no checkpoint '9'"):
        lab.checkpoint("digits-0", "9")
    for step in ("../x", "", "-1", "best/..", "٣"):
        with pytest.raises(InputError):
            lab.checkpoint("digits-0", step)


def test_a_checkpoint_that_is_a_link_out_is_refused(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text("{}", encoding="utf-8")
    (run / "checkpoints" / "step-000001").symlink_to(Workspace(runs).checkpoint("digits-0"))
    with pytest.raises(Refused, match="link"):
        Workspace(tmp_path / "runs").checkpoint("run", "1")


@pytest.mark.parametrize("text", ["step-²".encode(), b"step-" + b"9" * 5000, b"\xff", b""])
def test_a_pointer_that_leads_nowhere_is_what_the_newest_checkpoint_says(
    text: bytes, runs: Path, tmp_path: Path, open_app: Opener
) -> None:
    run = tmp_path / "runs" / "run"
    shutil.copytree(runs / "quick", run)
    (run / "checkpoints" / "best").write_bytes(text)
    (run / "checkpoints" / "step-²").mkdir()
    (run / "probes" / "step-².safetensors").touch()
    client = open_app(run.parent)
    assert client.get("/api/runs/run")["best"] == 8
    assert client.get("/api/runs/run/inspect")["snapshots"] == [4, 8]
    asked = {"run": "run", "text": "SECOND 7 3 9"}
    assert client.post("/api/inspect", asked).status == 200
    assert client.post("/api/inspect", {**asked, "step": "²"}).status == 400


def test_two_models_stay_in_memory(runs: Path) -> None:
    lab = Workspace(runs)
    first = lab.model("digits-0")
    assert lab.model("digits-0") is first
    lab.model("digits-1")
    assert lab.model("digits-0") is first
    lab.model("quick")
    assert lab.model("digits-0") is first, "the least used is let go, not the oldest"
    lab.model("digits-1")
    lab.model("quick")
    assert lab.model("digits-0") is not first


def test_results_go_with_the_model_that_they_hold(runs: Path, open_app: Opener) -> None:
    """Scrubbing through checkpoints must not leave a model in memory for each of them."""
    client = open_app(runs)
    lab: Workspace = client.app.state.workspace
    asked = {"run": "digits-0", "text": "SECOND 7 3 9"}
    keys, models = [], []
    for step, precision in (("4", "float32"), ("4", "int8"), ("8", "float32"), ("12", "float32")):
        answer = client.post("/api/inspect", {**asked, "step": step, "precision": precision})
        keys.append(answer.json["key"])
        models.append(weakref.ref(lab.model("digits-0", step).model))
    found = [client.ask(f"/api/inspect/{key}/ranking").status for key in keys]
    assert found == [404, 404, 200, 200]
    gc.collect()
    assert [model() is None for model in models] == [True, True, False, False]


def test_a_checkpoint_that_goes_away_is_told(runs: Path) -> None:
    with pytest.raises(Unknown, match="removed"):
        written_at(runs / "digits-0" / "checkpoints" / "step-000099")


def test_one_heavy_job_at_a_time(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PATIENCE_SECONDS", 0.01)
    lab = Workspace(runs)
    with lab.working("digits-0") as adapter:
        assert adapter is lab.model("digits-0")
        with pytest.raises(Busy), lab.heavy():
            pass
    with lab.heavy():
        pass


def test_busy_is_told_as_such(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PATIENCE_SECONDS", 0.01)
    with client.app.state.workspace.heavy():
        answer = client.ask("/api/runs/quick/errors")
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"


def test_results_are_kept_and_the_oldest_let_go(runs: Path) -> None:
    lab = Workspace(runs)
    keys = [lab.results.put(number) for number in range(limits.RESULTS + 1)]
    assert lab.results.get(keys[-1]) == limits.RESULTS
    with pytest.raises(Unknown, match="ask for it again"):
        lab.results.get(keys[0])


def test_a_model_is_loaded_once_by_two_threads(runs: Path) -> None:
    lab = Workspace(runs)
    found = []
    threads = [threading.Thread(target=lambda: found.append(lab.model("quick"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(adapter) for adapter in found}) == 1


# --- curves as the page keeps them ----------------------------------------------------------------


def line(step: int, loss: float = 1.0) -> str:
    """A step as a run writes it."""
    return json.dumps({"step": step, "loss": loss, "tokens": 10, "seconds": 0.5}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five steps."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(map(line, range(1, 6))))
    return folder


def test_a_step_that_comes_again_replaces_what_the_page_had(run: Path) -> None:
    reader = CurveReader()
    reader.read(run)
    with (run / "metrics.jsonl").open("a") as log:
        log.write(line(3, 7.0) + line(4, 8.0))
    mine, python = reader.read(run)[0]["loss"], read_curves(run)["loss"]
    assert mine.step.tolist() == python.step.tolist() == [1, 2, 3, 4]
    assert mine.value.tolist() == python.value.tolist() == [1.0, 1.0, 7.0, 8.0]


def test_a_long_run_keeps_nobody_else_waiting(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = run.parent / "other"
    shutil.copytree(run, other)
    begun, go_on = threading.Event(), threading.Event()

    def slow(folder: Path, **options) -> object:
        if folder == run:
            begun.set()
            assert go_on.wait(30)
        return read_curves(folder, **options)

    monkeypatch.setattr("glassformer.web.app.workspace.read_curves", slow)
    reader = CurveReader()
    waiting = threading.Thread(target=reader.read, args=(run,))
    waiting.start()
    assert begun.wait(30)
    assert reader.read(other)[0].last_step == 5
    go_on.set()
    waiting.join(30)
    assert not waiting.is_alive()
