"""Names of parts in users' own files: a task, a tokenizer, an optimizer, a position.

A spec names such a part by file (or module) and class, the SHA-256 of the file, and the options of
its constructor. Nothing is imported here: `data/own_code.py` does that, where the user consents.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from glassformer.spec.checks import at_least, spec
from glassformer.spec.errors import InputError

SOURCE = re.compile(r"(?P<module>[^:]+):(?P<name>[A-Za-z_]\w*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class OwnCodeRefused(InputError):
    """Code of a run's or a model's author that the user has not allowed to run."""


class Settings(Mapping[str, Any]):
    """Options by name: texts, numbers, true or false, and lists of them. Frozen and hashable."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = {name: _value(name, value) for name, value in (values or {}).items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._values.items(), key=lambda item: item[0])))

    def __repr__(self) -> str:
        return f"Settings({dict(sorted(self._values.items()))!r})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self._values.items()
        }


def _value(name: str, value: Any) -> Any:
    if not name.isidentifier():
        raise InputError(f"{name!r} is not the name of an option")
    if isinstance(value, (list, tuple)):
        return tuple(_value(name, item) for item in value)
    if value is not None and not isinstance(value, (str, int, float, bool)):
        raise InputError(f"option {name}: {value!r} is no text, number, true or false")
    return value


@spec
class OwnPart:
    """A class in a user's file: `my_task.py:MyTask` or `package.module:MyTask`.

    `sha256` is that of the file. `options` are keyword arguments of the class.
    """

    source: str
    sha256: str
    options: Settings = Settings()

    def __post_init__(self) -> None:
        check_source(self.source)
        if not _SHA256.fullmatch(self.sha256):
            raise InputError(f"{self.sha256[:80]!r} is no SHA-256", hint="64 hexadecimal digits")

    @property
    def class_name(self) -> str:
        """`MyTask` of `my_task.py:MyTask`."""
        return self.source.rpartition(":")[2]


@spec
class OwnTask(OwnPart):
    """A subclass of `glassformer.data.task.Task`."""


@spec
class OwnTokenizer(OwnPart):
    """A subclass of `glassformer.data.tokenizers.own.TrainedTokenizer`."""


@spec
class OwnOptimizer(OwnPart):
    """A subclass of `torch.optim.Optimizer`; torch only."""

    def state_size(self, parameter: object) -> int:
        """Refuse to count the numbers kept for a parameter, which only its code knows."""
        raise InputError(f"how much {self.source} keeps is not known")


@spec
class OwnSchedule(OwnPart):
    """A class with `share(step, steps)`, which returns the rate as a fraction of `train.lr`."""

    def share(self, step: int, steps: int) -> float:
        """Refuse to compute a rate, which only its code knows: `data.own_code.learning_rate`."""
        raise InputError(f"the rates of {self.source} are not known")


@spec
class OwnParameter:
    """A tensor that a user's part learns, sampled from a normal distribution of this deviation."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.02

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise InputError(f"{self.name!r} cannot be the name of a parameter")
        for size in self.shape:
            at_least(f"size of {self.name}", size)
        if not 0.0 <= self.std < float("inf"):
            raise InputError(f"std {self.std} of {self.name} is negative or not finite")


@spec
class OwnPosition(OwnPart):
    """A torch module that adds positions to the embeddings; torch only.

    `parameters` repeats what the class declares, so that a model can be counted without its code.
    """

    parameters: tuple[OwnParameter, ...] = ()

    def __post_init__(self) -> None:
        OwnPart.__post_init__(self)
        names = [parameter.name for parameter in self.parameters]
        if len(set(names)) < len(names):
            raise InputError(f"{self.source} declares a parameter twice")

    @property
    def summary(self) -> str:
        """It in words."""
        return f"positions of your own ({self.source})"


def check_source(source: str) -> None:
    """Require `FILE.py:CLASS` or `package.module:CLASS`."""
    if not SOURCE.fullmatch(source) or len(source) > 1_000:
        raise InputError(
            f"{source[:80]!r} names no class in a file",
            hint="my_task.py:MyTask, or package.module:MyTask",
        )


def is_source(text: str) -> bool:
    """Return True if a text names a class in a file, `my_task.py:MyTask`, or in a module."""
    match = SOURCE.fullmatch(text)
    if match is None:
        return False
    module = match["module"]
    return module.endswith(".py") or all(word.isidentifier() for word in module.split("."))


#: Packages declare their parts here: `name = "package.module:Class"`.
GROUP = "glassformer.parts"


def installed_parts() -> dict[str, str]:
    """Return installed parts by name: `package.module:Class`; nothing is imported."""
    import importlib.metadata  # a quarter of the time that `glass --help` takes

    found = importlib.metadata.entry_points(group=GROUP)
    return {point.name: point.value for point in found if is_source(point.value)}
