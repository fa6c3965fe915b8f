"""A tokenizer as GGUF's metadata: pieces, kinds, merges, the name of its way of cutting.

Only what a reader would cut the same way is written: byte-level BPE, cut in a way that has a name.
Of anything else the reason is given, and the file says that it has no tokenizer.
"""

import json
from typing import Any

from glassformer.adapters.gguf.small_files import (
    CONTROL,
    ENDS,
    NAMED,
    NONE,
    PREFIX,
    TEMPLATE,
    TEMPLATES,
    UNUSED,
    USER_DEFINED,
)
from glassformer.adapters.tokenizer import FolderTokenizer
from glassformer.adapters.words import name_of
from glassformer.data.bpe import BytePairs
from glassformer.data.vocab import Tokenizer

PLAIN = 1
#: Options of the library's BPE that the format has no word for.
OFF = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
)


def write_vocabulary(
    tokenizer: Tokenizer | None, *, size: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The metadata, for a model of `size` ids, and what could not go along."""
    without = {f"{PREFIX}model": NONE[0]}
    if tokenizer is None:
        return without, ()
    if not isinstance(tokenizer, BytePairs | FolderTokenizer):
        return without, (f"a tokenizer of our kind {type(tokenizer).__name__} is not written",)
    data = json.loads(tokenizer.to_json())
    words = name_of(
        data["pre_tokenizer"],
        normalizer=data["normalizer"],
        whole=bool(data["model"].get("ignore_merges")),
    )
    why = _why_not(data, words, tokenizer, size)
    if why:
        return without, (f"the tokenizer is not written: {why}",)
    pieces = {i: token for token, i in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(pieces, PLAIN)
    for token in data["added_tokens"]:
        pieces[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = data["model"]["merges"]
    made: dict[str, Any] = {
        "model": "gpt2",
        "pre": words,
        # Rows of the embedding that have no token get a name, since every one needs one.
        "tokens": [pieces.get(i, f"[PAD{i}]") for i in range(size)],
        "token_type": [kinds.get(i, UNUSED) for i in range(size)],
        "merges": [each if isinstance(each, str) else " ".join(each) for each in merges],
        "add_bos_token": tokenizer.bos is not None,
    }
    notes: tuple[str, ...] = ()
    if isinstance(tokenizer, FolderTokenizer):
        by_text = {token: i for i, token in pieces.items()}
        made |= {NAMED[name]: by_text[text] for name, text in tokenizer.names.items()}
        first, *others = dict.fromkeys((made.get(ENDS[0], -1), *tokenizer.eos_ids))
        if first < 0 and others:
            made[ENDS[0]], *others = others
        if others:
            made[ENDS[1]] = others[0]
        if others[1:]:
            notes = (f"texts also end with {others[1:]}: GGUF has room for two",)
    return {PREFIX + key: value for key, value in made.items() if value != []}, notes


def write_templates(templates: dict[str, str]) -> dict[str, Any]:
    """Chat templates, the default one and those with a name."""
    named = {name: text for name, text in templates.items() if name != "default"}
    made: dict[str, Any] = {f"{TEMPLATE}.{name}": text for name, text in named.items()}
    if named:
        made[TEMPLATES] = sorted(named)
    return made | ({TEMPLATE: templates["default"]} if "default" in templates else {})


def _why_not(data: dict[str, Any], words: str | None, tokenizer: Tokenizer, size: int) -> str:
    """The reason why a reader of the file would not cut as this tokenizer does; or nothing."""
    model, decoder = data["model"], data["decoder"] or {}
    if words is None or decoder.get("type") != "ByteLevel":
        return "it is no byte-level BPE that cuts words in a way that GGUF names"
    if any(model.get(key) for key in OFF):
        return f"it sets one of {', '.join(OFF)}"
    if tokenizer.vocab_size > size:
        return f"it has {tokenizer.vocab_size} ids, and the model {size}"
    if any(token[key] for token in data["added_tokens"] for key in ("single_word", "lstrip")) or (
        any(token["rstrip"] for token in data["added_tokens"])
    ):
        return "its marks take in the spaces beside them"
    return ""
