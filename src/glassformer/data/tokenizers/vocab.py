"""`Vocab`: tokens with names, for tasks made of symbols; `Tokenizer`: what a model's text needs.

A checkpoint stores its tokenizer as `tokenizer.json`; `to_json` is the text of that file and
`glassformer.data.tokenizers.from_json.tokenizer_from_json` reads it again.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from glassformer.spec.errors import InputError, nearest

SPECIALS = ("PAD", "BOS", "EOS", "SEP")


class Tokenizer(Protocol):
    """Text to ids and back. Ids are 0 … vocab_size - 1; a special id may be None."""

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""

    @property
    def pad(self) -> int | None:
        """The id that fills short rows up."""

    @property
    def bos(self) -> int | None:
        """The id that begins a sequence."""

    @property
    def eos(self) -> int | None:
        """The id that ends a sequence."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""

    def to_json(self) -> str:
        """The text of `tokenizer.json`."""


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
        """How many tokens there are."""
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
        """The id of a name."""
        if name not in self._ids:
            raise InputError(f"'{name}' is not in the vocabulary", hint=nearest(name, self._ids))
        return self._ids[name]

    def tokenize(self, text: str) -> list[int]:
        """Ids of words separated by spaces."""
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
        """Names of ids, separated by spaces; special tokens are written too."""
        return " ".join(self.names[known_id(i, self.vocab_size)] for i in ids)

    def encode(self, text: str) -> list[int]:
        """`tokenize`, by the tokenizers' common name."""
        return self.tokenize(text)

    def decode(self, ids: Sequence[int]) -> str:
        """`detokenize`, by the tokenizers' common name."""
        return self.detokenize(ids)

    def to_json(self) -> str:
        """The names, in order."""
        return json.dumps({"kind": "vocab", "tokens": list(self.names)}, indent=1) + "\n"


def known_id(i: int, vocab_size: int) -> int:
    """`i`, if it is an id: a negative one would count from behind."""
    if not 0 <= i < vocab_size:
        raise InputError(f"{i} is no token's id", hint=f"ids are 0 to {vocab_size - 1}")
    return int(i)
