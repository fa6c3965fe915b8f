"""Answers with a form: response formats as constraints, and tool calls read from text."""

import json
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from glassformer.adapters.chat.template import ChatTemplate
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.constraint import Constraint
from glassformer.generation.text_stream import StopFilter
from glassformer.serve.request import ResponseFormat
from glassformer.spec.errors import InputError

#: Constraints that are kept for later requests; a pattern's longest length.
KEPT, LONGEST_PATTERN = 16, 2_000


class Formats:
    """The constraints of one model's tokenizer, the most recent ones kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._kept: OrderedDict[str, Constraint] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, wanted: ResponseFormat) -> Constraint | None:
        """Return the constraint of a format; None for plain text."""
        match wanted.kind:
            case "text":
                return None
            case "regex":
                return self._of(wanted.pattern)
            case "json_object" | "json_schema":
                raise InputError("JSON formats are not offered yet", hint="use a regex")

    def _of(self, pattern: str) -> Constraint:
        if len(pattern) > LONGEST_PATTERN:
            raise InputError(f"a pattern of {len(pattern)} characters", hint=f"{LONGEST_PATTERN}")
        with self._lock:
            if pattern in self._kept:
                self._kept.move_to_end(pattern)
                return self._kept[pattern]
            made = Constraint.of_regex(pattern, tokenizer=self.tokenizer)
            self._kept[pattern] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return made


# --- tools ----------------------------------------------------------------------------------------

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def reads_tools(template: ChatTemplate) -> bool:
    """Return whether a template offers tools in the form that is read here (Hermes', Qwen's)."""
    return any("tools" in source and OPEN in source for source in template.sources.values())


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function: its name, and its arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolReader:
    """Text in, text without tool calls out; `calls` are those found so far.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. What is between the marks
    and no such object stays text.
    """

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self._outside = StopFilter([OPEN])
        self._inside: str | None = None

    def push(self, piece: str) -> str:
        """Return the text that belongs to no call."""
        shown = ""
        while piece:
            if self._inside is None:
                before = self._outside.pending + piece
                out = self._outside.push(piece)
                shown += out
                if not self._outside.over:
                    return shown
                piece = before[len(out) + len(OPEN) :]
                self._inside, self._outside = "", StopFilter([OPEN])
            self._inside += piece
            body, mark, piece = self._inside.partition(CLOSE)
            if not mark:
                return shown
            shown += self._call(body, f"{OPEN}{body}{CLOSE}")
            self._inside = None
        return shown

    def flush(self) -> str:
        """Return the rest at the end; a call that lacks its closing mark is still one."""
        rest = self._outside.flush()
        if self._inside is not None:
            rest += self._call(self._inside, OPEN + self._inside)
            self._inside = None
        return rest

    def _call(self, body: str, written: str) -> str:
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return written
        match found:
            case {"name": str(name), "arguments": dict() | str() as arguments}:
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                self.calls.append(ToolCall(name, text))
                return ""
            case _:
                return written
