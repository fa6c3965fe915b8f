"""The small files of a Hugging Face folder, made from a GGUF file's metadata.

So tokenizers, chat templates and generation settings have one reader, with its limits. Byte-level
BPE with a known pre-tokenizer (`gpt2`), SentencePiece's pieces (`llama`, `t5`) and BERT's (`bert`)
are read; for others there is a reason why not. Pre-tokenizers are
listed by the names that GGUF files use, each as the `tokenizers` library's JSON. Only those that
are certain are listed: an unknown name is never guessed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from glassformer.adapters.gguf.header import Head, read_head
from glassformer.adapters.tokenizers.pieces import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    PieceModel,
    added,
    around,
    wordpiece_json,
)
from glassformer.spec.errors import FileError

#: How Qwen cuts text: contractions, words with one sign before them, single digits, signs, spaces.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Llama 3 does the same, with up to three digits together.
LLAMA_WORDS = QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": use_regex,
    }


def _in_order(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _split(pattern: str) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _in_order(cut, _bytes(use_regex=False))


@dataclass(frozen=True, slots=True)
class Words:
    """A pre-tokenizer. `whole`: a word that is a token stays unmerged. `begins`: texts get BOS."""

    cut: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    whole: bool = False
    begins: bool = False


WORDS = {
    "gpt-2": Words(_bytes(use_regex=True)),
    "qwen2": Words(_split(QWEN_WORDS), normalizer={"type": "NFC"}),
    "llama-bpe": Words(_split(LLAMA_WORDS), whole=True, begins=True),
    "smollm": Words(
        _in_order({"type": "Digits", "individual_digits": True}, _bytes(use_regex=True))
    ),
}


def name_of(cut: Any, *, normalizer: Any, whole: bool) -> str | None:
    """Return the name of a pre-tokenizer, or None."""
    for name, words in WORDS.items():
        same = _plain(words.cut) == _plain(cut) and words.normalizer == normalizer
        if same and words.whole == whole:
            return name
    return None


def _plain(part: Any) -> Any:
    """Return the JSON without settings that only change offsets."""
    if isinstance(part, dict):
        return {key: _plain(value) for key, value in part.items() if key != "trim_offsets"}
    return [_plain(each) for each in part] if isinstance(part, list) else part


PREFIX = "tokenizer.ggml."
TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
NONE = ("none", "no_vocab")

#: What config files call the tokens that the format numbers.
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "mask_token": "mask_token_id",
}
#: SentencePiece's pieces by the algorithm that joins them, and BERT's.
JOINED = {"llama": BPE, "t5": UNIGRAM}
KINDS = ("gpt2", *JOINED, "bert")
ENDS = ("eos_token_id", "eot_token_id")


def small_file(path: Path, name: str) -> dict[str, Any]:
    """Return one of the files as data; empty if the metadata has nothing for it."""
    head = read_head(path)
    match name:
        case "tokenizer.json":
            return tokenizer_json(head)
        case "tokenizer_config.json":
            return tokenizer_config(head)
        case "generation_config.json":
            return generation_config(head)
        case "config.json":
            rows = head.tensors.get("token_embd.weight")
            return {} if rows is None else {"vocab_size": rows.shape[0]}
        case _:
            return {}


def kept_files(head: Head) -> dict[str, bytes]:
    """Return all of them except config.json, for a checkpoint's `origin/`."""
    made = {
        name: json.dumps(data, ensure_ascii=False)
        for name, data in (
            ("generation_config.json", generation_config(head)),
            ("tokenizer_config.json", tokenizer_config(head)),
        )
        if data
    }
    if why_no_tokenizer(head) is None:
        made["tokenizer.json"] = tokenizer_text(head)
    return {name: (text + "\n").encode() for name, text in made.items()}


def why_no_tokenizer(head: Head) -> str | None:
    """Return why the tokenizer cannot be read: None if it can, empty if there is none."""
    kind = head.metadata.get(f"{PREFIX}model", NONE[0])
    if kind in NONE:
        return ""
    if kind not in KINDS:
        return f"its tokenizer is of the kind {str(kind)[:40]!r}; read here: {', '.join(KINDS)}"
    if kind != "gpt2":
        return None
    words = head.metadata.get(f"{PREFIX}pre", "absent")
    if not isinstance(words, str) or words not in WORDS:
        return (
            f"how its tokenizer cuts words ({str(words)[:40]!r}) is not known here; "
            f"known: {', '.join(WORDS)}"
        )
    return None


@lru_cache(maxsize=1)
def tokenizer_json(head: Head) -> dict[str, Any]:
    """Return the tokenizer as JSON of the `tokenizers` library; special tokens keep their ids.

    The last one is cached, as its header is: a checkpoint keeps it, a tokenizer is made of it.
    """
    if why_no_tokenizer(head) is not None:
        return {}
    kind = head.metadata[f"{PREFIX}model"]
    if kind in JOINED:
        return _joined_pieces(head, JOINED[kind])
    if kind == "bert":
        return _words(head)
    words = WORDS[head.metadata[f"{PREFIX}pre"]]
    tokens, kinds = _tokens(head)
    pieces = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    if len(pieces) < sum(kind != UNUSED for kind in kinds):
        raise FileError("two tokens are the same text", where=head.where)
    merges = _texts(head, f"{PREFIX}merges")
    for merge in merges:
        if merge.count(" ") != 1 or merge.startswith(" ") or merge.endswith(" "):
            raise FileError(f"a merge is not two pieces: {merge[:60]!r}", where=head.where)
    return {
        "version": "1.0",
        "added_tokens": [
            added(token, i, special=kinds[i] == CONTROL)
            for i, token in enumerate(tokens)
            if kinds[i] in (CONTROL, USER_DEFINED)
        ],
        "normalizer": words.normalizer,
        "pre_tokenizer": words.cut,
        "post_processor": _begin(head, tokens),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": words.whole,
            "vocab": pieces,
            "merges": [merge.split(" ") for merge in merges],
        },
    }


@lru_cache(maxsize=1)
def tokenizer_text(head: Head) -> str:
    """Return `tokenizer_json` as text; the last one is cached, for the same two readers."""
    return json.dumps(tokenizer_json(head), ensure_ascii=False)


def _joined_pieces(head: Head, how: int) -> dict[str, Any]:
    """Return SentencePiece's pieces as a tokenizer; the defaults are llama.cpp's."""
    tokens, kinds = _tokens(head)
    scores = head.metadata.get(f"{PREFIX}scores", [0.0] * len(tokens))
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise FileError("the scores of tokens are not one number for each", where=head.where)
    charsmap = head.metadata.get(f"{PREFIX}precompiled_charsmap", [])
    try:
        table = bytes(byte & 0xFF for byte in charsmap)
        pieces = tuple(
            Piece(text, float(score), kind if kind in range(NORMAL, BYTE + 1) else NORMAL)
            for text, score, kind in zip(tokens, scores, kinds, strict=True)
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise FileError(f"the tokenizer's tables: {error}", where=head.where) from error
    unknown = _id(head, "unknown_token_id")
    if unknown is not None and not any(piece.kind == UNKNOWN for piece in pieces):
        pieces = (
            *pieces[:unknown],
            Piece(pieces[unknown].text, pieces[unknown].score, UNKNOWN),
            *pieces[unknown + 1 :],
        )
    found = PieceModel(
        pieces=pieces,
        kind=how,
        charsmap=table,
        prefix=_flag(head, "add_space_prefix", default=True),
        folds=_flag(head, "remove_extra_whitespaces", default=how == UNIGRAM),
        where=head.where,
    )
    data = found.to_json()
    data["post_processor"] = _begin(head, tokens)
    return data


def _words(head: Head) -> dict[str, Any]:
    """Return BERT's pieces: the format marks beginnings of words, BERT their continuations."""
    tokens, kinds = _tokens(head)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind != NORMAL]
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        marked = token if kinds[i] != NORMAL or token.startswith("[") else f"##{token}"
        vocab[token[1:] if token.startswith(SPACE) else marked] = i
    if len(vocab) < len(tokens):
        raise FileError("two tokens are the same text", where=head.where)
    return wordpiece_json(vocab, lowercase=True, special=special, where=head.where)


def _flag(head: Head, key: str, *, default: bool) -> bool:
    found = head.metadata.get(PREFIX + key, default)
    if not isinstance(found, bool):
        raise FileError(f"{PREFIX}{key} is {str(found)[:40]}", where=head.where)
    return found


def tokenizer_config(head: Head) -> dict[str, Any]:
    """Return the named special tokens and the chat templates."""
    made: dict[str, Any] = {}
    if why_no_tokenizer(head) is None:
        tokens, _ = _tokens(head)
        made["tokenizer_class"] = "PreTrainedTokenizerFast"
        if head.metadata[f"{PREFIX}model"] != "bert":
            made["add_bos_token"] = _begins(head)
        for name, key in NAMED.items():
            i = _id(head, key)
            if i is not None:
                made[name] = tokens[i]
    templates = _templates(head)
    if set(templates) == {"default"}:
        made["chat_template"] = templates["default"]
    elif templates:
        made["chat_template"] = [{"name": n, "template": text} for n, text in templates.items()]
    return made


def generation_config(head: Head) -> dict[str, Any]:
    """Return the end-of-sequence ids: the end of a text, and of a turn if it has its own token."""
    ids = [i for i in (_id(head, key) for key in ENDS) if i is not None]
    return {"eos_token_id": list(dict.fromkeys(ids))} if ids else {}


@lru_cache(maxsize=1)
def _tokens(head: Head) -> tuple[list[str], list[int]]:
    tokens = _texts(head, f"{PREFIX}tokens")
    kinds = head.metadata.get(f"{PREFIX}token_type", [1] * len(tokens))
    right = isinstance(kinds, list) and len(kinds) == len(tokens)
    if not right or {*map(type, kinds)} - {int}:
        raise FileError("the kinds of tokens are not one number for each", where=head.where)
    return tokens, kinds


@lru_cache(maxsize=4)
def _texts(head: Head, key: str) -> list[str]:
    found = head.metadata.get(key, [])
    if not isinstance(found, list) or {*map(type, found)} - {str}:
        raise FileError(f"{key} is no list of texts", where=head.where)
    return found


def _id(head: Head, key: str) -> int | None:
    found = head.metadata.get(PREFIX + key)
    if found is None:
        return None
    most = len(_texts(head, f"{PREFIX}tokens"))
    if type(found) is not int or not 0 <= found < most:
        raise FileError(f"{PREFIX}{key} is {str(found)[:40]} of {most} tokens", where=head.where)
    return found


def _begins(head: Head) -> bool:
    """Return whether texts begin with BOS: as the file says, or as its kind implies."""
    match head.metadata[f"{PREFIX}model"]:
        case "gpt2":
            own = WORDS[head.metadata[f"{PREFIX}pre"]].begins
        case "llama":
            own = True
        case _:
            own = False
    return _flag(head, "add_bos_token", default=own and _id(head, "bos_token_id") is not None)


def _begin(head: Head, tokens: list[str]) -> dict[str, Any] | None:
    """Return what puts BOS before a text and EOS after it, where the file says so."""
    bos, eos = _id(head, "bos_token_id"), _id(head, "eos_token_id")
    ends = _flag(head, "add_eos_token", default=head.metadata[f"{PREFIX}model"] == "t5")
    before = [] if bos is None or not _begins(head) else [(tokens[bos], bos)]
    after = [] if eos is None or not ends else [(tokens[eos], eos)]
    if not before and not after:
        return None
    made = around(before, after)
    if before and not after:  # a second text begins as the first one does
        made["pair"] = [*made["single"], made["single"][0], _second()]
    return made


def _second() -> dict[str, Any]:
    return {"Sequence": {"id": "B", "type_id": 0}}


def _templates(head: Head) -> Mapping[str, str]:
    found = {"default": head.metadata.get(TEMPLATE)} if TEMPLATE in head.metadata else {}
    for name in _texts(head, TEMPLATES):
        found[name] = head.metadata.get(f"{TEMPLATE}.{name}")
    if not all(isinstance(text, str) for text in found.values()):
        raise FileError("a chat template is no text", where=head.where)
    return {name: str(text) for name, text in found.items()}
