"""Answers in OpenAI's shapes: complete, or streamed as server-sent events.

`Answer` collects the tokens of one request's continuations. An event carries what has arrived since
the last one: a token where tokens come slowly, several where they come faster than events can be
written, or than the client reads.
"""

import asyncio
import contextlib
import json
import math
import secrets
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glassformer.generation.batching import Continuation
from glassformer.generation.choosing import NOTHING
from glassformer.generation.streaming import NewToken
from glassformer.serve.engine import Engine, Listener, Served
from glassformer.serve.fields import BadRequest
from glassformer.serve.request import ChatRequest, CompletionRequest
from glassformer.serve.structured import ToolCall, ToolReader

#: Why a text ended, in OpenAI's words.
FINISH = {"eos": "stop", "stop": "stop", "constraint": "stop", "length": "length"}
#: Seconds that an event waits for room at its client before the answer is on hold, and ended.
HOLD_SECONDS, UNREAD_SECONDS = 0.05, 5.0
#: The log-probability that stands for minus infinity, which JSON does not have.
LEAST_LOGPROB = -9999.0
HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}


def json_response(value: Mapping[str, Any], *, status: int = 200, headers: Any = None) -> Response:
    """Return JSON with the headers of every response."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(
        body, status, media_type="application/json", headers={**HEADERS, **(headers or {})}
    )


def problem(error: BadRequest) -> Response:
    """Return an error as OpenAI's clients read it."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return json_response(error.body(), status=error.status, headers=headers)


def mistake(error: BaseException) -> BadRequest:
    """Print the traceback on the terminal; the client sees one line."""
    traceback.print_exception(error, file=sys.stderr)
    return BadRequest("The server has a bug; its log shows it", status=500, kind="server_error")


def too_late(seconds: float) -> BadRequest:
    """Return the error of an answer that took too long."""
    return BadRequest(
        f"The answer took longer than {seconds:g} seconds",
        status=503,
        kind="server_error",
        code="timeout",
    )


def unread(seconds: float) -> BadRequest:
    """Return the error of an answer whose client does not read it."""
    return BadRequest(
        f"The client read nothing for {seconds:g} seconds, and the answer was ended",
        status=503,
        kind="server_error",
        code="unread",
    )


# --- a request that is being answered -------------------------------------------------------------


class Answer:
    """The continuations of one request while they run: `pieces` yields what arrives."""

    def __init__(self, engine: Engine, style: "Style", *, seconds: float) -> None:
        self.engine, self.style, self.seconds = engine, style, seconds
        self.served, self.rows = style.served, style.rows
        self.listener = Listener()
        self.left = {id(row) for row in self.rows}
        self.places = {id(row): place for place, row in enumerate(self.rows)}
        self.begun = time.perf_counter()
        self._clock: asyncio.TimerHandle | None = None
        for row in self.rows:
            row.data = self.listener

    def begin(self) -> None:
        """Queue everything, and start the clock."""
        self.begun = time.perf_counter()
        self._clock = asyncio.get_running_loop().call_later(self.seconds, self._too_late)
        self.engine.add(self.served.name, self.rows)

    def _too_late(self) -> None:
        self.engine.count(self.served.name, "timeout")
        self.listener.fail(too_late(self.seconds))

    async def pieces(self) -> AsyncIterator[tuple[int, list[NewToken], str]]:
        """Yield (choice, its new tokens, the text they add) until every choice has ended."""
        first = True
        while self.left:
            arrived = await self.listener.get()
            if first:
                first = False
                waited = time.perf_counter() - self.begun
                self.engine.figures[self.served.name].first_token.add(waited)
            by_row: dict[int, tuple[Continuation, list[NewToken]]] = {}
            for row, new in arrived:
                by_row.setdefault(id(row), (row, []))[1].append(new)
            for row, tokens in by_row.values():
                finish = tokens[-1].finish
                if finish == "error":
                    raise BadRequest(
                        "The model's logits are not numbers", status=500, kind="server_error"
                    )
                place = self.places[id(row)]
                text = self.style.take(place, tokens, self.style.shown(row, tokens))
                if finish is not None:
                    self.left.discard(id(row))
                    self.engine.count(self.served.name, FINISH[finish])
                yield place, tokens, text

    def end(self, outcome: str = "") -> None:
        """Cancel what has not ended: the client has gone or reads nothing, or an error ends it."""
        if self._clock is not None:
            self._clock.cancel()
        if self.left:
            if outcome or all(row.finish is None for row in self.rows):
                self.engine.count(self.served.name, outcome or "cancelled")
            self.engine.cancel(self.served.name, self.rows)
            self.left.clear()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Put the continuations on hold while the client takes no event, from HOLD_SECONDS on."""
        name, is_held = self.served.name, False

        def hold() -> None:
            nonlocal is_held
            is_held = True
            self.engine.hold(name, self.rows)

        clock = asyncio.get_running_loop().call_later(HOLD_SECONDS, hold)
        try:
            yield
        finally:
            clock.cancel()
            if is_held:
                self.engine.go_on(name, self.rows)

    async def collected(self, receive: Receive) -> Response:
        """Return the complete answer; what has not ended is cancelled if the client goes away."""
        body: Response | None = None
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await gone(receive)
                group.cancel_scope.cancel()

            group.start_soon(watch)
            try:
                self.begin()
                async for _ in self.pieces():
                    pass
                body = json_response(self.style.whole())
            except BadRequest as error:
                body = problem(error)
            finally:
                self.end()
            group.cancel_scope.cancel()
        return Response(status_code=499) if body is None else body


async def gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Response):
    """Server-sent events: chunks as tokens arrive, then usage if requested, then `[DONE]`.

    An answer is not generated for a client that does not read: while the next event finds no room,
    it is on hold; after UNREAD_SECONDS it ends with an error, which is what the client reads last.
    """

    def __init__(self, answer: Answer, *, include_usage: bool) -> None:
        self.answer = answer
        self.include_usage = include_usage
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {**HEADERS, "content-type": "text/event-stream; charset=utf-8"}
        start = [(name.encode(), value.encode()) for name, value in headers.items()]
        try:
            async with anyio.create_task_group() as group:

                async def watch() -> None:
                    await gone(receive)
                    group.cancel_scope.cancel()

                group.start_soon(watch)
                await send({"type": "http.response.start", "status": 200, "headers": start})
                await self._write(send)
                group.cancel_scope.cancel()
        finally:
            self.answer.end()

    async def _write(self, send: Send) -> None:
        async def write(*values: Mapping[str, Any] | str) -> None:
            if not values:
                return
            texts = (x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in values)
            body = "".join(f"data: {text}\n\n" for text in texts).encode("utf-8", "replace")
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async def write_soon(*values: Mapping[str, Any] | str) -> None:
            with anyio.move_on_after(UNREAD_SECONDS) as clock, self.answer.held_up():
                await write(*values)
            if clock.cancelled_caught:
                self.answer.end("unread")
                raise unread(UNREAD_SECONDS)

        style = self.answer.style
        with anyio.move_on_after(self.answer.seconds + 1.0) as clock:  # slow readers are cut off
            try:
                await write_soon(*style.opening())
                async for place, tokens, text in self.answer.pieces():
                    await write_soon(*style.chunks(place, tokens, text))
                await write_soon(*([style.usage_chunk()] if self.include_usage else []), "[DONE]")
            except BadRequest as error:
                await write(error.body())
            except Exception as error:
                await write(mistake(error).body())
        if not clock.cancelled_caught:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


# --- the shapes of answers ------------------------------------------------------------------------


class Style(ABC):
    """The part of an answer that both endpoints share: ids, usage, tokens by choice."""

    object = ""
    prefix = ""

    def __init__(self, served: Served, rows: list[Continuation], fingerprint: str) -> None:
        self.served, self.rows = served, rows
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.fingerprint = fingerprint
        self.texts: dict[int, list[str]] = {}
        self.finish: dict[int, str] = {}

    def take(self, place: int, tokens: Sequence[NewToken], text: str) -> str:
        """Record new tokens and the text they add; return what is text of the answer."""
        self.texts.setdefault(place, []).append(text)
        finish = tokens[-1].finish
        if finish is not None:
            self.finish[place] = FINISH[finish]
        return text

    def text(self, place: int) -> str:
        """Return the text of a choice so far."""
        return "".join(self.texts.get(place, ()))

    def head(self, object_: str) -> dict[str, Any]:
        """Return the fields that every answer begins with."""
        return {
            "id": self.id,
            "object": object_,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": self.fingerprint,
        }

    def token_text(self, token: int) -> str:
        """Return a token's own text; without a tokenizer its id."""
        tokenizer = self.served.tokenizer
        return str(token) if tokenizer is None else tokenizer.decode([token])

    def shown(self, row: Continuation, new: Sequence[NewToken]) -> str:
        """Return the text that new tokens add; without a tokenizer a blank and the id of each."""
        if self.served.tokenizer is not None:
            return row.shown(new)
        return "".join(f" {one.token}" for one in new if not one.is_end and one.token != NOTHING)

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks before the first token."""
        return []

    @abstractmethod
    def chunks(self, place: int, tokens: Sequence[NewToken], text: str) -> list[dict[str, Any]]:
        """Return the chunks of some new tokens, which `take` has recorded, and of their text."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the complete answer."""

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream, with the counts and no choice."""
        return {**self.head(self.object), "choices": [], "usage": usage(self.rows)}


def usage(rows: Sequence[Continuation]) -> dict[str, Any]:
    """Return the counts of tokens; a prompt counts once, however many choices it has."""
    prompts = {row.prompt: row for row in reversed(rows)}
    read = sum(len(row.prompt) + len(row.source or ()) for row in prompts.values())
    made = sum(len(row.tokens) for row in rows)
    cached = sum(row.reused for row in prompts.values())
    return {
        "prompt_tokens": read,
        "completion_tokens": made,
        "total_tokens": read + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


class Chat(Style):
    """`chat.completion` and `chat.completion.chunk`."""

    object, prefix = "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, served: Served, rows: list[Continuation], asked: ChatRequest, fingerprint: str
    ) -> None:
        super().__init__(served, rows, fingerprint)
        self.asked = asked
        self.logprobs: dict[int, list[dict[str, Any]]] = {}
        self.tools: dict[int, ToolReader] = {}

    def _reader(self, place: int) -> ToolReader | None:
        if not self.asked.tools:
            return None
        return self.tools.setdefault(place, ToolReader())

    def take(self, place: int, tokens: Sequence[NewToken], text: str) -> str:
        reader = self._reader(place)
        if reader is not None:
            text = reader.push(text)
            if tokens[-1].finish is not None:
                text += reader.flush()
        super().take(place, tokens, text)
        if reader is not None and reader.calls and place in self.finish:
            self.finish[place] = "tool_calls"
        if self.asked.logprobs:
            self.logprobs.setdefault(place, []).extend(self._entries(tokens))
        return text

    def _entries(self, tokens: Sequence[NewToken]) -> list[dict[str, Any]]:
        return [self._logprob(new) for new in tokens if not new.is_end]

    def _logprob(self, new: NewToken) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self.token_text(token)
            data = None if "\ufffd" in text else list(text.encode("utf-8"))
            return {"token": text, "logprob": _finite(logprob), "bytes": data}

        top = [entry(token, logprob) for token, logprob in new.top]
        return {**entry(new.token, new.logprob), "top_logprobs": top}

    def _choice(self, place: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        choice = {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self.head(self.object), "choices": [choice]}

    def opening(self) -> list[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        return [self._choice(place, first) for place in range(len(self.rows))]

    def chunks(self, place: int, tokens: Sequence[NewToken], text: str) -> list[dict[str, Any]]:
        made = []
        count = sum(not new.is_end for new in tokens) if self.asked.logprobs else 0
        if text or count:
            chunk = self._choice(place, {"content": text})
            if count:
                last = self.logprobs[place][-count:]
                chunk["choices"][0]["logprobs"] = {"content": last, "refusal": None}
            made.append(chunk)
        if tokens[-1].finish is not None:
            reader = self._reader(place)
            for number, call in enumerate(reader.calls if reader is not None else ()):
                delta = {"tool_calls": [{"index": number, **call_json(call)}]}
                made.append(self._choice(place, delta))
            end = self._choice(place, {})
            end["choices"][0]["finish_reason"] = self.finish[place]
            made.append(end)
        return made

    def whole(self) -> dict[str, Any]:
        choices = []
        for place in range(len(self.rows)):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": self.text(place),
                "refusal": None,
            }
            reader = self._reader(place)
            if reader is not None and reader.calls:
                message["tool_calls"] = [call_json(call) for call in reader.calls]
                message["content"] = message["content"].strip() or None
            logprobs = None
            if self.asked.logprobs:
                logprobs = {"content": self.logprobs.get(place, []), "refusal": None}
            choices.append(
                {
                    "index": place,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": self.finish[place],
                }
            )
        return {**self.head("chat.completion"), "choices": choices, "usage": usage(self.rows)}


def call_json(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's shape."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


#: A token with its log-probability, None for the first of a prompt, and the likeliest ones.
Scored = tuple[int, float | None, Sequence[tuple[int, float]]]


class Completion(Style):
    """`text_completion`, streamed or not; with `echo`, the prompt before it."""

    object, prefix = "text_completion", "cmpl"

    def __init__(
        self, served: Served, rows: list[Continuation], asked: CompletionRequest, fingerprint: str
    ) -> None:
        super().__init__(served, rows, fingerprint)
        self.asked = asked
        self.made: dict[int, list[Scored]] = {}
        self._echoed: set[int] = set()
        self._offsets: dict[int, int] = {}  # characters of the tokens that were shown

    def take(self, place: int, tokens: Sequence[NewToken], text: str) -> str:
        if self.asked.logprobs is not None:
            self.made.setdefault(place, []).extend(_scored(tokens))
        return super().take(place, tokens, text)

    def _logprobs(self, place: int, tokens: Sequence[Scored]) -> dict[str, Any]:
        """Return the entries of the next tokens of a choice."""
        texts = [self.token_text(token) for token, _, _ in tokens]
        before = 0 if self.asked.scores_prompt else len(self._echo(place))
        offset = self._offsets.get(place, before)
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[place] = offset
        tops = [None if value is None else self._top(top) for _, value, top in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [None if x is None else _finite(x) for _, x, _ in tokens],
            "top_logprobs": tops if self.asked.logprobs else None,
            "text_offset": offsets,
        }

    def _top(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the likeliest tokens by text; of several with one text, the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in top:
            found.setdefault(self.token_text(token), _finite(logprob))
        return found

    def _echo(self, place: int) -> str:
        if not self.asked.echo:
            return ""
        prompt = self.asked.prompts[place // self.asked.generation.choices]
        if isinstance(prompt, str):
            return prompt
        tokenizer = self.served.tokenizer
        return " ".join(map(str, prompt)) if tokenizer is None else tokenizer.decode(prompt)

    def _prompt(self, place: int) -> list[Scored]:
        """Return the tokens of a prompt with their log-probabilities, if they were requested."""
        row = self.rows[place]
        if row.scores is None:
            return []
        rest = zip(row.prompt[1:], row.scores, strict=True)
        return [(row.prompt[0], None, ()), *((token, *score) for token, score in rest)]

    def opening(self) -> list[dict[str, Any]]:
        if not self.asked.echo or self.asked.scores_prompt:  # what is scored comes when it is read
            return []
        return [
            self._chunk(place, self._echo(place), None, None) for place in range(len(self.rows))
        ]

    def _chunk(self, place: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": place, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {**self.head(self.object), "choices": [choice]}

    def chunks(self, place: int, tokens: Sequence[NewToken], text: str) -> list[dict[str, Any]]:
        made = []
        if self.asked.scores_prompt and place not in self._echoed:
            self._echoed.add(place)
            scored = self._logprobs(place, self._prompt(place))
            made.append(self._chunk(place, self._echo(place), scored, None))
        shown = _scored(tokens)
        logprobs = None
        if self.asked.logprobs is not None and shown:
            logprobs = self._logprobs(place, shown)
        if text or logprobs is not None or tokens[-1].finish is not None:
            made.append(self._chunk(place, text, logprobs, self.finish.get(place)))
        return made

    def whole(self) -> dict[str, Any]:
        choices = []
        for place in range(len(self.rows)):
            echo, logprobs = self._echo(place), None
            if self.asked.logprobs is not None:
                made = self.made.get(place, [])
                logprobs = self._logprobs(place, [*self._prompt(place), *made])
            choices.append(
                {
                    "index": place,
                    "text": echo + self.text(place),
                    "logprobs": logprobs,
                    "finish_reason": self.finish[place],
                }
            )
        return {**self.head(self.object), "choices": choices, "usage": usage(self.rows)}


def _scored(tokens: Sequence[NewToken]) -> list[Scored]:
    """Return new tokens with their log-probabilities, the end among them.

    Clients that score a prompt leave out the last token, which is the one that was made.
    """
    return [(new.token, new.logprob, new.top) for new in tokens if new.token != NOTHING]
