"""Tokenizers that are lists of pieces: SentencePiece's two kinds and WordPiece, from any file.

A SentencePiece `.model` file is a protocol buffer; the few fields that decide how text is split are
read here, without that library. A list of pieces becomes the JSON of the `tokenizers` library, for
`.model` files, `vocab.txt` and GGUF alike. The space before the first word, folded spaces and the
table of replaced characters are written as normalizers, so that no word boundary is lost.
"""

import base64
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glassformer.spec.errors import FileError

SPACE = "\u2581"  # stands for a space inside of a piece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text, its score, and its kind by SentencePiece's (and GGUF's) numbers."""

    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True, slots=True)
class PieceModel:
    """Everything that decides how a SentencePiece model splits text.

    `charsmap` is its compiled table of replaced characters, `prefix` whether a space is put before
    a text, `folds` whether runs of spaces become one and those at the ends go.
    """

    pieces: tuple[Piece, ...]
    kind: int = UNIGRAM
    charsmap: bytes = b""
    prefix: bool = True
    folds: bool = True
    where: str = ""
    names: Mapping[str, int] = field(default_factory=dict)

    def ids(self, *kinds: int) -> dict[str, int]:
        """Return the ids of the pieces of these kinds."""
        return {piece.text: i for i, piece in enumerate(self.pieces) if piece.kind in kinds}

    @property
    def unknown(self) -> int | None:
        """The id of what no piece can spell."""
        return next((i for i, piece in enumerate(self.pieces) if piece.kind == UNKNOWN), None)

    @property
    def has_bytes(self) -> bool:
        """True if every byte has a piece, so that nothing is unknown."""
        return sum(piece.kind == BYTE for piece in self.pieces) == 256

    def to_json(self) -> dict[str, Any]:
        """Return the tokenizer as data of the `tokenizers` library; nothing is put around texts."""
        if not self.pieces:
            raise FileError("a tokenizer without tokens", where=self.where)
        used = [piece for piece in self.pieces if piece.kind != UNUSED]
        if len({piece.text for piece in used}) < len(used):
            raise FileError("two tokens are the same text", where=self.where)
        if not all(math.isfinite(piece.score) for piece in used):
            raise FileError("a token's score is not a finite number", where=self.where)
        if self.unknown is None and not self.has_bytes:
            raise FileError(
                "the tokenizer has neither an unknown token nor bytes", where=self.where
            )
        model = self._unigram() if self.kind == UNIGRAM else self._pairs()
        return {
            "version": "1.0",
            "added_tokens": [
                added(piece.text, i, special=piece.kind == CONTROL)
                for i, piece in enumerate(self.pieces)
                if piece.kind in (CONTROL, USER_DEFINED)
            ],
            "normalizer": self._normalizer(),
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": self._decoder(),
            "model": model,
        }

    def _normalizer(self) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        if self.charsmap:
            table = base64.b64encode(self.charsmap).decode()
            parts.append({"type": "Precompiled", "precompiled_charsmap": table})
        if self.folds:
            parts.append(_replace({"Regex": r"\A +| +\z"}, ""))
            parts.append(_replace({"Regex": " {2,}"}, " "))
        if self.prefix:
            parts.append({"type": "Prepend", "prepend": SPACE})
        parts.append(_replace({"String": " "}, SPACE))
        return {"type": "Sequence", "normalizers": parts}

    def _decoder(self) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [_replace({"String": SPACE}, " ")]
        if self.has_bytes:
            parts.append({"type": "ByteFallback"})
        parts.append({"type": "Fuse"})
        if self.prefix:
            parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {"type": "Sequence", "decoders": parts}

    def _unigram(self) -> dict[str, Any]:
        # A piece that is not used for splitting keeps its id, at a score that never wins.
        never = min(piece.score for piece in self.pieces) - 1e4
        plain = (NORMAL, UNKNOWN, USER_DEFINED)
        return {
            "type": "Unigram",
            "unk_id": self.unknown,
            "vocab": [
                [piece.text, piece.score if piece.kind in plain else never] for piece in self.pieces
            ],
            "byte_fallback": self.has_bytes,
        }

    def _pairs(self) -> dict[str, Any]:
        unknown = self.unknown
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else self.pieces[unknown].text,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": self.has_bytes,
            "ignore_merges": False,
            "vocab": self.ids(NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE),
            "merges": [list(pair) for pair in self.merges()],
        }

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs that make each piece, the highest score first."""
        plain = self.ids(NORMAL)
        found = []
        for text, i in plain.items():
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in plain and right in plain:
                    found.append((-self.pieces[i].score, plain[left], plain[right], left, right))
        return [(left, right) for *_, left, right in sorted(found)]


def added(text: str, i: int, *, special: bool) -> dict[str, Any]:
    """Return an added token as data of the library."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": text, **flags, "special": special}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def around(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return the post-processor that puts tokens (text, id) before and after a text."""

    def mark(text: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": kind}}

    def text(letter: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": letter, "type_id": kind}}

    first = [mark(t, 0) for t, _ in before] + [text("A", 0)] + [mark(t, 0) for t, _ in after]
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, text("B", 1), *(mark(t, 1) for t, _ in after)],
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in (*before, *after)},
    }


def wordpiece_json(
    vocab: Mapping[str, int],
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    chinese: bool = True,
    special: Sequence[str] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    where: str = "",
) -> dict[str, Any]:
    """Return BERT's tokenizer: words cut at spaces and punctuation, then the longest pieces."""
    for name in ("[UNK]", "[CLS]", "[SEP]"):
        if name not in vocab:
            raise FileError(f"the vocabulary has no {name}", where=where)
    return {
        "version": "1.0",
        "added_tokens": [
            added(text, vocab[text], special=True)
            for text in sorted((name for name in special if name in vocab), key=vocab.__getitem__)
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": chinese,
            "strip_accents": strip_accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": around([("[CLS]", vocab["[CLS]"])], [("[SEP]", vocab["[SEP]"])]),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": dict(vocab),
        },
    }


# --- the .model file ------------------------------------------------------------------------------

MOST_PIECES = 1_000_000
#: Fields of SentencePiece's `sentencepiece_model.proto` that decide anything.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL, _SUFFIX = 3, 24
_IDS = {"unk_token": 40, "bos_token": 41, "eos_token": 42, "pad_token": 43}
_CHARSMAP, _PREFIX, _FOLDS, _ESCAPES = 2, 3, 4, 5


def read_pieces(data: bytes, *, where: str) -> PieceModel:
    """Read a SentencePiece model; what is not understood is refused."""
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data, where):
        if number not in (_PIECE, _TRAINER, _NORMALIZER):
            continue
        if not isinstance(value, bytes):
            raise _broken(where)
        if number == _PIECE:
            pieces.append(_piece(value, where))
            if len(pieces) > MOST_PIECES:
                raise FileError(f"more than {MOST_PIECES:,} tokens", where=where)
        elif number == _TRAINER:
            trainer |= dict(_fields(value, where))
        elif number == _NORMALIZER:
            normalizer |= dict(_fields(value, where))
    kind = trainer.get(_MODEL, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise FileError(
            f"a SentencePiece model of kind {str(kind)[:20]}",
            where=where,
            hint="unigram and BPE are read",
        )
    if trainer.get(_SUFFIX) or not normalizer.get(_ESCAPES, 1):
        raise FileError("a SentencePiece model that keeps spaces in another way", where=where)
    charsmap = normalizer.get(_CHARSMAP, b"")
    if not isinstance(charsmap, bytes):
        raise _broken(where)
    usual = {"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": -1}
    ids = {name: _signed(trainer.get(number, usual[name])) for name, number in _IDS.items()}
    return PieceModel(
        pieces=tuple(pieces),
        kind=kind,
        charsmap=charsmap,
        prefix=bool(normalizer.get(_PREFIX, 1)),
        folds=bool(normalizer.get(_FOLDS, 1)),
        where=where,
        names={name: i for name, i in ids.items() if 0 <= i < len(pieces)},
    )


def _piece(data: bytes, where: str) -> Piece:
    found = dict(_fields(data, where))
    text, score, kind = (
        found.get(_TEXT, b""),
        found.get(_SCORE, b"\0\0\0\0"),
        found.get(_KIND, NORMAL),
    )
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4:
        raise _broken(where)
    if kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE):
        raise FileError(f"a piece of kind {str(kind)[:20]}", where=where)
    try:
        return Piece(text.decode(), struct.unpack("<f", score)[0], kind)
    except UnicodeDecodeError as error:
        raise _broken(where) from error


def _signed(value: Any) -> int:
    """Return a number that may be negative: protocol buffers store it in 64 bits."""
    if not isinstance(value, int):
        return -1
    return value - 2**64 if value >= 2**63 else value


def _fields(data: bytes, where: str) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protocol buffer; groups are not used here."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place, where)
        match tag & 7:
            case 0:
                value, place = _varint(data, place, where)
                yield tag >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, place = _varint(data, place, where)
            case 5:
                size = 4
            case _:
                raise _broken(where)
        if place + size > len(data):
            raise _broken(where)
        yield tag >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise _broken(where)


def _broken(where: str) -> FileError:
    return FileError("not a SentencePiece model, or a damaged one", where=where)
