"""Tokenizers that need no training: one id for each character of a text, or for each byte."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from glassformer.data.tokenizers.vocab import known_id
from glassformer.spec.errors import InputError


@dataclass(frozen=True, slots=True)
class Characters:
    """The characters of a corpus in the order of their code points; others are refused by place."""

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
        """Every character that occurs in these texts."""
        return cls("".join(sorted(set().union(*texts))))

    @property
    def vocab_size(self) -> int:
        """How many different characters there are."""
        return len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """An id for each character."""
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
        """The characters, joined."""
        return "".join(self.alphabet[known_id(i, self.vocab_size)] for i in ids)

    def to_json(self) -> str:
        """The alphabet."""
        return json.dumps({"kind": "characters", "alphabet": self.alphabet}, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Bytes:
    """The 256 bytes of UTF-8. Decoding puts U+FFFD where bytes are no character."""

    pad: ClassVar[None] = None
    bos: ClassVar[None] = None
    eos: ClassVar[None] = None

    @property
    def vocab_size(self) -> int:
        """256."""
        return 256

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(utf8(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these bytes."""
        return bytes(known_id(i, 256) for i in ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Nothing but the kind: all bytes are alike everywhere."""
        return json.dumps({"kind": "bytes"}) + "\n"


def utf8(text: str) -> bytes:
    """The text's bytes; half a surrogate pair is no character and has none."""
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
