"""Prompts: checked rows of token ids.

Whatever side they were padded on, rows are padded on the left from here on: the last token of every
row is then in the last column, and the real tokens of a row stay contiguous while it grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from glassformer.data.tokenizers.vocab import Tokenizer, Translates
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# B batch, T length, S source length

Ids = tuple[int, ...]


class Reader(Protocol):
    """The limits of a model that a prompt must keep."""

    vocab_size: int
    source_vocab: int | None
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """Rows of token ids to continue, and of source ids for an encoder."""

    tokens: tuple[Ids, ...]
    sources: tuple[Ids, ...] | None = None

    @classmethod
    def of(
        cls,
        tokens: "Sequence[Sequence[int]] | ArrayLike",
        *,
        valid: ArrayLike | None = None,
        sources: "Sequence[Sequence[int]] | ArrayLike | None" = None,
        source_valid: ArrayLike | None = None,
    ) -> "Prompts":
        """Make prompts from rows of any lengths, or an array with a mask (True = real token)."""
        rows = _rows(tokens, valid, name="prompts")
        if sources is None:
            return cls(rows)
        return cls(rows, _rows(sources, source_valid, name="sources"))

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self, reader: Reader) -> None:
        """Refuse prompts that this model cannot read, before any work."""
        _check_rows("prompts", self.tokens, reader.vocab_size)
        for place, row in enumerate(self.tokens):
            if len(row) >= reader.max_seq_len:
                raise InputError(
                    f"a prompt of {len(row)} tokens leaves no room in a context of "
                    f"{reader.max_seq_len}",
                    where=f"prompts[{place}]",
                    hint=f"at most {reader.max_seq_len - 1} tokens",
                )
        if reader.source_vocab is None:
            if self.sources is not None:
                raise InputError("a source sequence for a model without an encoder")
            return
        if self.sources is None:
            raise InputError(
                "an encoder-decoder needs a source sequence",
                hint="gf.generate(model, [begin], source=ids)",
            )
        _check_rows("sources", self.sources, reader.source_vocab)
        if len(self.sources) != len(self.tokens):
            raise InputError(f"{len(self.sources)} sources for {len(self.tokens)} prompts")
        longest = max(map(len, self.sources))
        if longest > reader.max_seq_len:
            raise InputError(
                f"a source of {longest} tokens exceeds max_seq_len {reader.max_seq_len}",
                hint="shorten it",
            )

    def room(self, reader: Reader, max_new_tokens: int) -> list[int]:
        """Return the maximum number of new tokens of each row."""
        return [min(max_new_tokens, reader.max_seq_len - len(row)) for row in self.tokens]


def text_prompt(spec: ModelSpec, tokenizer: Tokenizer, text: str) -> Prompts:
    """Return a text as in training: after BOS, or for an encoder as the source."""
    if "next" not in spec.head_names():
        raise InputError(
            "this model has no next-token head, so it cannot continue a text",
            hint="glass evaluate measures what it answers",
        )
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("an empty prompt", hint="give some text, or - to read stdin")
    own = tokenizer if isinstance(tokenizer, Translates) else None
    if spec.encoder is not None and own is not None and own.target_start:
        return Prompts.of([own.target_start], sources=[own.encode_source(text)])
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    if spec.encoder is None:
        return Prompts.of([begin + ids])
    end = [] if tokenizer.eos is None else [tokenizer.eos]
    return Prompts.of([begin], sources=[ids + end])


def padded(rows: Sequence[Ids]) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Return ids (B, T), padded on the left with 0, and which are real; None if all are."""
    longest = max(map(len, rows))
    shape = len(rows), longest
    if min(map(len, rows)) == longest:
        count = len(rows) * longest
        return np.fromiter(chain.from_iterable(rows), np.int64, count).reshape(shape), None
    tokens_BT, valid_BT = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    for place, row in enumerate(rows):
        tokens_BT[place, longest - len(row) :] = row
        valid_BT[place, longest - len(row) :] = True
    return tokens_BT, valid_BT


def _rows(
    given: "Sequence[Sequence[int]] | ArrayLike", valid: ArrayLike | None, *, name: str
) -> tuple[Ids, ...]:
    if valid is not None:
        ids_BT, valid_BT = np.asarray(given), np.asarray(valid)
        if ids_BT.shape != valid_BT.shape or valid_BT.dtype != np.bool_ or ids_BT.ndim != 2:
            raise InputError(
                f"{name} of shape {ids_BT.shape} with a mask of shape {valid_BT.shape} and dtype "
                f"{valid_BT.dtype}",
                hint="one bool for each token, True = real token",
            )
        given = [row[real] for row, real in zip(ids_BT, valid_BT, strict=True)]
    made = []
    try:
        for row in given:  # type: ignore[union-attr]
            if isinstance(row, list | tuple) and set(map(type, row)) == {int}:
                made.append(tuple(row))
                continue
            ids = np.asarray(row)
            if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
                raise TypeError(f"a row of shape {ids.shape} and dtype {ids.dtype}")
            made.append(tuple(ids.tolist()))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be read: {error}", hint="rows of token ids") from error
    return tuple(made)


def _check_rows(name: str, rows: Sequence[Ids], vocab_size: int) -> None:
    if not rows:
        raise InputError(f"there are no {name}", hint="give at least one")
    for place, row in enumerate(rows):
        if not row:
            raise InputError(
                f"one of the {name} is empty",
                where=f"{name}[{place}]",
                hint="give at least one token, the one that begins a sequence if nothing else",
            )
        if min(row) >= 0 and max(row) < vocab_size:
            continue
        for column, token in enumerate(row):
            if not 0 <= token < vocab_size:
                raise InputError(
                    f"token id {token} is outside the vocabulary of {vocab_size}",
                    where=f"{name}[{place}], token {column + 1}",
                    hint=f"ids run from 0 to {vocab_size - 1}",
                )


def shared_length(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the number of ids at the beginning that are the same."""
    low, high = 0, min(len(held), len(prompt))
    if high == 0 or held[0] != prompt[0]:
        return 0
    while low < high:  # slices are compared in C
        middle = (low + high + 1) // 2
        if list(held[low:middle]) == list(prompt[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
