"""What an executor runs, declared as a table of types and fields, and what it lacks, derived.

The types are kinds of the program, specs inside their fields, or any other specs: of a training, a
block, a quantization scheme.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any


class _Any:
    """Every value of a field."""

    def __repr__(self) -> str:
        return "ANY"


ANY = _Any()

#: What an executor runs: kinds (and types of specs inside their fields) with, for each field, the
#: values that it takes, or `ANY`. A field that is not named must have its default; a field without
#: one is a size, and every executor of its kind takes it.
Runs = Mapping[type, Mapping[str, "Collection[Any] | _Any"]]


def lacks(value: Any, runs: Runs) -> Iterator[str]:
    """Yield what is not declared of a kind, or of a spec inside one."""
    cls = type(value)
    if cls not in runs:
        yield cls.__name__
        return
    taken = runs[cls]
    for one in fields(cls):
        held = getattr(value, one.name)
        if one.name not in taken:
            default = one.default
            if default is not dataclasses.MISSING and held != default:
                yield f"{cls.__name__} {one.name}={shortened(held)}"
        elif isinstance(allowed := taken[one.name], _Any):
            if dataclasses.is_dataclass(held):
                yield from lacks(held, runs)
        elif held not in allowed:
            yield f"{cls.__name__} {one.name}={shortened(held)}"


def every_field(cls: type, **only: Collection[Any]) -> Mapping[str, Collection[Any] | _Any]:
    """Return the fields of a kind or spec with every value, but for those that are given."""
    return {each.name: only.get(each.name, ANY) for each in fields(cls)}


def shortened(value: Any) -> str:
    """Return the value of a field in few letters."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else repr(value)
