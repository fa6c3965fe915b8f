"""What the page Generate may ask for: a prompt, a way to decode, and the numbers of that way."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError
from glassformer.web import limits
from glassformer.web.query import Query

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter

MODES = ("greedy", "sample", "beam")
#: A search draws its whole tree: longer ones are for the command.
BEAM_TOKENS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What the page asked for, within the limits."""

    run: str
    step: str
    prompt: str
    mode: str
    cached: bool
    beams: int
    length_penalty: float
    settings: dict[str, Any]

    def draws(self, adapter: "BaseAdapter") -> DecodeSpec:
        """Token after token."""
        return DecodeSpec(eos=adapter.end_ids(), forbidden=adapter.nameless_ids(), **self.settings)

    def search(self, adapter: "BaseAdapter") -> BeamSpec:
        """Beams; what belongs to draws was refused."""
        return BeamSpec(
            width=self.beams,
            alpha=self.length_penalty,
            max_new_tokens=self.settings["max_new_tokens"],
            eos=adapter.end_ids(),
            forbidden=adapter.nameless_ids(),
        )


def asked(query: Query) -> Ask:
    """The question, checked; settings of another mode are refused, not ignored."""
    query.only(
        *("run", "step", "prompt", "mode", "max_tokens", "temperature", "top_k", "top_p"),
        *("seed", "beams", "length_penalty", "forced", "cached"),
    )
    mode = query.choice("mode", MODES, default="greedy")
    own = {
        "greedy": ("forced",),
        "sample": ("temperature", "top_k", "top_p", "seed", "forced"),
        "beam": ("beams", "length_penalty"),
    }
    for name in {name for names in own.values() for name in names} - {*own[mode]}:
        if query.has(name):
            raise InputError(f"{name} says nothing to {mode}", hint="leave it out")
    most = BEAM_TOKENS if mode == "beam" else limits.NEW_TOKENS
    forced = _forced(query.text("forced", default="", most=8 * limits.NEW_TOKENS))
    settings: dict[str, Any] = {
        "max_new_tokens": query.integer("max_tokens", low=1, high=most, default=64),
        "forced": forced,
    }
    if mode == "sample":
        settings |= {
            "temperature": query.number("temperature", low=0.01, high=100.0, default=1.0),
            "top_p": query.number("top_p", low=0.001, high=1.0, default=1.0),
            "seed": query.integer("seed", low=0, high=(1 << 53) - 1, default=0),
        }
        if query.has("top_k"):
            settings["top_k"] = query.integer("top_k", low=1, high=1 << 20)
    return Ask(
        run=query.text("run"),
        step=query.text("step", default="best", most=20),
        prompt=query.text("prompt", most=limits.PROMPT_CHARACTERS),
        mode=mode,
        cached=query.flag("cached", default=True),
        beams=query.integer("beams", low=1, high=limits.BEAMS, default=4),
        length_penalty=query.number("length_penalty", low=-40.0, high=40.0, default=0.6),
        settings=settings,
    )


def _forced(text: str) -> tuple[int, ...]:
    """Ids that a branch begins with: `12,5,7`."""
    parts = [part for part in text.split(",") if part]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise InputError("forced holds more than token ids", hint="numbers with commas: 12,5,7")
    return tuple(map(int, parts))
