"""Reading metrics.jsonl into columns, and smoothing and thinning a curve before it is drawn.

Each line is an object of JSON. Columns are arrays from the start, so that the largest log takes as
much memory as it has bytes, or little more.
"""

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.spec.errors import InputError

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
    """Read complete lines, each with its newline."""
    found, at, number = _Columns(), 0, 0
    while at < len(data):
        end = data.index(b"\n", at)
        found.add(parse_line(data[at:end], number + 1), number)
        at, number = end + 1, number + 1
    return found.lines()


def parse_line(line: bytes, number: int) -> dict[str, Any]:
    """Read a line as JSON: an object with a step."""
    try:
        found: dict[str, Any] = json.loads(line)
        if type(found["step"]) is not int or not 0 <= found["step"] < 1 << 62:
            raise TypeError("no step in it")
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadLine(number) from error


@dataclass(eq=False)
class _Columns:
    """What was read: step, tokens and seconds of every line, and the values of each name."""

    step: "array[int]" = field(default_factory=lambda: array("q"))
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    columns: dict[str, tuple["array[int]", "array[float]"]] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any], number: int) -> None:
        """Add a step, or an evaluation."""
        tokens = seconds = None
        if "val" not in line:
            tokens, seconds = _number(line.get("tokens")), _number(line.get("seconds"))
            if tokens and seconds:
                self._put("tokens_per_second", number, tokens / seconds)
        self.step.append(line["step"])
        self.tokens.append(int(_counted(tokens)))
        self.seconds.append(_counted(seconds))
        for name, value in _flat(line):
            self._put(name, number, value)

    def _put(self, name: str, number: int, value: float) -> None:
        if name not in self.columns:
            self.columns[name] = array("q"), array("d")
        numbers, values = self.columns[name]
        numbers.append(number)
        values.append(value)

    def lines(self) -> Lines:
        """Return the lines as arrays."""
        return Lines(
            np.array(self.step, dtype=np.int64),
            np.array(self.tokens, dtype=np.int64),
            np.array(self.seconds, dtype=np.float64),
            {
                name: (np.array(numbers, dtype=np.int64), np.array(values, dtype=np.float64))
                for name, (numbers, values) in self.columns.items()
            },
        )


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
