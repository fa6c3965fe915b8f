"""Words of tokens made visible: blanks at the ends are marked, control characters escaped."""

from collections.abc import Callable, Sequence

from glassformer.spec.errors import InputError

#: A function from an id to its word.
Names = Callable[[int], str]

BLANK = "\u2423"
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def shown(word: str, *, most: int = 0) -> str:
    """Return a word for a label: blanks at its ends as marks, control characters as escapes."""
    inner = word.strip(" ")
    before = len(word) - len(word.lstrip(" "))
    after = len(word) - before - len(inner)
    text = BLANK * before + "".join(map(_visible, inner)) + BLANK * after
    if not text:
        return "''"
    return text if not most or len(text) <= most else text[: most - 1] + "…"


def _visible(sign: str) -> str:
    if sign in _ESCAPES:
        return _ESCAPES[sign]
    # Escaped: what a terminal would act on, and what reverses the direction of a line.
    return sign if sign.isprintable() else f"\\u{ord(sign):04x}"


def naming(names: Names | Sequence[str] | None) -> Names:
    """Return a function from ids to words; without words, ids are shown as numbers."""
    if names is None:
        return str
    if callable(names):
        return names
    listed = list(names)
    return lambda i: listed[i] if 0 <= i < len(listed) else str(i)


def checked_words(
    words: Sequence[str] | None, ids: Sequence[int], names: Names | None, *, what: str = "words"
) -> tuple[str, ...]:
    """Return one word per token, after checking that there are as many."""
    if words is None:
        return tuple(str((names or str)(i)) for i in ids)
    if len(words) != len(ids):
        raise InputError(f"{len(words)} {what} for {len(ids)} tokens", hint="one for each token")
    return tuple(map(str, words))
