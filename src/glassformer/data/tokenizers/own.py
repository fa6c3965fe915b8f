"""Tokenizers that a user defines, and reading `tokenizer.json` of any tokenizer.

For a user's tokenizer it holds what the user's class wrote, and which class reads it again.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from glassformer.data.own_code import open_part, running
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.vocab import Bytes, Characters, Tokenizer, Vocab
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.own import OwnTokenizer
from glassformer.spec.serialize import from_dict, to_dict, unique_keys

KIND = "own"


class TrainedTokenizer(ABC):
    """The contract of a user's tokenizer. Ids are 0 … vocab_size - 1; special ids may be None."""

    pad: int | None = None
    bos: int | None = None
    eos: int | None = None

    @classmethod
    @abstractmethod
    def train(cls, texts: Iterable[str], **options: Any) -> Self:
        """Make a tokenizer from the training part of a text, with the options of the spec."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of ids."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    @abstractmethod
    def to_json(self) -> str:
        """Return all that `from_json` needs."""

    @classmethod
    @abstractmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""


class Own:
    """A user's tokenizer together with the spec that names its class."""

    def __init__(self, tokenizer: TrainedTokenizer, part: OwnTokenizer) -> None:
        self._tokenizer = tokenizer
        self._part = part
        with running(part):
            if not isinstance(tokenizer.vocab_size, int) or tokenizer.vocab_size < 1:
                raise InputError(
                    f"{part.source}: vocab_size {tokenizer.vocab_size!r} is no number of ids"
                )

    @classmethod
    def trained(cls, part: OwnTokenizer, texts: Iterable[str]) -> "Own":
        """Train the class that a spec names."""
        kind = _class_of(part)
        with running(part):
            return cls(kind.train(texts, **part.options), part)

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return self._tokenizer.vocab_size

    @property
    def pad(self) -> int | None:
        """The id of padding."""
        return self._tokenizer.pad

    @property
    def bos(self) -> int | None:
        """The id that begins a sequence."""
        return self._tokenizer.bos

    @property
    def eos(self) -> int | None:
        """The id that ends a sequence."""
        return self._tokenizer.eos

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; refuse one outside of the vocabulary."""
        with running(self._part):
            ids = [int(i) for i in self._tokenizer.encode(text)]
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise InputError(
                f"{self._part.source} encoded an id {wrong} outside of its vocabulary",
                hint=f"ids are 0 to {self.vocab_size - 1}",
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        with running(self._part):
            return self._tokenizer.decode(list(ids))

    def to_json(self) -> str:
        """Return the class and what it wrote."""
        with running(self._part):
            state = self._tokenizer.to_json()
        data = {"kind": KIND, "part": to_dict(self._part), "state": state}
        return json.dumps(data, indent=1) + "\n"


def own_from_json(data: Mapping[str, Any]) -> Tokenizer:
    """Read what `Own.to_json` wrote; runs the user's class, so it needs consent."""
    part, state = data.get("part"), data.get("state")
    if not isinstance(part, dict) or not isinstance(state, str):
        raise InputError("the tokenizer names no class of its own, or holds nothing for it")
    spec = from_dict(OwnTokenizer, part)
    kind = _class_of(spec)
    with running(spec):
        return Own(kind.from_json(state), spec)


def _class_of(part: OwnTokenizer) -> type[TrainedTokenizer]:
    kind = open_part(part)
    if not issubclass(kind, TrainedTokenizer):
        raise InputError(
            f"{part.source} is no tokenizer",
            hint="subclass glassformer.data.tokenizers.own.TrainedTokenizer",
        )
    return kind


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that a checkpoint keeps of a tokenizer: `tokenizer.json`.

    Where that does not say which tokens begin and end a text, `tokenizer_config.json` does.
    """
    files = {"tokenizer.json": tokenizer.to_json().encode()}
    if isinstance(tokenizer, BytePairs) and not tokenizer.names_its_ends:
        text = json.dumps(tokenizer.ends_config(), indent=2) + "\n"
        files["tokenizer_config.json"] = text.encode()
    return files


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Return True if two tokenizers give every text the same ids."""
    first, second = one.to_json(), other.to_json()
    if first == second:
        return True
    parts = ("model", "normalizer", "pre_tokenizer", "added_tokens")
    both = [json.loads(text) for text in (first, second)]
    return all("model" in data for data in both) and all(
        both[0].get(part) == both[1].get(part) for part in parts
    )


KINDS = ("vocab", "characters", "bytes", "own")


def tokenizer_from_json(text: str) -> Tokenizer:
    """Return the tokenizer that `to_json` wrote."""
    try:
        data = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the tokenizer is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"the tokenizer is a {type(data).__name__}, not an object")
    match data.get("kind"):
        case "vocab":
            names = _only(data, "tokens", list)
            if not all(isinstance(name, str) for name in names):
                raise InputError("tokens holds more than names")
            return Vocab(tuple(names))
        case "characters":
            return Characters(_only(data, "alphabet", str))
        case "bytes":
            return Bytes()
        case "own":
            return own_from_json(data)
        case None if "model" in data:
            return BytePairs.from_json(text)
        case kind:
            raise InputError(
                f"a tokenizer of kind {kind!r} is not known", hint=nearest(str(kind), KINDS)
            )


def _only(data: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(data.get(key), kind):
        raise InputError(f"the tokenizer's '{key}' is missing, or not a {kind.__name__}")
    return data[key]
