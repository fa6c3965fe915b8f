"""The fields of a JSON object, taken out by type; and the error that a client reads.

`BadRequest` carries what OpenAI's clients expect of an error: a message, a type, the field, a code.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from glassformer.spec.errors import GlassError, nearest

#: How deep JSON may nest, and how many characters of a value an error quotes.
DEEPEST, QUOTED = 64, 60


class BadRequest(Exception):
    """A request that is refused, as OpenAI's clients read it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param
        self.code, self.kind, self.retry_after = code, kind, retry_after

    def body(self) -> dict[str, Any]:
        """Return the error's JSON."""
        fields = {"type": self.kind, "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **fields}}


def refused(error: GlassError, *, param: str | None = None) -> BadRequest:
    """Return an error of ours as one for a client: what and what to do, never where on a disk."""
    hint = f" ({error.hint})" if error.hint else ""
    return BadRequest(f"{error.what}{hint}", param=param, code="invalid_value")


#: Texts and names of fields in a body.
MOST_TEXTS = 20_000


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the object in a body; numbers that JSON does not have are refused."""

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    texts = (data.count(b'"') - data.count(b'\\"')) // 2
    if texts > MOST_TEXTS:  # the interpreter is held while a body is parsed: nobody is answered
        raise BadRequest(f"The body has {texts:,} texts and names; at most {MOST_TEXTS:,}")
    try:
        found = json.loads(data, parse_constant=no_constant)
        depth = _depth(found)
    except (ValueError, RecursionError) as error:
        text = str(error)[:200] if isinstance(error, ValueError) else "it nests too deeply"
        raise BadRequest(f"The body is not JSON: {text}", code="invalid_json") from None
    if depth > DEEPEST:
        raise BadRequest(f"The body nests more than {DEEPEST} levels", code="invalid_json")
    if not isinstance(found, dict):
        raise BadRequest("The body is not a JSON object", code="invalid_json")
    return found


def _depth(value: Any) -> int:
    depth, layer = 0, [value]
    while layer:
        depth += 1
        parts = [one for one in layer if isinstance(one, dict | list)]
        layer = [v for one in parts for v in (one.values() if isinstance(one, dict) else one)]
        if depth > DEEPEST:
            break
    return depth


def _shown(value: Any) -> str:
    """Return the beginning of a value as JSON; the rest is not looked at."""
    shown = ""
    value = value[: QUOTED + 1] if isinstance(value, str) else value
    for piece in json.JSONEncoder(default=str).iterencode(value):
        shown += piece[: QUOTED + 1]
        if len(shown) > QUOTED:
            return f"{shown[:QUOTED]}…"
    return shown


class Fields:
    """The fields of one JSON object; `path` is how errors name it."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def name(self, key: str) -> str:
        """Return a field's name with where it is."""
        return f"{self.path}.{key}" if self.path else key

    def only(self, known: Sequence[str]) -> "Fields":
        """Refuse fields of other names."""
        for key in self.values:
            if key not in known:
                near = nearest(key[:QUOTED], known)
                raise BadRequest(
                    f"Unrecognized request argument supplied: {key[:QUOTED]} ({near})",
                    param=self.name(key[:QUOTED]),
                    code="unknown_parameter",
                )
        return self

    def wrong(self, key: str, wanted: str) -> BadRequest:
        """Return the error of a value that is not what was wanted."""
        shown = _shown(self.values.get(key))
        return BadRequest(
            f"Invalid value for '{self.name(key)}': expected {wanted}, got {shown}.",
            param=self.name(key),
            code="invalid_type" if key in self.values else "missing_required_parameter",
        )

    def unsupported(self, key: str, why: str) -> BadRequest:
        """Return the error of a field that this server cannot honour."""
        return BadRequest(
            f"Unsupported value for '{self.name(key)}': {why}.",
            param=self.name(key),
            code="unsupported_parameter",
        )

    def has(self, key: str) -> bool:
        """Return True if it was given, and not as null."""
        return self.values.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string without half characters."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise self.wrong(key, "a string without lone surrogates") from None
        return value

    def integer(self, key: str, default: int | None, *, low: int, high: int) -> int | None:
        """Return a whole number within bounds."""
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is float and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float, *, low: float, high: float) -> float:
        """Return a finite number within bounds."""
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "a boolean")
        return value

    def list_(self, key: str, *, most: int) -> list[Any]:
        """Return a list of at most so many values; empty without one."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(key, f"an array of at most {most}")
        return value

    def object_(self, key: str) -> "Fields | None":
        """Return the fields of an object, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, self.name(key))
