"""The file of results: one entry a job, written whole after each, and what three seeds say.

A score's interval is its mean ± 4.30 standard errors over the seeds (Student's t for three), where
the deviation is at least what counting so few examples allows. Two settings differ if their
intervals do not overlap; else no difference was seen.
"""

import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.findings.cells import SEEDS, Cell, Job
from glassformer.spec.errors import FileError

FILE = Path("docs/findings.json")
#: 97.5 % points of Student's t by degrees of freedom.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


def read(path: Path) -> dict[str, Any]:
    """What was found so far; nothing if there is no file."""
    if not path.exists():
        return {"machine": {}, "results": {}}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileError(f"not JSON: {error}", where=str(path)) from error
    if not isinstance(found, dict) or set(found) != {"machine", "results"}:
        raise FileError("not a file of findings", where=str(path))
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """The whole file, in place of the old one at once: a kill leaves either."""
    ordered = {"machine": found["machine"], "results": dict(sorted(found["results"].items()))}
    beside = path.with_name(f".{path.name}.part")
    beside.parent.mkdir(parents=True, exist_ok=True)
    with beside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(ordered, indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@dataclass(frozen=True, slots=True)
class Score:
    """A share over the seeds: mean, lowest, highest, half of its interval."""

    mean: float
    low: float
    high: float
    half: float

    def overlaps(self, other: "Score") -> bool:
        """Whether the intervals touch."""
        return abs(self.mean - other.mean) <= self.half + other.half


def score(shares: list[float], examples: int) -> Score | None:
    """Return the score of two seeds or more; fewer say nothing about spread."""
    if len(shares) < 2:
        return None
    mean = statistics.fmean(shares)
    # One answer more and one fewer right than seen: a spread of 0 is no proof of certainty.
    smooth = (mean * examples + 1) / (examples + 2)
    counted = math.sqrt(smooth * (1 - smooth) / examples)
    deviation = max(statistics.stdev(shares), counted)
    half = T[len(shares) - 1] * deviation / math.sqrt(len(shares))
    return Score(mean, min(shares), max(shares), half)


def entries(found: dict[str, Any], task: str, cell: Cell) -> list[dict[str, Any]]:
    """The results of a cell, seed by seed, as far as they are there."""
    keys = [Job(task, cell, seed).key for seed in SEEDS]
    return [found["results"][key] for key in keys if key in found["results"]]


def split_score(found: dict[str, Any], task: str, cell: Cell, split: str) -> Score | None:
    """Exact match of a split."""
    made = [entry["splits"][split] for entry in entries(found, task, cell)]
    return score([one["exact"] for one in made], made[0]["examples"]) if made else None


def verdict(ours: Score | None, theirs: Score | None) -> str:
    """better, worse, or no difference seen."""
    if ours is None or theirs is None:
        return "not measured"
    if ours.overlaps(theirs):
        return "no difference seen"
    return "better" if ours.mean > theirs.mean else "worse"
