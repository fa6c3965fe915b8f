"""The page Errors: what a run's model gets wrong, as tables, and the examples behind each cell.

A checkpoint is evaluated once per split, on as many examples as the limits allow; the response says
how many those are. Numbers are those of `glass evaluate`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.lens.show.text import shown
from glassformer.spec.errors import InputError, nearest
from glassformer.store.rundir import RunRef
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route
from glassformer.web.app.workspace import Workspace, written_at

if TYPE_CHECKING:
    from glassformer.data.task import Task
    from glassformer.lab.measure.evaluate import Evaluation


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation of one step, and the task whose examples it used."""

    step: str
    evaluation: "Evaluation"
    task: "Task"


def evaluated(name: str, *, step: str, split: str | None, workspace: Workspace) -> Evaluated:
    """Evaluate a checkpoint on a split, once."""
    workspace.run(name)
    folder = workspace.checkpoint(name, step)
    key = ("errors", folder, written_at(folder), split)
    result: Evaluated | None = workspace.results.find(key)
    if result is None:
        with workspace.heavy():
            result = workspace.results.find(key) or _evaluate(
                workspace.folder(name), folder.name, split, device=workspace.device
            )
        workspace.results.put(result, key=key)
    assert result is not None
    return result


def _evaluate(run: Any, checkpoint: str, split: str | None, *, device: str) -> Evaluated:
    from glassformer.lab.api import opened
    from glassformer.lab.measure.evaluate import evaluate

    step = str(int(checkpoint.removeprefix("step-")))
    engine, task = opened(str(RunRef(str(run), step)), device=device)
    sizes = task.sizes()
    split = split or ("test" if "test" in sizes else "val")
    if split not in sizes:
        raise InputError(f"no split '{split}'", hint=nearest(split, sizes))
    lengths = task.lengths(split)[: limits.EVALUATED_EXAMPLES]
    longest = int(lengths.max()) if len(lengths) else 1
    most = max(1, min(len(lengths), limits.EVALUATED_TOKENS // max(1, longest)))
    return Evaluated(step, evaluate(engine, task, split=split, examples=most), task)


def errors(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return the whole evaluation: shares by group, confusion tables, some wrong rows."""
    from glassformer.data.tasks.fsm import Fsm
    from glassformer.lab.measure.evaluate import READINGS, order, shares

    query.only("split", "step")
    found = _requested(query, workspace)
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
        "kind": evaluation.kind,
        "counts": {group: dict(labels) for group, labels in evaluation.counts.items()},
        "step": found.step,
        "splits": dict(sizes),
        "of": sizes[evaluation.split],
        "tables": tables,
        "is_machine": isinstance(found.task, Fsm),
        "wrong": evaluation.wrong,
        "errors": [_shown(error) for error in evaluation.errors],
        "positions": evaluation.tokens.get("positions", []),
        "confused": [_shown(pair) for pair in evaluation.tokens.get("confused", [])],
    }


def _shown(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was right and what was predicted, with tokens that can be seen."""

    def seen(value: Any) -> Any:
        return [shown(token) for token in value] if isinstance(value, list) else shown(value)

    several = {
        name: [[shown(token), share] for token, share in told[name].items()]
        for name in ("truth", "model")
        if name in told
    }
    return {**told, **several} | {name: seen(told[name]) for name in ("target", "predicted")}


def cell(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return the examples of one cell of a table, as text, with what was predicted."""
    query.only("split", "step", "group", "target", "predicted")
    found = _requested(query, workspace)
    pairs = found.evaluation.pairs
    group = query.text("group")
    if group not in pairs:
        raise InputError(f"no table by {group[:60]!r}", hint=nearest(group, pairs))
    wanted = query.text("target"), query.text("predicted")
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
                "targets": {other: pairs[other][row][0] for other in pairs},
                "answers": {other: pairs[other][row][1] for other in pairs},
            }
            for row in rows[: limits.EXAMPLES]
        ],
    }


def machine(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return the finite-state machine that a model computes, in words and drawn."""
    query.only("step")
    name = query.text("id")
    workspace.run(name)
    folder = workspace.checkpoint(name, query.text("step", default="best", most=20))
    key = ("machine", folder, written_at(folder))
    result: dict[str, Any] | None = workspace.results.find(key)
    if result is None:
        with workspace.heavy():
            result = workspace.results.find(key) or _machine(workspace.folder(name), folder.name)
        workspace.results.put(result, key=key)
    return result


def _machine(run: Any, checkpoint: str) -> dict[str, Any]:
    from glassformer.lab.extract import extract

    found = extract(str(RunRef(str(run), str(int(checkpoint.removeprefix("step-"))))))
    return {
        "text": " ".join(found.sentences()),
        "drawing": found.picture().tree(),
    }


def _requested(query: Query, workspace: Workspace) -> Evaluated:
    return evaluated(
        query.text("id"),
        step=query.text("step", default="best", most=20),
        split=query.text("split", most=40) if query.has("split") else None,
        workspace=workspace,
    )


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/runs/{id}/errors", errors),
    ("GET", "/api/runs/{id}/errors/cell", cell),
    ("GET", "/api/runs/{id}/machine", machine),
)
