"""The controls of the page Generate, and what a reader asks with them.

The page draws its controls from the options that `spec.decoding` declares (`GET
/api/generate/options`); what it sends back is checked here, whoever makes the tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError
from glassformer.spec.options import Option, options_of
from glassformer.web.app import limits
from glassformer.web.app.query import Query
from glassformer.web.app.workspace import Workspace

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter

MODES = ("greedy", "sample", "beam")
#: The page shows the complete tree of a search: longer ones are for the command.
BEAM_TOKENS = 128
#: The largest number that JavaScript counts with, and a limit for numbers that have none.
LARGEST, WIDEST = (1 << 53) - 1, 1e9
#: Values that the page starts with, where they are not the specs' defaults.
INITIAL = {"max_new_tokens": 64, "temperature": 1.0}
#: The number of likeliest tokens that are listed beside each chosen one.
ALTERNATIVES = 8


def options(query: Query, lab: Workspace) -> dict[str, Any]:
    """The options of every mode, for the page to draw its controls and to write commands."""
    query.only()
    return {mode: [control(each, mode) for each in controls(mode)] for mode in MODES}


def controls(mode: str) -> list[Option]:
    """The options of a mode that the page offers: numbers and choices."""
    own = options_of(BeamSpec if mode == "beam" else DecodeSpec)
    return [
        each
        for each in own
        if (each.typed in (int, float) or each.choices)
        and (mode == "sample" or each.group != "sampling")
    ]


def control(each: Option, mode: str) -> dict[str, Any]:
    """An option with the page's limits and its first value."""
    low, high = _range(each, mode)
    bounds = {} if each.choices else {"min": low, "max": high}
    return each.to_dict() | bounds | {"default": INITIAL.get(each.name, each.default)}


def _range(each: Option, mode: str) -> tuple[float, float]:
    """The page's limits: the option's own, and what the server is willing to compute."""
    beam = mode == "beam"
    most = {"max_new_tokens": BEAM_TOKENS if beam else limits.NEW_TOKENS, "width": limits.BEAMS}
    low = each.above if each.at_least is None else each.at_least
    high = most.get(each.name, each.below if each.at_most is None else each.at_most)
    widest = LARGEST if each.type is int else WIDEST
    return -widest if low is None else low, widest if high is None else high


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A checked question of the page; `options` by the names of the specs' fields."""

    run: str
    step: str
    prompt: str
    mode: str
    cached: bool
    options: dict[str, Any]

    def sampling(self, adapter: "BaseAdapter") -> DecodeSpec:
        """The settings of greedy decoding and sampling."""
        return DecodeSpec(eos=adapter.end_ids(), forbidden=adapter.nameless_ids(), **self.options)

    def search(self, adapter: "BaseAdapter") -> BeamSpec:
        """The settings of a beam search."""
        return BeamSpec(eos=adapter.end_ids(), forbidden=adapter.nameless_ids(), **self.options)


def read_ask(query: Query) -> Ask:
    """Check the question; options of another mode are refused, not ignored."""
    known = {each.name: each for mode in MODES for each in controls(mode)}
    query.only("run", "step", "prompt", "mode", "cached", "forced", *known)
    mode = query.choice("mode", MODES, default="greedy")
    own = {each.name for each in controls(mode)}
    for name in {*known, "forced"} - own:
        if query.has(name) and not (name == "forced" and mode != "beam"):
            raise InputError(f"{name} has no effect in mode {mode}", hint="leave it out")
    values = {name: _value(query, known[name], mode) for name in own if query.has(name)}
    initial = {name: value for name, value in INITIAL.items() if name in own}
    forced = _forced(query.text("forced", default="", most=8 * limits.NEW_TOKENS))
    return Ask(
        run=query.text("run"),
        step=query.text("step", default="best", most=20),
        prompt=query.text("prompt", most=limits.PROMPT_CHARACTERS),
        mode=mode,
        cached=query.flag("cached", default=True),
        options=initial | values | ({"forced": forced} if forced else {}),
    )


def _value(query: Query, each: Option, mode: str) -> Any:
    low, high = _range(each, mode)
    if each.choices:
        return query.choice(each.name, each.choices)
    if each.type is int:
        return query.integer(each.name, low=int(low), high=int(high))
    return query.number(each.name, low=low, high=high)


def _forced(text: str) -> tuple[int, ...]:
    """The ids that a branch begins with: `12,5,7`."""
    parts = [part for part in text.split(",") if part]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise InputError("forced holds more than token ids", hint="numbers with commas: 12,5,7")
    return tuple(map(int, parts))
