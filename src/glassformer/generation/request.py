"""`read_request`: decoding options by name, checked for every caller. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glassformer.data.automata.library import machine_named
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.constraint import Constraint
from glassformer.spec.decoding import (
    BeamSpec,
    ConstraintSpec,
    DecodeSpec,
    StepSpec,
    by_name,
    decoding_spec,
)
from glassformer.spec.errors import InputError
from glassformer.spec.options import Option, options_of


@dataclass(frozen=True, slots=True)
class Request:
    """Checked options: how tokens are chosen, what they must match, how a step is computed."""

    decoding: DecodeSpec | BeamSpec
    constraint: Constraint | None
    step: StepSpec

    @property
    def is_for_arrays(self) -> bool:
        """True if an `ArrayStepper` does all of this: no beams, and the default step."""
        plain_step = self.step == StepSpec(kv_cache=self.step.kv_cache)
        return isinstance(self.decoding, DecodeSpec) and plain_step


def read_request(
    options: Mapping[str, Any],
    *,
    tokenizer: Tokenizer | None,
    eos: tuple[int, ...] = (),
    forbidden: tuple[int, ...] = (),
    spell: Callable[[Option], str] = by_name,
) -> Request:
    """Check options by name; `spell` says how errors name them.

    `forbidden` are added to those of the options. Options that hold token ids (`forced`,
    `forbidden`) may be given as text where there is a tokenizer.
    """
    constraint, step = (_of(cls, options) for cls in (ConstraintSpec, StepSpec))
    rest = {k: v for k, v in options.items() if k not in constraint and k not in step}
    known = {each.name: each for cls in (DecodeSpec, BeamSpec) for each in options_of(cls)}
    for name in rest.keys() & known.keys():
        rest[name] = _value(known[name], rest[name], tokenizer)
    if forbidden:
        rest["forbidden"] = tuple(sorted({*rest.get("forbidden", ()), *forbidden}))
    decoding = decoding_spec(rest, eos=eos, spell=spell)
    made = make_constraint(ConstraintSpec(**constraint), tokenizer)
    how = StepSpec(**step)
    if how.speculate and isinstance(decoding, BeamSpec):
        raise InputError(
            "{--speculate|speculate} is for one sequence, and beams are several",
            hint="leave out one of the two",
        )
    return Request(decoding, made, how)


def make_constraint(spec: ConstraintSpec, tokenizer: Tokenizer | None) -> Constraint | None:
    """Return the constraint over this tokenizer's tokens, or None."""
    if spec.regex is None and spec.machine is None:
        return None
    if tokenizer is None:
        raise InputError("a constraint needs a tokenizer", hint="model.with_tokenizer(tokenizer)")
    if spec.regex is not None:
        return Constraint.of_regex(spec.regex, tokenizer=tokenizer)
    assert spec.machine is not None
    return Constraint(machine_named(spec.machine), tokenizer=tokenizer)


def _of(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that belong to one spec."""
    names = {each.name for each in options_of(cls)}
    return {name: value for name, value in options.items() if name in names}


def _value(each: Option, value: Any, tokenizer: Tokenizer | None) -> Any:
    """Return a field's value: a tuple where it holds several, token ids where it holds tokens."""
    if not each.holds_tokens and not each.repeated:
        return value
    parts: list[Any] = [value] if isinstance(value, str | int) else list(value)
    if not each.holds_tokens:
        return tuple(parts)
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str) and tokenizer is None:
            raise InputError(f"{each.name} as text needs a tokenizer", hint="give token ids")
        if not isinstance(part, str) or tokenizer is None:
            ids.append(part)
            continue
        found = tokenizer.encode(part)
        if not found:
            flag_or_name = f"{{{each.flag}|{each.name}}}"
            raise InputError(f"{flag_or_name} {part!r} has no token", hint="leave it out")
        ids += found
    return tuple(ids)
