"""`ArrayStepper`: a decoding step of a complete model as one call into `kernels/step.c`.

Nothing is timed or compiled, so the first step is as fast as the last. Weights, tokens and logits
are NumPy arrays, and torch is not imported; `native_stepper.NativeStepper` is the same over a torch
model, and the default on a CPU.

Rows need no padding: each new token has a sequence and a position, and sequences may be at any
positions. A past is a set of rows; to add rows to a batch, read their prompts with `start` and
`join` that past to the batch's; to remove rows, `reorder` to those that stay. Keys and values are
in pages that equal beginnings share, so neither copies more than a page a row.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

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
from glassformer.models.stepping import BeamRun, BeamStep, RewindingStepper
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.model import ModelSpec

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

    def reserve(self, more: int) -> None:
        """Make room for `more` positions in each row; a page that is shared is copied first."""
        width = -(-(int(self.length.max(initial=0)) + more) // PAGE)
        if width > self.table.shape[1]:
            wider = np.full((len(self.table), width + width // 2), -1, dtype=np.int32)
            wider[:, : self.table.shape[1]] = self.table
            self.table = wider
        while missing := c_library.library().glass_reserve(
            self.pages.address,
            self.table.ctypes.data,
            self.table.shape[1],
            self.length.ctypes.data,
            len(self.table),
            more,
        ):
            self.pages.grow(missing)

    def reserve_row(self, row: int, more: int) -> None:
        """Make room for `more` positions behind one row's length, in a table of enough width."""
        width = self.table.shape[1]
        while missing := c_library.library().glass_reserve(
            self.pages.address,
            self.table[row : row + 1].ctypes.data,
            width,
            self.length[row : row + 1].ctypes.data,
            1,
            more,
        ):
            self.pages.grow(missing)

    def full_pages(self, row: int) -> NDArray[np.float32]:
        """Return a copy of the pages of a row that are full."""
        return self.pages.numbers[self.table[row, : self.length[row] // PAGE]]

    def fill(self, row: int, pages: NDArray[np.float32], *, length: int) -> None:
        """Let an empty row with room for it begin with copies of these pages."""
        self.pages.numbers[self.table[row, : len(pages)]] = pages
        self.length[row] = length

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


class NativePast:
    """The sequences of one batch: pages of their own, and of their sources after an encoder."""

    def __init__(self, own: Rows, source: Rows | None) -> None:
        self.own, self.source = own, source

    def __len__(self) -> int:
        return len(self.own.length)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens read by each row."""
        return [int(length) for length in self.own.length]

    def reorder(self, rows_B: Any) -> None:
        rows = np.ascontiguousarray(rows_B, dtype=np.int64)
        self.own.reorder(rows)
        if self.source is not None:
            self.source.reorder(rows)

    def join(self, other: "NativePast") -> None:
        """Add another past's rows behind the own ones; the other one is empty afterwards."""
        self.own.join(other.own)
        if self.source is not None and other.source is not None:
            self.source.join(other.source)

    def cut(self, lengths: Sequence[int]) -> None:
        """Forget what each row has read beyond these lengths."""
        self.own.length = np.minimum(self.own.length, np.array(lengths, dtype=np.int64))


# --- steps ----------------------------------------------------------------------------------------


class ArrayStepper(RewindingStepper):
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

    def array(self, numbers: NDArray[Any]) -> Any:
        return numbers

    def start(self, prompts: Prompts, *, room: int) -> tuple[Any, NativePast]:
        """Read the prompts in blocks; the memory grows as needed, whatever `room` was requested."""
        past = self._begun(prompts)
        return self.read(prompts.tokens, past=past), past

    def _begun(self, prompts: Prompts) -> NativePast:
        """Return a past of empty rows, with their sources read."""
        past = NativePast(Rows(self.pages, len(prompts)), None)
        if self._encoder is not None:
            assert prompts.sources is not None
            past.source = self._read_sources(prompts.sources)
        return past

    def empty_past(self, rows: int, *, room: int) -> NativePast:
        """Return rows without a token, with all the memory that `room` positions of each take."""
        past = NativePast(Rows(self.pages, rows), None)
        width = -(-room // PAGE)
        past.own.table = np.full((rows, width), -1, dtype=np.int32)
        self.pages.grow(rows * width - self.pages.form.n_spare)
        return past

    def read_some(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        rows: list[int],
        starts: list[int],
        past: NativePast,
        chosen: list[int],
    ) -> Any:
        """Read new tokens of some rows of a past with room for them, each from its own position.

        What such a row has read from there on is forgotten. Logits are after the chosen tokens,
        counted through all rows, and valid until the next step.
        """
        own, counts = past.own, [len(new) for new in tokens]
        if max(counts) == 1:  # the sequences go on, and no prompt is read: nothing to be put apart
            self._ready_some(rows, starts, past, more=1)
            self._token[: len(rows)] = [new[0] for new in tokens]
            self._run(len(rows))
            self.positions += 1
            own.length[rows] += 1
            return self.array(self._buffers[LOGITS][: len(rows)])
        for place, start, count in zip(rows, starts, counts, strict=True):
            own.length[place] = start
            own.reserve_row(place, count)
        token = np.concatenate([np.asarray(new, dtype=np.int64) for new in tokens])
        owner = np.repeat(np.asarray(rows, dtype=np.int64), counts)
        begins = zip(starts, counts, strict=True)
        position = np.concatenate([start + np.arange(count) for start, count in begins])
        self.positions += max(counts)
        logits_RV = self._in_blocks(token, owner, position, np.asarray(chosen), past)
        own.length[rows] += np.asarray(counts)
        return logits_RV

    def read(self, tokens: Sequence[Sequence[int]], *, past: NativePast) -> Any:
        """Read one or more new tokens of each row; return the logits (B, V) after the last."""
        last = np.cumsum([len(row) for row in tokens]) - 1
        return self.read_all(tokens, past=past, chosen=last)

    def read_all(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        past: NativePast,
        chosen: NDArray[np.int64] | None = None,
    ) -> Any:
        """Return logits after each new token, row by row, or after the chosen of them."""
        assert len(tokens) == len(past)
        counts = [len(row) for row in tokens]
        token = np.concatenate([np.asarray(row, dtype=np.int64) for row in tokens])
        row = np.repeat(np.arange(len(tokens)), counts)
        position = np.concatenate(
            [length + np.arange(count) for length, count in zip(past.lengths, counts, strict=True)]
        )
        chosen = np.arange(len(token)) if chosen is None else chosen
        self.positions += max(counts)
        past.own.reserve(max(counts))
        logits = self._in_blocks(token, row, position, chosen, past)
        past.own.length += np.array(counts)
        return logits

    def read_several(self, tokens: Sequence[int], *, past: NativePast) -> Any:
        """Add several tokens to the only row: next-token logits (T, V) after each."""
        return self.read_all([tokens], past=past)

    def extend(self, tokens: Sequence[int], *, past: NativePast) -> Any:
        """Add several tokens to the only row: next-token logits (1, V) after the last."""
        return self.read([tokens], past=past)

    def forget(self, count: int, *, past: NativePast) -> None:
        """Take back the last tokens that were added."""
        past.cut([length - count for length in past.lengths])

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

    def step(self, tokens_B: Any, *, past: NativePast) -> Any:
        B = len(past)
        self._ready(B, past, more=1)
        self._token[:B] = tokens_B
        self._run(B)
        self.positions += 1
        past.own.length += 1
        return self.array(self._buffers[LOGITS][:B])

    def _ready(self, count: int, past: NativePast, *, more: int) -> None:
        """Point at a past whose rows get one new token each, with room for `more`."""
        past.own.reserve(more)
        self._use(self._decoder, past.own, past.source)
        self._room_for(count)
        self._row[:count] = self._order[:count]
        self._position[:count] = past.own.length
        self._chosen[:count] = self._order[:count]
        self._step.n_new = self._step.n_chosen = count

    def _ready_some(
        self, rows: list[int], starts: list[int], past: NativePast, *, more: int
    ) -> None:
        """The same of some rows of a past with room for them, each from its own position."""
        own, count = past.own, len(rows)
        own.length[rows] = starts
        for row in rows:
            own.reserve_row(row, more)
        self._use(self._decoder, own, past.source)
        self._room_for(count)
        self._row[:count], self._position[:count] = rows, starts
        self._chosen[:count] = self._order[:count]
        self._step.n_new = self._step.n_chosen = count

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
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Choose the likeliest tokens, step after step in one call; see `Stepper.run_greedy`."""
        B = len(past)
        count = min(count, self._steps_within(seconds, B))
        self._ready(B, past, more=count)
        self._token[:B] = tokens_B
        found = self._greedy_steps(B, count, ends=ends, closed=closed, logprobs=logprobs)
        past.own.length += len(found[0])
        return found

    def run_some_greedy(
        self,
        tokens: list[int],
        *,
        rows: list[int],
        starts: list[int],
        past: NativePast,
        count: int,
        ends: Sequence[int],
        closed: Sequence[int],
        seconds: float,
    ) -> list[list[int]]:
        """Do so in some rows of a past with room for them, as `read_some` reads them."""
        count = min(count, self._steps_within(seconds, len(rows)))
        self._ready_some(rows, starts, past, more=count)
        self._token[: len(rows)] = tokens
        made, _ = self._greedy_steps(len(rows), count, ends=ends, closed=closed, logprobs=False)
        past.own.length[rows] += len(made)
        return made

    def _steps_within(self, seconds: float, rows: int) -> int:
        """Return how many greedy steps of so many rows take that long, by what the last ones took.

        A step takes at most as many times longer as it has more rows.
        """
        if not self._seconds:
            return 1
        return max(1, int(seconds / (self._seconds * max(1.0, rows / self._timed_rows))))

    def _greedy_steps(
        self, B: int, count: int, *, ends: Sequence[int], closed: Sequence[int], logprobs: bool
    ) -> tuple[list[list[int]], list[list[float]]]:
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
        return made[:steps].tolist(), values[:steps].tolist()

    def run_beams(
        self, tokens_B: Any, *, past: NativePast, run: BeamRun
    ) -> tuple[Any, list[BeamStep]]:
        """Run beam steps in one call; see `Stepper.run_beams`."""
        B = len(past)
        most = int(run.seconds / self._beam_seconds) if self._beam_seconds else 1
        count = min(run.count, BEAM_STEPS, most)
        if count < 1:
            return self.step(tokens_B, past=past), []
        self._ready(B, past, more=count + 1)
        self._token[:B] = tokens_B
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
