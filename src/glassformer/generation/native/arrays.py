"""`ArrayStepper`: a decoding step of a complete model as one call into `kernels/step.c`.

Nothing is timed or compiled, so the first step is as fast as the last. Weights, tokens and logits
are NumPy arrays, and torch is not imported; `native_stepper.NativeStepper` is the same over a torch
model, and the default on a CPU.

Rows need no padding: each new token has a sequence and a position, and sequences may be at any
positions. A state is a set of rows; to add rows to a batch, read their prompts with `start` and
`join` that state to the batch's; to remove rows, `reorder` to those that stay. Keys and values are
in pages that equal beginnings share, so neither copies more than a page a row.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from glassformer.generation.native.lowering import (
    BUFFERS,
    LOGITS,
    PAGE,
    Op,
    Source,
    programs,
    unknown_part,
)
from glassformer.kernels import c_library, threads
from glassformer.kernels.large_pages import empty
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import BeamRun, BeamStep, Stepper
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.model import ModelSpec
from glassformer.spec.state import State

# B rows, V vocab

#: New tokens that are read at once: a prompt goes through the layers in blocks of so many.
BLOCK = 256

#: Beam steps in one call at most: the memory is there before, as if no beams shared any.
BEAM_STEPS = 64


class _Memory(ctypes.Structure):
    """`struct memory` of step.c."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page", "pages", "n_spare")),
        *((name, ctypes.c_void_p) for name in ("uses", "spare")),
    )


class _Step(ctypes.Structure):
    """`struct step` of step.c."""

    _fields_ = (
        ("ops", ctypes.c_void_p),
        ("n_ops", ctypes.c_int64),
        ("buffers", ctypes.c_void_p),
        ("memory", ctypes.c_void_p * 2),
        ("table", ctypes.c_void_p * 2),
        ("table_width", ctypes.c_int64 * 2),
        ("length", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in ("token", "row", "position")),
        ("n_new", ctypes.c_int64),
        ("chosen", ctypes.c_void_p),
        ("n_chosen", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("threads", "failed")),
    )


class _Greedy(ctypes.Structure):
    """`struct greedy` of step.c."""

    _fields_ = (
        ("step", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "made")),
        *((name, ctypes.c_void_p) for name in ("closed", "ends")),
        *((name, ctypes.c_int64) for name in ("n_closed", "n_ends")),
        *((name, ctypes.c_void_p) for name in ("tokens", "logprobs")),
    )


class _Beams(ctypes.Structure):
    """`struct beams` of step.c."""

    _fields_ = (
        ("step", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "made")),
        ("first", ctypes.c_void_p),
        ("n_items", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("closed", "ends")),
        *((name, ctypes.c_int64) for name in ("n_closed", "n_ends")),
        *((name, ctypes.c_void_p) for name in ("last", "shortest", "longest", "sums")),
        *((name, ctypes.c_void_p) for name in ("tokens", "parents", "totals", "table")),
    )


# --- memory ---------------------------------------------------------------------------------------


class Pages:
    """Memory for keys and values in pages of 16 positions, shared by all pasts of a stepper."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.form = _Memory(page=page)
        self.address = ctypes.addressof(self.form)
        self._pool = empty((0, page))
        self._uses = np.zeros(0, dtype=np.int32)
        self._spare = np.zeros(0, dtype=np.int32)

    def grow(self, more: int) -> None:
        """Add pages: as many as are needed, and at least half as many as there are."""
        form, before = self.form, self.form.pages
        after = before + max(more, before // 2)
        try:
            pool = empty((after, self.page))
        except MemoryError as error:
            raise MachineError(f"no memory for {after * PAGE:,} positions of the cache") from error
        pool[:before] = self._pool
        uses, spare = np.zeros(after, dtype=np.int32), np.zeros(after, dtype=np.int32)
        uses[:before] = self._uses
        spare[: form.n_spare] = self._spare[: form.n_spare]
        spare[form.n_spare : form.n_spare + after - before] = np.arange(after - 1, before - 1, -1)
        self._pool, self._uses, self._spare = pool, uses, spare
        form.pool, form.pages = pool.ctypes.data, after
        form.n_spare += after - before
        form.uses, form.spare = uses.ctypes.data, spare.ctypes.data

    def exchange(self, before: int, after: int) -> None:
        """Count one use of page `after` more, and one of `before` (-1: of none) less."""
        self._uses[after] += 1
        if before < 0:
            return
        self._uses[before] -= 1
        if self._uses[before] == 0:
            self._spare[self.form.n_spare] = before
            self.form.n_spare += 1

    def share(self, pages: NDArray[np.int32]) -> None:
        """Count one use more of each of these pages, which may repeat."""
        np.add.at(self._uses, pages, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._pool.nbytes

    @property
    def numbers(self) -> NDArray[np.float32]:
        """Keys and values, a row for each page."""
        return self._pool

    @property
    def used(self) -> int:
        """The number of pages that some row holds."""
        return int(self.form.pages - self.form.n_spare)


class Rows:
    """The pages and lengths of some sequences in one memory."""

    def __init__(self, pages: Pages, count: int) -> None:
        self.pages = pages
        self.table = np.full((count, 1), -1, dtype=np.int32)
        self.length = np.zeros(count, dtype=np.int64)

    def reserve(self, more: int, *, row: int | None = None) -> None:
        """Make room for `more` positions in each row, or in one; shared pages are copied first."""
        first, count = (0, len(self.table)) if row is None else (row, 1)
        length = self.length[first : first + count]
        width = -(-(int(length.max(initial=0)) + more) // PAGE)
        if width > self.table.shape[1]:
            wider = np.full((len(self.table), width + width // 2), -1, dtype=np.int32)
            wider[:, : self.table.shape[1]] = self.table
            self.table = wider
        while missing := c_library.library().glass_reserve(
            self.pages.address,
            self.table[first:].ctypes.data,
            self.table.shape[1],
            length.ctypes.data,
            count,
            more,
        ):
            self.pages.grow(missing)

    def used(self, row: int) -> NDArray[np.int32]:
        """Return the pages of a row that hold what it has read."""
        return self.table[row, : -(-int(self.length[row]) // PAGE)]

    def fork(self, rows: Sequence[int]) -> "Rows":
        """Return rows that begin as these do: their pages are held by both until one writes."""
        other = Rows(self.pages, len(rows))
        other.length = self.length[list(rows)]
        pages = [self.used(row) for row in rows]
        other.table = np.full((len(rows), max(1, *map(len, pages))), -1, dtype=np.int32)
        for line, some in zip(other.table, pages, strict=True):
            line[: len(some)] = some
            self.pages.share(some)
        return other

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the bytes of all rows' pages, one row after another, and the rows' lengths."""
        pages = np.concatenate([self.used(row) for row in range(len(self.table))])
        return {"pages": self.pages.numbers[pages].view(np.uint8), "lengths": self.length.copy()}

    def fill(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Hold copies of such pages, in place of what was there."""
        lengths = arrays["lengths"]
        self.reorder(np.zeros(0, dtype=np.int64))
        self.table = np.full((len(lengths), 1), -1, dtype=np.int32)
        self.length = np.zeros(len(lengths), dtype=np.int64)
        pages = arrays["pages"].view(np.float32)
        begin = 0
        for row, length in enumerate(lengths.tolist()):
            self.reserve(length, row=row)
            self.length[row] = length
            used = self.used(row)
            self.pages.numbers[used] = pages[begin : begin + len(used)]
            begin += len(used)

    def share(self, source: int, target: int, *, length: int) -> None:
        """Let one row begin as another does: its pages are held by both until one writes."""
        count = -(-length // PAGE)
        for place in range(count):
            self.pages.exchange(self.table[target, place], self.table[source, place])
            self.table[target, place] = self.table[source, place]
        self.length[target] = length

    def reorder(self, rows: NDArray[np.int64]) -> None:
        """Replace row b by row rows[b]: by index, nothing is copied."""
        after = np.empty((len(rows), self.table.shape[1]), dtype=np.int32)
        c_library.library().glass_reorder(
            self.pages.address,
            self.table.ctypes.data,
            len(self.table),
            after.ctypes.data,
            rows.ctypes.data,
            len(rows),
            self.table.shape[1],
        )
        self.table, self.length = after, self.length[rows]

    def join(self, other: "Rows") -> None:
        """Take over another's rows, behind the own ones."""
        assert self.pages is other.pages
        width = max(self.table.shape[1], other.table.shape[1])
        both = [
            np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1)
            for table in (self.table, other.table)
        ]
        self.table = np.concatenate(both)
        self.length = np.concatenate((self.length, other.length))
        other.table, other.length = other.table[:0], other.length[:0]

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if len(self.table) and not is_ending():
            self.reorder(np.zeros(0, dtype=np.int64))


class NativePast(State):
    """The sequences of one batch: pages of their own, and of their sources after an encoder."""

    def __init__(self, own: Rows, source: Rows | None) -> None:
        self.own, self.source = own, source

    @property
    def parts(self) -> dict[str, Rows]:
        """The rows in each memory, by name."""
        return {"own": self.own} | ({} if self.source is None else {"source": self.source})

    @property
    def lengths(self) -> list[int]:
        found: list[int] = self.own.length.tolist()
        return found

    def reorder(self, rows: Sequence[int]) -> None:
        index = np.ascontiguousarray(rows, dtype=np.int64)
        for part in self.parts.values():
            part.reorder(index)

    def fork(self, rows: Sequence[int] | None = None) -> "NativePast":
        rows = range(len(self.own.table)) if rows is None else rows
        source = None if self.source is None else self.source.fork(rows)
        return NativePast(self.own.fork(rows), source)

    def rewind(self, lengths: Sequence[int]) -> list[int]:
        self.own.length = np.minimum(self.own.length, np.array(lengths, dtype=np.int64))
        return self.lengths

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {
            f"{name}.{key}": array
            for name, part in self.parts.items()
            for key, array in part.arrays().items()
        }

    def fill(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for name, part in self.parts.items():
            part.fill({key: arrays[f"{name}.{key}"] for key in ("pages", "lengths")})

    def join(self, other: Self) -> None:
        """Add another state's rows behind the own ones; the other one is empty afterwards."""
        for name, part in self.parts.items():
            part.join(other.parts[name])


# --- steps ----------------------------------------------------------------------------------------


class ArrayStepper(Stepper):
    """A `Stepper` for one model, to be kept and used again; several pasts may be live at once.

    Logits and tokens are NumPy arrays here (`array` makes them what a subclass gives).
    With `kv_cache="int8"` the keys and values of pasts are in 8 bits, as `nn.cache` defines.
    """

    def __init__(self, model: ModelSpec, source: Source, *, kv_cache: KVCache = "float") -> None:
        super().__init__(model)
        if reason := c_library.unavailable() or unknown_part(model, kv_cache=kv_cache):
            raise InputError(f"no native step: {reason}", hint="TorchStepper runs any model")
        self.kv_cache: KVCache = kv_cache
        self._prepare()
        self._write(model, source)

    def _prepare(self) -> None:
        self._step = _Step()
        self._greedy = _Greedy()
        self._rows = 0
        self._seconds, self._timed_rows = 0.0, 1  # of one greedy step, and its rows
        self._beam_seconds = 0.0

    def _write(self, model: ModelSpec, source: Source) -> None:
        """Write the program of these weights, and begin with empty memory."""
        decoder, encoder, page = programs(model, source, kv_cache=self.kv_cache)
        self._programs = decoder, encoder
        self._decoder = decoder.compiled()
        self._encoder = None if encoder is None else encoder.compiled()
        both = [decoder.widths, encoder.widths if encoder else [1] * BUFFERS]
        self._widths = [max(pair) for pair in zip(*both, strict=True)]
        self._rows = 0
        self.pages, self._sources = Pages(decoder.page), Pages(page)
        self._scratch = Pages(0 if encoder is None else encoder.page)

    finds_likeliest_in_c = True
    forward_only = ""

    def array(self, numbers: NDArray[Any]) -> Any:
        return numbers

    def start(self, prompts: Prompts, *, room: int) -> tuple[Any, NativePast]:
        """Read the prompts in blocks; the memory grows as needed, whatever `room` was requested."""
        past = NativePast(Rows(self.pages, len(prompts)), None)
        if self._encoder is not None:
            assert prompts.sources is not None
            past.source = self._read_sources(prompts.sources)
        return self.read(prompts.tokens, past=past), past

    def empty(self, rows: int, *, room: int = 0) -> NativePast:
        """Return rows without a token, with all the memory that `room` positions of each take."""
        source = None if self._encoder is None else Rows(self._sources, rows)
        past = NativePast(Rows(self.pages, rows), source)
        width = max(1, -(-room // PAGE))
        past.own.table = np.full((rows, width), -1, dtype=np.int32)
        lacking = -(-room // PAGE) * rows - self.pages.form.n_spare
        if lacking > 0:
            self.pages.grow(lacking)
        return past

    def read(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        past: NativePast,
        rows: Sequence[int] | None = None,
        chosen: NDArray[np.int64] | None = None,
    ) -> Any:
        """Read one or more new tokens of each row, or of some: the logits after the last of each.

        Or after the `chosen` tokens, counted through all rows.
        """
        own, counts = past.own, np.array([len(new) for new in tokens])
        places = np.arange(len(tokens)) if rows is None else np.asarray(rows)
        if chosen is None:
            chosen = np.cumsum(counts) - 1
        for place, count in zip(places, counts, strict=True) if rows is not None else ():
            own.reserve(count, row=place)
        if rows is None:
            own.reserve(counts.max())
        token = np.concatenate([np.asarray(new, dtype=np.int64) for new in tokens])
        position = np.concatenate(
            [begin + np.arange(n) for begin, n in zip(own.length[places], counts, strict=True)]
        )
        self.positions += int(counts.max())
        logits = self._in_blocks(token, np.repeat(places, counts), position, chosen, past)
        own.length[places] += counts
        return logits

    def restored(self, arrays: Mapping[str, NDArray[Any]], *, room: int) -> NativePast:
        past = self.empty(0)
        past.fill(arrays)
        return past

    def extend(self, tokens: Sequence[int], *, past: NativePast, every: bool = False) -> Any:
        chosen = np.arange(len(tokens)) if every else None
        return self.read([tokens], past=past, chosen=chosen)

    def _in_blocks(
        self,
        token: NDArray[np.int64],
        row: NDArray[np.int64],
        position: NDArray[np.int64],
        chosen: NDArray[np.int64],
        past: NativePast,
    ) -> Any:
        """Read new tokens, a block at a time; return the logits after the chosen ones, in order."""
        logits = empty((len(chosen), self.vocab_size))
        self._use(self._decoder, past.own, past.source)
        for begin in range(0, len(token), BLOCK):
            end = min(begin + BLOCK, len(token))
            first, last = np.searchsorted(chosen, (begin, end))
            here = chosen[first:last] - begin
            self._call(token[begin:end], row[begin:end], position[begin:end], here)
            logits[first:last] = self._buffers[LOGITS][: len(here)]
        return self.array(logits)

    def step(self, tokens_B: Any, *, past: NativePast, rows: Sequence[int] | None = None) -> Any:
        """Add one token to each row, or to some of them."""
        B = self._ready(tokens_B, past, more=1, rows=rows)
        self._run(B)
        self.positions += 1
        self._add(past, 1, rows)
        return self.array(self._buffers[LOGITS][:B])

    def _ready(
        self, tokens_B: Any, past: NativePast, *, more: int, rows: Sequence[int] | None
    ) -> int:
        """Point at rows that get one new token each, with room for `more`; return how many."""
        own = past.own
        if rows is None:
            own.reserve(more)
        else:
            for row in rows:
                own.reserve(more, row=row)
        B = len(own.table) if rows is None else len(rows)
        self._use(self._decoder, own, past.source)
        self._room_for(B)
        self._row[:B] = self._order[:B] if rows is None else rows
        self._position[:B] = own.length if rows is None else own.length[rows]
        self._chosen[:B] = self._order[:B]
        self._token[:B] = tokens_B
        self._step.n_new = self._step.n_chosen = B
        return B

    def _add(self, past: NativePast, count: int, rows: Sequence[int] | None) -> None:
        """Count new positions of these rows, or of all."""
        past.own.length[slice(None) if rows is None else rows] += count

    def run_greedy(
        self,
        tokens_B: Any,
        *,
        past: NativePast,
        count: int,
        ends: Sequence[int],
        closed: Sequence[int],
        logprobs: bool,
        seconds: float,
        rows: Sequence[int] | None = None,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Choose the likeliest tokens of all rows or some, step after step in one call of C.

        See `Stepper.run_greedy`.
        """
        count = min(count, self._steps_within(seconds, len(tokens_B)))
        B = self._ready(tokens_B, past, more=count, rows=rows)
        made = np.empty((count, B), dtype=np.int64)
        values = np.full((count, B), np.nan, dtype=np.float32)
        never, last = np.array(closed, dtype=np.int64), np.array(ends, dtype=np.int64)
        call = self._greedy
        call.step, call.count = ctypes.addressof(self._step), count
        call.closed, call.n_closed = never.ctypes.data, len(never)
        call.ends, call.n_ends = last.ctypes.data, len(last)
        call.tokens, call.logprobs = made.ctypes.data, values.ctypes.data if logprobs else None
        self._step.threads = threads.current()
        begin = time.perf_counter()
        steps = c_library.library().glass_greedy(ctypes.addressof(call))
        if steps < 0:
            raise MachineError(f"no memory for a step of {B} rows")
        self._seconds, self._timed_rows = (time.perf_counter() - begin) / steps, B
        self.positions += steps
        self._add(past, steps, rows)
        return made[:steps].tolist(), values[:steps].tolist()

    def _steps_within(self, seconds: float, rows: int) -> int:
        """Return how many greedy steps of so many rows take that long, by what the last ones took.

        A step takes at most as many times longer as it has more rows.
        """
        if not self._seconds:
            return 1
        return max(1, int(seconds / (self._seconds * max(1.0, rows / self._timed_rows))))

    def run_beams(
        self, tokens_B: Any, *, past: NativePast, run: BeamRun
    ) -> tuple[Any, list[BeamStep]]:
        """Run beam steps in one call; see `Stepper.run_beams`."""
        most = int(run.seconds / self._beam_seconds) if self._beam_seconds else 1
        count = min(run.count, BEAM_STEPS, most)
        if count < 1:
            return self.step(tokens_B, past=past), []
        B = self._ready(tokens_B, past, more=count + 1, rows=None)
        parents, tokens = np.empty((2, count, B), dtype=np.int64)
        totals = np.empty((count, B))
        whole = {"first": run.first, "closed": run.closed, "ends": run.ends}
        real = {name: getattr(run, name) for name in ("sums", "last", "shortest", "longest")}
        arrays: dict[str, NDArray[np.generic]] = {
            name: np.array(some, dtype=np.int64) for name, some in whole.items()
        }
        arrays |= {name: np.array(some, dtype=np.float64) for name, some in real.items()}
        arrays |= {"parents": parents, "tokens": tokens, "totals": totals}
        arrays["table"] = np.empty_like(past.own.table)
        self._step.threads = threads.current()
        call = _Beams(
            step=ctypes.addressof(self._step),
            count=count,
            n_items=len(run.first) - 1,
            n_closed=len(run.closed),
            n_ends=len(run.ends),
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        begin = time.perf_counter()
        steps = c_library.library().glass_beams(ctypes.addressof(call))
        if steps < 0:
            raise MachineError(f"no memory for a step of {B} rows")
        self._beam_seconds = (time.perf_counter() - begin) / (steps + 1)
        self.positions += steps + 1
        made = (parents[:steps].tolist(), tokens[:steps].tolist(), totals[:steps].tolist())
        return self.array(self._buffers[LOGITS][:B]), list(zip(*made, strict=True))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self.pages.nbytes + self._sources.nbytes

    # --- one call

    def _read_sources(self, sources: Sequence[Sequence[int]]) -> Rows:
        """Run the encoder over each source; return the keys and values that are read of them."""
        assert self._encoder is not None
        self.encoder_calls += 1
        made = Rows(self._sources, len(sources))
        begin = 0
        while begin < len(sources):  # complete sources, as many as fit into a block
            end = begin + 1
            while end < len(sources) and sum(map(len, sources[begin : end + 1])) <= BLOCK:
                end += 1
            group = sources[begin:end]
            lengths = np.array([len(row) for row in group])
            own, cross = Rows(self._scratch, len(group)), Rows(self._sources, len(group))
            for rows in (own, cross):
                rows.reserve(int(lengths.max()))
                rows.length[:] = lengths
            self._use(self._encoder, own, cross)
            self._call(
                np.concatenate([np.array(row, dtype=np.int64) for row in group]),
                np.repeat(np.arange(len(group)), lengths),
                np.concatenate([np.arange(length) for length in lengths]),
                np.zeros(0, dtype=np.int64),
            )
            if begin == 0:
                made = cross
            else:
                made.join(cross)
            begin = end
        return made

    def _call(
        self,
        token: NDArray[np.int64],
        row: NDArray[np.int64],
        position: NDArray[np.int64],
        chosen: NDArray[np.int64],
    ) -> None:
        count = len(token)
        self._room_for(count)
        self._token[:count], self._row[:count], self._position[:count] = token, row, position
        self._chosen[: len(chosen)] = chosen
        self._step.n_new, self._step.n_chosen = count, len(chosen)
        self._run(count)

    def _run(self, count: int) -> None:
        self._step.threads = threads.current()
        if c_library.library().glass_step(ctypes.addressof(self._step)):
            raise MachineError(f"no memory for a step of {count} tokens")

    def _use(self, program: ctypes.Array[Op], own: Rows, source: Rows | None) -> None:
        """Point at a program and at the rows that it reads and writes."""
        step = self._step
        step.ops, step.n_ops = ctypes.addressof(program), len(program)
        for number, rows in enumerate((own, source)):
            if rows is not None:
                step.memory[number] = rows.pages.address
                step.table[number] = rows.table.ctypes.data
                step.table_width[number] = rows.table.shape[1]
                step.length[number] = rows.length.ctypes.data

    def _room_for(self, count: int) -> None:
        """Make the buffers hold this many new tokens."""
        if count <= self._rows:
            return
        self._rows = count
        self._buffers = [empty((count, width)) for width in self._widths]
        self._addresses = (ctypes.c_void_p * BUFFERS)(*(b.ctypes.data for b in self._buffers))
        self._step.buffers = ctypes.addressof(self._addresses)
        arrays = [np.zeros(count, dtype=np.int64) for _ in range(4)]
        self._token, self._row, self._position, self._chosen = arrays
        self._order = np.arange(count)
        for name, array in zip(("token", "row", "position", "chosen"), arrays, strict=True):
            setattr(self._step, name, array.ctypes.data)
