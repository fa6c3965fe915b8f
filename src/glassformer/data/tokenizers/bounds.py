"""What the parts of a foreign tokenizer may cost: a bound on how much they lengthen a text.

A `tokenizer.json` chains rewriting parts, and a chain of a few hundred bytes can make gigabytes of
one word (each `Replace` multiplies). The library runs it without a limit, so the chain's growth is
computed from the file and refused before the library reads it. Its regular expressions are bounded
by the library itself, which gives up after ten million steps of one match.
"""

import base64
import binascii
import math
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from glassformer.spec.errors import FileError

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
