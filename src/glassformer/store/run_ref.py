"""References to a run and one of its checkpoints: `RUN`, `RUN@last`, `RUN@120`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from glassformer.spec.errors import InputError
from glassformer.spec.units import plain_digits
from glassformer.store.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class RunRef:
    """A path and, behind `@`, the checkpoint: `best` (also when empty), `last` or a step.

    A model of the Hugging Face cache is written the same way, with its revision behind the `@`.
    """

    path: str
    step: str = ""

    @classmethod
    def parse(cls, text: str | Path) -> Self:
        """Split a text at its first `@`."""
        path, _, step = str(text).partition("@")
        return cls(path, step)

    def __str__(self) -> str:
        return f"{self.path}@{self.step}" if self.step else self.path

    @property
    def folder(self) -> Path:
        """The run's folder, without the checkpoint."""
        return Path(self.path)

    @property
    def directory(self) -> RunDirectory:
        """The files of the run."""
        return RunDirectory(self.folder)

    def checkpoint(self) -> Path:
        """Return the folder of this checkpoint; raise if the run has none of that name."""
        run = self.directory
        steps = run.steps()
        if self.step in ("", "best", "last"):
            step = run.pointed(self.step or "best") or run.pointed("last") or steps[-1]
            return run.step_folder(step)
        number = plain_digits(self.step)
        if number is None or number not in steps:
            known = ", ".join(map(str, steps))
            raise InputError(
                f"no checkpoint '{self.step}' in {self.folder}", hint=f"best, last, {known}"
            )
        return run.step_folder(number)
