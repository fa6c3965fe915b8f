"""The decorator behind every spec class, and the checks their validators share."""

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, wraps
from typing import (
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from glassformer.spec.errors import InputError, nearest

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def spec(cls: type[T]) -> type[T]:
    """Make a frozen, keyword-only, slotted dataclass: a value that describes, and never computes.

    Fields that are words hold one of those that their type names. Unions are closed: a field whose
    type names spec classes accepts exactly those classes, no subclass of them and nothing else.
    Code that dispatches on such a field ends in `typing.assert_never`, so a new variant cannot be
    computed as if it were another one.
    """
    own_checks = cls.__dict__.get("__post_init__")

    def checks(self: object) -> None:
        check_variants(self)
        _check_words(self)
        if own_checks is not None:
            own_checks(self)

    type.__setattr__(cls, "__post_init__", wraps(own_checks)(checks) if own_checks else checks)
    if "__repr__" not in cls.__dict__:
        type.__setattr__(cls, "__repr__", source_text)
    made = dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)(cls)
    if shorthands := shorthands_of(made):
        init = made.__init__

        @wraps(init)
        def with_shorthands(self: T, **given: Any) -> None:
            for key, (field, _) in shorthands.items():
                if key in given:
                    given[field] = given.pop(key)
            init(self, **given)

        type.__setattr__(made, "__init__", with_shorthands)
    return made


def shorthands_of(cls: type) -> Mapping[str, tuple[str, str]]:
    """Return the keys that stand for a field with a value of one class: (field, class)."""
    found: Mapping[str, tuple[str, str]] = getattr(cls, "shorthands", {})
    return found


#: Columns of a line of `source_text`.
COLUMNS = 88


def source_text(value: object, indent: int = 0) -> str:
    """Return a spec as the Python that makes it: on several lines if long, without defaults."""
    if not dataclasses.is_dataclass(value):
        if not isinstance(value, tuple) or len(repr(value)) <= COLUMNS - indent:
            return repr(value)
        parts = [f"{source_text(one, indent + 4)}," for one in value]
        return _bracketed("(", parts, ")", indent)
    parts = []
    for field in dataclasses.fields(value):
        held, default = getattr(value, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if type(held) is not type(default) or held != default:
            parts.append(f"{field.name}={source_text(held, indent + 4)},")
    name = type(value).__name__
    line = f"{name}({' '.join(parts).removesuffix(',')})"
    if len(line) <= COLUMNS - indent and "\n" not in line:
        return line
    return _bracketed(f"{name}(", parts, ")", indent)


def _bracketed(opened: str, parts: list[str], closed: str, indent: int) -> str:
    inside = "".join(f"{' ' * (indent + 4)}{part}\n" for part in parts)
    return f"{opened}\n{inside}{' ' * indent}{closed}"


P = ParamSpec("P")
R = TypeVar("R")


def named_options(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse an option that a public function does not have, with the one that was meant."""
    known = [
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is not each.POSITIONAL_ONLY
    ]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise InputError(
                    f"{function.__name__}() has no option '{name}'", hint=nearest(name, known)
                )
        return function(*args, **kwargs)

    return checked


def check_variants(node: object) -> None:
    """Refuse a field that holds a class which its type does not name."""
    cls: type = type(node)
    for name, members in _variant_fields(cls):
        value = getattr(node, name)
        for one in value if isinstance(value, tuple) else (value,):
            if type(one) not in members:
                raise unknown_variant(name, one, members)


def _check_words(node: object) -> None:
    """Refuse a word that its field does not know; an option's field is checked by its name."""
    cls: Any = type(node)
    for name, words, others in _word_fields(cls):
        value = getattr(node, name)
        if value not in words and (isinstance(value, str) or type(value) not in others):
            one_of(name, value, words)


@cache
def _word_fields(cls: Any) -> tuple[tuple[str, tuple[str, ...], frozenset[type]], ...]:
    """Return the fields that are words, their words, and the types of what else they hold."""
    found = []
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        others = frozenset(kind for kind in kinds if get_origin(kind) is not Literal)
        if words and str not in others and not field.metadata:
            found.append((field.name, tuple(words), others))
    return tuple(found)


def check_member(name: str, value: object, union: Any) -> None:
    """Refuse a value that is not of exactly one of the classes of a union."""
    members = frozenset(_members(union))
    if type(value) not in members:
        raise unknown_variant(name, value, members)


def check_tree(node: object) -> None:
    """Check a spec and everything below it; every consumer of specs calls this first."""
    check_variants(node)
    cls: type = type(node)
    for name, _ in _variant_fields(cls):
        value = getattr(node, name)
        for one in value if isinstance(value, tuple) else (value,):
            check_tree(one)


def unknown_variant(name: str, value: object, members: Iterable[type]) -> InputError:
    """Return the error for a value of a class that is not a member of the union `name`."""
    known = sorted(member.__name__ for member in members if member is not type(None))
    return InputError(
        f"{name}: {type(value).__name__} is not one of {', '.join(known)}",
        hint="a spec takes exactly these classes; subclasses and own classes are not computed",
    )


@cache
def _variant_fields(cls: type) -> tuple[tuple[str, frozenset[type]], ...]:
    """Return the fields whose types name spec classes, each with the classes allowed."""
    if not dataclasses.is_dataclass(cls):
        return ()
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    members = {name: frozenset(_members(hints[name])) for name in names}
    return tuple(
        (name, classes)
        for name, classes in members.items()
        if any(dataclasses.is_dataclass(one) for one in classes)
    )


def _members(hint: Any) -> Iterator[type]:
    """Return the classes that a type names: of a union each, of tuple[X, ...] those of X."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType, tuple):
        for option in get_args(hint):
            yield from _members(option)
    elif origin is Literal:
        yield from map(type, get_args(hint))
    elif isinstance(origin or hint, type):
        yield origin or hint


#: The largest size of a part of a model; beyond it, arithmetic on sizes would be all that is left.
LARGEST = (1 << 31) - 1


def at_least(name: str, value: int, least: int = 1, *, most: int | None = None) -> None:
    """Require a whole number of at least `least`, and of at most `most` if given."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} {value!r} is not a whole number", hint=f"use {least} or more")
    if value < least:
        raise InputError(
            f"{name} {value} is below {least}", hint=f"the nearest valid {name} is {least}"
        )
    if most is not None and value > most:
        raise InputError(
            f"{name} {shown(value)} is above {most:,}", hint=f"the nearest valid {name} is {most}"
        )


def shown(value: int) -> str:
    """Return a whole number as text; Python refuses to print very long ones."""
    digits = 1 + int(0.30103 * value.bit_length())
    return f"{value:,}" if digits < 16 else f"of about {digits} digits"


def size(name: str, value: int, least: int = 1) -> None:
    """Require a size of a model: a whole number from `least` to `LARGEST`."""
    at_least(name, value, least, most=LARGEST)


def divides(name: str, value: int, by_name: str, by: int) -> None:
    """Require that `by` divides `value`; the hint names the neighbours that work."""
    at_least(by_name, by)
    if value % by:
        below, above = value - value % by, value - value % by + by
        choices = f"{below} or {above}" if below else f"{above}"
        raise InputError(
            f"{name} {value} is not divisible by {by_name} {by}",
            hint=f"the nearest valid {name} is {choices}",
        )


def one_of(name: str, value: str, choices: Iterable[str]) -> None:
    """Require one of the choices: a misspelt word must not mean the other one."""
    known = sorted(choices)
    if value not in known:
        raise InputError(
            f"{name} {value!r} is not one of {', '.join(known)}", hint=nearest(str(value), known)
        )


def probability(name: str, value: float) -> None:
    """Require 0 <= value < 1, the range of a dropout rate."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name} {value!r} is not a number", hint="a rate from 0 to below 1")
    if not 0.0 <= value < 1.0:
        near = 0.0 if value < 0 else 0.9
        raise InputError(
            f"{name} {value} is outside [0, 1)", hint=f"the nearest usable value is {near}"
        )


def positive(name: str, value: float) -> None:
    """Require a finite number above zero."""
    if not 0.0 < value < float("inf"):
        raise InputError(f"{name} {value} is not a positive number")
