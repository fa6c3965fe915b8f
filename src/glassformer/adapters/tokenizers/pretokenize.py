"""Pre-tokenizers of byte-level BPE, by the names that GGUF files use for them.

Each is written as the `tokenizers` library's JSON. Only those that are certain are listed: an
unknown name is never guessed.
"""

from dataclasses import dataclass
from typing import Any

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
