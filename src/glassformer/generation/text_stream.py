"""Text while it is generated: pieces are never taken back, and never half a character."""

from collections.abc import Sequence

from glassformer.data.tokenizers.vocab import Tokenizer

BROKEN = "\ufffd"  # decoders write it for bytes that are no character, or not yet one


class TextStream:
    """Tokens in, finished text out; all pieces together are the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []  # from the last token that ended with a complete character
        self._shown = 0  # characters of their text that were returned

    def push(self, *tokens: int) -> str:
        """Return the text that these tokens add; empty while a character lacks bytes."""
        self._ids += tokens
        text = self.tokenizer.decode(self._ids)
        # An unfinished character is the last one: decoders write one sign for all of its bytes.
        whole = len(text) - text.endswith(BROKEN)
        piece, self._shown = text[self._shown : whole], max(self._shown, whole)
        if whole == len(text):
            # One token stays: what a token adds can depend on the one before (a space between).
            self._ids = self._ids[-1:]
            self._shown = len(self.tokenizer.decode(self._ids))
        return piece

    def flush(self) -> str:
        """Return the rest, after the last token: incomplete bytes as replacement characters."""
        piece = self.tokenizer.decode(self._ids)[self._shown :] if self._ids else ""
        self._ids, self._shown = [], 0
        return piece


class StopFilter:
    """Text up to the first of some strings; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.over = False
        self._held = ""

    @property
    def pending(self) -> str:
        """What is held back."""
        return self._held

    def push(self, piece: str) -> str:
        """Return the part that cannot belong to a stop string."""
        if self.over:
            return ""
        text = self._held + piece
        cuts = [text.find(stop) for stop in self.stops if stop in text]
        if cuts:
            self.over, self._held = True, ""
            return text[: min(cuts)]
        most = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - most :]
        return text[: len(text) - most]

    def flush(self) -> str:
        """Return what was held back, at the end: it began like a stop string but was none."""
        piece, self._held = self._held, ""
        return piece


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of the text that begin the stop string."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
