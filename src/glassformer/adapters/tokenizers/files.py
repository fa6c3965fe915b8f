"""Read a tokenizer's files: `tokenizer.json`, or what older folders have in its place.

That is `vocab.json` + `merges.txt`, tiktoken ranks, a SentencePiece model, or BERT's `vocab.txt`.
All become one engine of the `tokenizers` library; sizes and counts are bounded before the library
reads anything. Pre-tokenization is never guessed: where no file states it, the tokenizer's class
must be a known one. A tiktoken rank is also the order of merging, so the pair that made a
token is what remains of its bytes after every merge of a lower rank.
"""

import base64
import binascii
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from glassformer.adapters.folder.files import read_object, read_sidecar, read_text
from glassformer.adapters.gguf.header import is_gguf
from glassformer.adapters.gguf.hf_files import QWEN_WORDS, small_file
from glassformer.adapters.tokenizers.pieces import (
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    added,
    around,
    read_pieces,
    wordpiece_json,
)
from glassformer.data.tokenizers.bpe import check_growth, is_panic
from glassformer.spec.errors import FileError
from glassformer.spec.serialize import unique_keys

MOST_TOKENS = 1_000_000
LONGEST_TOKEN = 1_024

#: Qwen-1 numbers its special tokens after its ranks, and names them in code, not in a file.
QWEN_1_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{i}|>" for i in range(205)),
)


def pieces_of_ranks(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return pieces by id and merges in order, spelled as in byte-level BPE."""
    letters = byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    return vocab, [(spelled[left], spelled[right]) for left, right in merges_of(ranks)]


def read_ranks(path: Path, *, limit: int) -> dict[bytes, int]:
    """Read lines of a base64 token and its rank; all 256 bytes must occur, ranks without gaps."""
    ranks: dict[bytes, int] = {}
    lines = read_text(path, limit=limit).split("\n")
    if len(lines) > MOST_TOKENS:
        raise FileError(f"more than {MOST_TOKENS:,} tokens", where=str(path))
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        where = f"{path}, line {number + 1}"
        try:
            token, rank = line.split()
            piece = base64.b64decode(token, validate=True)
            place = int(rank)
        except (ValueError, binascii.Error) as error:
            raise FileError("not a token in base64 and its rank", where=where) from error
        if not piece or len(piece) > LONGEST_TOKEN or piece in ranks:
            raise FileError("a token that is empty, too long or there twice", where=where)
        ranks[piece] = place
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise FileError("the ranks have gaps, or two are equal", where=str(path))
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise FileError("not all of the 256 bytes are tokens", where=str(path))
    return ranks


def merges_of(ranks: dict[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    """Return the pair that made each token: its bytes after merging all lower ranks."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            found = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            best = min(found)
            if best >= rank:
                break
            place = found.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]
        elif len(parts) > 2:
            raise FileError(f"no two tokens make token {rank}")


def byte_letters() -> list[str]:
    """Return GPT-2's printable character for each byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


ENGINE = "tokenizer.json"
VOCAB, MERGES = "vocab.json", "merges.txt"
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
WORDS = "vocab.txt"
SOURCE = "source.spm"
CONFIG = "tokenizer_config.json"

FILE_LIMIT = 64_000_000
MOST_ADDED = 20_000
LONGEST_TEXT = 8_192  # of a pattern or a replacement in the engine's other parts
LONGEST_TABLE = 4_000_000  # of replaced characters, in base64
DEEPEST = 32
KINDS = ("BPE", "Unigram", "WordPiece", "WordLevel")


def read_engine(folder: Path) -> Tokenizer:
    """Build the library's tokenizer from the files that exist; added tokens keep their ids."""
    config = read_sidecar(folder, CONFIG)
    try:
        engine = _from_any(folder, config)
        _add_tokens(engine, folder, config)
    except BaseException as error:
        raise_if_panic(error, where=str(folder))
        raise
    return engine


def raise_if_panic(error: BaseException, *, where: str) -> None:
    """Turn a panic of the library, which is no `Exception`, into a FileError."""
    if is_panic(error):
        raise FileError(f"the tokenizer fails: {str(error)[:200]}", where=where) from error


def _from_any(folder: Path, config: dict[str, Any]) -> Tokenizer:
    if is_gguf(folder):
        return _from_data(small_file(folder, ENGINE), None, where=str(folder))
    if (folder / ENGINE).is_file():
        path = folder / ENGINE
        return _from_json(read_text(path, limit=FILE_LIMIT), where=str(path))
    if (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        return _from_merges(folder, config)
    ranks = sorted(path for path in folder.glob("*.tiktoken") if path.is_file())
    if len(ranks) == 1:
        vocab, merges = pieces_of_ranks(read_ranks(ranks[0], limit=FILE_LIMIT))
        engine = _engine(vocab, merges, qwen=True, where=str(ranks[0]))
        names = (AddedToken(name, normalized=False, special=True) for name in QWEN_1_SPECIALS)
        add_in_order(engine, list(names))
        return engine
    if (folder / VOCAB).is_file() and (folder / SOURCE).is_file():
        return _from_translation(folder)
    for name in PIECES:
        if (folder / name).is_file():
            return _from_pieces(folder, folder / name, config)
    if (folder / WORDS).is_file():
        return _from_words(folder / WORDS, config)
    raise FileError(
        "no tokenizer in this folder",
        where=str(folder),
        hint=f"{ENGINE}, {VOCAB} with {MERGES}, {PIECES[0]}, {WORDS}, or one .tiktoken file",
    )


# --- tokenizer.json -----------------------------------------------------------------------------


def _from_json(text: str, *, where: str) -> Tokenizer:
    try:
        data = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{ENGINE} is not JSON: {error}", where=where) from error
    return _from_data(data, text, where=where)


def _from_data(data: Any, text: str | None, *, where: str) -> Tokenizer:
    """Build the library's tokenizer from JSON: `text`, that was read as `data`; or data of ours."""
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict):
        raise FileError(f"{ENGINE} holds no tokenizer of the tokenizers library", where=where)
    kind = model.get("type") or ("Unigram" if isinstance(model.get("vocab"), list) else "BPE")
    if kind not in KINDS:
        raise FileError(
            f"a tokenizer of type {str(kind)[:40]!r}",
            where=where,
            hint=f"read here: {', '.join(KINDS)}",
        )
    vocab, merges = model.get("vocab"), model.get("merges", None if kind == "BPE" else [])
    if kind == "Unigram":
        vocab = _scored(vocab, where=where)
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise FileError("the tokenizer's vocab or merges are missing", where=where)
    check_pieces(vocab, where=where)
    check_count("merges", merges, MOST_TOKENS, where=where)
    check_count("added tokens", data.get("added_tokens") or [], MOST_ADDED, where=where)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        _check_part(data.get(part), where=f"{where}, {part}")
    check_growth(data, where=where)
    try:
        if text is None and kind == "BPE":
            engine = _assembled(data)
        else:
            made = json.dumps(data, ensure_ascii=False) if text is None else text
            engine = Tokenizer.from_str(made)
    except Exception as error:  # the library raises Exception itself
        raise FileError(f"{ENGINE} cannot be used: {str(error)[:200]}", where=where) from error
    for token in data.get("added_tokens") or []:
        _check_id(engine, str(token.get("content")), token.get("id"), where=where)
    engine.no_truncation()
    engine.no_padding()
    return engine


def _assembled(data: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of this JSON, a BPE model; its vocabulary is not written and parsed."""
    model = data["model"]
    given = {name: model[name] for name in model if name not in ("type", "vocab", "merges")}
    settings = {name: value for name, value in given.items() if value is not None}
    merges = [(left, right) for left, right in model["merges"]]
    engine = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, **settings))
    small = {"added_tokens": [], "model": {**model, "vocab": {}, "merges": []}}
    parts = Tokenizer.from_str(json.dumps({**data, **small}, ensure_ascii=False))
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(parts, name) is not None:
            setattr(engine, name, getattr(parts, name))
    for token in data["added_tokens"]:
        made = AddedToken(**{name: token[name] for name in token if name != "id"})
        (engine.add_special_tokens if token["special"] else engine.add_tokens)([made])
    return engine


def _scored(vocab: Any, *, where: str) -> dict[str, int]:
    """Return the ids of a unigram model's pieces, which come as pairs of text and score."""
    check_count("tokens", vocab, MOST_TOKENS, where=where)
    ids: dict[str, int] = {}
    for i, entry in enumerate(vocab):
        pair = entry if isinstance(entry, list) and len(entry) == 2 else [None, None]
        text, score = pair
        scored = isinstance(score, (int, float)) and math.isfinite(score)
        if not isinstance(text, str) or not scored or text in ids:
            raise FileError(f"token {i} is not a text of its own and its score", where=where)
        ids[text] = i
    return ids


def check_pieces(vocab: dict[str, Any], *, where: str) -> None:
    """Require tokens of bounded length, each with its own id."""
    check_count("tokens", vocab, MOST_TOKENS, where=where)
    ids = vocab.values()
    if not all(type(i) is int and 0 <= i < 2 * MOST_TOKENS for i in ids):
        raise FileError("a token's id is not a number from 0 upwards", where=where)
    if len(set(ids)) < len(vocab):
        raise FileError("two tokens have the same id", where=where)
    if max(map(len, vocab), default=0) > LONGEST_TOKEN:
        raise FileError(f"a token of more than {LONGEST_TOKEN} characters", where=where)
    if not vocab:
        raise FileError("a tokenizer without tokens", where=where)


def check_count(name: str, found: Any, most: int, *, where: str) -> None:
    """Refuse a count above the limit."""
    if not isinstance(found, (dict, list)):
        raise FileError(f"the tokenizer's {name} are not a list", where=where)
    if len(found) > most:
        raise FileError(f"{len(found):,} {name}, more than the {most:,} allowed", where=where)


def _check_part(part: Any, *, where: str, depth: int = 0) -> None:
    """Require small, shallow patterns, templates and replacements."""
    if depth > DEEPEST:
        raise FileError("nested too deeply", where=where)
    if isinstance(part, str) and len(part) > LONGEST_TEXT:
        raise FileError(f"a text of {len(part):,} characters", where=where)
    if isinstance(part, (dict, list)):
        check_count("entries", part, MOST_ADDED, where=where)
        items = list(part.values()) if isinstance(part, dict) else part
        table = part.get("precompiled_charsmap") if isinstance(part, dict) else None
        if isinstance(table, str) and len(table) <= LONGEST_TABLE:
            items = [item for item in items if item is not table]
        for item in items:
            _check_part(item, where=where, depth=depth + 1)


# --- vocab.json + merges.txt --------------------------------------------------------------------


def _from_merges(folder: Path, config: dict[str, Any]) -> Tokenizer:
    where = str(folder / VOCAB)
    vocab = read_object(folder / VOCAB, limit=FILE_LIMIT)
    check_pieces(vocab, where=where)
    lines = read_text(folder / MERGES, limit=FILE_LIMIT).split("\n")
    if lines and lines[0].startswith("#version"):
        lines = lines[1:]
    check_count("merges", lines, MOST_TOKENS, where=str(folder / MERGES))
    merges = []
    for number, line in enumerate(lines):
        parts = tuple(line.rstrip("\r").split(" "))
        if parts == ("",):
            continue
        if len(parts) != 2 or not all(parts):
            raise FileError("a merge is not two pieces", where=f"{folder / MERGES}, {number + 1}")
        merges.append((parts[0], parts[1]))
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    match kind or str(read_sidecar(folder, "config.json").get("model_type", "")):
        case "Qwen2Tokenizer" | "qwen2" | "qwen3":
            return _engine(vocab, merges, qwen=True, where=where)
        case "GPT2Tokenizer" | "gpt2":
            spaced = config.get("add_prefix_space") is True
            return _engine(vocab, merges, qwen=False, prefix_space=spaced, where=where)
        case other:
            raise FileError(
                f"how a tokenizer of class {other[:60]!r} cuts text is not known here",
                where=str(folder),
                hint=f"Qwen2Tokenizer, GPT2Tokenizer, or a {ENGINE}, which states it itself",
            )


def _engine(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    qwen: bool,
    prefix_space: bool = False,
    where: str,
) -> Tokenizer:
    """Build byte-level BPE with the pre-tokenizer of Qwen or of GPT-2."""
    try:
        engine = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the library raises Exception itself
        raise FileError(f"the merges do not fit: {str(error)[:200]}", where=where) from error
    if qwen:
        engine.normalizer = normalizers.NFC()
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    engine.decoder = decoders.ByteLevel()
    return engine


# --- lists of pieces ------------------------------------------------------------------------------


def _from_pieces(folder: Path, path: Path, config: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer of a SentencePiece model whose ids are the model's own.

    A class of transformers may number them otherwise, or put marks around a text: the known ones
    are listed, others are refused.
    """
    if path.stat().st_size > FILE_LIMIT:
        raise FileError(f"{path.stat().st_size:,} bytes", where=str(path))
    found = read_pieces(path.read_bytes(), where=str(path))
    data = found.to_json()
    texts = {name: (found.pieces[i].text, i) for name, i in found.names.items()}
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    match kind or str(read_sidecar(folder, "config.json").get("model_type", "")):
        case "LlamaTokenizer" | "GemmaTokenizer" | "llama" | "mistral" | "gemma" | "gemma2":
            begin = [texts["bos_token"]] if config.get("add_bos_token", True) else []
            end = [texts["eos_token"]] if config.get("add_eos_token", False) else []
        case "T5Tokenizer" | "t5" | "mt5":
            begin, end = [], [texts["eos_token"]]
            extra = config.get("extra_ids", 100)
            if type(extra) is not int or not 0 <= extra <= MOST_ADDED:
                raise FileError(f"extra_ids {str(extra)[:20]}", where=str(folder))
            first = len(found.pieces)
            for place, number in enumerate(range(extra - 1, -1, -1)):
                mark = f"<extra_id_{number}>"
                if kind and mark not in found.ids(CONTROL, USER_DEFINED):
                    data["model"]["vocab"].append([mark, 0.0])
                    data["added_tokens"].append(added(mark, first + place, special=True))
        case other:
            raise FileError(
                f"how a tokenizer of class {other[:60]!r} numbers the pieces of {path.name} is not "
                "known here",
                where=str(folder),
                hint=f"LlamaTokenizer, GemmaTokenizer, T5Tokenizer, or a {ENGINE}, which states it",
            )
    if begin or end:
        data["post_processor"] = around(begin, end)
    return _from_json(json.dumps(data), where=str(path))


def _from_translation(folder: Path) -> Tokenizer:
    """Build Marian's: SentencePiece splits a source, `vocab.json` numbers the pieces of both sides.

    Answers are spelled with the same numbers, so one tokenizer reads and writes.
    """
    path, where = folder / SOURCE, str(folder)
    if path.stat().st_size > FILE_LIMIT:
        raise FileError(f"{path.stat().st_size:,} bytes", where=str(path))
    found = read_pieces(path.read_bytes(), where=str(path))
    vocab = read_object(folder / VOCAB, limit=FILE_LIMIT)
    check_pieces(vocab, where=str(folder / VOCAB))
    if sorted(vocab.values()) != list(range(len(vocab))) or found.kind != UNIGRAM:
        raise FileError(
            "the ids of vocab.json have gaps, or the pieces are no unigram", where=where
        )
    scores = {piece.text: piece.score for piece in found.pieces if piece.kind == NORMAL}
    lost = sorted(set(scores) - set(vocab))
    if lost or "</s>" not in vocab or "<unk>" not in vocab:
        raise FileError(f"vocab.json has no {(lost or ['</s> or <unk>'])[0][:40]!r}", where=where)
    kinds = {"<unk>": UNKNOWN, "</s>": CONTROL, "<pad>": CONTROL}
    pieces = tuple(
        Piece(text, scores.get(text, 0.0), kinds.get(text, NORMAL if text in scores else UNUSED))
        for text in sorted(vocab, key=vocab.__getitem__)
    )
    data = replace(found, pieces=pieces).to_json()
    data["post_processor"] = around([], [("</s>", vocab["</s>"])])
    return _from_json(json.dumps(data), where=where)


def _from_words(path: Path, config: dict[str, Any]) -> Tokenizer:
    """Build BERT's tokenizer: a line of `vocab.txt` for each piece, in the order of their ids."""
    lines = read_text(path, limit=FILE_LIMIT).split("\n")
    lines = [line.rstrip("\r") for line in (lines[:-1] if lines and not lines[-1] else lines)]
    vocab = {piece: i for i, piece in enumerate(lines)}
    if len(vocab) < len(lines):
        raise FileError("two tokens are the same text", where=str(path))
    data = wordpiece_json(
        vocab,
        lowercase=config.get("do_lower_case", True) is True,
        strip_accents=config.get("strip_accents"),
        chinese=config.get("tokenize_chinese_chars", True) is True,
        where=str(path),
    )
    return _from_json(json.dumps(data), where=str(path))


# --- added tokens -------------------------------------------------------------------------------


def _add_tokens(engine: Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """Add tokens that other files define, each with its id."""
    where = str(folder)
    wanted: dict[int, AddedToken] = {}
    for content, i in read_sidecar(folder, "added_tokens.json").items():
        wanted[_number(i, where=where)] = AddedToken(content, normalized=False)
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict):
        raise FileError("added_tokens_decoder is not a table", where=where)
    for i, entry in declared.items():
        wanted[_number(i, where=where)] = _added(entry, where=where)
    check_count("added tokens", wanted, MOST_ADDED, where=where)
    there = engine.get_added_tokens_decoder()
    add_in_order(engine, [wanted[i] for i in sorted(wanted) if i not in there])
    for i, token in wanted.items():
        _check_id(engine, token.content, i, where=where)


def add_in_order(engine: Tokenizer, tokens: list[AddedToken]) -> None:
    """Add special and ordinary tokens without changing their order."""
    for token in tokens:
        engine.add_special_tokens([token]) if token.special else engine.add_tokens([token])


def _number(text: Any, *, where: str) -> int:
    if not str(text).isascii() or not str(text).isdigit() or int(text) >= 2 * MOST_TOKENS:
        raise FileError(f"an added token with the id {str(text)[:40]!r}", where=where)
    return int(text)


def _added(entry: Any, *, where: str) -> AddedToken:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, str) or not 0 < len(content) <= LONGEST_TOKEN:
        raise FileError("an added token without its text", where=where)
    flags = {
        name: entry.get(name) is True
        for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
    }
    return AddedToken(content, **flags)


def _check_id(engine: Tokenizer, content: str, wanted: Any, *, where: str) -> None:
    found = engine.token_to_id(content)
    if found != wanted:
        raise FileError(
            f"token {content[:60]!r} should have id {str(wanted)[:20]} and has {found}",
            where=where,
            hint="the files of the tokenizer do not belong together",
        )
