"""Chat: templates, which write a conversation as the model was trained to read it; `Conversation`.

A template is a program from a model's folder, so it runs in a process of its own
(`template_worker`) in Jinja's immutable sandbox, with bounded output, memory and processor time.
The process starts at the first use and serves every later one; after a failure a new one is
started. The text equals that of transformers' `apply_chat_template`.
"""

import contextlib
import importlib.util
import json
import shlex
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from glassformer.adapters.chat import worker as template_worker
from glassformer.adapters.folder.files import find_sidecar, need_folder, read_sidecar, read_text
from glassformer.adapters.tokenizers.folder_tokenizer import special_names
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.streaming import Collected, NewToken, stream
from glassformer.models.stepping import Stepper
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import FileError, InputError, MachineError, nearest
from glassformer.spec.units import visible

FILE = "chat_template.jinja"
MORE = "additional_chat_templates"
LONGEST_TEMPLATE = 1_000_000
MOST_TEMPLATES = 20
LONGEST_REQUEST = 20_000_000

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The resources that a template may use; `patience` is in seconds of wall-clock time."""

    characters: int = 2_000_000
    seconds: float = 2.0
    megabytes: int = 512
    patience: float = 60.0


def read_templates(folder: Path) -> dict[str, str]:
    """Read templates by name: the `.jinja` files first, then those of `tokenizer_config.json`."""
    need_folder(folder)
    found: dict[str, str] = {}
    file = find_sidecar(folder, FILE)
    if file is not None:
        found["default"] = read_text(file, limit=LONGEST_TEMPLATE)
        for more in sorted((file.parent / MORE).glob("*.jinja"))[:MOST_TEMPLATES]:
            if more.is_file():
                found[more.stem] = read_text(more, limit=LONGEST_TEMPLATE)
        return found
    given = read_sidecar(folder, "tokenizer_config.json").get("chat_template")
    named = [{"name": "default", "template": given}] if isinstance(given, str) else given or []
    where = str(folder / "tokenizer_config.json")
    if not isinstance(named, list) or len(named) > MOST_TEMPLATES:
        raise FileError("chat_template is neither a text nor a short list of them", where=where)
    for entry in named:
        match entry:
            case {"name": str(name), "template": str(text)} if len(text) <= LONGEST_TEMPLATE:
                found[name] = text
            case _:
                raise FileError("a chat template without a name, or a very long one", where=where)
    return found


def read_chat(folder: Path, *, limits: Limits = Limits()) -> "ChatTemplate":  # noqa: B008  frozen
    """Read the folder's templates, with the special tokens that they may use."""
    sources = read_templates(folder)
    if not sources:
        shown = folder.parents[1] if folder.parent.name == "checkpoints" else folder  # of a run
        command = f"glass generate {shlex.quote(str(shown))} 'Once upon a time'"
        raise InputError(
            "this model has no chat template",
            where=str(shown),
            hint=f"a base model continues text: {command}",
        )
    return ChatTemplate(sources, names=special_names(folder), limits=limits, where=str(folder))


class ChatTemplate:
    """Chat templates: `render` returns the text of a conversation, `close` ends the worker."""

    def __init__(
        self,
        sources: Mapping[str, str] | str,
        *,
        names: Mapping[str, str] | None = None,
        limits: Limits = Limits(),  # noqa: B008  frozen
        where: str = "",
    ) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.names = dict(names or {})
        self.limits = limits
        self.where = where
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], ChatTemplate] | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> str:
        """Return a conversation as text; `add_generation_prompt` begins the model's turn.

        `options` are the template's own switches (`enable_thinking`), `template` picks one of
        several by name, and `now` is the time that the template sees.
        """
        for place, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InputError("a message without a role", where=f"messages[{place}]")
        names = {
            **self.names,
            **(options or {}),
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        request = {
            "template": self._pick(template, tools=tools is not None),
            "names": names,
            "now": None if now is None else now.isoformat(),
        }
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"the conversation is not plain data: {error}", hint="texts, numbers, lists, tables"
            ) from error
        if len(line) > LONGEST_REQUEST:
            raise InputError(f"a conversation of {len(line):,} bytes", hint="shorten it")
        with self._lock:
            found = self._ask(line)
        return found["text"] if "text" in found else self._refuse(found)

    def close(self) -> None:
        """End the process; a later `render` starts another."""
        if self._end is not None:
            self._end()
        self._worker = self._end = None

    def _pick(self, wanted: str | None, *, tools: bool) -> str:
        name = wanted or ("tool_use" if tools and "tool_use" in self.sources else "default")
        if name not in self.sources:
            raise InputError(f"no chat template '{name}'", hint=nearest(name, self.sources))
        return name

    def _ask(self, line: bytes) -> dict[str, str]:
        worker = self._worker or self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        watch = threading.Timer(self.limits.patience, worker.kill)
        watch.start()
        try:
            worker.stdin.write(line)
            worker.stdin.flush()
            # JSON writes a character in twelve bytes at most.
            reply = worker.stdout.readline(12 * self.limits.characters + 1_000)
        except OSError:  # it has ended
            reply = b""
        except BaseException:  # an interrupt: the pending answer must not reach the next caller
            self.close()
            raise
        finally:
            watch.cancel()
        if reply.endswith(b"\n"):
            found: dict[str, str] = json.loads(reply)
            return found
        code = worker.wait() if not reply else None
        self.close()
        kind = "time" if code in (-signal.SIGPROF, -signal.SIGKILL) else "ended"
        return {"error": kind, "message": str(code)}

    def _start(self) -> subprocess.Popen[bytes]:
        spec = importlib.util.find_spec("jinja2")
        if spec is None or spec.origin is None:
            raise MachineError(
                "chat templates need jinja2, which is missing", hint="pip install jinja2"
            )
        words = (self.limits.megabytes, self.limits.characters, self.limits.seconds)
        worker = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-B",
                template_worker.__file__,
                str(Path(spec.origin).parents[1]),
            ]
            + [str(word) for word in words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
        )
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(self.sources).encode() + b"\n")
        self._worker, self._end = worker, weakref.finalize(self, _stop, worker)
        return worker

    def _refuse(self, found: dict[str, str]) -> str:
        limits, message = self.limits, visible(found["message"])[:300]
        match found["error"]:
            case "refused":
                raise InputError(f"the chat template refuses this conversation: {message}")
            case "failed":
                raise InputError(
                    f"the chat template cannot use this conversation: {message}", where=self.where
                )
            case "length":
                what = f"it makes more than {limits.characters:,} characters"
            case "time":
                what = f"it takes more than {limits.seconds:g} seconds"
            case "memory":
                what = f"it needs more than {limits.megabytes} megabytes, or nests too deeply"
            case "security":
                what = f"it does what a template may not: {message}"
            case "syntax":
                what = f"it cannot be read: {message}"
            case _:
                what = f"its process ended by itself ({message})"
        raise FileError(f"the chat template was stopped: {what}", where=self.where)


def _stop(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # unsent bytes for a process that is gone
            pipe.close()


# --- a conversation -------------------------------------------------------------------------------
#
# The complete history is kept; the oldest turns that no longer fit are left out of the prompt, and
# `Turn.dropped` counts them. An answer streams; a caller that stops iterating ends it, and the part
# generated so far stays in the history.

#: An answer that may be this share of the context or longer has at least 1 / SHARE left for it.
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

    def __call__(self, text: str) -> str:
        """Return the complete answer to a question."""
        return "".join(self.ask(text))

    def __repr__(self) -> str:
        lines = [f"{one['role']}: {visible(one['content'])}" for one in self._spoken(self.messages)]
        return "\n".join(lines) or "a conversation without a word: talk('hello'), talk.ask('hello')"

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
            raise MachineError(
                f"the conversation cannot be saved: {error.strerror}",
                where=visible(str(path)),
                hint="name a file in a folder that is there and yours to write to",
            ) from error

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
