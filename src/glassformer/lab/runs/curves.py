"""The curves of a run: its metrics.jsonl and alerts.jsonl as series of numbers, nothing drawn.

Terminal, figure, table, report and page read them here. A last line without its end is left for
the next reading; a step that comes again (a run that was resumed) replaces what it was before.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.lab.runs.metrics_file import (
    MOST,
    BadLine,
    Floats,
    Ints,
    Lines,
    extremes,
    parse_line,
    read_lines,
    smooth,
)
from glassformer.spec.errors import FileError, InputError, MachineError, nearest

#: A metrics file beyond this is not read at once.
LIMIT = 1 << 30
#: The quantities of the x axis.
AXES = ("step", "tokens", "time")


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens and seconds of training before a reading begins, for one that goes on at an offset."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AlertMark:
    """A line of alerts.jsonl."""

    step: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over the run; `tokens` and `seconds` are all that was spent up to each step."""

    name: str
    step: Ints
    tokens: Ints
    seconds: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.step)

    def x(self, axis: str = "step") -> Floats:
        """Return the points' x values: step, tokens, or time in seconds."""
        if axis not in AXES:
            raise InputError(f"no axis '{axis}'", hint=nearest(axis, AXES))
        chosen = {"step": self.step, "tokens": self.tokens, "time": self.seconds}[axis]
        return chosen.astype(np.float64)

    def smoothed(self, span: float | None = None) -> "Series":
        """Return the same points, each the mean over about `span` of them around it."""
        return Series(
            self.name, self.step, self.tokens, self.seconds, smooth(self.value, span=span)
        )

    def thinned(self, most: int = MOST) -> "Series":
        """Return at most `most` points: lowest and highest of each bucket of neighbours."""
        kept = extremes(self.value, most=most)
        return Series(
            self.name, self.step[kept], self.tokens[kept], self.seconds[kept], self.value[kept]
        )


@dataclass(frozen=True, slots=True)
class Curves:
    """All series of one run. `next` is the byte at which the next reading goes on.

    `restarted`: the file had been cut back below `start`, so everything was read again.
    """

    run: str
    series: Mapping[str, Series]
    alerts: tuple[AlertMark, ...]
    next: int = 0
    spent: Spent = field(default_factory=Spent)
    restarted: bool = False

    def __getitem__(self, name: str) -> Series:
        if name not in self.series:
            raise InputError(
                f"the run {self.run} has no curve '{name}'", hint=nearest(name, self.series)
            )
        return self.series[name]

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} ({len(one)})" for name, one in self.series.items())
        return f"Curves({self.run}: {counts or 'nothing yet'}; {len(self.alerts)} alerts)"

    @property
    def last_step(self) -> int:
        """The newest step with any value; 0 for a run that has not begun."""
        return max((int(one.step[-1]) for one in self.series.values() if len(one)), default=0)

    def frame(self) -> Any:
        """Return `rows()` as a pandas data frame; a value that is missing is NaN."""
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise MachineError(
                "a data frame needs pandas, which is not installed",
                hint="pip install pandas; rows() is a list of dicts and needs nothing",
            ) from error
        fixed = ["run", "step", "tokens", "seconds"]
        rows = self.rows()
        frame = pandas.DataFrame(rows, columns=[*fixed, *self.series])
        return frame.astype(dict.fromkeys(self.series, "float64"))

    def rows(self) -> list[dict[str, Any]]:
        """Return a wide table: rows are steps, columns series, None where a series has no value."""
        table: dict[int, dict[str, Any]] = {}
        for one in self.series.values():
            for step, tokens, seconds, value in zip(
                one.step.tolist(),
                one.tokens.tolist(),
                one.seconds.tolist(),
                one.value.tolist(),
                strict=True,
            ):
                start = {"run": self.run, "step": step, "tokens": tokens, "seconds": seconds}
                table.setdefault(step, start)[one.name] = value
        empty: dict[str, Any] = dict.fromkeys(self.series)
        fixed = ("run", "step", "tokens", "seconds")
        return [
            {name: row[name] for name in fixed} | empty | row
            for _, row in sorted(table.items(), key=lambda item: item[0])
        ]


def history(run: str | Path) -> Curves:
    """Return everything that a run measured: `rows()`, `frame()`, or a series by its name.

    `run` is the folder of a run, `runs/demo`; `gf.train(...).history` is the same.
    """
    return read_curves(Path(run))


def read_curves(folder: Path, *, start: int = 0, spent: Spent | None = None) -> Curves:
    """Read a run's curves from byte `start` of its metrics on, and all of its alerts.

    `spent` is what an earlier reading returned, so that tokens and time go on from there.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file() and not (folder / "run.json").is_file():
        raise InputError(
            "no metrics.jsonl here, so this is not a run",
            where=str(folder),
            hint="glass list shows the runs",
        )
    if start < 0:
        raise InputError(f"cannot read from byte {start}", hint="0 is the beginning")
    data, begin = _read(path, start)
    restarted = begin != start
    whole = data.rfind(b"\n") + 1
    try:
        lines = read_lines(data[:whole])
    except BadLine as error:
        raise _bad(path, error, whole=begin == 0) from error
    series, after = _series(lines, Spent() if restarted or spent is None else spent)
    return Curves(
        run=folder.resolve().name,
        series=series,
        alerts=tuple(_alerts(folder / "alerts.jsonl")),
        next=begin + whole,
        spent=after,
        restarted=restarted,
    )


def _series(lines: Lines, before: Spent) -> tuple[dict[str, Series], Spent]:
    """Return each column over what was spent up to its lines; loss first, derived ones last."""
    tokens = before.tokens + np.cumsum(lines.tokens)
    seconds = np.cumsum(np.concatenate([[before.seconds], lines.seconds]))[1:]
    made = {}
    for name in sorted(lines.columns, key=lambda name: name == "tokens_per_second"):
        number, value = lines.columns[name]
        kept = _lasting(lines.step[number])
        at = number[kept]
        made[name] = Series(name, lines.step[at], tokens[at], seconds[at], value[kept])
    after = Spent(int(tokens[-1]), float(seconds[-1])) if len(tokens) else before
    return made, after


def _lasting(step: Ints) -> "np.ndarray":
    """Return True where no later point has this step or an earlier one, which would replace it."""
    lowest_after = np.minimum.accumulate(step[::-1])[::-1][1:]
    return np.append(step[:-1] < lowest_after, True)


def _read(path: Path, start: int) -> tuple[bytes, int]:
    """Read the bytes from `start` on, or from 0 if no line begins there any more."""
    if not path.is_file():
        return b"", 0
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if start:
            file.seek(start - 1)
            start = start if file.read(1) == b"\n" else 0
        if size - start > LIMIT:
            raise FileError(f"metrics.jsonl has {size:,} bytes", where=str(path.parent))
        file.seek(start)
        return file.read(LIMIT), start


def _bad(path: Path, error: BadLine, *, whole: bool) -> FileError:
    which = f"line {error.number}" if whole else "a line"
    return FileError(f"{path.name}: {which} cannot be read", where=str(path.parent))


def _alerts(path: Path) -> Iterator[AlertMark]:
    if not path.is_file():
        return
    data, _ = _read(path, 0)
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            found = parse_line(line, number)
        except BadLine as error:
            raise _bad(path, error, whole=True) from error
        yield AlertMark(found["step"], str(found.get("kind", "")), str(found.get("message", "")))
