"""Tokenizers that multiply text are refused before the library runs them."""

import json
import unicodedata
from pathlib import Path

import pytest

from glassformer.adapters.folder.paths import load_tokenizer
from glassformer.data.tokenizers.bpe import MOST_ADDED, MOST_GROWTH, BytePairs, check_growth
from glassformer.spec.errors import FileError

LETTERS = "abcdefghijklmnopqrstuvwxyz "
PLAIN = json.loads(BytePairs.train([LETTERS], vocab_size=260).to_json())


def replace(pattern: str, content: str, kind: str = "String") -> dict:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def several(kind: str, *parts: dict) -> dict:
    names = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    return {kind: {"type": "Sequence", names[kind]: list(parts)}}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 3,
    "pair": [],
    "special_tokens": {},
}
BOMBS = {
    "doubling": several("normalizer", *[replace("a", "aa")] * 30),
    "one long replacement": {"normalizer": replace("a", "a" * 8_000)},
    "every gap": {"normalizer": replace("", "a" * 100, "Regex")},
    "nothing": {"normalizer": replace("", "a")},
    "prepending": several("normalizer", *[{"type": "Prepend", "prepend": "a" * 8_000}] * 30),
    "decomposing": several("normalizer", *[replace("x", "ﷺ"), {"type": "NFKD"}] * 3),
    "bytes of bytes": several("pre_tokenizer", *[BYTES] * 30),
    "while decoding": several("decoder", *[replace("a", "aa")] * 30),
    "repeating the text": {
        "post_processor": {"type": "Sequence", "processors": [TEMPLATE] * 20},
    },
    "many parts": several("normalizer", *[{"type": "NFC"}] * 1_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_multiplies_text_is_refused(name, tmp_path):
    text = json.dumps({**PLAIN, **BOMBS[name]})
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "config.json").write_text("{}")
    for read in (BytePairs.from_json, lambda _: load_tokenizer(tmp_path)):
        with pytest.raises(FileError):
            read(text)


USUAL = {
    "llama": several("normalizer", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
    "albert": several(
        "normalizer",
        replace("``", '"'),
        replace("''", '"'),
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        replace(" {2,}", " ", "Regex"),
    ),
    "byte level": {"pre_tokenizer": BYTES},
    "decoder": several(
        "decoder",
        replace("▁", " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ),
}


@pytest.mark.parametrize("name", USUAL)
def test_what_real_tokenizers_do_is_allowed(name):
    check_growth({**PLAIN, **USUAL[name]}, where="")


def test_the_bound_is_above_what_a_chain_really_does():
    from tokenizers import Tokenizer

    text = "aaaa aaaa aaaa"
    for chain in ([("a", "aa")] * 5, [("a", "aﷺ")], [(" ", "a"), ("a", "aaaa")]):
        parts = several("normalizer", *[replace(old, new) for old, new in chain])
        check_growth({**PLAIN, **parts}, where="")
        made = Tokenizer.from_str(json.dumps({**PLAIN, **parts})).normalizer.normalize_str(text)
        longest = unicodedata.normalize("NFKD", made)
        assert len(longest) <= MOST_GROWTH * len(text) + MOST_ADDED


def test_a_panic_of_the_library_is_an_error_of_the_file(tmp_path: Path):
    text = json.dumps({**PLAIN, "normalizer": replace("(a+)+$", "b", "Regex")})
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "config.json").write_text("{}")
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(FileError, match="the tokenizer fails"):
        tokenizer.encode("a" * 40 + "b")
