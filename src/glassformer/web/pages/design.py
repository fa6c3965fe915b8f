"""The page Design: a parameter budget from the sliders, and everything the page shows of it.

The query has the names of `glassformer.design`, and the list of controls is made from `Budget`.
Nothing is solved, counted or rounded in the browser. A search that takes longer than a reader waits
is stopped; the page then shows the command to run instead.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from glassformer.budget.answer import Answer, Design
from glassformer.budget.design import EXPANSIONS, RATIOS, ask, drift, neighbour, solve
from glassformer.budget.infeasible import Infeasible, InfeasibleBudget, Undecided, command_of, show
from glassformer.budget.question import WISHES, Budget
from glassformer.budget.search import Effort, SearchStopped
from glassformer.costs.parameter_table import allocation_lines
from glassformer.lab.budget_report import design_costs, judged, run_of_design, unusual_shapes
from glassformer.lab.plots.figures import MOST_DRIFT
from glassformer.lab.runs.record import to_toml
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.options import options_of
from glassformer.web.app.query import Query, Route
from glassformer.web.app.workspace import Workspace

#: The most that the page solves for; the command has no such limits.
MOST = {
    "params": 1_000_000_000,
    "vocab": 1_000_000,
    "rank": 1_000_000,
    "length": 1_000_000,
    "multiple": 4096,
    "ffn_multiple": 4096,
    "heads": 256,
    "kv_heads": 256,
    "experts": 1024,
    "experts_per_token": 1024,
    "min_layers": 10_000,
    "max_layers": 10_000,
}
#: Seconds for one answer, for one cell of the landscape and for all of them.
PATIENCE, CELL_PATIENCE, LANDSCAPE_PATIENCE = 3.0, 0.5, 10.0
#: Batch size of the training step whose memory is shown.
BATCH = 8
OPTIONS = {option.name: option for option in options_of(Budget)}
#: The options that the page always shows, and writes into the command.
SHOWN = ("params", "vocab", "embedding_ratio", "glu_expansion", "heads", "length")
DEFAULTS: dict[str, Any] = {name: OPTIONS[name].default for name in SHOWN}


def until(seconds: float) -> Callable[[], bool]:
    """Return a signal that says stop once this time has passed."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


# --- the question -------------------------------------------------------------------------------


def question(query: Query) -> dict[str, Any]:
    """Return the query as options of a budget, with the page's defaults."""
    query.only(*OPTIONS)
    given = {name: query.text(name, most=40) for name in OPTIONS if query.has(name)}
    return DEFAULTS | {name: _value(name, text) for name, text in given.items()}


def _value(name: str, text: str) -> Any:
    option = OPTIONS[name]
    if option.typed is bool:
        if text not in ("true", "false"):
            raise InputError(f"{name} '{text}' is neither true nor false")
        return text == "true"
    value = text if option.parse is None else option.parse(name, text)
    if name in MOST and isinstance(value, int) and not 1 <= value <= MOST[name]:
        raise InputError(
            f"{name} {value:,} is outside 1 to {MOST[name]:,}",
            hint=f"the nearest valid {name} is {min(max(value, 1), MOST[name]):,}",
        )
    return value


def _written(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is the default anyway, except for the options that the page always shows."""
    return {
        name: value
        for name, value in options.items()
        if name in SHOWN or name not in OPTIONS or value != OPTIONS[name].default
    }


def command(options: Mapping[str, Any]) -> str:
    """Return the command that asks the same: `glass design --params 10000000 ...`."""
    words = ["glass", "design"]
    for name, value in _written(options).items():
        flag = OPTIONS[name].flag if name in OPTIONS else f"--{name}"
        words += [flag] if isinstance(value, bool) else [flag, _text(value)]
    return shlex.join(words)


def python(options: Mapping[str, Any]) -> str:
    """Return the Python code that asks the same."""
    written = _written(options)
    first = [f"{written.pop('params'):_}", f"{written.pop('vocab'):_}"]
    arguments = ", ".join([*first, *(f"{name}={value!r}" for name, value in written.items())])
    return f"import glassformer as gf\n\nanswer = gf.design({arguments})\nprint(answer)"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value)


def _solve(options: dict[str, Any]) -> Answer:
    stop = until(PATIENCE)
    try:
        return judged(solve(ask(options, Effort(stop=stop)), stop=stop), stop=stop)
    except Undecided as error:
        hint = f"the command can search on: {command(options | {'thorough': True})}"
        raise InputError(error.what, hint=hint) from error
    except SearchStopped as error:
        raise InputError(
            f"nothing was found in {PATIENCE:g} seconds: too many shapes are possible",
            hint=f"the command has no time limit: {command(options)}",
        ) from error


# --- the answer ---------------------------------------------------------------------------------


def design(query: Query, lab: Workspace) -> dict[str, Any]:
    """Return the answer, or why there is none and what would work."""
    options = question(query)
    shown = {"options": options, "cli": command(options), "python": python(options)}
    try:
        answer = _solve(options)
    except InfeasibleBudget as error:
        return shown | {"infeasible": _infeasible(error.certificate)}
    best = answer.best
    assert best.portability is not None, "judged"
    change = best.portability.change
    return shown | {
        "verdict": list(best.parts()),
        "design": best.to_dict(),
        "portable": {
            "verdict": best.portability.verdict(),
            "reasons": best.portability.reasons(),
            "settings": change,
            "label": f"request {command_of(change).replace('--', '')}" if change else "",
        },
        "within": abs(best.error) <= answer.budget.tolerance,
        "lines": [
            {"name": line.name, "parameters": line.parameters, "share": line.share}
            | {"note": line.note, "indented": line.indented}
            for line in allocation_lines(answer.spec)
        ],
        "costs": [
            {"name": cost.name, "value": cost.value, "text": cost.text, "note": cost.note}
            for cost in design_costs(answer.spec, batch=BATCH)
        ],
        "gave_way": list(answer.gave_way),
        "not_proven": list(answer.not_proven),
        "warnings": [
            {"what": each.what, "settings": each.options} for each in unusual_shapes(best)
        ],
        "alternatives": [
            {"name": each.name, "miss": each.miss, "settings": each.options or None}
            | each.to_dict()
            for each in (best, *answer.alternatives)
        ],
    }


def _infeasible(found: Infeasible) -> dict[str, Any]:
    """Return the certificate, with the options that make each change that works alone."""
    labels = {name: name.replace("_", " ") for name in found.nearest}
    changes = [
        {
            "label": f"{labels[name]} {show(found.nearest[name])}"
            + (", or a nearer one" if name in found.unproven else ""),
            "settings": settings,
        }
        for name, settings in found.changes().items()
    ]
    without = [name for name, value in found.nearest.items() if value is None]
    return {
        "why": found.why,
        "bound": found.bound,
        "changes": changes,
        "helpless": [labels[name] for name in without if name not in found.unproven],
        "unknown": [labels[name] for name in without if name in found.unproven],
    }


def design_controls(query: Query, lab: Workspace) -> dict[str, Any]:
    """Return the options that the page has controls for: names, kinds, defaults, choices."""
    query.only()
    return {
        "options": [
            option.to_dict() | {"shown": option.name in SHOWN, "most": MOST.get(option.name)}
            for option in OPTIONS.values()
        ],
        "wishes": {name: list(limits) for name, limits in WISHES.items()},
    }


# --- the landscape ------------------------------------------------------------------------------


def design_landscape(query: Query, lab: Workspace) -> Iterator[dict[str, Any]]:
    """Yield the two axes, then the best design for each pair of ratio and expansion, a line each.

    A cell is `late` if its search took too long; without that, None means that no design exists.
    """
    options = question(query)
    for name, limits in WISHES.items():
        options[name] = OPTIONS[name].default
        for limit in limits:
            options.pop(limit, None)
    return _cells(ask(options, Effort(stop=until(PATIENCE))))


def _cells(budget: Budget) -> Iterator[dict[str, Any]]:
    yield {"ratios": list(RATIOS), "expansions": list(EXPANSIONS), "most": MOST_DRIFT}
    end = time.monotonic() + LANDSCAPE_PATIENCE
    for row, expansion in enumerate(EXPANSIONS):
        for column, ratio in enumerate(RATIOS):
            at = {"row": row, "column": column}
            stop = until(min(CELL_PATIENCE, end - time.monotonic()))
            try:
                found = neighbour(budget, ratio, expansion, stop=stop)
            except (SearchStopped, Undecided):
                yield at | {"cell": None, "late": True}
            else:
                yield at | {"cell": None if found is None else _cell(found)}


def _cell(design: Design) -> dict[str, Any]:
    return {
        "n_layers": design.sizes.n_layers,
        "d_model": design.sizes.d_model,
        "params": design.params,
        "drift": drift(design),
    }


def design_config(query: Query, lab: Workspace) -> dict[str, Any]:
    """Return the config that `glass train` takes, as `glass design --save` writes it."""
    text = to_toml(run_of_design(_solve(question(query)), batch=BATCH))
    if text is None:
        raise MachineError("writing TOML needs the library tomli_w", hint="pip install tomli-w")
    return {"toml": text}


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/design", design),
    ("GET", "/api/design/options", design_controls),
    ("GET", "/api/design/config", design_config),
    ("POST", "/api/design/landscape", design_landscape),
)
