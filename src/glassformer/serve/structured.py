"""Answers with a form: constraints of response formats, and tool calls read from text."""

import contextlib
import json
import os
import secrets
import subprocess
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from glassformer.adapters.chat.template import ChatTemplate
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.constraint import Constraint, TokenTexts
from glassformer.generation.text_stream import StopFilter
from glassformer.serve.patterns import CLOSE, LONGEST_SCHEMA, OPEN, SECONDS, command
from glassformer.spec.errors import InputError, MachineError

#: Bytes of the tables that are kept for later requests, for each model.
KEPT_BYTES = 1 << 25
#: Processes that build constraints: the server itself needs a core, and its clients one.
PROCESSES = max(1, min(2, (os.cpu_count() or 1) - 1))
#: Seconds that a request waits for one, in all.
PATIENCE = 30.0


class Builders:
    """The processes that build constraints, for all models; each is started when it is needed."""

    def __init__(self) -> None:
        self._room = anyio.CapacityLimiter(PROCESSES)
        self._free: list[_Builder] = []

    async def constraint(self, formats: "Formats", wanted: Mapping[str, Any]) -> Constraint:
        """Return the constraint of a format; cancelled, its process is killed."""
        text = json.dumps({"model": formats.name, **wanted}, sort_keys=True)
        if len(text) > LONGEST_SCHEMA:
            raise InputError(
                f"a schema of {len(text):,} characters", hint=f"at most {LONGEST_SCHEMA:,}"
            )
        kept = formats.kept(text)
        if kept is not None:
            return kept
        async with self._room:
            kept = formats.kept(text)  # someone else may have asked for it meanwhile
            if kept is not None:
                return kept
            builder = self._free.pop() if self._free else _Builder()
            try:
                made = await anyio.to_thread.run_sync(
                    builder.build, formats, text, abandon_on_cancel=True
                )
            except InputError:
                self._free.append(builder)
                raise
            except BaseException:  # cancelled, or its process has ended
                builder.close()
                raise
            self._free.append(builder)
        formats.keep(text, made)
        return made


class _Builder:
    """One process; what it has been told of the models' tokens."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"OPENBLAS_NUM_THREADS": "1"},  # and no key
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
        )
        self.close = weakref.finalize(self, _end, self._process)
        self._told: set[str] = set()

    def build(self, formats: "Formats", wanted: str) -> Constraint:
        """Return the constraint of a format, written as JSON; called in a thread."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        lines = []
        if formats.name not in self._told:
            texts = formats.texts()
            told = {"alone": texts.alone, "behind": texts.behind, "are_names": texts.are_names}
            lines.append(json.dumps({"model": formats.name, **told}))
            self._told.add(formats.name)
        lines.append(wanted)
        try:
            for line in lines:
                stdin.write(line.encode() + b"\n")
            stdin.flush()
            answer = json.loads(stdout.readline() or "null")
            if answer is not None and "shape" in answer:
                rows, columns = answer["shape"]
                data = stdout.read(rows * columns * np.dtype(np.int16).itemsize)
                table = np.frombuffer(data, dtype=np.int16).reshape(rows, columns)
                return Constraint.of_table(table, ends=answer["ends"])
        except (OSError, ValueError):  # it has ended, in the middle of its answer
            answer = None
        if answer is None:
            raise MachineError(
                f"its machine was not built within {SECONDS:g} seconds of CPU time and the memory "
                "that is allowed",
                hint="a smaller schema or pattern",
            )
        raise InputError(answer["what"], hint=answer["hint"])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # unsent bytes for a process that is gone
            pipe.close()


class Formats:
    """The constraints of one model that are kept, and the texts of its tokens."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self._kept: OrderedDict[str, Constraint] = OrderedDict()
        self._texts: TokenTexts | None = None
        self._reading = threading.Lock()

    def kept(self, text: str) -> Constraint | None:
        """Return the constraint of a format if it is still there."""
        found = self._kept.get(text)
        if found is not None:
            self._kept.move_to_end(text)
        return found

    def keep(self, text: str, made: Constraint) -> None:
        """Keep a constraint; those that were not used for longest go."""
        self._kept[text] = made
        while sum(one.target_QV.nbytes for one in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)

    def texts(self) -> TokenTexts:
        """Return the texts of the tokens, decoded once."""
        with self._reading:
            if self._texts is None:
                self._texts = TokenTexts.of(self.tokenizer)
            return self._texts


# --- tools ----------------------------------------------------------------------------------------


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
