"""The state of a model that reads: what it remembers of the sequences that it has read so far.

A decoder reads a prompt once, and then one token after another. What later tokens need of earlier
ones is a `State`: keys and values today, and just as well the last columns of a convolution or the
matrix of a recurrent layer. Whoever decodes holds the state and passes it in; nothing is stored on
a model. A state has one row for each sequence, and rows may have read different numbers of tokens.

Only a model can make a state longer (`Stepper.step`, `Stepper.extend`). All the rest is here, and
decoding, beams, speculation, conversations, kept prompts and the server's slots use nothing else:

    reorder(rows)        row b becomes what row rows[b] was; rows repeat (beams) or leave (ends)
    fork(rows)           another state with these rows: neither notices what the other reads later
    reach(row, length)   the longest length, at most this one, to which a row can be taken back
    rewind(lengths)      take every row back as far as `reach` says; return the lengths it has now
    arrays(), fill(...)  everything that a row's future depends on, as arrays by name, and back

A state need not know how to go back to every length. Keys and values do: later positions are
dropped. A recurrent memory has snapshots at some lengths, say at the borders of its chunks, and
`reach` returns one of those, or 0; the caller reads the rest again, which it knows, since it has
the tokens. A state that cannot do something at all says so by raising `InputError`, and a stepper
whose states only go forward says why (`Stepper.forward_only`), so that speculation and the reuse of
prompts can refuse by that reason before they begin.

There are three memories, and disk is their serialisation:

- `Memories`, here: arrays of a fixed library, torch (`nn.cache`) or NumPy (`byhand`), one `Memory`
  for each layer that looks beyond its own row. `Columns` is the memory of attention. Rows of
  different lengths are padded: `valid_BS` says which columns are real tokens, positions count these
  alone, and a row that is taken back further than others leaves its last columns as padding.
- `generation.native.arrays.NativePast`: pages of 16 positions that equal beginnings share, written
  by `kernels/step.c`. A row's bits do not depend on how it came to be: read at once, in parts,
  forked, taken back and read again, or loaded.
- `generation.stepper.Text`: the tokens themselves, of steppers that read everything again.

`store.states` writes `arrays` with a digest of the model, and refuses those of another one.

A new mixer adds a `Memory`: what its operation extends it by, how rows move (`take`, `copied`), the
lengths that it can return to (`reach`, `cut`), and its arrays. Nobody above asks what is inside.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from glassformer.spec.errors import InputError

# B rows, K heads, S columns so far, T new columns

#: A torch tensor or a NumPy array: indexing, slices and assignment are all that is used here.
Array = Any
#: What a memory is known by: its name in the program, or its layer's number.
Name = Any
#: Make an array of another shape, where this one is.
Make = Callable[[Array, tuple[int, ...]], Array]


@dataclass(frozen=True, slots=True)
class Library:
    """The calls in which torch and NumPy differ; each is given some array that it is to be like."""

    #: An array of the same type, with any contents.
    empty: Make
    #: Bools, all True.
    true: Make
    #: The numbers of rows, as what picks them.
    index: Callable[[Array, Sequence[int]], Array]


class State(ABC):
    """What is remembered of some sequences, one row each; see the module."""

    @abstractmethod
    def reorder(self, rows: Sequence[int]) -> None:
        """Make row b what row rows[b] was; rows may repeat, be fewer or be more."""

    @property
    def lengths(self) -> list[int]:
        """The number of tokens that each row has read."""
        raise self._cannot("say what it has read")

    def fork(self, rows: Sequence[int] | None = None) -> Self:
        """Return another state with these rows (all of them by default)."""
        raise self._cannot("be forked")

    def reach(self, row: int, length: int) -> int:
        """Return the longest length, at most this one, to which a row can be taken back."""
        return min(length, self.lengths[row])

    def rewind(self, lengths: Sequence[int]) -> list[int]:
        """Take every row back to the length that it can reach; return these lengths."""
        raise self._cannot("be taken back")

    def arrays(self) -> dict[str, Array]:
        """Return everything that is remembered, as arrays by name."""
        raise self._cannot("be saved")

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """Remember what `arrays` returned, in place of what was there."""
        raise self._cannot("be loaded")

    def _cannot(self, what: str) -> InputError:
        return InputError(
            f"a {type(self).__name__} cannot {what}",
            hint="NativeStepper and TorchStepper have states that can",
        )


# --- memories of arrays ---------------------------------------------------------------------------


class Memory(ABC):
    """What one layer remembers of all rows, after the `length` columns that its state has read."""

    @abstractmethod
    def take(self, rows_B: Array, length: int) -> None:
        """Make row b what row rows_B[b] was."""

    @abstractmethod
    def copied(self, rows_B: Array, length: int) -> Self:
        """Return a copy of these rows that shares nothing with this memory."""

    def reach(self, length: int) -> int:
        """Return the last length, at most this one, that it can return to."""
        return length

    def cut(self, length: int) -> None:
        """Return to a length that is within reach."""
        assert self.reach(length) == length

    @abstractmethod
    def arrays(self, length: int) -> tuple[Array, ...]:
        """Return what is remembered."""

    @abstractmethod
    def fill(self, arrays: Sequence[Array]) -> None:
        """Remember this."""


class Columns(Memory):
    """Arrays (B, K, S, ...) with one column for each position, in room for more of them.

    What is beyond the state's length is overwritten by what comes next, so nothing is done to cut.
    """

    def __init__(self) -> None:
        self.held: tuple[Array, ...] = ()

    def extend(self, new: Sequence[Array], *, state: "Memories") -> tuple[Array, ...]:
        """Write new columns (B, K, T, ...) behind those of the state; return views of them all."""
        length, end = state.length, state.length + new[0].shape[2]
        if self.held and len(self.held[0]) != len(new[0]):
            raise InputError(
                f"the cache holds {len(self.held[0])} sequences, and {len(new[0])} were given",
                hint="reorder the cache to this number of rows, or start a new one",
            )
        if not self.held or self.held[0].shape[2] < end:
            before, shape = self.held, (*new[0].shape[:2], state.room(end))
            self.held = tuple(state.library.empty(one, (*shape, *one.shape[3:])) for one in new)
            for held, one in zip(self.held, before, strict=bool(before)):
                held[:, :, :length] = one[:, :, :length]
        for held, one in zip(self.held, new, strict=True):
            held[:, :, length:end] = one
        return tuple(held[:, :, :end] for held in self.held)

    def take(self, rows_B: Array, length: int) -> None:
        moved = self._rows(rows_B, length)
        if len(rows_B) != len(self.held[0]):
            self.held = moved
            return
        for held, one in zip(self.held, moved, strict=True):
            held[:, :, :length] = one  # the room is kept

    def copied(self, rows_B: Array, length: int) -> Self:
        other = copy.copy(self)
        other.held = self._rows(rows_B, length)
        return other

    def _rows(self, rows_B: Array, length: int) -> tuple[Array, ...]:
        return tuple(held[:, :, :length][rows_B] for held in self.held)

    def arrays(self, length: int) -> tuple[Array, ...]:
        return tuple(held[:, :, :length] for held in self.held)

    def fill(self, arrays: Sequence[Array]) -> None:
        self.held = tuple(arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the room that it has."""
        return sum(int(held.nbytes) for held in self.held)


class Memories(State):
    """The memories of all layers by name, over arrays of one library; `length` counts columns.

    `valid_BS` says which columns are real tokens, None: all. `cross` has what was computed from a
    source once and is only read: keys and values of the layers that attend to it, and the encoder's
    own output where a model reads it again.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.length = 0
        self.valid_BS: Array | None = None
        self.memories: dict[Name, Any] = {}
        self.cross: dict[Name, tuple[Array, ...]] = {}

    @abstractmethod
    def room(self, end: int) -> int:
        """Return how many columns to have where `end` are needed."""

    def memory(self) -> Any:
        """Return a memory without anything in it: that of attention."""
        return Columns()

    def of(self, name: Name) -> Any:
        """Return the memory of this name, made at its first use."""
        if name not in self.memories:
            self.memories[name] = self.memory()
        return self.memories[name]

    def advance(self, count: int, valid_BT: Array | None) -> None:
        """Count new columns as read; called after every layer was extended by them."""
        self.valid_BS = joined_valid(
            self.valid_BS, self.length, valid_BT, count, true=self.library.true
        )
        self.length += count

    def _like(self) -> Array:
        """Return some array (B, ...)."""
        return next(iter(self.memories.values())).arrays(self.length)[0]

    @property
    def lengths(self) -> list[int]:
        if self.valid_BS is not None:
            return [sum(row) for row in self.valid_BS.tolist()]
        return [self.length] * (len(self._like()) if self.memories else 0)

    def reorder(self, rows: Sequence[int]) -> None:
        if self.memories:
            rows_B = self.library.index(self._like(), rows)
            for memory in self.memories.values():
                memory.take(rows_B, self.length)
            self._take_rest(rows_B)

    def fork(self, rows: Sequence[int] | None = None) -> Self:
        like = self._like()
        rows_B = self.library.index(like, range(len(like)) if rows is None else rows)
        other = copy.copy(self)
        other.memories = {
            name: memory.copied(rows_B, self.length) for name, memory in self.memories.items()
        }
        other._take_rest(rows_B)
        return other

    def _take_rest(self, rows_B: Array) -> None:
        self.cross = {name: tuple(one[rows_B] for one in held) for name, held in self.cross.items()}
        self.valid_BS = None if self.valid_BS is None else self.valid_BS[rows_B]

    def rewind(self, lengths: Sequence[int]) -> list[int]:
        found = [self.reach(row, length) for row, length in enumerate(lengths)]
        ends = found if self.valid_BS is None else list(map(_end, self.valid_BS.tolist(), found))
        end = max(ends, default=0)
        if self.valid_BS is not None or min(ends, default=0) < end:
            mask_BS = self._valid()[:, :end]
            for row, own in enumerate(ends):
                mask_BS[row, own:] = False
            self.valid_BS = mask_BS
        for memory in self.memories.values():
            memory.cut(end)
        self.length = end
        return found

    def _valid(self) -> Array:
        """Return which columns are real tokens (B, S), in memory of its own."""
        like = self._like()
        mask_BS = self.library.true(like, (len(like), self.length))
        if self.valid_BS is not None:
            mask_BS[:] = self.valid_BS
        return mask_BS

    def arrays(self) -> dict[str, Array]:
        found = {"valid": self._valid()}
        for name, memory in self.memories.items():
            for place, array in enumerate(memory.arrays(self.length)):
                found[f"memory.{name}.{place}"] = array
        for name, held in self.cross.items():
            for place, array in enumerate(held):
                found[f"cross.{name}.{place}"] = array
        return found

    def fill(self, arrays: Mapping[str, Array]) -> None:
        valid_BS = arrays["valid"]
        self.length = valid_BS.shape[1]
        self.valid_BS = None if bool(valid_BS.all()) else valid_BS
        parts: dict[tuple[str, Name], list[Array]] = {}
        for key in sorted(arrays.keys() - {"valid"}, key=_in_order):
            kind, _, rest = key.partition(".")
            name = rest.rpartition(".")[0]
            found = parts.setdefault((kind, int(name) if name.isdigit() else name), [])
            found.append(arrays[key])
        self.cross = {own: tuple(held) for (kind, own), held in parts.items() if kind == "cross"}
        self.memories = {}
        for (kind, own), held in parts.items():
            if kind == "memory":
                self.of(own).fill(held)


def _in_order(key: str) -> tuple[str, int]:
    name, _, place = key.rpartition(".")
    return name, int(place)


def _end(valid: Sequence[bool], count: int) -> int:
    """Return the number of columns up to the last of `count` real tokens."""
    real = [column for column, is_real in enumerate(valid, 1) if is_real]
    return real[count - 1] if count else 0


def joined_valid(
    past_BS: Array | None, length: int, new_BT: Array | None, count: int, *, true: Make
) -> Array | None:
    """Join the validity of past and new columns; None while every column is a real token."""
    like = past_BS if new_BT is None else new_BT
    if like is None:
        return None
    valid_BS = true(like, (len(like), length + count))
    if past_BS is not None:
        valid_BS[:, :length] = past_BS
    if new_BT is not None:
        valid_BS[:, length:] = new_BT
    return valid_BS
