"""The endpoints: OpenAI's paths over the engine, server-sent events, limits, and the guard.

A request is checked and tokenized in a worker thread, computed by the engine's thread, and written
by the event loop. Whoever goes away is noticed while waiting, and the slots are free again. Errors
have OpenAI's shape; none names a path of this machine.
"""

import base64
import hashlib
import hmac
import json
import math
import secrets
import socket
import struct
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from glassformer.generation.batching import Continuation
from glassformer.generation.constraint import Constraint
from glassformer.generation.streaming import NewToken
from glassformer.kernels.matmul import machine
from glassformer.serve.engine import BUCKETS, LONGEST, Engine, Histogram, Listener, Served
from glassformer.serve.http import (
    EVERYWHERE,
    LOOPBACK,
    TimedConnection,
    TooLong,
    complete_body,
    is_address,
    plain_host,
    single_headers,
    split_host,
)
from glassformer.serve.request import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    Generation,
    ResponseFormat,
    chat_request,
    completion_request,
    embedding_request,
    parse_json,
    refused,
)
from glassformer.serve.structured import Formats, ToolCall, ToolReader, reads_tools
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import GlassError, InputError

#: Why a text ended, in OpenAI's words.
FINISH = {"eos": "stop", "stop": "stop", "constraint": "stop", "length": "length"}
#: The log-probability that stands for minus infinity, which JSON does not have.
LEAST_LOGPROB = -9999.0
HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}
DECISIVE = ("host", "origin", "content-type", "content-length", "authorization")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one request, and all of them together, may take."""

    body_bytes: int = 4 << 20
    body_seconds: float = 10.0
    path_bytes: int = 8 << 10
    #: New tokens of one choice; None: as many as fit into the context.
    output_tokens: int | None = None
    #: Seconds from the request to the last token.
    seconds: float = 600.0
    #: Choices that may wait for a slot; beyond it requests get 429.
    queue: int = 256
    #: Requests that are being checked and tokenized at once.
    workers: int = 4


def create_app(
    engine: Engine,
    *,
    api_key: str | None = None,
    host: str = "127.0.0.1",
    allow_hosts: Sequence[str] = (),
    limits: Limits = Limits(),  # noqa: B008  frozen
) -> Starlette:
    """Make the server of an engine's models."""
    api = _Api(engine, limits)
    routes = [
        Route("/v1/chat/completions", api.endpoint(api.chat), methods=["POST"]),
        Route("/v1/completions", api.endpoint(api.complete), methods=["POST"]),
        Route("/v1/embeddings", api.endpoint(api.embed), methods=["POST"]),
        Route("/v1/models", api.endpoint(api.models), methods=["GET"]),
        Route("/v1/models/{name:path}", api.endpoint(api.model), methods=["GET"]),
        Route("/health", api.endpoint(api.health), methods=["GET"]),
        Route("/metrics", api.endpoint(api.metrics), methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    app.state.engine = engine
    app.add_middleware(
        _Guard,
        api_key=api_key,
        host=host.strip("[]"),
        allow_hosts=tuple(allow_hosts),
        limits=limits,
    )
    return app


#: Connections that may be open at once, idle ones too.
CONNECTIONS = 4_096


def serve_forever(app: Starlette, listening: socket.socket) -> None:
    """Serve until a signal: the first finishes what is running, the second ends at once."""
    config = uvicorn.Config(
        app,
        http=TimedConnection,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        limit_concurrency=CONNECTIONS,
    )
    _Server(config, app.state.engine).run(sockets=[listening])


class _Server(uvicorn.Server):
    """A server that takes no more requests after the first signal."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._engine.closing = True
        super().handle_exit(sig, frame)


# --- the guard ------------------------------------------------------------------------------------


class _Guard:
    """What is refused before any route: other hosts, pages of others, no key, too much."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        host: str,
        allow_hosts: tuple[str, ...],
        limits: Limits,
    ) -> None:
        self.app = app
        self.key = None if api_key is None else api_key.encode()
        self.hosts = frozenset(map(plain_host, (*LOOPBACK, host, *allow_hosts)))
        self.any_address = host in EVERYWHERE
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            headers = single_headers(scope, DECISIVE)
            if isinstance(headers, str):
                raise BadRequest(f"Two headers called {headers}")
            self.check(scope, headers)
            if scope["method"] == "POST":
                receive = await complete_body(
                    receive,
                    headers,
                    most=self.limits.body_bytes,
                    seconds=self.limits.body_seconds,
                )
        except BadRequest as error:
            await _problem(error)(scope, receive, send)
            return
        except TooLong as error:
            await _problem(BadRequest(error.what, status=413))(scope, receive, send)
            return
        except InputError as error:
            await _problem(BadRequest(error.what, status=408))(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        host = split_host(headers.get("host", ""))
        if host is None or not self.is_ours(host[0]):
            raise BadRequest("This name is not one of the server's (--allow-host)", status=403)
        origin = headers.get("origin")
        if origin is not None:
            scheme, _, rest = origin.partition("://")
            found = split_host(rest) if scheme in ("http", "https") else None
            if found is None or not self.is_ours(found[0]):
                raise BadRequest("The request comes from another page", status=403)
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > self.limits.path_bytes:
            raise BadRequest("The address is too long", status=414)
        if self.key is not None and scope["path"] != "/health":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.key)
            if scheme.lower() != "bearer" or not right:
                raise BadRequest("Incorrect API key provided", status=401, code="invalid_api_key")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise BadRequest("The body must be application/json", status=415)

    def is_ours(self, name: str) -> bool:
        return name in self.hosts or (self.any_address and is_address(name))


def _json(value: Mapping[str, Any], *, status: int = 200, headers: Any = None) -> Response:
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(
        body, status, media_type="application/json", headers={**HEADERS, **(headers or {})}
    )


def _problem(error: BadRequest) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return _json(error.body(), status=error.status, headers=headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "Not allowed method" if error.status_code == 405 else "Unknown request URL"
    path = request.url.path[:200]
    message = f"{what}: {request.method[:20]} {path}"
    return _problem(BadRequest(message, status=error.status_code, code="unknown_url"))


# --- the endpoints --------------------------------------------------------------------------------


class _Api:
    """The handlers."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self.formats = {name: Formats(served.tokenizer) for name, served in engine.models.items()}
        self.checking = anyio.CapacityLimiter(limits.workers)
        # Equal fingerprints, models and seeds give equal answers: kernels, processor, torch.
        seen = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode())
        self.fingerprint = f"fp_{seen.hexdigest()[:12]}"

    def endpoint(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Return a handler whose errors are answers."""

        async def answer(request: Request) -> Response:
            self.engine.start()
            try:
                response: Response = await handler(request)
                return response
            except BadRequest as error:
                return _problem(error)
            except GlassError as error:
                return _problem(refused(error))
            except Exception as error:
                return _problem(_mistake(error))

        return answer

    def served(self, name: str) -> Served:
        """Return a model by name."""
        found = self.engine.models.get(name)
        if found is None:
            known = ", ".join(self.engine.models)
            raise BadRequest(
                f"The model '{name[:100]}' does not exist; there is: {known}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return found

    async def models(self, request: Request) -> Response:
        """List the models."""
        data = [_model(served) for served in self.engine.models.values()]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        return _json(_model(self.served(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """Answer 200 while requests are taken."""
        ready = not self.engine.closing and self.engine.failed is None
        status = {"status": "ok" if ready else "stopping"}
        return _json(status, status=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Write the figures as Prometheus reads them."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(metrics_text(self.engine), media_type=kind, headers=HEADERS)

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        asked = chat_request(parse_json(await request.body()))
        served = self.served(asked.generation.model)
        if served.template is None:
            raise BadRequest(
                f"'{served.name}' has no chat template; /v1/completions continues text",
                param="messages",
                code="unsupported_model",
            )
        if asked.tools and not reads_tools(served.template):
            raise BadRequest(
                f"the chat template of '{served.name}' knows no tools",
                param="tools",
                code="unsupported_parameter",
            )
        self.check_room(served, asked.generation.choices)
        rows = await self.checked(partial(self._chat_rows, served, asked, _client(request)))
        style = _Chat(served, asked, self.fingerprint)
        return await self.respond(request, served, rows, asked.generation, style)

    def _chat_rows(self, served: Served, asked: ChatRequest, client: str) -> list[Continuation]:
        ids = served.chat_ids(
            asked.messages, tools=asked.tools or None, options=asked.template_options
        )
        constraint = self.constraint(served, asked.response_format)
        return self.rows(
            served,
            [(ids, None)],
            asked.generation,
            client,
            constraint=constraint,
            default_tokens=LONGEST,
            logprobs=asked.logprobs,
            top_logprobs=asked.top_logprobs,
        )

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        asked = completion_request(parse_json(await request.body()))
        served = self.served(asked.generation.model)
        self.check_room(served, asked.generation.choices * len(asked.prompts))
        rows = await self.checked(partial(self._text_rows, served, asked, _client(request)))
        style = _Completion(served, asked, self.fingerprint)
        return await self.respond(request, served, rows, asked.generation, style)

    def _text_rows(
        self, served: Served, asked: CompletionRequest, client: str
    ) -> list[Continuation]:
        prompts = []
        for one in asked.prompts:
            if isinstance(one, str):
                prompts.append(served.text_ids(one))
            elif served.spec.encoder is None:
                prompts.append((one, None))
            else:
                begin = served.tokenizer.bos
                prompts.append(((0 if begin is None else begin,), one))
        return self.rows(
            served,
            prompts,
            asked.generation,
            client,
            constraint=self.constraint(served, asked.response_format),
            default_tokens=LONGEST,
            logprobs=asked.logprobs is not None,
            top_logprobs=asked.logprobs or 0,
        )

    async def embed(self, request: Request) -> Response:
        """Return the embeddings of texts."""
        asked = embedding_request(parse_json(await request.body()))
        served = self.served(asked.model)
        self.check_room(served, len(asked.texts))

        data, count = [], 0
        for place, text in enumerate(asked.texts):
            work = partial(served.embedding, text, pooling=asked.pooling)
            found = await self.engine.call(work)
            count += sum(found.tokens)
            numbers = found.vectors[0].tolist()
            packed = struct.pack(f"<{len(numbers)}f", *numbers)
            vector = base64.b64encode(packed).decode() if asked.base64 else numbers
            data.append({"object": "embedding", "index": place, "embedding": vector})
        usage = {"prompt_tokens": count, "total_tokens": count}
        return _json({"object": "list", "data": data, "model": served.name, "usage": usage})

    # --- from a request to continuations ----------------------------------------------------------

    def check_room(self, served: Served, count: int) -> None:
        """Refuse what would wait too long, before any work is done for it."""
        if self.engine.closing or self.engine.failed is not None:
            raise BadRequest(
                "The server is stopping", status=503, kind="server_error", retry_after=5
            )
        if self.engine.waiting(served.name) + count > self.limits.queue + served.slots.slots:
            self.count(served, "refused")
            raise BadRequest(
                f"{self.engine.waiting(served.name)} requests wait already; try again later",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=1,
            )

    async def checked(self, work: Callable[[], Any]) -> Any:
        """Run what takes a while in a worker thread, a few at a time."""
        return await anyio.to_thread.run_sync(work, limiter=self.checking)

    def constraint(self, served: Served, wanted: ResponseFormat) -> Constraint | None:
        """Return the constraint of a response format; kept for the next request like it."""
        try:
            return self.formats[served.name].constraint(wanted)
        except InputError as error:
            raise refused(error, param="response_format") from error

    def rows(
        self,
        served: Served,
        prompts: Sequence[tuple[Sequence[int], Sequence[int] | None]],
        generation: Generation,
        client: str,
        *,
        constraint: Constraint | None,
        default_tokens: int,
        logprobs: bool,
        top_logprobs: int,
    ) -> list[Continuation]:
        """Return the prepared continuations of a request: the choices of each prompt in turn."""
        most = self.limits.output_tokens or served.context
        wanted = generation.max_tokens
        if wanted is not None and wanted > most and self.limits.output_tokens is not None:
            raise BadRequest(
                f"max_tokens is too large: {wanted}; this server makes at most {most}",
                param="max_tokens",
                code="invalid_value",
            )
        for ids, source in prompts:
            _check_prompt(served, ids, most=served.context - 1)
            _check_prompt(served, source or (), most=served.spec.max_seq_len, empty=True)
        try:
            spec = DecodeSpec(
                max_new_tokens=min(default_tokens if wanted is None else wanted, most),
                eos=served.eos,
                forbidden=served.nameless,
                stop=generation.stop,
                seed=generation.seed,
                **{**served.settings, **generation.settings},
            )
            return [
                served.batcher.prepare(
                    ids,
                    spec=spec,
                    constraint=constraint,
                    row=choice,
                    logprobs=logprobs,
                    top_logprobs=top_logprobs,
                    source=source,
                    owner=f"{client}/{generation.owner}",
                )
                for ids, source in prompts
                for choice in range(generation.choices)
            ]
        except InputError as error:
            raise refused(error) from error

    # --- from continuations to a response ---------------------------------------------------------

    def count(self, served: Served, outcome: str) -> None:
        """Count how a request ended."""
        counts = self.engine.figures[served.name].requests
        counts[outcome] = counts.get(outcome, 0) + 1

    async def respond(
        self,
        request: Request,
        served: Served,
        rows: list[Continuation],
        generation: Generation,
        style: "_Style",
    ) -> Response:
        """Queue the continuations; stream them, or collect them while the client is there."""
        answer = _Answer(self, served, rows, style)
        if generation.stream:
            answer.begin()
            return _Events(answer, include_usage=generation.include_usage)
        body: Response | None = None
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await _gone(request.receive)
                group.cancel_scope.cancel()

            group.start_soon(watch)
            try:
                answer.begin()
                async for _ in answer.tokens():
                    pass
                body = _json(style.whole(rows))
            except BadRequest as error:
                body = _problem(error)
            finally:
                answer.end()
            group.cancel_scope.cancel()
        return Response(status_code=499) if body is None else body


def _check_prompt(served: Served, ids: Sequence[int], *, most: int, empty: bool = False) -> None:
    if len(ids) > most:
        raise BadRequest(
            f"This model's maximum context length is {served.context} tokens, and the prompt has "
            f"{len(ids)}",
            param="messages",
            code="context_length_exceeded",
        )
    if not ids and not empty:
        raise BadRequest("The prompt is empty", code="invalid_value")


def _client(request: Request) -> str:
    return "" if request.client is None else request.client.host


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _mistake(error: BaseException) -> BadRequest:
    """Print the traceback on the terminal; the client sees one line."""
    traceback.print_exception(error, file=sys.stderr)
    return BadRequest("The server has a bug; its log shows it", status=500, kind="server_error")


class _Answer:
    """The continuations of one request while they run: `tokens` yields what arrives."""

    def __init__(
        self, api: _Api, served: Served, rows: list[Continuation], style: "_Style"
    ) -> None:
        self.api, self.served, self.rows, self.style = api, served, rows, style
        self.listener = Listener()
        self.left = {id(row) for row in rows}
        self.places = {id(row): place for place, row in enumerate(rows)}
        self.begun = time.perf_counter()
        for row in rows:
            row.data = self.listener

    def begin(self) -> None:
        """Queue everything."""
        self.begun = time.perf_counter()
        self.api.engine.add(self.served.name, self.rows)

    async def tokens(self) -> AsyncIterator[tuple[int, NewToken]]:
        """Yield (choice, token) until every choice has ended, within the time limit."""
        first = True
        ends = self.begun + self.api.limits.seconds
        while self.left:
            new = None
            with anyio.move_on_after(max(ends - time.perf_counter(), 0)):
                row, new = await self.listener.get()
            if new is None:
                self.api.count(self.served, "timeout")
                raise BadRequest(
                    f"The answer took longer than {self.api.limits.seconds:g} seconds",
                    status=503,
                    kind="server_error",
                    code="timeout",
                )
            if first:
                first = False
                waited = time.perf_counter() - self.begun
                self.api.engine.figures[self.served.name].first_token.add(waited)
            if new.finish == "error":
                raise BadRequest(
                    "The model's logits are not numbers", status=500, kind="server_error"
                )
            place = self.places[id(row)]
            self.style.take(place, new)
            if new.finish is not None:
                self.left.discard(id(row))
                self.api.count(self.served, FINISH[new.finish])
            yield place, new

    def end(self) -> None:
        """Cancel what has not ended: the client has gone, or an error ends the answer."""
        if self.left:
            if len(self.left) and all(row.finish is None for row in self.rows):
                self.api.count(self.served, "cancelled")
            self.api.engine.cancel(self.served.name, self.rows)
            self.left.clear()


class _Events(Response):
    """Server-sent events: a chunk for each token, then usage if asked for, then `[DONE]`."""

    def __init__(self, answer: _Answer, *, include_usage: bool) -> None:
        self.answer = answer
        self.include_usage = include_usage
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {**HEADERS, "content-type": "text/event-stream; charset=utf-8"}
        start = [(name.encode(), value.encode()) for name, value in headers.items()]
        try:
            async with anyio.create_task_group() as group:

                async def watch() -> None:
                    await _gone(receive)
                    group.cancel_scope.cancel()

                group.start_soon(watch)
                await send({"type": "http.response.start", "status": 200, "headers": start})
                await self._write(send)
                group.cancel_scope.cancel()
        finally:
            self.answer.end()

    async def _write(self, send: Send) -> None:
        async def event(value: Mapping[str, Any] | str) -> None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            body = f"data: {text}\n\n".encode("utf-8", "replace")
            await send({"type": "http.response.body", "body": body, "more_body": True})

        style, rows = self.answer.style, self.answer.rows
        limit = self.answer.api.limits.seconds + 1.0
        with anyio.move_on_after(limit) as clock:  # who reads too slowly is cut off
            try:
                for chunk in style.opening(len(rows)):
                    await event(chunk)
                async for place, new in self.answer.tokens():
                    for chunk in style.chunks(place, new):
                        await event(chunk)
                if self.include_usage:
                    await event(style.usage_chunk(rows))
                await event("[DONE]")
            except BadRequest as error:
                await event(error.body())
            except Exception as error:
                await event(_mistake(error).body())
        if not clock.cancelled_caught:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


# --- the shapes of answers ------------------------------------------------------------------------


class _Style:
    """The part of an answer that both endpoints share: ids, usage, tokens by choice."""

    object = ""
    prefix = ""

    def __init__(self, served: Served, fingerprint: str) -> None:
        self.served = served
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.fingerprint = fingerprint
        self.texts: dict[int, list[str]] = {}
        self.finish: dict[int, str] = {}

    def take(self, place: int, new: NewToken) -> None:
        """Record a token."""
        self.texts.setdefault(place, []).append(new.text)
        if new.finish is not None:
            self.finish[place] = FINISH[new.finish]

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
        """Return a token's own text."""
        return self.served.tokenizer.decode([token])

    def opening(self, count: int) -> list[dict[str, Any]]:
        """Return the chunks before the first token."""
        return []

    def chunks(self, place: int, new: NewToken) -> list[dict[str, Any]]:
        """Return the chunks of a token."""
        raise NotImplementedError

    def whole(self, rows: Sequence[Continuation]) -> dict[str, Any]:
        """Return the complete answer."""
        raise NotImplementedError

    def usage_chunk(self, rows: Sequence[Continuation]) -> dict[str, Any]:
        """Return the last chunk of a stream, with the counts and no choice."""
        return {**self.head(self.object), "choices": [], "usage": usage(rows)}


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


class _Chat(_Style):
    """`chat.completion` and `chat.completion.chunk`."""

    object, prefix = "chat.completion.chunk", "chatcmpl"

    def __init__(self, served: Served, asked: ChatRequest, fingerprint: str) -> None:
        super().__init__(served, fingerprint)
        self.asked = asked
        self.logprobs: dict[int, list[dict[str, Any]]] = {}
        self.tools: dict[int, ToolReader] = {}

    def _reader(self, place: int) -> ToolReader | None:
        if not self.asked.tools:
            return None
        return self.tools.setdefault(place, ToolReader())

    def take(self, place: int, new: NewToken) -> None:
        reader = self._reader(place)
        if reader is not None:
            text = reader.push(new.text)
            if new.finish is not None:
                text += reader.flush()
            new = replace(new, text=text)
        super().take(place, new)
        if reader is not None and reader.calls and place in self.finish:
            self.finish[place] = "tool_calls"
        if self.asked.logprobs and not new.is_end:
            self.logprobs.setdefault(place, []).append(self._logprob(new))

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

    def opening(self, count: int) -> list[dict[str, Any]]:
        return [self._choice(n, {"role": "assistant", "content": ""}) for n in range(count)]

    def chunks(self, place: int, new: NewToken) -> list[dict[str, Any]]:
        made = []
        text = self.texts[place][-1]  # what `take` left of it: the text of no tool call
        if text or (self.asked.logprobs and not new.is_end):
            chunk = self._choice(place, {"content": text})
            if self.asked.logprobs and not new.is_end:
                chunk["choices"][0]["logprobs"] = {
                    "content": [self.logprobs[place][-1]],
                    "refusal": None,
                }
            made.append(chunk)
        if new.finish is not None:
            reader = self._reader(place)
            for number, call in enumerate(reader.calls if reader is not None else ()):
                delta = {"tool_calls": [{"index": number, **call_json(call)}]}
                made.append(self._choice(place, delta))
            last = self._choice(place, {})
            last["choices"][0]["finish_reason"] = self.finish[place]
            made.append(last)
        return made

    def whole(self, rows: Sequence[Continuation]) -> dict[str, Any]:
        choices = []
        for place in range(len(rows)):
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
        return {**self.head("chat.completion"), "choices": choices, "usage": usage(rows)}


def call_json(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's shape."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class _Completion(_Style):
    """`text_completion`, streamed or not."""

    object, prefix = "text_completion", "cmpl"

    def __init__(self, served: Served, asked: CompletionRequest, fingerprint: str) -> None:
        super().__init__(served, fingerprint)
        self.asked = asked
        self.made: dict[int, list[NewToken]] = {}

    def take(self, place: int, new: NewToken) -> None:
        super().take(place, new)
        if self.asked.logprobs is not None and not new.is_end:
            self.made.setdefault(place, []).append(new)

    def _logprobs(self, tokens: Sequence[NewToken], offset: int) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        texts = [self.token_text(new.token) for new in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        tops = [
            {self.token_text(token): _finite(logprob) for token, logprob in new.top}
            for new in tokens
        ]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(new.logprob) for new in tokens],
            "top_logprobs": tops if self.asked.logprobs else None,
            "text_offset": offsets,
        }

    def _echo(self, place: int) -> str:
        if not self.asked.echo:
            return ""
        prompt = self.asked.prompts[place // self.asked.generation.choices]
        return prompt if isinstance(prompt, str) else self.served.tokenizer.decode(list(prompt))

    def opening(self, count: int) -> list[dict[str, Any]]:
        if not self.asked.echo:
            return []
        return [self._chunk(place, self._echo(place), None, None) for place in range(count)]

    def _chunk(self, place: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": place, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {**self.head(self.object), "choices": [choice]}

    def chunks(self, place: int, new: NewToken) -> list[dict[str, Any]]:
        logprobs = None
        if self.asked.logprobs is not None and not new.is_end:
            logprobs = self._logprobs([new], len(self.text(place)) - len(new.text))
        if not new.text and logprobs is None and new.finish is None:
            return []
        return [self._chunk(place, new.text, logprobs, self.finish.get(place))]

    def whole(self, rows: Sequence[Continuation]) -> dict[str, Any]:
        choices = []
        for place in range(len(rows)):
            echo = self._echo(place)
            choices.append(
                {
                    "index": place,
                    "text": echo + self.text(place),
                    "logprobs": self._logprobs(self.made.get(place, []), len(echo)),
                    "finish_reason": self.finish[place],
                }
            )
        return {**self.head(self.object), "choices": choices, "usage": usage(rows)}


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "glassformer",
        "context_length": served.context,
    }


# --- figures --------------------------------------------------------------------------------------


def metrics_text(engine: Engine) -> str:
    """Return the figures of all models in Prometheus' text format."""
    counters = (
        ("tokens_read", "counter", "Tokens of prompts and answers that went through the model."),
        ("tokens_reused", "counter", "Tokens of prompts that a slot held already."),
        ("tokens_generated", "counter", "Tokens that were sampled."),
        ("steps", "counter", "Passes over the weights."),
        ("step_seconds", "counter", "Seconds in these passes and in sampling."),
        ("running", "gauge", "Sequences with a slot."),
        ("waiting", "gauge", "Sequences that wait for a slot."),
        ("slots", "gauge", "Slots."),
        ("cache_bytes", "gauge", "The most bytes that keys and values take."),
    )
    lines = []
    for name, kind, help_text in counters:
        full = f"glass_{name}_total" if kind == "counter" else f"glass_{name}"
        lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}"]
        for served in engine.models.values():
            lines.append(f'{full}{{model="{served.name}"}} {_figure(engine, served, name)}')
    full = "glass_requests_total"
    lines += [f"# HELP {full} Choices by how they ended.", f"# TYPE {full} counter"]
    for name, figures in engine.figures.items():
        for outcome, count in sorted(figures.requests.items()):
            lines.append(f'{full}{{model="{name}",outcome="{outcome}"}} {count}')
    full = "glass_first_token_seconds"
    lines += [f"# HELP {full} From a request to its first token.", f"# TYPE {full} histogram"]
    for name, figures in engine.figures.items():
        lines += _histogram(full, name, figures.first_token)
    return "\n".join(lines) + "\n"


def _figure(engine: Engine, served: Served, name: str) -> float:
    batcher = served.batcher
    figures: dict[str, float] = {
        "tokens_read": batcher.read_tokens,
        "tokens_reused": batcher.reused_tokens,
        "tokens_generated": batcher.made_tokens,
        "steps": batcher.steps,
        "step_seconds": engine.figures[served.name].step_seconds,
        "running": batcher.running,
        "waiting": engine.waiting(served.name),
        "slots": served.slots.slots,
        "cache_bytes": served.slots.memory_bytes,
    }
    return figures[name]


def _histogram(full: str, name: str, found: Histogram) -> list[str]:
    lines, sum_ = [], 0
    for bound, count in zip((*BUCKETS, math.inf), found.counts, strict=True):
        sum_ += count
        shown = "+Inf" if math.isinf(bound) else f"{bound:g}"
        lines.append(f'{full}_bucket{{model="{name}",le="{shown}"}} {sum_}')
    lines.append(f'{full}_sum{{model="{name}"}} {found.total}')
    lines.append(f'{full}_count{{model="{name}"}} {sum_}')
    return lines
