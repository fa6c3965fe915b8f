"""Options declared once: a spec's field carries its help text, limits and names.

`option(...)` declares a field, `check_options` enforces its limits, and `options_of` lists what the
command line, the chat, the web page and the tables of the docs are made from. A field without
`option` is no option: it is set from Python only.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from glassformer.spec.checks import at_least as check_at_least
from glassformer.spec.checks import one_of, shown
from glassformer.spec.errors import InputError

T = TypeVar("T")
_KEY = "option"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Declared:
    """The arguments of `option`, kept in the field's metadata."""

    help: str
    flag: str
    label: str
    at_least: float | None
    above: float | None
    at_most: float | None
    below: float | None
    choices: tuple[str, ...]
    metavar: str | None
    off: Any
    hint: str
    group: str
    hf: str | None
    show_default: bool
    typed: Any
    parse: Callable[[str, str], Any] | None


def option(
    default: T,
    *,
    help: str,
    flag: str = "",
    label: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    off: Any = None,
    hint: str = "",
    group: str = "",
    hf: str | None = None,
    show_default: bool = True,
    typed: Any = None,
    parse: Callable[[str, str], Any] | None = None,
) -> T:
    """Declare a spec's field as an option.

    help: one sentence for the command line, the page and the docs.
    flag: its name on the command line; `--top-k` for `top_k` by default. A true-or-false option
        whose default is True is turned off by its flag (`tied`, `--untied`).
    label: its name on the page; `Top k` by default.
    at_least, above, at_most, below: limits; None is allowed where the field's type admits it.
    choices: words that are allowed; by default those of a Literal type.
    off: the value at which the option has no effect, as the hint of an error states.
    hint: what an error suggests; by default the nearest valid value.
    group: options with the same group belong together (`sampling`).
    hf: its name in Hugging Face's generation_config.json.
    show_default: False where the command line does something else if the option is not typed.
    typed: what the command line reads if not the field's type: `str` or `tuple[str, ...]`.
    parse: makes the field's value of a name and a text, as `parse_count` does; implies `typed=str`.
    """
    declared = _Declared(
        help=help,
        flag=flag,
        label=label,
        at_least=at_least,
        above=above,
        at_most=at_most,
        below=below,
        choices=choices,
        metavar=metavar,
        off=off,
        hint=hint,
        group=group,
        hf=hf,
        show_default=show_default,
        typed=typed,
        parse=parse,
    )
    return dataclasses.field(default=default, metadata={_KEY: declared})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Option(_Declared):
    """One option of a spec, resolved: `type` without None, `optional` if None is allowed.

    `repeated`: a tuple, typed several times on the command line. `typed` is the type of one
    value there: int, float, bool or str.
    """

    name: str
    type: Any
    optional: bool
    repeated: bool
    default: Any

    @property
    def holds_tokens(self) -> bool:
        """True if the field holds token ids, which the command line reads as text."""
        return bool(self.type == tuple[int, ...]) and self.typed is str

    @property
    def limits(self) -> str:
        """The limits in words of mathematics: `0 < x <= 1`, `x >= 1, or any`, `gnmt or power`."""
        words = " or ".join(self.choices)
        numbers = self._interval()
        return f"{numbers}, or {words}" if numbers and words else numbers or words

    def _interval(self) -> str:
        low = f"{self.above:g} < " if self.above is not None else ""
        low = f"{self.at_least:g} <= " if self.at_least is not None else low
        high = f" < {self.below:g}" if self.below is not None else ""
        high = f" <= {self.at_most:g}" if self.at_most is not None else high
        if low and not high:
            number, sign = low.split()
            return f"x {sign.replace('<', '>')} {number}"
        return f"{low}x{high}" if high else ""

    @property
    def default_text(self) -> str:
        """The default as it is typed; empty for none."""
        if self.default is None or self.default == () or isinstance(self.default, bool):
            return ""
        return _written(self.default)

    @property
    def help_text(self) -> str:
        """The help with limits and default, as `--help` shows it."""
        default = self.default_text if self.show_default else ""
        notes = [f"default: {default}"] if default else []
        notes += [self.limits] if self.limits else []
        notes += ["repeatable"] if self.repeated else []
        return f"{self.help} [{'; '.join(notes)}]" if notes else self.help

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the page: what it needs to draw a control and to write a command."""
        kinds = {int: "integer", float: "number", bool: "flag"}
        kind = "choice" if self.choices and self.type is str else kinds.get(self.typed, "text")
        low = self.above if self.at_least is None else self.at_least
        return {
            "name": self.name,
            "flag": self.flag,
            "label": self.label,
            "help": self.help,
            "kind": kind,
            "repeated": self.repeated,
            "optional": self.optional,
            "default": self.default if _is_plain(self.default) else str(self.default),
            "min": low,
            "max": self.below if self.at_most is None else self.at_most,
            "open": [self.above is not None, self.below is not None],
            "choices": list(self.choices),
            "group": self.group,
        }

    def check(self, value: Any) -> None:
        """Require that a value keeps the limits."""
        if value is None:
            if not self.optional:
                raise InputError(f"{self.name} None is no value", hint=self._hint(self.default))
            return
        if self.type is str and self.choices:
            one_of(self.name, value, self.choices)
        elif value in self.choices:
            return
        elif self.type is int:
            self._check_integer(value)
        elif self.type is float:
            self._check_number(value)

    def _check_integer(self, value: Any) -> None:
        low = self.at_least if self.above is None else self.above + 1
        high = self.at_most if self.below is None else self.below - 1
        if low is not None and high is None and not self.hint:
            check_at_least(self.name, value, int(low))
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{self.name} {value!r} is not a whole number", hint=self._hint(low))
        if low is not None and value < low:
            raise InputError(f"{self.name} {shown(value)} is below {low:g}", hint=self._hint(low))
        if high is not None and value > high:
            raise InputError(f"{self.name} {shown(value)} is above {high:g}", hint=self._hint(high))

    def _check_number(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"{self.name} {value!r} is not a number", hint=self._hint(None))
        low = self.at_least if self.above is None else self.above
        high = self.at_most if self.below is None else self.below
        too_low = low is not None and (value < low or (value == low and self.above is not None))
        too_high = high is not None and (value > high or (value == high and self.below is not None))
        if math.isfinite(value) and not too_low and not too_high:
            return
        near = self.at_least if too_low else self.at_most if too_high else None
        raise InputError(f"{self.name} {value} is {self._broken_rule()}", hint=self._hint(near))

    def _broken_rule(self) -> str:
        low = self.at_least if self.above is None else self.above
        high = self.at_most if self.below is None else self.below
        if low is not None and high is not None:
            left = "[" if self.above is None else "("
            right = "]" if self.below is None else ")"
            return f"outside {left}{low:g}, {high:g}{right}"
        if low is not None and self.above is None:
            return f"not a finite number of {low:g} or more"
        if low is not None:
            return "not a positive number" if low == 0 else f"not a finite number above {low:g}"
        if high is not None:
            return f"not a finite number {'below' if self.below is not None else 'up to'} {high:g}"
        return "not a finite number"

    def _hint(self, near: Any) -> str:
        """The declared hint, else the nearest valid value and how to turn the option off."""
        if self.hint:
            return self.hint
        nearest = "" if near is None else f"the nearest valid {self.name} is {_written(near)}"
        if self.off is None:
            return nearest
        if near == self.off:
            return f"{nearest}, which turns it off"
        turned = f"{_written(self.off)} turns it off"
        return f"{nearest}; {turned}" if nearest else turned


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the options of a spec class, in the order of its fields."""
    return _options_of(cls)


@functools.cache
def _options_of(cls: Any) -> tuple[Option, ...]:
    hints = get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        declared = field.metadata.get(_KEY)
        if declared is not None:
            found.append(_resolve(field, hints[field.name], declared))
    return tuple(found)


def option_of(name: str, hint: Any, field: "dataclasses.Field[Any]") -> Option:
    """Return the option that `option` declares elsewhere than in a class, as for a parameter."""
    field.name = name
    return _resolve(field, hint, field.metadata[_KEY])


def settings_text(cls: type, *, prefix: str) -> str:
    """Return the options of a spec as settings, two lines each: `train.lr=0.001` and what it is."""
    lines = []
    for each in options_of(cls):
        limits = f" [{each.limits}]" if each.limits else ""
        value = each.default_text or str(each.default)
        lines += [f"{prefix}{each.name}={value}", f"    {each.help}{limits}"]
    return "\n".join(lines)


def check_options(value: Any, *, has_flags: bool = False) -> None:
    """Require that every option of a spec keeps its limits; for `__post_init__`.

    `has_flags`: the command line sets them by flags, so its errors name those.
    """
    for each in options_of(type(value)):
        held = getattr(value, each.name)
        if has_flags:
            each = dataclasses.replace(each, name=f"{{{each.flag}|{each.name}}}")
        each.check(held)


def _resolve(field: "dataclasses.Field[Any]", hint: Any, declared: _Declared) -> Option:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [kind for kind in members if kind is not type(None)]
    words = tuple(
        word
        for kind in kinds
        if get_origin(kind) is Literal
        for word in get_args(kind)
        if isinstance(word, str)
    )
    plain = [kind for kind in kinds if get_origin(kind) is not Literal]
    own: Any = str if not plain else plain[0] if len(plain) == 1 else object
    typed = declared.typed or (str if declared.parse is not None else own)
    repeated = get_origin(typed) is tuple
    typed = get_args(typed)[0] if repeated else typed
    stated = {each.name: getattr(declared, each.name) for each in dataclasses.fields(declared)}
    return Option(
        name=field.name,
        type=own,
        optional=type(None) in members,
        repeated=repeated,
        default=field.default,
        **stated
        | {
            "flag": declared.flag or f"--{field.name.replace('_', '-')}",
            "label": declared.label or field.name.replace("_", " ").capitalize(),
            "choices": declared.choices or words,
            "typed": typed if typed in (int, float, bool) else str,
        },
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _written(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    return f"{value:g}" if isinstance(value, float) else str(value)
