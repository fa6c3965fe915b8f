"""Response formats as tables over a model's tokens; run as a process of its own, confined.

A pattern or a schema is a client's program for the construction of a machine. The construction
counts its work and refuses what takes too much; the process bounds memory and CPU time once more,
and can be killed when the client leaves. It computes for nobody else, at a low priority.
"""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glassformer.adapters.chat.worker import confine
from glassformer.data.automata.construct import LONGEST_PATTERN, machine_of_regex
from glassformer.generation.constraint import TokenTexts, targets
from glassformer.spec.errors import InputError

#: States x tokens of a constraint.
MOST_ENTRIES = 1 << 23
#: Characters of a schema or of the tools of a request, as JSON.
LONGEST_SCHEMA = 200_000
#: What the process may use for one request, and how much it yields to others (`nice`): where all
#: cores are busy it still gets a tenth of one, so that a format is there after some seconds.
SECONDS, MEGABYTES, YIELDS = 2.0, 512, 10


# --- the process ----------------------------------------------------------------------------------

START = "import sys; sys.path += sys.argv[1:]; from glassformer.serve.patterns import main; main()"


def command() -> list[str]:
    """Return the command that starts the process, with this package and NumPy and nothing else."""
    places = []
    for name in ("glassformer", "numpy"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        places.append(str(Path(spec.origin).parents[1]))
    return [sys.executable, "-I", "-B", "-c", START, *places]


def main() -> None:
    """Answer requests from standard input: lines of JSON, an answer with the bytes of its table."""
    os.nice(YIELDS)
    confine(megabytes=MEGABYTES)
    texts: dict[str, TokenTexts] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request["model"]
        if "alone" in request:
            alone, behind = tuple(request["alone"]), tuple(request["behind"])
            texts[name] = TokenTexts(alone, behind, are_names=request["are_names"])
            continue
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        answer, table = _answer(request, texts[name])
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + table)
        sys.stdout.buffer.flush()


def _answer(request: Mapping[str, Any], texts: TokenTexts) -> tuple[dict[str, Any], bytes]:
    """Return the table of a format; or why it is refused."""
    try:
        machine = machine_of_regex(pattern_of(request), spaces=True)
        tokens = len(texts.alone)
        if machine.n_states * tokens > MOST_ENTRIES:
            size = f"{machine.n_states} states over {tokens} tokens"
            raise InputError(f"a machine of {size}", hint="a smaller schema or pattern")
        target_QV = targets(machine, texts)
    except InputError as error:
        return {"what": error.what, "hint": error.hint}, b""
    except (MemoryError, RecursionError):
        return {"what": f"it takes more than {MEGABYTES} megabytes", "hint": "a smaller one"}, b""
    ends = [*machine.ends, machine.ends[machine.start]]
    return {"shape": target_QV.shape, "ends": [bool(end) for end in ends]}, target_QV.tobytes()


def pattern_of(request: Mapping[str, Any]) -> str:
    """Return the regular expression of a format: its own, JSON's, a schema's, or a tool call's."""
    match request:
        case {"kind": "regex", "pattern": str(pattern)}:
            return pattern
        case {"kind": "json_schema", "schema": schema}:
            return json_pattern(schema)
        case {"kind": "tools", "tools": list(tools), "names": list(names)}:
            return call_pattern(tools, names)
        case _:
            return json_pattern({"type": "object"})


# --- JSON -----------------------------------------------------------------------------------------

#: Characters of a string are those of ASCII; others are written as escapes.
CHARACTER = r'([ !#-\[\]-~]|\\["\\/bfnrt]|\\u[0-9a-f][0-9a-f][0-9a-f][0-9a-f])'
STRING = f'"{CHARACTER}*"'
INTEGER = "-?(0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?"
COMMA, COLON = ", ?", ": ?"
#: Words of a schema that constrain nothing.
NOTES = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
)
#: How deep references and parts may nest; values without a schema nest this much less.
DEEPEST_SCHEMA, MOST_ITEMS = 12, 16
#: Parts of a schema that are translated, and the characters of all their patterns together: a part
#: that is referred to often is translated as often.
MOST_PARTS, MOST_CHARACTERS = 5_000, 50 * LONGEST_PATTERN
LONGEST_REFERENCE = 1_000
LITERAL = {"boolean": "(true|false)", "null": "null", "integer": INTEGER, "number": NUMBER}


def json_pattern(schema: Any) -> str:
    """Return a regular expression for the JSON texts of a schema, with properties in its order.

    A subset: types, enum, const, properties and required, items with minItems and maxItems,
    anyOf, and references to definitions that do not contain themselves. A keyword that is not
    among them is refused by name. Blanks stand behind `,` and `:` only, one or none.
    """
    return _Schema(schema).pattern(schema, "schema", 0)


class _Schema:
    """A schema with its definitions while it is translated."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.parts = self.characters = 0

    def pattern(self, schema: Any, where: str, depth: int) -> str:
        """Return the pattern of one part; refuse a schema as soon as it is too much work."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise _too_long(f"more than {MOST_PARTS:,} parts")
        made = self.translated(schema, where, depth)
        self.characters += len(_short(made))
        if self.characters > MOST_CHARACTERS:
            raise _too_long(f"parts of more than {MOST_CHARACTERS:,} characters together")
        return made

    def translated(self, schema: Any, where: str, depth: int) -> str:
        """Return the pattern of one part, by its keywords."""
        if depth > DEEPEST_SCHEMA:
            raise InputError(f"{where} nests too deeply, or contains itself", hint="flatten it")
        if schema is True or schema == {}:
            return self.anything(1)
        if not isinstance(schema, dict):
            raise InputError(f"{where} is no schema", hint="an object")
        rest = {key: value for key, value in schema.items() if key not in NOTES}
        if "$ref" in rest:
            self.only(rest, ("$ref",), where)
            return self.pattern(self.definition(rest["$ref"], where), where, depth + 1)
        for key in ("enum", "const"):
            if key in rest:
                self.only(rest, (key, "type"), where)
                return self.listed(rest[key] if key == "enum" else [rest[key]], where)
        if "anyOf" in rest:
            self.only(rest, ("anyOf",), where)
            parts = rest["anyOf"]
            if not isinstance(parts, list) or not parts:
                raise InputError(f"{where}.anyOf is no list of schemas")
            return _either(
                self.pattern(one, f"{where}.anyOf[{n}]", depth + 1) for n, one in enumerate(parts)
            )
        kind = rest.get("type", "object" if "properties" in rest else None)
        if isinstance(kind, list):
            return _either(
                self.pattern({**self.of_type(rest, one), "type": one}, where, depth + 1)
                for one in kind
            )
        match kind:
            case "object":
                return self.object_(rest, where, depth)
            case "array":
                return self.array(rest, where, depth)
            case "string":
                self.only(rest, ("type",), where)
                return STRING
            case "boolean" | "null" | "integer" | "number":
                self.only(rest, ("type",), where)
                return LITERAL[str(kind)]
            case _:
                raise InputError(f"{where} has the type {str(kind)[:40]!r}", hint="JSON's types")

    @staticmethod
    def of_type(rest: dict[str, Any], kind: Any) -> dict[str, Any]:
        """Return the keywords that belong to one of several types."""
        own = {
            "object": ("properties", "required", "additionalProperties"),
            "array": ("items", "minItems", "maxItems"),
        }
        others = {name for words in own.values() for name in words}
        kept = own.get(str(kind), ())
        return {k: v for k, v in rest.items() if k != "type" and (k in kept or k not in others)}

    @staticmethod
    def only(found: dict[str, Any], known: tuple[str, ...], where: str) -> None:
        """Refuse keywords that would be ignored."""
        for key in found:
            if key not in known:
                raise InputError(
                    f"{where} has the keyword {key[:40]!r}, which is not offered",
                    hint=f"keywords that are offered with it: {', '.join(known)}",
                )

    def definition(self, ref: Any, where: str) -> Any:
        """Return what a reference names: `#`, or a path of names from there."""
        found = self.root
        if not isinstance(ref, str) or not ref.startswith("#") or len(ref) > LONGEST_REFERENCE:
            raise InputError(f"{where} refers to another document", hint='"#/$defs/NAME"')
        for name in ref.removeprefix("#").split("/")[1:]:
            if not isinstance(found, dict) or name not in found:
                raise InputError(f"{where} refers to {ref[:60]!r}, which is not there")
            found = found[name]
        return found

    @staticmethod
    def listed(values: Any, where: str) -> str:
        """Return the pattern of some values as they are."""
        if not isinstance(values, list) or not values:
            raise InputError(f"{where} lists no value")
        return _either(_quoted(json.dumps(value)) for value in values)

    def object_(self, rest: dict[str, Any], where: str, depth: int) -> str:
        self.only(rest, ("type", "properties", "required", "additionalProperties"), where)
        properties, required = rest.get("properties"), rest.get("required", [])
        if isinstance(rest.get("additionalProperties"), dict):
            raise InputError(f"{where} has a schema of other properties", hint="name them")
        if properties is None:
            return self.anything(1, only="object")
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise InputError(f"{where} has no table of properties and list of required ones")
        for name in required:
            if not isinstance(name, str) or name not in properties:
                raise InputError(f"{where} requires {str(name)[:40]!r}, which has no schema")
        needed_ones = frozenset(required)
        members = [
            (
                _quoted(json.dumps(name))
                + COLON
                + self.pattern(part, f"{where}.properties.{name[:40]}", depth + 1),
                name in needed_ones,
            )
            for name, part in properties.items()
        ]
        later = ""  # the members from here on, behind another one
        first = ""  # the members from here on, as the first ones
        for member, needed in reversed(members):
            alone = member + later
            first = alone if needed else f"({alone}|{first})" if first else f"({alone})?"
            later = COMMA + member + later if needed else f"({COMMA}{member})?" + later
            _short(first)
        return rf"\{{{first}\}}"

    def array(self, rest: dict[str, Any], where: str, depth: int) -> str:
        self.only(rest, ("type", "items", "minItems", "maxItems"), where)
        least, most = rest.get("minItems", 0), rest.get("maxItems")
        for number in (least, 0 if most is None else most):
            if type(number) is not int or not 0 <= number <= MOST_ITEMS:
                raise InputError(f"{where} counts {number} items", hint=f"0 to {MOST_ITEMS}")
        item = self.pattern(rest.get("items", True), f"{where}.items", depth + 1)
        return rf"\[{_repeated(item, least, most)}\]"

    def anything(self, nested: int, *, only: str = "") -> str:
        """Return the pattern of any value whose arrays and objects nest this much."""
        plain = _either([STRING, NUMBER, "true", "false", "null"])
        inner = self.anything(nested - 1) if nested else plain
        object_ = rf"\{{{_repeated(STRING + COLON + inner, 0, None)}\}}"
        if only == "object":
            return object_
        return _either([plain, object_, rf"\[{_repeated(inner, 0, None)}\]"]) if nested else plain


def _short(pattern: str) -> str:
    """Return a pattern, or part of one, that is not too long; patterns of patterns grow fast."""
    if len(pattern) > LONGEST_PATTERN:
        raise _too_long(f"a pattern of more than {LONGEST_PATTERN:,} characters")
    return pattern


def _too_long(what: str) -> InputError:
    return InputError(f"the schema makes {what}", hint="a smaller schema")


def _either(parts: Iterable[str]) -> str:
    made, length = [], 0
    for part in parts:
        made.append(part)
        length += len(part) + 1
        if length > LONGEST_PATTERN:
            raise _too_long(f"a pattern of more than {LONGEST_PATTERN:,} characters")
    return f"({'|'.join(made)})"


def _repeated(item: str, least: int, most: int | None) -> str:
    """Return items with commas between them, at least and at most so many."""
    if most == 0:
        return ""
    if most is None:
        more = f"({COMMA}{item})" * max(least - 1, 0) + f"({COMMA}{item})*"
    else:
        more = f"({COMMA}{item})" * max(least - 1, 0)
        tail = ""
        for _ in range(most - max(least, 1)):
            tail = _short(f"({COMMA}{item}{tail})?")
        more += tail
    return _short(f"{item}{more}" if least else f"({item}{more})?")


def _quoted(text: str) -> str:
    """Return a pattern that matches this text alone."""
    _short(text)
    return _short("".join(c if c.isalnum() or c in ' "_,:-' else f"\\{c}" for c in text))


# --- tools ----------------------------------------------------------------------------------------

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def call_pattern(tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return a regular expression for one call of one of these tools, arguments by its schema."""
    parts: list[str] = []
    for function in (tool["function"] for tool in tools):
        _short("".join(parts))
        if function["name"] in names:
            schema = function.get("parameters") or {"type": "object", "properties": {}}
            arguments = json_pattern(schema)
            name = _quoted(json.dumps(function["name"]))
            parts.append(rf'\{{"name": {name}, "arguments": {arguments}\}}')
    return _short(f"{_quoted(OPEN)}{_either(parts)}{_quoted(CLOSE)}")
