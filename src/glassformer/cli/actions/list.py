"""Run `glass list`: tasks to train, presets to verify, suites to measure with, runs to inspect."""

from pathlib import Path
from typing import Any

from glassformer.cli.actions.evaluate import SUITES
from glassformer.lab.finetune.recipe import NAME as FINETUNE
from glassformer.lab.recipes import RECIPES
from glassformer.spec.errors import FileError
from glassformer.spec.own import installed_parts
from glassformer.spec.presets import PRESETS
from glassformer.store.rundir import RunDirectory


def listing(runs: Path) -> dict[str, Any]:
    """Collect tasks, presets, suites and runs."""
    found = []
    for path in sorted(runs.glob("*/run.json")) if runs.is_dir() else ():
        record = _record(path.parent)
        val = record.get("val")
        val = val if isinstance(val, dict) else {}
        found.append(
            {
                "run": path.parent.name,
                "status": record.get("status"),
                "step": record.get("step"),
                "task": record.get("task"),
                "val_loss": val.get("loss"),
                "val_accuracy": val.get("accuracy"),
            }
        )
    tasks = [*RECIPES, FINETUNE, *installed_parts()]
    return {"tasks": tasks, "presets": list(PRESETS), "suites": list(SUITES), "runs": found}


def _record(folder: Path) -> dict[str, Any]:
    """Read run.json; a damaged one does not hide the other runs."""
    try:
        return RunDirectory(folder).read_json("run.json")
    except FileError:
        return {"status": "damaged"}


def listing_text(found: dict[str, Any]) -> str:
    """Format the listing for the terminal."""
    lines = [f"{kind:<9}{', '.join(found[kind])}" for kind in ("tasks", "presets", "suites")]
    for run in found["runs"]:
        loss, accuracy = _number(run["val_loss"]), _number(run["val_accuracy"])
        score = ""
        if loss is not None and accuracy is not None:
            score = f"  val loss {loss:.4f}, accuracy {accuracy:.2%}"
        about = f"{run['run']:<20} {run['task'] or ''!s:<10} {run['status'] or 'unknown'!s:<10}"
        lines.append(f"run      {about} step {run['step']}{score}")
    return "\n".join(lines)


def _number(value: Any) -> float | None:
    """Read a number of a record, where values that are not finite are strings."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
