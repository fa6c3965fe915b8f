"""`Conversation`: a chat in turns, within the model's context.

The complete history is kept; the oldest turns that no longer fit are left out of the prompt, and
`Turn.dropped` counts them. An answer streams; a caller that stops iterating ends it, and the part
generated so far stays in the history.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glassformer.adapters.chat.template import ChatTemplate
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.stepper import Stepper
from glassformer.generation.streaming import Collected, NewToken, stream
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError, MachineError

#: Of the context, what at least is left for an answer that may be this long or longer.
SHARE = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn; `dropped` counts the messages left out of its prompt."""

    text: str
    tokens: tuple[int, ...]
    finish: str
    dropped: int


class Conversation:
    """A chat with a model: `ask` yields the answer in pieces, `last` is the finished turn.

    `spec` says how answers are sampled; every turn has its own seed. `options` are the template's
    switches.
    """

    def __init__(
        self,
        stepper: Stepper,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        spec: DecodeSpec,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.stepper = stepper
        self.tokenizer = tokenizer
        self.template = template
        self.spec = spec
        self.system = system
        self.options = dict(options or {})
        self.messages: list[dict[str, str]] = []
        self.last: Turn | None = None
        self._hidden = 0  # messages at the beginning that the model no longer sees
        self._turns = 0

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yield the answer in pieces of complete characters; a bad question is refused at once."""
        if not text.strip():
            raise InputError("an empty question", hint="type something")
        question = {"role": "user", "content": text}
        ids, hidden = self._fitting([*self.messages, question])
        spec = replace(self.spec, seed=self.spec.seed + self._turns)
        new = stream(self.stepper, [ids], spec=spec, tokenizer=self.tokenizer, logprobs=False)
        return self._answer(question, new, hidden)

    def _answer(
        self, question: dict[str, str], new_tokens: Iterator[list[NewToken]], hidden: int
    ) -> Generator[str, None, None]:
        dropped, self._hidden = hidden - self._hidden, hidden
        self.messages.append(question)
        self._turns += 1
        answer = Collected()
        try:
            for (new,) in new_tokens:
                answer.add(new)
                yield new.text
        finally:  # also when the caller stops iterating
            self.messages.append({"role": "assistant", "content": answer.text})
            self.last = Turn(answer.text, tuple(answer.tokens), answer.finish or "stopped", dropped)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages.clear()
        self.last = None
        self._hidden = 0

    def instruct(self, text: str | None) -> None:
        """Set the system message from the next turn on; None removes it."""
        self.system = text or None

    def save(self, path: Path) -> None:
        """Append the conversation to a JSONL file, as fine-tuning reads it."""
        line = json.dumps({"messages": self._spoken(self.messages)}, ensure_ascii=False)
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise MachineError(f"could not write {path}: {error.strerror}") from error

    def _spoken(self, messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *messages]

    def _fitting(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], int]:
        """Return the ids of the messages that fit, and the number of those left out."""
        longest = self.stepper.max_seq_len
        room = min(self.spec.max_new_tokens, max(1, longest // SHARE))
        hidden = self._hidden
        while True:
            text = self.template.render(self._spoken(messages[hidden:]), options=self.options)
            ids = self.tokenizer.encode(text)
            if len(ids) + room <= longest:
                return ids, hidden
            if hidden + 2 >= len(messages):  # the question alone: it gets what room there is
                if len(ids) < longest:
                    return ids, hidden
                raise InputError(
                    f"the question takes {len(ids)} tokens of a context of {longest}",
                    hint="shorten it, or the system's words",
                )
            hidden += 2
