"""The curves of a run: its metrics.jsonl and alerts.jsonl as series of numbers, nothing drawn.

Terminal, figure, table, report and page read them here. A last line without its end is left for
the next reading; a step that comes again (a run that was resumed) replaces what it was before.
"""

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.spec.errors import FileError, InputError, MachineError, nearest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Points a drawn series has at most: more than a screen has columns.
MOST = 1_500
#: The default span of the smoothed line, as a share of its points.
SPAN_SHARE = 0.02


def default_span(count: int) -> float:
    """Return the default span of the mean: a fiftieth of the points, if that is at least two."""
    share = SPAN_SHARE * count
    return share if share >= 2 else 1.0


def smooth(values: Floats, *, span: float | None = None) -> Floats:
    """Return a centred mean over about `span` points, taken twice, so that nothing lags behind.

    The window is as long to the left as to the right. The ends, where it does not fit, continue the
    trend of the first and the last window, so that a line stays the line that it is and one point
    does not bend an end. The default span is 2 % of the points. Values that are not finite are
    skipped and kept.
    """
    span = default_span(len(values)) if span is None else span
    if not 1.0 <= span < math.inf:
        raise InputError(f"a mean over {span} points", hint="1 leaves the curve as it is")
    made = values.astype(np.float64, copy=True)
    finite = np.isfinite(made)
    made[finite] = _centred(_centred(made[finite], int(span / 2)), int(span / 2))
    return made


def _centred(values: Floats, half: int) -> Floats:
    """Return the mean over `half` neighbours on each side; both ends are lines, see `_line`.

    Windows are sums of the ends of two blocks, never differences: a spike of 1e30 spoils nothing
    beyond its own window.
    """
    count = len(values)
    half = min(half, (count - 1) // 2)
    if half < 1:
        return values
    width = 2 * half + 1
    padded = np.zeros(-(-count // width) * width)
    padded[:count] = values
    blocks = padded.reshape(-1, width)
    before, after = np.cumsum(blocks, axis=1).ravel(), np.cumsum(blocks[:, ::-1], axis=1)
    first = np.arange(count - 2 * half)
    rest = np.where(first % width == 0, 0.0, after[:, ::-1].ravel()[first])
    return np.concatenate(
        [
            _line(values[:width])[:half],
            (rest + before[first + 2 * half]) / width,
            _line(values[-width:])[-half:],
        ]
    )


def _line(window: Floats) -> Floats:
    """Return the line of least squares through a window, no higher or lower than its values.

    In the middle it is the window's mean; at the end a point has 4/n of the weight that it has as
    itself. Without the bounds an accuracy could end above 1.
    """
    offsets = np.arange(len(window)) - (len(window) - 1) / 2
    slope = (offsets @ window) / (offsets @ offsets)
    made: Floats = (window.mean() + slope * offsets).clip(window.min(), window.max())
    return made


def extremes(values: Floats, *, most: int = MOST) -> Ints:
    """Return the points to keep, ascending: lowest and highest of each bucket, and both ends.

    Buckets hold equally many neighbours; what is not finite is kept only where a bucket has
    nothing else.
    """
    if most < 4:
        raise InputError(f"{most} points are too few to keep", hint="4 at least")
    count = len(values)
    if count <= most:
        return np.arange(count, dtype=np.int64)
    edges = np.linspace(0, count, (most - 2) // 2 + 1).round().astype(np.int64)
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {0, count - 1}
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        kept.add(first + int(low[first:last].argmin()))
        kept.add(first + int(high[first:last].argmax()))
    return np.array(sorted(kept), dtype=np.int64)


#: The most dots in a name; deeper values are not ours.
DEEPEST = 8
#: A value beyond this counts as infinite: no axis holds it beside its opposite.
LARGEST = 1e300
#: Tokens or seconds that no step can spend; their sum over the largest file fits 64 bits.
MOST_SPENT = 1 << 36
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class BadLine(Exception):
    """A line that cannot be read; `number` counts from 1."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number}")
        self.number = number


@dataclass(frozen=True, eq=False)
class Lines:
    """Step, tokens and seconds of every line; columns: the lines that have a name, and values."""

    step: Ints
    tokens: Ints
    seconds: Floats
    columns: Mapping[str, tuple[Ints, Floats]]


def read_lines(data: bytes) -> Lines:
    """Read complete lines, each with its newline; columns are arrays from the start."""
    step, tokens, seconds = array("q"), array("q"), array("d")
    columns: dict[str, tuple[array[int], array[float]]] = {}
    at = 0
    while at < len(data):
        number, end = len(step), data.index(b"\n", at)
        line = parse_line(data[at:end], number + 1)
        at = end + 1
        named = [*_flat(line)]
        spent: tuple[float | None, float | None] = None, None
        if "val" not in line:
            spent = _number(line.get("tokens")), _number(line.get("seconds"))
            if spent[0] and spent[1]:
                named.append(("tokens_per_second", spent[0] / spent[1]))
        step.append(line["step"])
        tokens.append(int(_counted(spent[0])))
        seconds.append(_counted(spent[1]))
        for name, value in named:
            numbers, values = columns.setdefault(name, (array("q"), array("d")))
            numbers.append(number)
            values.append(value)
    return Lines(
        np.array(step, dtype=np.int64),
        np.array(tokens, dtype=np.int64),
        np.array(seconds, dtype=np.float64),
        {
            name: (np.array(numbers, dtype=np.int64), np.array(values, dtype=np.float64))
            for name, (numbers, values) in columns.items()
        },
    )


def parse_line(line: bytes, number: int) -> dict[str, Any]:
    """Read a line as JSON: an object with a step."""
    try:
        found: dict[str, Any] = json.loads(line)
        if type(found["step"]) is not int or not 0 <= found["step"] < 1 << 62:
            raise TypeError("no step in it")
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadLine(number) from error


def _flat(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield loss, lr, grad_norm, nll.HEAD; of an evaluation val.loss, val.by.GROUP.LABEL etc."""
    nll = line.get("nll")
    if isinstance(nll, dict) and len(nll) > 1 and "objective" not in line and "loss" in line:
        # In older runs `loss` was of all heads; in an evaluation it has always been the first's.
        line = {**line, "loss": next(iter(nll.values())), "objective": line["loss"]}
    for key, value in line.items():
        if key not in ("step", "tokens", "seconds"):
            yield from _leaves(key, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict) and name.count(".") < DEEPEST:
        for key, item in value.items():
            if key != "examples":  # the number of examples is no curve
                yield from _leaves(f"{name}.{key}", item)
    elif (number := _number(value)) is not None:
        yield name, number


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 1000):
        number = float(value)
        return number if number != number or abs(number) < LARGEST else number * math.inf
    return _NOT_FINITE.get(value) if isinstance(value, str) else None


def _counted(amount: float | None) -> float:
    """Return what a step spent; an impossible amount counts as 0."""
    return amount if amount is not None and 0 <= amount < MOST_SPENT else 0.0


# --- the run --------------------------------------------------------------------------------------

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
