"""Byte-level BPE, trained and run by the `tokenizers` library, which is imported on first use.

Its JSON is that library's own format, so that other tools open a checkpoint's `tokenizer.json`.

Foreign files of that format are bounded here. A `tokenizer.json` chains rewriting parts, and a
chain of a few hundred bytes can make gigabytes of one word (each `Replace` multiplies). The library
runs it without a limit, so the chain's growth is computed from the file and refused before the
library reads it. Its regular expressions are bounded by the library itself, which gives up after
ten million steps of one match.
"""

import base64
import binascii
import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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


# --- bounds on foreign tokenizers -----------------------------------------------------------------


#: How many times longer the parts may make a text, how many characters they may add to it, and
#: how many parts there may be.
MOST_GROWTH, MOST_ADDED, MOST_PARTS = 64.0, 10_000.0, 64
#: Characters of a word that WordPiece may search: its time grows with their square.
LONGEST_WORD = 1_000
LONGEST_AFFIX = 64
DEEPEST = 32


def is_panic(error: BaseException) -> bool:
    """Return True for a panic of the library, which is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


def check_growth(data: Mapping[str, Any], *, where: str) -> None:
    """Refuse a tokenizer whose parts could lengthen a text beyond the bounds."""
    before = _checked(data, ("normalizer", "pre_tokenizer"), where=where)
    _checked(data, ("post_processor",), where=where, begun=before)
    _checked(data, ("decoder",), where=where)
    model = data.get("model")
    if isinstance(model, dict):
        longest = model.get("max_input_chars_per_word", 0)
        if not isinstance(longest, int) or longest > LONGEST_WORD:
            raise FileError(f"words of more than {LONGEST_WORD:,} characters", where=where)
        for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
            if len(str(model.get(name) or "")) > LONGEST_AFFIX:
                raise FileError(f"a {name} of more than {LONGEST_AFFIX} characters", where=where)


def _checked(
    data: Mapping[str, Any],
    names: tuple[str, ...],
    *,
    where: str,
    begun: tuple[float, float] = (1.0, 0.0),
) -> tuple[float, float]:
    """Follow a text through these parts: `n` characters become at most `growth * n + added`."""
    growth, added = begun
    count = 0
    for name in names:
        for part in _flat(data.get(name), where=f"{where}, {name}"):
            count += 1
            times, more = _cost(part, where=f"{where}, {name}")
            growth, added = growth * times, added * times + more
            if count > MOST_PARTS:
                raise FileError(f"more than {MOST_PARTS} parts", where=f"{where}, {name}")
            if growth > MOST_GROWTH or added > MOST_ADDED:
                raise FileError(
                    f"its parts could make a text {growth:,.0f} times as long and add {added:,.0f} "
                    f"characters; {MOST_GROWTH:g} times and {MOST_ADDED:,.0f} are allowed",
                    where=f"{where}, {name}",
                    hint="a tokenizer that multiplies text is an attack, or damaged",
                )
    return growth, added


def _flat(part: Any, *, where: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the parts of nested sequences in their order."""
    if depth > DEEPEST:
        raise FileError("nested too deeply", where=where)
    if not isinstance(part, dict):
        return
    inner = [value for value in part.values() if isinstance(value, list)]
    if part.get("type") == "Sequence":
        for one in inner:
            for each in one:
                yield from _flat(each, where=where, depth=depth + 1)
    else:
        yield part


def _cost(part: dict[str, Any], *, where: str) -> tuple[float, float]:
    """Return how many times longer one part can make a text, and how much it adds."""
    match part.get("type"):
        case "Replace":
            return _replaced(part, where=where), float(_length(part.get("content")))
        case "Prepend":
            return 1.0, float(_length(part.get("prepend")))
        case "Precompiled":
            return _longest_entry(part.get("precompiled_charsmap"), where=where), 0.0
        case "TemplateProcessing":
            return _template(part)
        case "ByteLevel" | "Metaspace" | "WordPiece":  # a byte, a space or a word becomes two
            return 2.0, 1.0
        case _:  # splits, removes, or changes the form: as long, but for what Unicode decomposes
            return 1.0, 2.0


def _length(text: Any) -> int:
    """Return a text's length once it is decomposed, which a later part may do to it."""
    return len(unicodedata.normalize("NFKD", text)) if isinstance(text, str) else 0


def _replaced(part: dict[str, Any], *, where: str) -> float:
    content = _length(part.get("content"))
    pattern = part.get("pattern")
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        if not pattern["String"]:
            raise FileError("a replacement of nothing", where=where)
        return max(1.0, content / len(pattern["String"]))
    return 1.0 + content  # an expression may match between any two characters


def _template(part: dict[str, Any]) -> tuple[float, float]:
    single = part.get("single")
    pieces = single if isinstance(single, list) else []
    texts = sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces)
    table = part.get("special_tokens")
    ids = [
        len(entry["ids"])
        for entry in (table.values() if isinstance(table, dict) else ())
        if isinstance(entry, dict) and isinstance(entry.get("ids"), list)
    ]
    return max(1.0, float(texts)), float((len(pieces) - texts) * max(ids, default=1))


def _longest_entry(table: Any, *, where: str) -> float:
    """Return the length of the longest text of a table of replaced characters.

    Four bytes hold the size of a trie, the trie follows, then the texts, a NUL after each.
    """
    try:
        data = base64.b64decode(table or "", validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise FileError("precompiled_charsmap is not base64", where=where) from error
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size > len(data) - 4:
        raise FileError("precompiled_charsmap is cut off", where=where)
    texts = data[4 + size :].split(b"\0")
    longest = max((_length(text.decode("utf-8", "replace")) for text in texts), default=1)
    return float(math.ceil(max(1, longest)))
