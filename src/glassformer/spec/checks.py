"""The decorator behind every spec class, and the checks their validators share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

from glassformer.spec.errors import InputError, nearest

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def spec(cls: type[T]) -> type[T]:
    """A frozen, keyword-only, slotted dataclass: a value that describes, and never computes."""
    return dataclass(frozen=True, kw_only=True, slots=True)(cls)


def at_least(name: str, value: int, least: int = 1) -> None:
    """Require a whole number that is not below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} {value!r} is not a whole number", hint=f"use {least} or more")
    if value < least:
        raise InputError(
            f"{name} {value} is below {least}", hint=f"the nearest valid {name} is {least}"
        )


def divides(name: str, value: int, by_name: str, by: int) -> None:
    """Require that `by` divides `value`; the hint names the neighbours that work."""
    if value % by:
        below, above = value - value % by, value - value % by + by
        choices = f"{below} or {above}" if below else f"{above}"
        raise InputError(
            f"{name} {value} is not divisible by {by_name} {by}",
            hint=f"the nearest valid {name} is {choices}",
        )


def one_of(name: str, value: str, choices: Iterable[str]) -> None:
    """Require one of some words: a misspelt one must not mean the other choice."""
    known = sorted(choices)
    if value not in known:
        raise InputError(
            f"{name} {value!r} is not one of {', '.join(known)}", hint=nearest(str(value), known)
        )


def probability(name: str, value: float) -> None:
    """Require 0 <= value < 1, the range of a dropout rate."""
    if not 0.0 <= value < 1.0:
        near = 0.0 if value < 0 else 0.9
        raise InputError(
            f"{name} {value} is outside [0, 1)", hint=f"the nearest usable value is {near}"
        )


def positive(name: str, value: float) -> None:
    """Require a finite number above zero."""
    if not 0.0 < value < float("inf"):
        raise InputError(f"{name} {value} is not a positive number")
