"""Runs in a folder: trained, stopped, resumed, and all that they leave, to compare."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from glassformer.lab.runs.record import load_run_spec
from glassformer.lab.runs.run import TrainingRun
from glassformer.spec.train import RunSpec
from glassformer.store.checkpoint import write_folder
from glassformer.store.rundir import RunDirectory
from tests.training.samples import digits

KEPT = "train.keep=1000"


def sample(engine: str = "torch", *changes: str) -> RunSpec:
    """30 steps that cross epochs, with dropout, clipping, decay, accumulation and a schedule."""
    return digits(
        f"engine={engine}",
        "model.decoder.dropout=0.2",
        "train.clip=0.5",
        "train.accumulate=2",
        "train.optimizer.weight_decay=0.1",
        "train.label_smoothing=0.1",
        *changes,
    )


def trained(spec: RunSpec, folder: Path, *, stop_at: int | None = None) -> TrainingRun:
    """A new run, to its end or to a stop after that step, as a signal would."""
    run = TrainingRun(spec, folder)
    with run.directory.locked():
        run.prepare()
        _go(run, stop_at)
    return run


def resumed(
    folder: Path, *, spec: RunSpec | None = None, stop_at: int | None = None
) -> tuple[TrainingRun, list[str]]:
    """The run that the folder holds, in a process that knows nothing else, and what it told."""
    run = TrainingRun(load_run_spec(RunDirectory(folder)) if spec is None else spec, folder)
    with run.directory.locked():
        notes = run.resume()
        _go(run, stop_at)
    return run, notes


def _go(run: TrainingRun, stop_at: int | None) -> None:
    for _ in run.events():
        if run.progress.step == stop_at:
            run.stop_requested = True


def killed_after(folder: Path, step: int, *, to: Path) -> Path:
    """A copy of a finished run as a kill would have left it after the save of that step.

    The logs go on beyond the checkpoint, as they do when steps follow before the kill.
    """
    shutil.copytree(folder, to)
    directory = RunDirectory(to)
    for later in directory.steps():
        if later > step:
            shutil.rmtree(directory.step_folder(later))
    directory.point("last", step)
    best = json.loads((directory.step_folder(step) / "state.json").read_text())["progress"][
        "best_step"
    ]
    if best is None:
        (directory.checkpoints / "best").unlink(missing_ok=True)
    else:
        directory.point("best", best)
    with directory.metrics.open("a") as file:
        file.write('{"step": 31, "loss"')  # the kill came in the middle of a line
    return to


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves and that two equal runs must share: everything but the clocks."""
    directory = RunDirectory(folder)
    last = directory.step_folder(directory.steps()[-1])
    state = json.loads((last / "state.json").read_text())
    run = directory.read_json("run.json")
    del run["clock"]
    del state["progress"]["metrics_bytes"]  # clocks are written with as many digits as they need
    del state["progress"]["metrics_sha256"]
    return {
        "steps": directory.steps(),
        "weights": _sha256(last / "model.safetensors"),
        "optimizer": _sha256(last / "state.safetensors"),
        "state": state,
        "best": directory.pointed("best"),
        "last": directory.pointed("last"),
        "metrics": metrics(folder),
        "alerts": directory.alerts.read_text() if directory.alerts.exists() else "",
        "run": run,
        "probes": {path.name: _sha256(path) for path in sorted((folder / "probes").glob("*"))},
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without their one clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    return lines


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal in every part; the part that differs is named."""
    for part, value in theirs.items():
        assert ours[part] == value, f"{part} differs"


def rewritten(folder: Path, step: int, **files: bytes) -> None:
    """The checkpoint of that step with other contents, and a manifest that agrees with them."""
    place = RunDirectory(folder).step_folder(step)
    contents = {
        path.relative_to(place).as_posix(): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and path.name != "MANIFEST.json"
    }
    shutil.rmtree(place)
    write_folder(place, contents | {name.replace("__", "."): data for name, data in files.items()})


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
