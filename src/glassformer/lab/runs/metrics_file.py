"""Reading metrics.jsonl into columns, and smoothing and thinning a curve before it is drawn.

A run writes the same keys a million times. The first line of each shape is read as JSON; lines that
differ from it only in their numbers then match a regular expression, and all of their numbers are
read at once. The result equals that of reading each line by itself, bit for bit: anything else in a
line is left to JSON to read or to refuse.
"""

import json
import math
import re
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
#: The number of shapes that are tried, and of lines that are read at once: what a cache holds.
SHAPES, TOGETHER = 16, 4096

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
#: Numbers as JSON writes them, but none with so many digits that no float is read from it, and no
#: -0, which is an integer without a sign.
_NUMBER = rb"(?!-0[^.eE])-?(?:0|[1-9][0-9]{0,289}+)(?![0-9])(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"
_STEP = rb"(?:0|[1-9][0-9]{0,14}+)"
#: Strings without a sign that JSON itself uses, and the numbers outside of strings.
_TOKENS = re.compile(rb'"[\w ./+-]*+"|(%s)' % _NUMBER)
_OF_NUMBERS = b"0123456789+-.eE"
_NOT_FINITE_TEXTS = {b'"%s"' % word.encode() for word in _NOT_FINITE}
_OTHERS = bytes(sign for sign in range(256) if sign not in _OF_NUMBERS)
_TO_BLANKS = bytes.maketrans(_OTHERS, b" " * len(_OTHERS))


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
    shapes: list[_Shape] = []
    alone = _Alone()
    at = number = 0
    while at < len(data):
        for shape in shapes:
            found = shape.rows.match(data, at)
            if found is not None:
                end = found.end()
                count = data.count(b"\n", at, end)
                shape.take(data[at:end], number, count)
                break
        else:
            end, count = data.index(b"\n", at) + 1, 1
            alone.add(parse_line(data[at : end - 1], number + 1), number)
            if len(shapes) < SHAPES and (made := _shape_of(data[at:end])) is not None:
                shapes.append(made)
        at, number = end, number + count
    return _joined([alone.lines(), *(shape.lines() for shape in shapes if shape.taken)], number)


def parse_line(line: bytes, number: int) -> dict[str, Any]:
    """Read a line as JSON: an object with a step."""
    try:
        found: dict[str, Any] = json.loads(line)
        if type(found["step"]) is not int or not 0 <= found["step"] < 1 << 62:
            raise TypeError("no step in it")
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadLine(number) from error


# --- one line -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Alone:
    """Lines that were read one by one."""

    spent: list[tuple[int, int, int, float]] = field(default_factory=list)
    columns: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any], number: int) -> None:
        """Add a step, or an evaluation."""
        tokens = seconds = None
        if "val" not in line:
            tokens, seconds = _number(line.get("tokens")), _number(line.get("seconds"))
            if tokens and seconds:
                self._put("tokens_per_second", number, tokens / seconds)
        self.spent.append((number, line["step"], int(_counted(tokens)), _counted(seconds)))
        for name, value in _flat(line):
            self._put(name, number, value)

    def _put(self, name: str, number: int, value: float) -> None:
        self.columns.setdefault(name, []).append((number, value))

    def lines(self) -> "_Part":
        """Return the lines as arrays."""
        number, step, tokens, seconds = zip(*self.spent, strict=True) if self.spent else ((),) * 4
        columns = {
            name: (np.array([i for i, _ in pairs]), np.array([value for _, value in pairs]))
            for name, pairs in self.columns.items()
        }
        return _Part(
            number=np.array(number, dtype=np.int64),
            step=np.array(step, dtype=np.int64),
            tokens=np.array(tokens, dtype=np.int64),
            seconds=np.array(seconds, dtype=np.float64),
            columns=columns,
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


# --- many lines of one shape ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Part:
    """Some of the lines: their numbers, what each spent, and their columns."""

    number: Ints
    step: Ints
    tokens: Ints
    seconds: Floats
    columns: Mapping[str, tuple[Ints, Floats]]


@dataclass(eq=False)
class _Shape:
    """A template of lines: everything but their numbers, which are holes.

    `pieces` are the texts between holes that contain characters of numbers; `names` gives the hole
    of each value; `step`, `tokens`, `seconds` are holes as well, or None.
    """

    rows: re.Pattern[bytes]
    pieces: list[bytes]
    holes: int
    names: list[tuple[str, int]]
    step: int
    tokens: int | None
    seconds: int | None
    texts: list[bytes] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)

    def take(self, text: bytes, number: int, count: int) -> None:
        """Take `count` lines from `number` on; only the numbers of their text are kept."""
        for piece in self.pieces:
            text = text.replace(piece, b" ")
        self.texts.append(text.translate(_TO_BLANKS))
        self.taken.append((number, count))

    def lines(self) -> _Part:
        """Return the lines as arrays."""
        count = sum(count for _, count in self.taken)
        read = np.fromstring(b"".join(self.texts), dtype=np.float64, sep=" ")
        assert len(read) == count * self.holes
        values = read.reshape(count, self.holes).T
        large = np.abs(values) >= LARGEST
        values[large] *= math.inf
        ranges = [np.arange(first, first + size) for first, size in self.taken]
        number = np.concatenate(ranges)
        columns: dict[str, tuple[Ints, Floats]] = {}
        nothing = np.zeros(count)
        tokens, seconds = (
            nothing if hole is None else values[hole] for hole in (self.tokens, self.seconds)
        )
        rated = (tokens != 0) & (seconds != 0)
        if rated.any():
            with np.errstate(all="ignore"):
                rates = tokens[rated] / seconds[rated]
            columns["tokens_per_second"] = (number[rated], rates)
        for name, hole in self.names:
            own = (number, values[hole])
            columns[name] = _both(columns[name], own) if name in columns else own
        step = values[self.step].astype(np.int64)
        spent = (np.where((x >= 0) & (x < MOST_SPENT), x, 0.0) for x in (tokens, seconds))
        counted, took = spent
        return _Part(number, step, counted.astype(np.int64), took, columns)


def _shape_of(line: bytes) -> _Shape | None:
    """Return the shape of a line that JSON has read; None if something in it is not plain."""
    pieces, start = [], 0
    for token in _TOKENS.finditer(line):
        if token[1] is not None:
            pieces.append(line[start : token.start()])
            start = token.end()
        elif token[0] in _NOT_FINITE_TEXTS:
            return None
    pieces.append(line[start:])
    rest = _TOKENS.sub(b"", line)  # the quotes of a string that is not plain are left
    if not line.isascii() or any(sign in rest for sign in (b'"', b"NaN", b"Infinity")):
        return None
    ends = [*(piece[-1:] for piece in pieces[:-1]), *(piece[:1] for piece in pieces[1:])]
    if any(end in _OF_NUMBERS for end in ends):  # also the end of no text: two numbers in a row
        return None
    # The same line with numbered holes: reading it gives the hole of each name.
    counted = b"".join(b"%s%d" % (piece, hole) for hole, piece in enumerate(pieces[:-1]))
    sample = json.loads(counted + pieces[-1])
    step, *spent = (sample.get(name) for name in ("step", "tokens", "seconds"))
    tokens, seconds = (
        hole if type(hole) is int and "val" not in sample else None for hole in spent
    )
    row = b"".join(
        re.escape(piece) + (_STEP if hole == step else _NUMBER)
        for hole, piece in enumerate(pieces[:-1])
    )
    rows = re.compile(rb"(?:%s%s){1,%d}+" % (row, re.escape(pieces[-1]), TOGETHER))
    troubled = {piece for piece in pieces if piece.translate(None, _OTHERS)}
    return _Shape(
        rows=rows,
        pieces=sorted(troubled, key=len, reverse=True),
        holes=len(pieces) - 1,
        names=[(name, int(hole)) for name, hole in _flat(sample)],
        step=step,
        tokens=tokens,
        seconds=seconds,
    )


# --- all lines ------------------------------------------------------------------------------------


def _joined(parts: list[_Part], count: int) -> Lines:
    """Join the parts in the order of their lines."""
    step, tokens = np.zeros(count, np.int64), np.zeros(count, np.int64)
    seconds = np.zeros(count)
    columns: dict[str, tuple[Ints, Floats]] = {}
    for part in parts:
        step[part.number], tokens[part.number] = part.step, part.tokens
        seconds[part.number] = part.seconds
        for name, own in part.columns.items():
            columns[name] = _both(columns[name], own) if name in columns else own
    return Lines(step, tokens, seconds, columns)


def _both(one: tuple[Ints, Floats], other: tuple[Ints, Floats]) -> tuple[Ints, Floats]:
    """Merge two parts of a column by line; on the same line, `one` comes first."""
    number, values = (np.concatenate(pair) for pair in zip(one, other, strict=True))
    if (number[1:] >= number[:-1]).all():  # as a rule: the first line of a shape stands alone
        return number, values
    order = np.argsort(number, kind="stable")
    return number[order], values[order]
