"""docs/findings.md: the parts between markers are made of the results, and of nothing else.

A verdict stands only where intervals do not overlap; everything else is listed, in a table of its
own, as a difference that was not seen. The figures need matplotlib, the page does not.
"""

import importlib.util
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.findings import allocation, failures, heads
from bench.findings.cells import (
    BASE,
    CELLS,
    LENGTHS,
    RECIPE,
    SEEDS,
    TASKS,
    WARMUP,
    Cell,
    compared,
)
from bench.findings.results import Score, entries, split_score, verdict
from bench.findings.tables import percent, shown, table
from glassformer.spec.errors import FileError

PAGE = "findings.md"
ABLATIONS = ("heads", "positions", "norm", "residuals", "feed-forward", "attention scale")
SIZES = ("width", "layers")
TRAINING = ("learning rate", "warmup", "label smoothing", "batch")
#: What is scored: a task and a split of it, and its name in a table.
SCORED = (("digits", "test", "digits"), ("reverse", "test", "reverse"))
LONGER = ("reverse", "longer", "reverse, longer")
#: The verdicts that say something.
CLAIMS = ("better", "worse")

FIGURES = {"ablations": ABLATIONS, "training": (*SIZES, *TRAINING)}

Found = dict[str, Any]


def image(name: str) -> str:
    """A figure's file, from the page's folder."""
    return f"images/findings-{name}.png"


def drawable(found: Found, groups: Iterable[str]) -> list[Cell]:
    """The cells of these groups that have a score on both tasks; none without a baseline."""
    measured = [c for c in CELLS if all(split_score(found, t, c, "test") for t in TASKS)]
    return [cell for cell in measured if cell.group in groups] if CELLS[0] in measured else []


def picture(name: str) -> Callable[[Found], str]:
    """The figure, where there is anything to draw."""
    return lambda found: (
        f"![Every setting with its interval: {name}]({image(name)})"
        if drawable(found, FIGURES[name])
        else ""
    )


def render(found: Found, folder: Path) -> Iterator[str]:
    """Fill the page in that folder, and draw the figures; what was written, name by name."""
    page = folder / PAGE
    if not page.exists():
        raise FileError("there is no page to fill", where=str(page))
    page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    yield f"{PAGE}: {len(found['results'])} results"
    if importlib.util.find_spec("matplotlib") is None:
        yield "no figures: matplotlib is not installed"
        return
    from bench.findings import figures

    for name, groups in FIGURES.items():
        if cells := drawable(found, groups):
            figures.draw(found, cells, folder / image(name))
            yield image(name)


def filled(text: str, found: Found) -> str:
    """The page with every marked part made anew; a part that nobody makes is refused."""

    def part(match: re.Match[str]) -> str:
        name = match[1]
        if name not in PARTS:
            raise FileError(f"no part is called '{name}'", where=PAGE)
        return f"<!-- made: {name} -->\n{PARTS[name](found)}\n<!-- end: {name} -->"

    return re.sub(r"<!-- made: (\w+) -->\n.*?<!-- end: \1 -->", part, text, flags=re.S)


def method(found: Found) -> str:
    """Sizes of what was run, and where."""
    lines = []
    for task in TASKS:
        steps, size = LENGTHS[task]
        base = entries(found, task, CELLS[0])
        cost = f", {statistics.fmean(e['cpu_seconds'] for e in base):.0f} CPU s" if base else ""
        lines.append(
            f"- **{task}**: the recipe `{task}`, cut to {steps:,} steps of {size} examples, "
            f"{percent(WARMUP, digits=0)} of them warmup{cost}."
        )
    done, all_ = len(found["results"]), len(CELLS) * len(TASKS) * len(SEEDS)
    machine = found["machine"]
    made = f", torch {machine['torch']}, Python {machine['python']}" if machine else ""
    lines.append(f"- {done} of {all_} runs{made}; one thread each.")
    return "\n".join(lines)


def tables(groups: Iterable[str], *, longer: bool = False) -> Callable[[Found], str]:
    """A table a group, its baseline first; then what can be said and what cannot."""

    def make(found: Found) -> str:
        parts = []
        for group in groups:
            cells = [cell for cell in CELLS if cell.group == group]
            parts.append(one_table(found, group, cells, longer=longer))
        return "\n\n".join([*parts, said(found, groups, longer=longer)])

    return make


def one_table(found: Found, group: str, cells: list[Cell], *, longer: bool) -> str:
    """Every cell of a group and what each is held against."""
    scored = [*SCORED, LONGER] if longer else list(SCORED)
    first = [cell for cell in map(compared, cells) if cell is not None]
    rows = []
    for cell in dict.fromkeys([*first, *cells]):
        own = cell.group == group
        row = [cell.name if own else f"{RECIPE.get(group, cell.name)} *"]
        for task, split, _ in scored:
            text = shown(split_score(found, task, cell, split)) + diverged(found, task, cell)
            result = told(found, cell, task, split) if own else ""
            row.append(f"{text} **{result}**" if result in CLAIMS else text)
        rows.append(row)
    return table([group, *(name for _, _, name in scored)], rows)


def diverged(found: Found, task: str, cell: Cell) -> str:
    """How many seeds left the finite numbers; they count with what they then score."""
    number = sum(entry["diverged"] for entry in entries(found, task, cell))
    return f", {number} diverged" if number else ""


def told(found: Found, cell: Cell, task: str, split: str) -> str:
    """The verdict beside what the cell is held against."""
    other = compared(cell)
    if other is None:
        return ""
    return verdict(split_score(found, task, cell, split), split_score(found, task, other, split))


def said(found: Found, groups: Iterable[str], *, longer: bool) -> str:
    """Every difference outside the noise in a sentence, and a table of those that were not."""
    scored = [*SCORED, LONGER] if longer else list(SCORED)
    claims: list[str] = []
    silent: dict[str, dict[tuple[str, str], list[str]]] = {}
    for cell in CELLS:
        if cell.group not in groups:
            continue
        for task, split, name in scored:
            result = told(found, cell, task, split)
            if result in CLAIMS:
                claims.append(f"- {sentence(found, cell, task, split, name, result)}")
            else:
                silent.setdefault(result, {}).setdefault((cell.group, name), []).append(cell.name)
    lines = ["Outside the noise:", "", *(claims or ["- nothing."])]
    for result, places in silent.items():
        named = dict.fromkeys(group for group, _ in places)
        rows = [
            [group, *("; ".join(places.get((group, name), [])) for _, _, name in scored)]
            for group in named
        ]
        lines += ["", table([result, *(name for _, _, name in scored)], rows)]
    return "\n".join(lines)


def sentence(found: Found, cell: Cell, task: str, split: str, name: str, result: str) -> str:
    """One claim with its two numbers."""
    other = compared(cell)
    assert other is not None
    ours, theirs = (split_score(found, task, one, split) for one in (cell, other))
    assert isinstance(ours, Score) and isinstance(theirs, Score)
    beside = RECIPE[cell.group] if other.name == BASE else f"{other.group} {other.name}"
    return (
        f"{cell.group} **{cell.name}** is {result} on {name}: "
        f"{percent(ours.mean)} against {percent(theirs.mean)} ({beside})."
    )


PARTS: dict[str, Callable[[Found], str]] = {
    "method": method,
    "ablations": tables(ABLATIONS, longer=True),
    "sizes": tables(SIZES),
    "training": tables(TRAINING),
    "ablations_figure": picture("ablations"),
    "training_figure": picture("training"),
    "heads": heads.part,
    "failures": failures.part,
    "allocation": allocation.part,
}
