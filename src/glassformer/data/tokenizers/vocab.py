"""Tokenizers that need no training: named symbols, characters, bytes; and the protocol of all.

A checkpoint stores its tokenizer as `tokenizer.json`; `to_json` is the text of that file and
`glassformer.data.tokenizers.own.tokenizer_from_json` reads it again.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from glassformer.spec.errors import InputError, nearest

SPECIALS = ("PAD", "BOS", "EOS", "SEP")


@runtime_checkable
class Translates(Protocol):
    """A tokenizer that came with an encoder-decoder, and knows how its two sides begin and end."""

    @property
    def target_start(self) -> tuple[int, ...]:
        """The ids that every answer begins with; empty where nothing says so."""

    def encode_source(self, text: str) -> list[int]:
        """Return the ids of a source text, with the marks around it."""


class Tokenizer(Protocol):
    """A mapping of text to ids and back. Ids are 0 … vocab_size - 1; a special id may be None."""

    @property
    def vocab_size(self) -> int:
        """The number of ids."""

    @property
    def pad(self) -> int | None:
        """The id that pads short rows."""

    @property
    def bos(self) -> int | None:
        """The id that begins a sequence."""

    @property
    def eos(self) -> int | None:
        """The id that ends a sequence."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def to_json(self) -> str:
        """Return the text of `tokenizer.json`."""


@dataclass(frozen=True, slots=True)
class Vocab:
    """Names in the order of their ids. PAD, BOS, EOS and SEP are special where they occur."""

    names: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.names:
            raise InputError("a vocabulary without tokens")
        for name in self.names:
            if not isinstance(name, str) or not name or name.split() != [name]:
                raise InputError(
                    f"token {name!r} is not one word", hint="names hold no spaces, and something"
                )
        object.__setattr__(self, "_ids", {name: i for i, name in enumerate(self.names)})
        if len(self._ids) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise InputError(f"token '{twice}' occurs twice in the vocabulary")

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.names)

    @property
    def pad(self) -> int | None:
        """PAD's id."""
        return self._ids.get("PAD")

    @property
    def bos(self) -> int | None:
        """BOS's id."""
        return self._ids.get("BOS")

    @property
    def eos(self) -> int | None:
        """EOS's id."""
        return self._ids.get("EOS")

    @property
    def sep(self) -> int | None:
        """SEP's id."""
        return self._ids.get("SEP")

    def id(self, name: str) -> int:
        """Return the id of a name."""
        if name not in self._ids:
            raise InputError(f"'{name}' is not in the vocabulary", hint=nearest(name, self._ids))
        return self._ids[name]

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of words separated by spaces."""
        words = text.split()
        for place, word in enumerate(words):
            if word not in self._ids:
                raise InputError(
                    f"'{word}' is not in the vocabulary",
                    where=f"token {place + 1} of {len(words)}",
                    hint=nearest(word, self._ids),
                )
        return [self._ids[word] for word in words]

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the names of ids, separated by spaces, special tokens included."""
        return " ".join(self.names[known_id(i, self.vocab_size)] for i in ids)

    def encode(self, text: str) -> list[int]:
        """Call `tokenize`, by the tokenizers' common name."""
        return self.tokenize(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Call `detokenize`, by the tokenizers' common name."""
        return self.detokenize(ids)

    def to_json(self) -> str:
        """Return the names, in order."""
        return json.dumps({"kind": "vocab", "tokens": list(self.names)}, indent=1) + "\n"


def known_id(i: int, vocab_size: int) -> int:
    """Return `i` if it is an id; refuse others: a negative one would count from the end."""
    if not 0 <= i < vocab_size:
        raise InputError(f"{i} is no token's id", hint=f"ids are 0 to {vocab_size - 1}")
    return int(i)


@dataclass(frozen=True, slots=True)
class Characters:
    """The characters of a corpus by code point; others are refused, with their position."""

    pad: ClassVar[None] = None
    bos: ClassVar[None] = None
    eos: ClassVar[None] = None

    alphabet: str
    _codes: NDArray[np.uint32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.alphabet:
            raise InputError("a vocabulary without characters")
        codes = _code_points(self.alphabet)
        if not (np.diff(codes.astype(np.int64)) > 0).all():
            raise InputError(
                "the characters are not in order, or one occurs twice",
                hint="Characters.of(text) puts them in order",
            )
        object.__setattr__(self, "_codes", codes)

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Characters":
        """Return a tokenizer of every character that occurs in these texts."""
        return cls("".join(sorted(set().union(*texts))))

    @property
    def vocab_size(self) -> int:
        """The number of different characters."""
        return len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Return an id for each character."""
        codes = _code_points(text)
        ids = np.searchsorted(self._codes, codes)
        ids[ids == len(self._codes)] = 0
        unknown = np.flatnonzero(self._codes[ids] != codes)
        if len(unknown):
            place = int(unknown[0])
            raise InputError(
                f"character {text[place]!r} does not occur in the text this vocabulary was made of",
                where=f"character {place}",
                hint="leave it out, or use bytes or BPE, which read any text",
            )
        made: list[int] = ids.tolist()
        return made

    def decode(self, ids: Sequence[int]) -> str:
        """Return the characters, joined."""
        return "".join(self.alphabet[known_id(i, self.vocab_size)] for i in ids)

    def to_json(self) -> str:
        """Return the alphabet."""
        return json.dumps({"kind": "characters", "alphabet": self.alphabet}, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Bytes:
    """The 256 bytes of UTF-8. Decoding writes U+FFFD for bytes that are not a character."""

    pad: ClassVar[None] = None
    bos: ClassVar[None] = None
    eos: ClassVar[None] = None

    @property
    def vocab_size(self) -> int:
        """The number of ids, 256."""
        return 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(utf8(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these bytes."""
        return bytes(known_id(i, 256) for i in ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Return nothing but the kind: bytes need no table."""
        return json.dumps({"kind": "bytes"}) + "\n"


def utf8(text: str) -> bytes:
    """Return the text's bytes; refuse half a surrogate pair, which has none."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{text[error.start]!r} is no Unicode character",
            where=f"character {error.start}",
            hint="a surrogate stands alone here; read the text as UTF-8",
        ) from error


def _code_points(text: str) -> NDArray[np.uint32]:
    utf8(text)
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4").astype(np.uint32)
