"""A question of the page Design as a command to paste, and as Python.

The page Design: a parameter budget as the sliders ask it, and everything the page shows of it.

The query has the names of `glassformer.design`; nothing is solved, counted or rounded elsewhere.
What takes longer than a reader waits is given up: `glass design` has the time.
"""

import math
import shlex
import time
from collections.abc import Iterator, Mapping
from typing import Any

from glassformer.budget.design import design as solve
from glassformer.budget.effort import OutOfPatience, patience
from glassformer.budget.infeasible import Infeasible, InfeasibleBudget, Undecided, show
from glassformer.budget.question import Answer, Design, Exact
from glassformer.costs.flops import flops
from glassformer.costs.memory import cache_bytes, training_memory, weight_bytes
from glassformer.costs.parameter_table import allocation_lines
from glassformer.lab.budget_report import design_numbers, odd_shapes, run_of_design
from glassformer.lab.plots.figures import EXPANSIONS, MOST, RATIOS, drift, neighbour
from glassformer.lab.runs.record import to_toml
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.units import format_bytes, format_flops, parse_count, parse_share
from glassformer.web.app.query import Query, Route
from glassformer.web.app.workspace import Lab

#: What the command does without being told; what the page always says is not among them.
SILENT: dict[str, Any] = {
    "tied": True,
    "tolerance": 0.005,
    "exact_ratio": False,
    "exact_expansion": False,
    "free_head_width": False,
    "multiple": 1,
    "min_layers": 1,
    "min_aspect": 0.0,
    "position": "learned",
    "bias": "none",
    "norm": "layernorm",
    "ratio_covers": "both",
}


def _said(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if SILENT.get(name) != value}


def command(asked: Mapping[str, Any]) -> str:
    """`glass design --params 10000000 ...`."""
    words = ["glass", "design"]
    for name, value in _said(asked).items():
        if name == "tied":
            words.append("--untied")
        elif value is True:
            words.append(f"--{name.replace('_', '-')}")
        else:
            words += [f"--{name.replace('_', '-')}", _text(value)]
    return shlex.join(words)


def python(asked: Mapping[str, Any]) -> str:
    """The same question to the library."""
    said = _said(asked)
    first = [f"{said.pop('params'):_}", f"{said.pop('vocab'):_}"]
    rest = [f"{name}={value!r}" for name, value in said.items()]
    arguments = ", ".join([*first, *rest])
    return f"import glassformer as gf\n\nanswer = gf.design({arguments})\nprint(answer)"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value)


MOST_PARAMS, MOST_VOCAB, MOST_LENGTH = 1_000_000_000, 1_000_000, 1_000_000
MOST_HEADS, MOST_LAYERS = 256, 10_000
#: Seconds for one answer, for one cell of the landscape and for all of them.
PATIENCE, CELL_PATIENCE, LANDSCAPE_PATIENCE = 3.0, 0.5, 10.0
#: Sequences in a training step, for its memory.
BATCH = 8
DEFAULTS: dict[str, Any] = {
    "params": 10_000_000,
    "vocab": 16_000,
    "embedding_ratio": 0.35,
    "glu_expansion": 2.66,
    "heads": 8,
    "tied": True,
    "length": 512,
}
COUNTS = {
    "params": MOST_PARAMS,
    "vocab": MOST_VOCAB,
    "length": MOST_LENGTH,
    "multiple": 4096,
    "ffn_multiple": 4096,
    "kv_heads": MOST_HEADS,
    "min_layers": MOST_LAYERS,
    "max_layers": MOST_LAYERS,
}
#: A number, or a word in its place.
WORDED = {"heads": "any", "rank": "any", "embedding_ratio": "free", "glu_expansion": "free"}
SHARES = ("tolerance", "ratio_within", "glu_within", "min_aspect", "max_aspect")
SWITCHES = ("tied", "exact_ratio", "exact_expansion", "free_head_width")
TEXTS = ("position", "bias", "norm", "ratio_covers")
KNOWN = (*COUNTS, *WORDED, *SHARES, *SWITCHES, *TEXTS)


def question(query: Query) -> dict[str, Any]:
    """The query as arguments of `glassformer.design`, the page's own defaults filled in."""
    query.only(*KNOWN)
    asked = dict(DEFAULTS)
    for name in KNOWN:
        if query.has(name):
            asked[name] = _value(name, query.text(name, most=40))
    return asked


def _value(name: str, text: str) -> Any:
    if name in WORDED and text == WORDED[name]:
        return text
    if name in TEXTS:
        return text
    if name in SWITCHES:
        if text not in ("true", "false"):
            raise InputError(f"{name} '{text}' is neither true nor false")
        return text == "true"
    if name in SHARES or name in ("embedding_ratio", "glu_expansion"):
        return parse_share(name, text)
    number = parse_count(name, text)
    most = COUNTS.get(name, MOST_HEADS if name == "heads" else MOST_VOCAB)
    if not 1 <= number <= most:
        raise InputError(
            f"{name} {number:,} is outside 1 to {most:,}",
            hint=f"the nearest valid {name} is {min(max(number, 1), most):,}",
        )
    return number


def _solve(asked: dict[str, Any]) -> Answer:
    try:
        return _limited(asked)
    except Undecided as error:
        hint = f"the command can search on: {command(asked | {'thorough': True})}"
        raise InputError(error.what, hint=hint) from error


def _limited(asked: dict[str, Any]) -> Answer:
    rest = {name: value for name, value in asked.items() if name not in ("params", "vocab")}
    try:
        with patience(PATIENCE):
            return solve(asked["params"], asked["vocab"], **rest)
    except OutOfPatience as error:
        raise InputError(
            f"nothing was found in {PATIENCE:g} seconds: too many shapes are possible",
            hint=f"the command has the time: {command(asked)}",
        ) from error


def design(query: Query, lab: Lab) -> dict[str, Any]:
    """The answer, or why there is none and what would work."""
    asked = question(query)
    shown = {"asked": asked, "cli": command(asked), "python": python(asked)}
    try:
        answer = _solve(asked)
    except InfeasibleBudget as error:
        return shown | {"infeasible": _infeasible(error.certificate)}
    best = answer.best
    return shown | {
        "verdict": verdict(best),
        "design": design_numbers(best),
        "within": abs(best.error) <= answer.budget.tolerance,
        "lines": [
            {"name": x.name, "parameters": x.parameters, "share": x.share, "note": x.note}
            | {"indented": x.indented}
            for x in allocation_lines(answer.spec)
        ],
        "costs": costs(answer),
        "gave_way": list(answer.gave_way),
        "not_proven": list(answer.not_proven),
        "warnings": [
            {"what": odd.what, "option": odd.option, "value": odd.value, "label": _change(odd)}
            for odd in odd_shapes(best)
        ],
        "alternatives": [
            {"name": each.name, "miss": each.miss, "settings": _asking(each.name)}
            | design_numbers(each)
            for each in (best, *answer.alternatives)
        ],
    }


def _asking(name: str) -> dict[str, Any] | None:
    """What asks for an alternative, where one setting does."""
    for part in name.split(", "):
        if part in ("exact ratio", "exact expansion"):
            return {part.replace(" ", "_"): True}
        if part.startswith("multiples of "):
            return {"multiple": int(part.rpartition(" ")[2])}
    return None


def _change(odd: Any) -> str:
    return f"{odd.option.replace('_', ' ')} {odd.value}"


def verdict(design: Design) -> list[str]:
    """The line that people read first, in its parts: count and miss, widths, layers, heads."""
    first, _, rest = str(design).partition(": ")
    return [first, *rest.split(", ")]


def costs(answer: Answer) -> list[dict[str, Any]]:
    """Work and bytes, each as a number and as people read it."""
    model, length = answer.spec, answer.spec.max_seq_len
    work = flops(model, length=length)
    kept = training_memory(model, batch=BATCH, length=length)
    cache = cache_bytes(model, batch=1, length=1, itemsize=4)
    rows: list[tuple[str, float, str, str]] = [
        ("forward, a token", work.forward / length, "flops", f"at length {length:,}"),
        ("training, a token", work.training / length, "flops", "forward and backward"),
    ]
    forms = weight_bytes(model)
    for form, count in forms.items():
        note = "32 divides neither width: the same as int8" if _same(forms, form) else ""
        rows.append((f"weights in {form}", count, "bytes", note))
    rows += [
        ("weights and AdamW", kept.weights + kept.optimizer, "bytes", "float32, without a batch"),
        ("training, at most", kept.peak, "bytes", f"batch {BATCH} x {length:,} in float32"),
        ("KV cache, a token", cache, "bytes", "float32; half of it in bf16"),
        ("KV cache, a whole context", cache * length, "bytes", f"{length:,} tokens, float32"),
    ]
    write = {"flops": format_flops, "bytes": format_bytes}
    return [
        {"name": name, "value": value, "text": write[unit](value), "note": note}
        for name, value, unit, note in rows
    ]


def _same(forms: Mapping[str, int], form: str) -> bool:
    return form == "int4" and forms["int4"] == forms["int8"]


def _infeasible(found: Infeasible) -> dict[str, Any]:
    """The certificate; each change that works alone, as the settings that make it."""
    changes = []
    for name, value in found.nearest.items():
        if value is None:
            continue
        settings = {name: value}
        for limit, wish, exact in (
            ("ratio_within", found.budget.embedding_ratio, "exact_ratio"),
            ("glu_within", found.budget.glu_expansion, "exact_expansion"),
        ):
            if name == limit and isinstance(wish, Exact):
                settings[exact] = False
        nearer = ", or a nearer one" if name in found.unproven else ""
        text = f"{name.replace('_', ' ')} {show(value)}{nearer}"
        changes.append({"label": text, "settings": settings})
    silent = [name for name, value in found.nearest.items() if value is None]
    return {
        "why": found.why,
        "bound": found.bound,
        "changes": changes,
        "helpless": [name.replace("_", " ") for name in silent if name not in found.unproven],
        "unknown": [name.replace("_", " ") for name in silent if name in found.unproven],
    }


def design_landscape(query: Query, lab: Lab) -> Iterator[dict[str, Any]]:
    """The best design for each pair of ratio and expansion, a line each, after the two axes.

    `late` is a cell that would have taken too long; None without it, that no design exists.
    """
    asked = question(query)
    for name in ("exact_ratio", "exact_expansion", "ratio_within", "glu_within"):
        asked.pop(name, None)
    return _cells(asked | {"embedding_ratio": 0.35, "glu_expansion": 2.66})


def _cells(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        budget = _limited(asked).budget
    except InfeasibleBudget as error:
        budget = error.certificate.budget
    except Undecided as error:
        budget = error.budget
    yield {"ratios": list(RATIOS), "expansions": list(EXPANSIONS), "most": MOST}
    end = time.monotonic() + LANDSCAPE_PATIENCE
    for row, glu in enumerate(EXPANSIONS):
        for column, ratio in enumerate(RATIOS):
            at = {"row": row, "column": column}
            try:
                with patience(min(CELL_PATIENCE, end - time.monotonic())):
                    found = neighbour(budget, ratio, glu)
            except OutOfPatience:
                yield at | {"cell": None, "late": True}
            else:
                yield at | {"cell": None if found is None else _cell(found)}


def _cell(design: Design) -> dict[str, Any]:
    away = drift(design)
    return {"n_layers": design.sizes.n_layers, "d_model": design.sizes.d_model} | {
        "params": design.params,
        "drift": away if math.isfinite(away) else None,
    }


def design_config(query: Query, lab: Lab) -> dict[str, Any]:
    """The config that `glass train` takes, as `glass design --save` writes it."""
    text = to_toml(run_of_design(_solve(question(query)), batch=BATCH))
    if text is None:
        raise MachineError("writing TOML needs the library tomli_w", hint="pip install tomli-w")
    return {"toml": text}


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/design", design),
    ("GET", "/api/design/config", design_config),
    ("POST", "/api/design/landscape", design_landscape),
)
