"""A request as checked plain values by name, each with its type and its bounds; and responses.

A handler is `name(query, workspace)` and knows nothing of HTTP. It returns a dict (JSON), `Bytes`
(an array as it is in memory) or an iterator of dicts (one line each, as they are made).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from glassformer.lab.runs.table import OutsideRun
from glassformer.serve.http import Refusal
from glassformer.spec.errors import GlassError, InputError, MachineError, nearest
from glassformer.spec.own import OwnCodeRefused
from glassformer.spec.serialize import json_numbers


class Unknown(InputError):
    """No such run, step, key or page: 404."""


class Refused(InputError):
    """Not allowed: 403."""


class TooLarge(InputError):
    """More than the limits allow: 413."""


class Mistake(GlassError):
    """A bug of the server: 500."""


class Busy(MachineError):
    """Another job is running: 503, try again."""


class Unreachable(MachineError):
    """The server that the page points at does not answer, or not as it should: 502."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """An array's bytes, little-endian, row after row; `dtype` is float16 or uint8."""

    data: bytes
    shape: tuple[int, ...]
    dtype: str
    headers: Mapping[str, str] = field(default_factory=dict)


Answer = Mapping[str, Any] | Bytes | Iterator[Mapping[str, Any]]
Handler = Callable[["Query", Any], Answer]  # the second is the `Workspace`
#: Method, path with `{name}` parts, and handler.
Route = tuple[str, str, Handler]

_ABSENT: Any = object()


class Query:
    """The values of one request: parts of the path, options after `?`, and a JSON body."""

    def __init__(
        self,
        path: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = dict(path or {})
        self._options = dict(options or {})
        self._body = dict(body or {})

    def only(self, *names: str) -> "Query":
        """Refuse names that the handler does not read, so that a misspelled option is noticed."""
        for name in (*self._options, *self._body):
            if name not in names:
                raise InputError(f"there is no option {name[:60]!r}", hint=nearest(name, names))
        return self

    def has(self, name: str) -> bool:
        """Return True if it was given, and not as null."""
        return self._find(name) is not None

    def text(self, name: str, *, default: str = _ABSENT, most: int = 200) -> str:
        """Return a string of at most `most` characters."""
        value = self._value(name, default)
        if value is default:
            return str(default)
        if not isinstance(value, str):
            raise InputError(f"{name} must be a text")
        if len(value) > most:
            raise TooLarge(f"{name} has {len(value):,} characters, at most {most:,} are read")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"{name} holds half a character (a lone surrogate)") from error
        return value

    def choice(self, name: str, choices: tuple[str, ...], *, default: str = _ABSENT) -> str:
        """Return one of a few words."""
        value = self.text(name, default=default)
        if value is not default and value not in choices:
            raise InputError(f"{name} {value[:60]!r} is unknown", hint=nearest(value, choices))
        return value

    def integer(self, name: str, *, low: int, high: int, default: int = _ABSENT) -> int:
        """Return a whole number within bounds."""
        value = self._value(name, default)
        if value is default:
            return int(default)
        if name not in self._body and isinstance(value, str):
            digits = value.removeprefix("-")
            good = digits.isascii() and digits.isdigit() and len(digits) <= 18
            value = int(value) if good else None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InputError(f"{name} must be a whole number from {low:,} to {high:,}")
        return value

    def number(self, name: str, *, low: float, high: float, default: float = _ABSENT) -> float:
        """Return a finite number within bounds."""
        value = self._value(name, default)
        if value is default:
            return float(default)
        if name not in self._body and isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = None
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not low <= value <= high:  # which NaN is not
            raise InputError(f"{name} must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false; 1 or 0 after `?`."""
        value = self._value(name, default)
        if name not in self._body and isinstance(value, str):
            value = {"1": True, "0": False, "true": True, "false": False}.get(value)
        if not isinstance(value, bool):
            raise InputError(f"{name} must be true or false")
        return value

    def texts(self, name: str, *, most: int, characters: int = 200) -> tuple[str, ...]:
        """A list of strings: JSON's in a body, with commas after `?`; () where it is not given."""
        value = self._find(name)
        if value is None:
            return ()
        if name not in self._body and isinstance(value, str):
            value = [part for part in value.split(",") if part]
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise InputError(f"{name} must be a list of texts")
        if len(value) > most:
            raise TooLarge(f"{name} has {len(value):,} entries, at most {most:,} are read")
        return tuple(Query(body={name: part}).text(name, most=characters) for part in value)

    def _find(self, name: str) -> Any:
        for source in (self._path, self._options, self._body):
            if name in source:
                return source[name]
        return None

    def _value(self, name: str, default: Any) -> Any:
        value = self._find(name)
        if value is not None:
            return value
        if default is _ABSENT:
            raise InputError(f"{name} is missing")
        return default


def parse_body(data: bytes) -> dict[str, Any]:
    """Parse a JSON object without NaN and Infinity; json itself refuses what nests too deep."""
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise InputError("the body must be a JSON object")
    return value


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def to_json(value: Any) -> bytes:
    """Return JSON in ASCII; a number that is not finite becomes null."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(
            json_numbers(value, not_finite="null"), allow_nan=False, separators=(",", ":")
        )
    return text.encode("ascii")


_STATUS = {
    Refused: 403,
    OutsideRun: 403,
    Unknown: 404,
    TooLarge: 413,
    Mistake: 500,
    Unreachable: 502,
    MachineError: 503,
}


def status_of(error: GlassError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, Refusal):
        return error.status
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 400)


def problem(error: GlassError) -> dict[str, Any]:
    """Return what the page shows for an error."""
    return {"error": {"what": error.what, "where": error.where, "hint": page_hint(error)}}


def page_hint(error: GlassError) -> str:
    """Return a hint in terms of `glass explore`, which started the page."""
    hint = error.in_command().hint
    restart = hint and isinstance(error, OwnCodeRefused)
    return f"start the page again: glass explore {hint}" if restart else hint
