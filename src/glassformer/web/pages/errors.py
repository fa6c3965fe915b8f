"""The page Errors: what a run's model gets wrong, as tables, and the examples behind each cell.

A checkpoint is measured once for each split, on as many examples as the limits allow; the answer
says how many those are. Numbers are those of `glass evaluate`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.spec.errors import InputError, nearest
from glassformer.store.run_ref import RunRef
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route
from glassformer.web.app.workspace import Lab, written_at

if TYPE_CHECKING:
    from glassformer.data.task import Task
    from glassformer.lab.measure.evaluate import Evaluation


@dataclass(frozen=True, slots=True)
class Measured:
    """An evaluation, and the task whose examples it is about."""

    step: str
    evaluation: "Evaluation"
    task: "Task"


def measured(name: str, *, step: str, split: str | None, lab: Lab) -> Measured:
    """The evaluation of a checkpoint on a split; computed once."""
    lab.run(name)
    folder = lab.checkpoint(name, step)
    key = ("errors", folder, written_at(folder), split)
    found = lab.remembered(key)
    if found is None:
        with lab.heavy():
            found = lab.remembered(key) or _measure(lab.folder(name), folder.name, split)
        lab.remember(key, found)
    return found


def _measure(run: Any, checkpoint: str, split: str | None) -> Measured:
    from glassformer.lab.api import opened
    from glassformer.lab.measure.evaluate import evaluate

    step = str(int(checkpoint.removeprefix("step-")))
    engine, task = opened(str(RunRef(str(run), step)))
    sizes = task.sizes()
    split = split or ("test" if "test" in sizes else "val")
    if split not in sizes:
        raise InputError(f"no split '{split}'", hint=nearest(split, sizes))
    lengths = task.lengths(split)[: limits.EVALUATED_EXAMPLES]
    longest = int(lengths.max()) if len(lengths) else 1
    most = max(1, min(len(lengths), limits.EVALUATED_TOKENS // max(1, longest)))
    return Measured(step, evaluate(engine, task, split=split, examples=most), task)


def errors(query: Query, lab: Lab) -> dict[str, Any]:
    """Everything that the evaluation says: shares by group, confusion tables, some wrong rows."""
    from glassformer.lab.measure.confusion import READINGS, order, shares

    query.only("split", "step")
    found = _asked(query, lab)
    evaluation = found.evaluation
    tables = []
    for group, table in evaluation.confusion.items():
        rows, columns = order(table)
        tables.append(
            {
                "group": group,
                "reading": READINGS.get(group, ""),
                "rows": rows,
                "columns": columns,
                "counts": [[table[row].get(column, 0) for column in columns] for row in rows],
                "shares": shares(table),
            }
        )
    sizes = found.task.sizes()
    return {
        **evaluation.to_dict(),
        "counts": {group: dict(labels) for group, labels in evaluation.counts.items()},
        "step": found.step,
        "splits": dict(sizes),
        "of": sizes[evaluation.split],
        "tables": tables,
        "errors": evaluation.errors,
    }


def cell(query: Query, lab: Lab) -> dict[str, Any]:
    """The examples of one cell of a table, as people write them, with what was answered."""
    query.only("split", "step", "group", "asked", "answered")
    found = _asked(query, lab)
    pairs = found.evaluation.pairs
    group = query.text("group")
    if group not in pairs:
        raise InputError(f"no table by {group[:60]!r}", hint=nearest(group, pairs))
    wanted = query.text("asked"), query.text("answered")
    rows = [row for row, pair in enumerate(pairs[group]) if pair == wanted]
    split = found.evaluation.split
    return {
        "group": group,
        "split": split,
        "count": len(rows),
        "examples": [
            {
                "row": row,
                "text": found.task.describe(split, row),
                "answers": {other: pairs[other][row][1] for other in pairs},
            }
            for row in rows[: limits.EXAMPLES]
        ],
    }


def _asked(query: Query, lab: Lab) -> Measured:
    return measured(
        query.text("id"),
        step=query.text("step", default="best", most=20),
        split=query.text("split", most=40) if query.has("split") else None,
        lab=lab,
    )


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/runs/{id}/errors", errors),
    ("GET", "/api/runs/{id}/errors/cell", cell),
)
