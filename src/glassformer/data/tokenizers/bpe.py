"""Byte-level BPE, trained and run by the `tokenizers` library, which is imported on first use.

Its JSON is that library's own format, so that other tools open a checkpoint's `tokenizer.json`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from glassformer.data.tokenizers.bounds import check_growth, is_panic
from glassformer.data.tokenizers.vocab import known_id, utf8
from glassformer.spec.checks import at_least
from glassformer.spec.errors import FileError, InputError, MachineError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine


class BytePairs:
    """Pieces of words, from 256 bytes upwards: decoding restores any text exactly."""

    def __init__(self, engine: "Engine") -> None:
        # A text that spells a special token's name means the letters, never the token.
        engine.encode_special_tokens = True
        self._engine = engine
        added = engine.get_added_tokens_decoder()
        self._size = max(int(engine.get_vocab_size()), max(added, default=-1) + 1)
        names = {token.content: int(i) for i, token in added.items() if token.special}
        self.pad, self.bos, self.eos = (names.get(name) for name in ("PAD", "BOS", "EOS"))

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        vocab_size: int,
        specials: Sequence[str] = (),
        digits_apart: bool = False,
    ) -> "BytePairs":
        """Merge the most frequent pairs until there are `vocab_size` pieces, or no pair is left.

        `specials` get the first ids. `digits_apart`: a digit is never part of a longer piece.
        """
        at_least("vocab_size", vocab_size, 256 + len(specials))
        _library()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        engine = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        single = pre_tokenizers.Digits(individual_digits=True)
        engine.pre_tokenizer = pre_tokenizers.Sequence([single, level]) if digits_apart else level
        engine.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(specials),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        engine.train_from_iterator(texts, trainer)
        return cls(engine)

    @classmethod
    def from_json(cls, text: str) -> "BytePairs":
        """Read what `to_json` wrote."""
        _library()
        from tokenizers import Tokenizer

        try:
            data = json.loads(text)
            check_growth(data if isinstance(data, dict) else {}, where="tokenizer.json")
            return cls(Tokenizer.from_str(text))
        except FileError:
            raise
        except BaseException as error:  # the library raises Exception itself, and panics
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise InputError(f"not a tokenizer of the tokenizers library: {error}") from error

    def with_ends(self, *, bos: int | None, eos: int | None) -> "BytePairs":
        """Return the same pieces with these ids at a text's beginning and end."""
        twin = BytePairs(self._engine)
        twin.bos, twin.eos = bos, eos
        return twin

    @property
    def names_its_ends(self) -> bool:
        """True if the JSON alone says what begins and ends a text: tokens BOS and EOS."""
        plain = BytePairs(self._engine)
        return (plain.bos, plain.eos) == (self.bos, self.eos)

    def ends_config(self) -> dict[str, object]:
        """Return what begins and ends a text, as Hugging Face's tokenizer_config.json says it."""
        names = {"bos_token": self.bos, "eos_token": self.eos}
        config = {name: self._engine.id_to_token(i) for name, i in names.items() if i is not None}
        return {**config, "add_bos_token": self.bos is not None}

    def with_config(self, config: Mapping[str, object]) -> "BytePairs":
        """Return the same pieces with the ends that `ends_config` wrote."""
        ids = {
            name: self._engine.token_to_id(text) if isinstance(text, str) else None
            for name, text in config.items()
        }
        bos = ids.get("bos_token") if config.get("add_bos_token") else None
        return self.with_ends(bos=bos, eos=ids.get("eos_token"))

    @property
    def vocab_size(self) -> int:
        """The number of pieces: fewer than requested if the text was short."""
        return self._size

    def encode(self, text: str) -> list[int]:
        """Return the ids of the pieces."""
        utf8(text)
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, on all cores."""
        found = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these pieces; U+FFFD where a character was cut."""
        known = [known_id(i, self._size) for i in ids]
        text: str = self._engine.decode(known, skip_special_tokens=False)
        return text

    def to_json(self) -> str:
        """Return the library's own JSON."""
        text: str = self._engine.to_str(pretty=False)
        return text + "\n"


def _library() -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise MachineError(
            "BPE needs the library tokenizers, which is not installed",
            hint="pip install tokenizers, or use tokenizer=bytes",
        ) from error
