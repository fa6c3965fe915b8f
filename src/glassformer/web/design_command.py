"""A question of the page Design as a command to paste, and as Python."""

import shlex
from collections.abc import Mapping
from typing import Any

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
