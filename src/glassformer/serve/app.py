"""The endpoints: OpenAI's paths over the engine, their limits, and the guard.

A request is checked and tokenized in a worker thread, computed by the engine's thread, and written
by the event loop. Whoever goes away is noticed while waiting, and the slots are free again. Errors
have OpenAI's shape; none names a path of this machine.
"""

import base64
import hashlib
import hmac
import json
import os
import platform
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import anyio
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from glassformer.adapters.embed import Embeddings, vector_limit, vector_width
from glassformer.generation.batching import Continuation
from glassformer.generation.constraint import Constraint
from glassformer.kernels import c_library
from glassformer.kernels.build import digest
from glassformer.serve.answers import (
    HEADERS,
    Answer,
    Chat,
    Completion,
    Events,
    Style,
    gone,
    json_response,
    mistake,
    problem,
    too_late,
)
from glassformer.serve.engine import LONGEST, Engine, Served, metrics_text
from glassformer.serve.fields import BadRequest, parse_json, refused
from glassformer.serve.http import (
    EVERYWHERE,
    LOOPBACK,
    EndingServer,
    Guard,
    Refusal,
    TimedConnection,
    WrongKey,
)
from glassformer.serve.patterns import CLOSE
from glassformer.serve.request import (
    ChatRequest,
    CompletionRequest,
    Generation,
    ResponseFormat,
    chat_request,
    completion_request,
    embedding_request,
)
from glassformer.serve.structured import PATIENCE, Builders, Formats, reads_tools
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import GlassError, InputError, MachineError

T = TypeVar("T")


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
    app.state.engine, app.state.formats = engine, api.formats
    app.add_middleware(
        _Guard,
        api_key=api_key,
        host=host.strip("[]"),
        allow_hosts=tuple(allow_hosts),
        limits=limits,
    )
    return app


#: Seconds after which a waiting thread gets the interpreter.
SWITCH_SECONDS = 0.0005
#: Connections that may be open at once, idle ones too.
CONNECTIONS = 4_096


def serve_forever(
    app: Starlette, listening: socket.socket, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until a signal: the first finishes what is running, the second ends at once.

    `ready` is called when all that uvicorn imports is there: a Ctrl-C that falls into an import can
    be swallowed by the module's lock. After SIGTERM what is running has GRACE_SECONDS; Ctrl-C
    leaves it the time of an answer.
    """
    # The engine's thread gives up the interpreter while a step computes and needs it back at once:
    # by default the event loop would keep it for 5 ms, longer than a step on a GPU takes.
    sys.setswitchinterval(SWITCH_SECONDS)
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
    config.load()
    config.get_loop_factory()
    server = EndingServer(config, partial(_refuse_more, app.state.engine))
    ready()
    server.run(sockets=[listening])


def _refuse_more(engine: Engine) -> None:
    engine.closing = True


# --- the guard ------------------------------------------------------------------------------------


class _Guard(Guard):
    """The API's guard: a key in `Authorization`, errors in OpenAI's shape."""

    decisive = ("host", "origin", "content-type", "content-length", "authorization")
    schemes = ("http", "https")
    names_page = False  # programs do not
    host_hint = "--allow-host adds one"

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        host: str,
        allow_hosts: tuple[str, ...],
        limits: Limits,
    ) -> None:
        super().__init__(
            app,
            hosts=(*LOOPBACK, host, *allow_hosts),
            any_address=host in EVERYWHERE,
            port=None,
            body_bytes=limits.body_bytes,
            body_seconds=limits.body_seconds,
            path_bytes=limits.path_bytes,
            proxied=allow_hosts,
        )
        self._key = None if api_key is None else _digest(api_key)

    def check_secret(self, scope: Scope, headers: dict[str, str]) -> None:
        """Compare the key; `/health` needs none."""
        if self._key is None or scope["path"] == "/health":
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(_digest(given.strip()), self._key)  # of one length, always
        if scheme.lower() != "bearer" or not right:
            raise WrongKey("incorrect API key provided")

    async def refuse(self, error: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in OpenAI's shape."""
        message = error.what[:1].upper() + error.what[1:]
        hint = f" ({error.hint})" if error.hint else ""
        code = "invalid_api_key" if isinstance(error, WrongKey) else None
        answer = problem(BadRequest(message + hint, status=error.status, code=code))
        await answer(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "Not allowed method" if error.status_code == 405 else "Unknown request URL"
    path = request.url.path[:200]
    message = f"{what}: {request.method[:20]} {path}"
    return problem(BadRequest(message, status=error.status_code, code="unknown_url"))


# --- the endpoints --------------------------------------------------------------------------------


def _machine() -> dict[str, object]:
    """Return what an answer depends on besides the model and the request."""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "variant": c_library.variant() if c_library.available() else None,
        "kernels": digest() if c_library.available() else None,
        "torch": torch.__version__,
    }


class _Api:
    """The handlers."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self.formats = {
            name: Formats(name, served.tokenizer)
            for name, served in engine.models.items()
            if served.tokenizer is not None
        }
        self.builders = Builders()
        self.checking = anyio.CapacityLimiter(limits.workers)
        # Equal fingerprints, models and seeds give equal answers: kernels, processor, torch.
        seen = hashlib.sha256(json.dumps(_machine(), sort_keys=True).encode())
        self.fingerprint = f"fp_{seen.hexdigest()[:12]}"

    def endpoint(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Return a handler whose errors are answers."""

        async def answer(request: Request) -> Response:
            self.engine.start()
            try:
                response: Response = await handler(request)
                return response
            except Gone:
                return Response(status_code=499)
            except BadRequest as error:
                return problem(error)
            except GlassError as error:
                return problem(refused(error))
            except Exception as error:
                return problem(mistake(error))

        return answer

    def writer(self, name: str) -> Served:
        """Return a model that continues texts by name."""
        served = self.served(name)
        if served.no_text:
            raise BadRequest(
                f"'{served.name}' continues no text: {served.no_text}; /v1/embeddings gives its "
                "vectors",
                param="model",
                code="unsupported_model",
            )
        return served

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
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        return json_response(_model(self.served(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """Answer 200 while requests are taken."""
        ready = not self.engine.closing and self.engine.failed is None
        status = {"status": "ok" if ready else "stopping"}
        return json_response(status, status=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Write the figures as Prometheus reads them."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(metrics_text(self.engine), media_type=kind, headers=HEADERS)

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        asked = chat_request(parse_json(await request.body()))
        served = self.writer(asked.generation.model)
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
        wanted, param = _format(asked.response_format), "response_format"
        if asked.must_call:
            wanted = {"kind": "tools", "tools": asked.tools, "names": asked.must_call}
            param = "tools"

        async def prepare() -> list[Continuation]:
            constraint = await self.constraint(served, wanted, param)
            work = partial(self._chat_rows, served, asked, _client(request), constraint)
            return await self.checked(work)

        rows = await while_there(request, prepare)
        style = Chat(served, rows, asked, self.fingerprint)
        return await self.respond(request, asked.generation, style)

    def _chat_rows(
        self, served: Served, asked: ChatRequest, client: str, constraint: Constraint | None
    ) -> list[Continuation]:
        text = served.chat_text(
            asked.messages, tools=asked.tools or None, options=asked.template_options
        )
        _check_length(served, text, served.context, param="messages")
        assert served.tokenizer is not None
        ids = served.tokenizer.encode(text)
        generation = asked.generation
        if asked.tools and not asked.parallel:  # a call is read also without its closing mark
            generation = replace(generation, stop=(*generation.stop, CLOSE))
        return self.rows(
            served,
            [(ids, None)],
            generation,
            client,
            constraint=constraint,
            param="messages",
            logprobs=asked.logprobs,
            top_logprobs=asked.top_logprobs,
        )

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        asked = completion_request(parse_json(await request.body()))
        served = self.writer(asked.generation.model)
        if asked.scores_prompt and served.spec.encoder is not None:
            raise BadRequest(
                f"'{served.name}' reads the prompt in its encoder and gives no probabilities of it",
                param="echo",
                code="unsupported_parameter",
            )
        self.check_room(served, asked.generation.choices * len(asked.prompts))
        wanted = _format(asked.response_format)

        async def prepare() -> list[Continuation]:
            constraint = await self.constraint(served, wanted, "response_format")
            work = partial(self._text_rows, served, asked, _client(request), constraint)
            return await self.checked(work)

        rows = await while_there(request, prepare)
        style = Completion(served, rows, asked, self.fingerprint)
        return await self.respond(request, asked.generation, style)

    def _text_rows(
        self, served: Served, asked: CompletionRequest, client: str, constraint: Constraint | None
    ) -> list[Continuation]:
        prompts = []
        for one in asked.prompts:
            if one == "":
                raise BadRequest("The prompt is empty", param="prompt", code="invalid_value")
            if isinstance(one, str):
                if served.tokenizer is None:
                    raise BadRequest(
                        f"'{served.name}' has no tokenizer; give token ids",
                        param="prompt",
                        code="unsupported_model",
                    )
                encoder = served.spec.encoder is not None
                most = served.spec.max_seq_len if encoder else served.context
                _check_length(served, one, most, param="prompt")
                try:
                    prompts.append(served.text_ids(one))
                except InputError as error:  # a word that a small vocabulary does not have
                    raise refused(error, param="prompt") from error
            elif served.spec.encoder is None:
                prompts.append((one, None))
            else:
                begin = None if served.tokenizer is None else served.tokenizer.bos
                prompts.append(((0 if begin is None else begin,), one))
        return self.rows(
            served,
            prompts,
            asked.generation,
            client,
            constraint=constraint,
            param="prompt",
            logprobs=asked.logprobs is not None,
            top_logprobs=asked.logprobs or 0,
            score_prompt=asked.scores_prompt,
        )

    async def embed(self, request: Request) -> Response:
        """Return the embeddings of texts, one text at a time: equal texts, equal vectors."""
        asked = embedding_request(parse_json(await request.body()))
        served = self.served(asked.model)
        if served.no_vectors:
            raise BadRequest(
                f"'{served.name}' gives no embeddings: {served.no_vectors}",
                param="model",
                code="unsupported_model",
            )
        width = vector_width(served.adapter)
        if asked.dimensions not in (None, width):
            raise BadRequest(
                f"'{served.name}' gives vectors of {width} dimensions",
                param="dimensions",
                code="unsupported_parameter",
            )
        self.check_room(served, 1)
        for text in asked.texts:
            _check_length(served, text, vector_limit(served.adapter), param="input")
        found: list[Embeddings] = []
        with anyio.move_on_after(self.limits.seconds) as clock:
            for text in asked.texts:
                if await request.is_disconnected():
                    return Response(status_code=499)
                work = partial(served.embedding, text, pooling=asked.pooling)
                try:
                    found.append(await self.engine.call(served.name, work))
                except InputError as error:
                    raise refused(error, param="input") from error
        if clock.cancelled_caught:
            raise too_late(self.limits.seconds)
        count = sum(sum(one.tokens) for one in found)
        self.engine.figures[served.name].embedded_tokens += count
        self.engine.count(served.name, "embedded")
        data = []
        for place, one in enumerate(found):
            vector = one.vectors[0]
            packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            given = packed if asked.base64 else vector.tolist()
            data.append({"object": "embedding", "index": place, "embedding": given})
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_response({"object": "list", "data": data, "model": served.name, "usage": usage})

    # --- from a request to continuations ----------------------------------------------------------

    def check_room(self, served: Served, count: int) -> None:
        """Refuse what would wait too long, before any work is done for it."""
        if self.engine.closing or self.engine.failed is not None:
            raise BadRequest(
                "The server is stopping", status=503, kind="server_error", retry_after=5
            )
        slots = 1 if served.no_text else served.batcher.slots.slots
        if self.engine.waiting(served.name) + count > self.limits.queue + slots:
            self.engine.count(served.name, "refused")
            raise BadRequest(
                f"{self.engine.waiting(served.name)} requests wait already; try again later",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=1,
            )

    async def checked(self, work: Callable[[], T]) -> T:
        """Run what takes a while in a worker thread, a few at a time."""
        return await anyio.to_thread.run_sync(work, limiter=self.checking)

    async def constraint(
        self, served: Served, wanted: Mapping[str, Any] | None, param: str
    ) -> Constraint | None:
        """Return the constraint of a format, built in a process of its own; kept for the next."""
        if wanted is None:
            return None
        if served.tokenizer is None:
            raise BadRequest(
                f"'{served.name}' has no tokenizer, and a form is one of texts",
                param=param,
                code="unsupported_model",
            )
        seconds = min(PATIENCE, self.limits.seconds)
        with anyio.move_on_after(seconds):
            try:
                return await self.builders.constraint(self.formats[served.name], wanted)
            except (InputError, MachineError) as error:
                raise refused(error, param=param) from error
        raise BadRequest(
            f"The machine of '{param}' was not built within {seconds:g} seconds; try again later",
            status=503,
            param=param,
            kind="server_error",
            code="timeout",
            retry_after=5,
        )

    def rows(
        self,
        served: Served,
        prompts: Sequence[tuple[Sequence[int], Sequence[int] | None]],
        generation: Generation,
        client: str,
        *,
        constraint: Constraint | None,
        param: str,
        logprobs: bool,
        top_logprobs: int,
        score_prompt: bool = False,
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
            _check_prompt(served, ids, most=served.context - 1, param=param)
            if source is not None:
                _check_prompt(served, source, most=served.spec.max_seq_len, param=param)
        vocab = served.spec.vocab_size
        for token, _ in generation.shift.bias:
            if token >= vocab:
                raise BadRequest(
                    f"logit_bias names token {token}; ids go from 0 to {vocab - 1}",
                    param="logit_bias",
                    code="invalid_value",
                )
        try:
            spec = DecodeSpec(
                max_new_tokens=min(LONGEST if wanted is None else max(wanted, 1), most),
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
                    shift=generation.shift,
                    row=choice,
                    logprobs=logprobs,
                    top_logprobs=top_logprobs,
                    score_prompt=score_prompt,
                    is_continued=wanted != 0,
                    source=source,
                    owner=f"{client}/{generation.owner}",
                )
                for ids, source in prompts
                for choice in range(generation.choices)
            ]
        except InputError as error:
            blamed = None if constraint is None else "response_format"
            raise refused(error, param=blamed) from error

    # --- from continuations to a response ---------------------------------------------------------

    async def respond(self, request: Request, generation: Generation, style: Style) -> Response:
        """Queue the continuations; stream them, or collect them while the client is there."""
        answer = Answer(self.engine, style, seconds=self.limits.seconds)
        if not generation.stream:
            return await answer.collected(request.receive)
        answer.begin()
        return Events(answer, include_usage=generation.include_usage)


class Gone(Exception):
    """The client went away while its request was prepared."""


async def while_there(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """Return what a function returns; it is cancelled if the client goes away before."""
    found: list[T] = []
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            await gone(request.receive)
            group.cancel_scope.cancel()

        group.start_soon(watch)
        error: Exception | None = None
        try:
            found.append(await work())
        except Exception as raised:  # a group would wrap it
            error = raised
        group.cancel_scope.cancel()
    if error is not None:
        raise error
    if not found:
        raise Gone
    return found[0]


def _format(wanted: ResponseFormat) -> dict[str, Any] | None:
    """Return a format as plain data; None where any text will do."""
    match wanted.kind:
        case "text":
            return None
        case "regex":
            return {"kind": wanted.kind, "pattern": wanted.pattern}
        case "json_object":
            return {"kind": wanted.kind}
        case "json_schema":
            return {"kind": wanted.kind, "schema": wanted.schema}


def _check_length(served: Served, text: str, tokens: int, *, param: str) -> None:
    """Refuse a text that cannot fit before it is tokenized."""
    most = served.most_characters(text, tokens)
    if most is not None:
        raise BadRequest(
            f"This model's maximum context length is {tokens} tokens, at most {most:,} characters, "
            f"and the text has {len(text):,}",
            param=param,
            code="context_length_exceeded",
        )


def _check_prompt(served: Served, ids: Sequence[int], *, most: int, param: str) -> None:
    if len(ids) > most:
        raise BadRequest(
            f"This model's maximum context length is {served.context} tokens, and the prompt has "
            f"{len(ids)}",
            param=param,
            code="context_length_exceeded",
        )
    if not ids:
        raise BadRequest("The prompt is empty", param=param, code="invalid_value")
    wrong = next((one for one in ids if not 0 <= one < served.spec.vocab_size), None)
    if wrong is not None:
        raise BadRequest(
            f"{str(wrong)[:20]} is no token of '{served.name}'; ids go from 0 to "
            f"{served.spec.vocab_size - 1}",
            param=param,
            code="invalid_value",
        )


def _client(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "glassformer",
        "context_length": served.context,
        "capabilities": served.capabilities(),
    }
