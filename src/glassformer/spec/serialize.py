"""Convert specs to and from plain data, strictly, and apply dotted overrides.

Reading is driven by the types of the spec classes: an unknown key, a wrong type or a missing value
is an error that names the path; all problems of one document are reported together.
"""

import dataclasses
import functools
import json
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from glassformer.spec.checks import shorthands_of
from glassformer.spec.errors import OTHER_WORDS, InputError, nearest, nearest_kind
from glassformer.spec.own import Settings

T = TypeVar("T")
_BAD = object()  # stands for a value that could not be read; the reason is in the list of problems


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def to_dict(node: Any) -> dict[str, Any]:
    """Return plain data for JSON. A node whose field allows several types carries its `kind`."""
    hints, data = _hints(node.__class__), {}
    keys = {held: key for key, held in shorthands_of(type(node)).items()}
    for field in dataclasses.fields(node):
        value, hint = getattr(node, field.name), hints[field.name]
        if (key := keys.get((field.name, type(value).__name__))) is not None:
            data[key] = _write(value, type(value))
        else:
            data[field.name] = _write(value, hint)
    return data


def _write(value: Any, hint: Any) -> Any:
    if isinstance(value, tuple):
        return [_write(item, get_args(hint)[0]) for item in value]
    if isinstance(value, Settings):
        return value.to_dict()
    if not dataclasses.is_dataclass(value):
        return value
    kind = {"kind": type(value).__name__} if len(_spec_classes(hint)) > 1 else {}
    return kind | to_dict(value)


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """Build a spec from plain data; every problem is named with its path."""
    problems: list[str] = []
    value = _read(cls, data, "", problems)
    if problems:
        raise InputError("\n  ".join(problems) if len(problems) == 1 else _several(problems))
    return value  # type: ignore[no-any-return]


def _several(problems: list[str]) -> str:
    return f"{len(problems)} problems:\n  " + "\n  ".join(problems)


def to_json(node: Any) -> str:
    """Return the text of `spec.json`."""
    return json.dumps(to_dict(node), indent=2, allow_nan=False) + "\n"


def from_json(cls: type[T], text: str) -> T:
    """Build a spec from the text that `to_json` makes."""
    try:
        data = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5,000 digits
        raise InputError(f"not JSON: {error}") from error
    return from_dict(cls, data)


def json_numbers(value: Any, *, not_finite: Literal["text", "null"] = "text") -> Any:
    """Return data for JSON, which has no word for NaN and infinity.

    In whatever is kept or printed for scripts they become the text "nan", "inf" or "-inf", which
    `float` reads back: a null would hide that a run diverged. In what a page or a table shows they
    become null, a gap.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) if not_finite == "text" else None
    if isinstance(value, Mapping):
        return {key: json_numbers(item, not_finite=not_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_numbers(item, not_finite=not_finite) for item in value]
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of pairs for `json.loads`, which refuses a key that occurs twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key occurs twice")
    return made


def override(node: T, *assignments: str | Iterable[str], **fields: Any) -> T:
    """Return a spec with some fields changed, by `path=value` strings, lists of them, or keywords.

    `override(spec, "decoder.dropout=0.1", "position=Rotary", d_model=64, position=Rotary())`.
    Where the path meets a tuple, a number picks one item and a field name means every item:
    `decoder.layers.count=2`, `decoder.layers.0.block.ffn.d_ff=64`. A path is a keyword too:
    `**{"decoder.layers.count": 2}`.
    """
    texts = [
        text for given in assignments for text in ([given] if isinstance(given, str) else given)
    ]
    data, errors = to_dict(node), []
    for assignment in (*texts, *fields.items()):
        try:
            if isinstance(assignment, str):
                path, equals, text = assignment.partition("=")
                if not equals or not path:
                    raise InputError(f"'{assignment}' is not an override", hint="write path=value")
                value = _parse(text)
            else:
                path, value = assignment
            _assign(data, path.split("."), value, path)
        except _UnknownKey as error:
            errors.append(InputError(error.what, hint=_meant(path, error.key, error.known, data)))
        except InputError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise InputError(_several([f"{error.what} ({error.hint})" for error in errors]))
    return from_dict(type(node), data)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


#: The keys of a block's mixer: of an attention, and of any other kind.
ALIKE = {"mixer": "attention", "attention": "mixer"}


def _assign(data: Any, keys: list[str], value: Any, path: str) -> None:
    key, rest = keys[0], keys[1:]
    if isinstance(data, dict) and key not in data and ALIKE.get(key) in data:
        if not rest:
            del data[ALIKE[key]]
            data[key] = value
            return
        key = ALIKE[key]
    if isinstance(data, list):
        if not key.isdigit():
            for item in data:
                _assign(item, keys, value, path)
            return
        if int(key) >= len(data):
            raise InputError(f"{path}: there is no item {key}", hint=f"there are {len(data)}")
        index: Any = int(key)
    else:
        if not isinstance(data, dict):
            raise InputError(f"{path}: '{data}' has no fields")
        if key not in data and not _is_open(path, keys):
            raise _UnknownKey(path, key, data)
        index = key
    if rest:
        _assign(data[index], rest, value, path)
    else:
        data[index] = value


class _UnknownKey(InputError):
    """A key that its table does not have."""

    def __init__(self, path: str, key: str, known: Mapping[str, Any]) -> None:
        super().__init__(f"{path}: unknown key '{key}'")
        self.key, self.known = key, known


def _meant(path: str, key: str, here: Mapping[str, Any], whole: dict[str, Any]) -> str:
    """Return a hint: the field that another word stands for, one of that name, or the nearest.

    A word that is nearly a key of its table is that key misspelled.
    """
    paths = list(_paths(whole))
    before = path[: len(path) - len(path.rpartition(key)[1] + path.rpartition(key)[2])]
    other = OTHER_WORDS.get(key)
    for full in () if other is None else (other, other.removeprefix("model.")):
        if full in paths:
            return f"did you mean '{full}'?"
    near = nearest(key, here)
    if not near.startswith("did you mean"):
        same = [full for full in paths if full.endswith(f".{key}")]
        if below := [full for full in same if full.startswith(before)]:
            return f"did you mean '{min(below, key=len)}'?"
    return near


def _paths(data: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every field; the items of a list share their paths."""
    for item in data if isinstance(data, list) else [data]:
        for key, value in item.items() if isinstance(item, dict) else ():
            full = f"{prefix}{key}"
            yield full
            yield from _paths(value, f"{full}.")


def _is_open(path: str, keys: list[str]) -> bool:
    """True if a key may be new: the options of a user's own part are not known here."""
    return path.split(".")[: -len(keys)][-1:] == ["options"]


# --- reading by type ----------------------------------------------------------------------------


def _spec_classes(hint: Any) -> list[type]:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)]


def _read(hint: Any, value: Any, path: str, problems: list[str]) -> Any:
    if dataclasses.is_dataclass(value):  # a spec that Python has made already
        known = {cls.__name__: cls for cls in _spec_classes(hint)}
        if isinstance(value, tuple(known.values())):
            return value
        return _bad(problems, path, f"{type(value).__name__} is none of {', '.join(known) or hint}")
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        classes = _spec_classes(hint)
        if len(classes) > 1:
            return _read_variant(classes, value, path, problems)
        if isinstance(value, str) and str in get_args(hint):
            return value
        words = [o for o in get_args(hint) if get_origin(o) is Literal]
        inner = classes or [o for o in get_args(hint) if o is not type(None)]
        if words and isinstance(value, str):  # one of some words, or a spec
            return _read(words[0], value, path, problems)
        return _read(inner[0], value, path, problems)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return _bad(problems, path, f"{value!r} is not a list")
        return tuple(
            _read(get_args(hint)[0], v, f"{path}.{i}", problems) for i, v in enumerate(value)
        )
    if origin is Literal:
        if isinstance(value, bool) and {"on", "off"} <= {*get_args(hint)}:
            value = "on" if value else "off"
        if value in get_args(hint):
            return value
        choices = [str(choice) for choice in get_args(hint)]
        return _bad(problems, path, f"unknown value {value!r}; {nearest(str(value), choices)}")
    if hint is Settings:
        if not isinstance(value, Mapping):
            return _bad(problems, path, f"{value!r} is not a table of options")
        return _build(lambda: Settings(value), path, problems)
    if dataclasses.is_dataclass(hint):
        return _read_node(hint, value, path, problems)
    return _read_scalar(hint, value, path, problems)


def _read_scalar(hint: Any, value: Any, path: str, problems: list[str]) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint:
        return _bad(problems, path, f"{value!r} is not {_words(hint)}")
    if hint is float and not math.isfinite(value):
        return _bad(problems, path, f"{value} is not a finite number")
    return value


def _read_variant(classes: list[type], value: Any, path: str, problems: list[str]) -> Any:
    kinds = {cls.__name__: cls for cls in classes}
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping) or "kind" not in value:
        return _bad(problems, path, f"needs a kind; known: {', '.join(sorted(kinds))}")
    kind = str(value["kind"])
    if kind not in kinds:
        return _bad(problems, path, f"unknown kind '{kind}'; {nearest_kind(kind, kinds)}")
    rest = {key: item for key, item in value.items() if key != "kind"}
    return _read_node(kinds[kind], rest, path, problems)


def _read_node(cls: Any, value: Any, path: str, problems: list[str]) -> Any:
    short = getattr(cls, "from_number", None)
    if short is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _build(lambda: short(float(value)), path, problems)
    if not isinstance(value, Mapping):
        return _bad(problems, path, f"{value!r} is not a table of fields")
    hints, fields = _hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    shorthands = shorthands_of(cls)
    for key, item in value.items():
        below = f"{path}.{key}" if path else str(key)
        name, kind = shorthands.get(key, (key, ""))
        if name not in fields:
            _bad(problems, below, f"unknown key; {nearest(str(key), (*shorthands, *fields))}")
        elif name in arguments:
            arguments[name] = _bad(problems, below, f"{name} is given twice")
        else:
            kinds = {each.__name__: each for each in _spec_classes(hints[name])}
            arguments[name] = _read(kinds.get(kind, hints[name]), item, below, problems)
    for name, field in fields.items():
        if name not in arguments and field.default is dataclasses.MISSING:
            arguments[name] = _bad(problems, f"{path}.{name}" if path else name, "missing")
    if any(_is_bad(argument) for argument in arguments.values()):
        return _BAD
    return _build(lambda: cls(**arguments), path, problems)


def _is_bad(argument: Any) -> bool:
    return argument is _BAD or (isinstance(argument, tuple) and any(map(_is_bad, argument)))


def _build(make: Any, path: str, problems: list[str]) -> Any:
    try:
        return make()
    except InputError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return _bad(problems, path, f"{error.what}{hint}")


def _bad(problems: list[str], path: str, what: str) -> Any:
    problems.append(f"{path}: {what}" if path else what)
    return _BAD


def check_scalar(cls: type, name: str, text: str, *, path: str) -> None:
    """Refuse a value of the wrong kind for a field that is a number, a text or a yes or no."""
    hint = _hints(cls)[name]
    if hint not in (int, float, bool, str):
        return
    problems: list[str] = []
    _read_scalar(hint, _parse(text), path, problems)
    if problems:
        raise InputError(problems[0])


def _words(hint: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(
        hint, str(hint)
    )
