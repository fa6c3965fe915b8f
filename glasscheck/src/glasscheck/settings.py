"""`[tool.glasscheck]` in pyproject.toml: which models a project checks, how, and by what rules.

[tool.glasscheck]
models = ["my_package.models:tiny"]
baseline = "glasscheck.toml"
require = ["THE NAME OF A CHECK"]
strict = true

[tool.glasscheck.call]              # arguments of every call of every model
return_loss = false

[tool.glasscheck.names]             # what an argument is, where its name does not tell
cache = "memories"

[[tool.glasscheck.model]]           # one model with settings of its own
factory = "my_package.models:recurrent"
names = { tokens = "words" }
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glasscheck.errors import FileError, InputError, nearest

KNOWN = ("models", "model", "baseline", "require", "strict", "allow_errors", "deep", "only", "call",
         "names", "bidirectional")  # fmt: skip
OF_A_MODEL = ("factory", "call", "names", "bidirectional")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that a project checks, and how it is called."""

    factory: str
    call: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    bidirectional: bool = False

    def options(self) -> dict[str, Any]:
        """Return what `verify` is told about it, as far as anything is."""
        told: dict[str, Any] = {"call": dict(self.call), "names": dict(self.names)}
        told["causal"] = False if self.bidirectional else None
        return {name: value for name, value in told.items() if value not in ({}, None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What pyproject.toml says, or nothing."""

    models: tuple[Model, ...] = ()
    baseline: str | None = None
    require: tuple[str, ...] = ()
    strict: bool = False
    allow_errors: bool = False
    deep: bool = False
    only: str | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def of(self, reference: str) -> Model:
        """Return the settings of a model: its own, or those of all."""
        known = {model.factory: model for model in self.models}
        return known.get(reference) or Model(factory=reference, call=self.call, names=self.names)


def settings_of(folder: Path) -> Settings:
    """Read the settings of the project in a folder; without a section, none."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        return Settings()
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("glasscheck", {})
    except (OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read: {error}") from error
    _known(told, KNOWN, "[tool.glasscheck]")
    call, names = told.get("call", {}), told.get("names", {})
    models = [
        Model(factory=one, call=call, names=names, bidirectional=bool(told.get("bidirectional")))
        for one in told.get("models", [])
    ]
    for one in told.get("model", []):
        _known(one, OF_A_MODEL, "[[tool.glasscheck.model]]")
        own = {"call": {**call, **one.get("call", {})}, "names": {**names, **one.get("names", {})}}
        models.append(Model(**{**one, **own}))
    baseline = told.get("baseline")
    return Settings(
        models=tuple(models),
        baseline=None if baseline is None else str(folder / baseline),
        require=tuple(told.get("require", ())),
        strict=bool(told.get("strict")),
        allow_errors=bool(told.get("allow_errors")),
        deep=bool(told.get("deep")),
        only=told.get("only"),
        call=call,
        names=names,
    )


def _known(told: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in told:
        if name not in known:
            raise InputError(f"no setting '{name}'", where=where, hint=nearest(name, known))


def shard_of(text: str | None) -> tuple[int, int] | None:
    """Read `3/8`: the third of eight parts."""
    if text is None:
        return None
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise InputError(f"--shard {text} is no part of a whole", hint="--shard 3/8: part 3 of 8")
    return int(part), int(parts)
