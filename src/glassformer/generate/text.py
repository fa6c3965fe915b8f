"""Text while it is made: what is shown is never taken back, and never half a character."""

from glassformer.data.vocab import Tokenizer

BROKEN = "\ufffd"  # what decoders write for bytes that are no character, or not yet one


class TextStream:
    """Tokens in, finished text out; all pieces together are the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []  # from the last token that ended with a whole character
        self._shown = 0  # characters of their text that were given out

    def push(self, token: int) -> str:
        """What this token adds; nothing while a character lacks bytes."""
        self._ids.append(token)
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
        """The rest, when no more tokens come: broken bytes are shown as broken."""
        piece = self.tokenizer.decode(self._ids)[self._shown :] if self._ids else ""
        self._ids, self._shown = [], 0
        return piece
