"""The app: static files from a fixed list, requests by a table of routes, errors as three fields.

Each page's module lists its own `ROUTES`; here they are joined. Handlers run in worker threads and
know nothing of HTTP. An iterator runs in one thread from its first line to its last (torch's modes
belong to a thread); when the client disconnects it is closed.

Some requests are refused before any route. Three attackers are considered: a web page the user
visits (Host, Origin, token, content type), another user of the machine (token on every request,
reads too), and one who sends too much (limits). There are no cookies and no CORS headers: nothing
is granted to another origin.
"""

import asyncio
import hmac
import ipaddress
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path_
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from glassformer.lens.show.block_picture import STYLE
from glassformer.spec.errors import GlassError, InputError
from glassformer.web.app import limits
from glassformer.web.app.query import (
    Answer,
    Busy,
    Bytes,
    Handler,
    Mistake,
    NotAllowed,
    Query,
    Refused,
    Route,
    TooLarge,
    Unknown,
    parse_body,
    problem,
    status_of,
    to_json,
)
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages import design, errors, generate, inspect, model, quantize, runs, sweeps

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: On every response, errors too.
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
TOKEN_HEADER = "x-glass-token"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
METHODS = ("GET", "HEAD", "POST")


def split_host(text: str, *, default_port: int = 80) -> tuple[str, int] | None:
    """Split `[::1]:7337` into ("::1", 7337), `localhost` into ("localhost", 80); None if invalid.

    A name is lower-cased and nothing else: no trailing dot, no user, no spaces, no second port.
    """
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return None
        port = rest[1:] if rest else ""
        if rest == ":":
            return None
        try:
            name = str(ipaddress.IPv6Address(name))
        except ValueError:
            return None
    else:
        name, colon, port = text.partition(":")
        allowed = name.isascii() and name.replace("-", "").replace(".", "").isalnum()
        if not allowed or ":" in port or (colon and not port):
            return None
    if port and not (port.isascii() and port.isdigit() and len(port) <= 5):
        return None
    return name.lower(), int(port) if port else default_port


class Guard:
    """An ASGI middleware around the whole app.

    hosts: names allowed in Host, with our port. `any_address` also allows every IP literal, for a
    server that listens on all addresses: a name rebound by DNS is still refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str,
        port: int,
        hosts: Iterable[str] = LOOPBACK,
        any_address: bool = False,
    ) -> None:
        self.app = app
        self._token = token.encode()
        self._port = port
        self._hosts = frozenset(_plain(host) for host in hosts)
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then pass it on or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no WebSockets
            await send({"type": "websocket.close", "code": 1008})
            return
        send = _with_headers(send)
        try:
            headers = _single_headers(scope)
            self._check(scope, headers)
            if scope["method"] == "POST":
                receive = await _complete_body(receive, headers)
        except GlassError as error:
            await refuse(send, error)
            return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        host = split_host(headers.get("host", ""))
        if host is None or not self._is_ours(host):
            raise Refused("this name is not one of the server's", hint="open the printed link")
        if scope["method"] not in METHODS:
            raise NotAllowed(f"{scope['method'][:20]} is not accepted here")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > limits.PATH_BYTES:
            raise TooLarge("the address is too long")
        post = scope["method"] == "POST"
        origin = headers.get("origin")
        if (post or origin is not None) and not self._is_our_origin(origin):
            raise Refused("the request comes from another page")
        if scope["path"].startswith("/api"):
            given = headers.get(TOKEN_HEADER, "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, self._token):
                raise Refused(
                    "the token is missing or wrong",
                    hint="open the link that `glass explore` printed; each start has its own",
                )
        if post:
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise InputError("a request with a body must be application/json")

    def _is_ours(self, host: tuple[str, int]) -> bool:
        name, port = host
        return port == self._port and (
            name in self._hosts or (self._any_address and _is_address(name))
        )

    def _is_our_origin(self, origin: str | None) -> bool:
        scheme, _, rest = (origin or "").partition("://")
        host = split_host(rest) if scheme == "http" else None
        return host is not None and self._is_ours(host)


async def refuse(send: Send, error: GlassError) -> None:
    """Send an error as JSON."""
    body = to_json(problem(error))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    status = status_of(error)
    if status == 503:
        headers.append((b"retry-after", b"%d" % limits.RETRY_SECONDS))
    if status == 405:
        headers.append((b"allow", ", ".join(METHODS).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _plain(host: str) -> str:
    """Return a host as `split_host` spells it: `0:0:0:0:0:0:0:1` is `::1`."""
    found = split_host(f"[{host}]" if ":" in host else host)
    return host.lower() if found is None else found[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _single_headers(scope: Scope) -> dict[str, str]:
    """Return headers by name; a repeated header that decides anything is refused."""
    found: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1").lower()
        decisive = ("host", "origin", "content-type", "content-length", TOKEN_HEADER)
        if name in found and name in decisive:
            raise Refused(f"two headers called {name}")
        found[name] = value.decode("latin-1")
    return found


async def _complete_body(receive: Receive, headers: dict[str, str]) -> Receive:
    """Read the body within its limits, with or without a length; the app reads it from memory."""
    length = headers.get("content-length", "0")
    digits = length.isascii() and length.isdigit() and len(length) <= 12
    if not digits or int(length) > limits.BODY_BYTES:
        raise TooLarge(f"the body is larger than {limits.BODY_BYTES:,} bytes")
    data, more, gone = bytearray(), True, False
    with anyio.move_on_after(limits.BODY_SECONDS) as clock:
        while more and not gone:
            message = await receive()
            gone = message["type"] == "http.disconnect"
            data += message.get("body", b"")
            more = message.get("more_body", False)
            if len(data) > limits.BODY_BYTES:
                raise TooLarge(f"the body is larger than {limits.BODY_BYTES:,} bytes")
    if clock.cancelled_caught:
        raise InputError(f"the body did not come within {limits.BODY_SECONDS:.0f} seconds")
    first: list[Message] = [{"type": "http.request", "body": bytes(data), "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Any] = list(message.get("headers", []))
            given = {name.lower() for name, _ in headers}
            missing = ((name.encode(), value.encode()) for name, value in HEADERS.items())
            headers += [(name, value) for name, value in missing if name not in given]
            message = {**message, "headers": headers}
        await send(message)

    return sending


KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
EVERYWHERE = ("0.0.0.0", "::")
Sender = Callable[[Mapping[str, object]], Coroutine[Any, Any, None]]


def create_app(
    runs: Path,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int,
    extra_models: Mapping[str, Path] | None = None,
    device: str = "cpu",
) -> Starlette:
    """Make the explorer of a runs folder, a run or a model; see `app.state.workspace`."""
    workspace = Workspace(runs, extra_models=extra_models, device=device)
    pages = [Path_(path, _file(path, text), methods=["GET"]) for path, text in static_files()]
    api = [
        Path_(path, _endpoint(handler, workspace), methods=[method])
        for method, path, handler in ROUTES
    ]
    app = Starlette(
        routes=[*pages, *api],
        exception_handlers={HTTPException: _no_route},
    )
    app.router.redirect_slashes = False  # an address is exact
    app.state.workspace = workspace
    app.add_middleware(
        Guard,
        token=token,
        port=port,
        hosts=(*LOOPBACK, host.strip("[]")),
        any_address=host.strip("[]") in EVERYWHERE,
    )
    return app


def static_files() -> list[tuple[str, bytes]]:
    """Return (address, contents) of the page's files: a fixed list, made once."""
    root = resources.files("glassformer.web") / "static"
    found = [("/", (root / "index.html").read_bytes())]
    for folder, prefix in ((root, "/static/"), (root / "js", "/static/js/")):
        for file in sorted(folder.iterdir(), key=lambda item: item.name):
            if file.is_file() and file.name != "index.html" and Path(file.name).suffix in KINDS:
                found.append((prefix + file.name, file.read_bytes()))
    return [*found, ("/static/diagram.css", STYLE.encode())]


def _file(path: str, data: bytes) -> Callable[[Request], Any]:
    kind = KINDS[Path(path).suffix or ".html"]

    async def answer(request: Request) -> Response:
        return Response(data, headers={"content-type": kind, "cache-control": "no-cache"})

    return answer


def _endpoint(handler: Handler, workspace: Workspace) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        try:
            body = parse_body(await request.body()) if request.method == "POST" else {}
            query = Query(request.path_params, dict(request.query_params), body)
            answered = await anyio.to_thread.run_sync(handler, query, workspace)
        except GlassError as error:
            return _Problem(error, workspace.root)
        except Exception as error:
            return _Problem(_mistake(error), workspace.root)
        return _response(answered, workspace)

    return answer


def _response(answered: Answer, workspace: Workspace) -> Response:
    if isinstance(answered, Bytes):
        shape = ",".join(map(str, answered.shape))
        headers = {"x-shape": shape, "x-dtype": answered.dtype, **answered.headers}
        return Response(answered.data, media_type="application/octet-stream", headers=headers)
    if isinstance(answered, Mapping):
        return Response(to_json(answered), media_type="application/json")
    return _Lines(answered, workspace)


class _Problem(Response):
    """An error as its three fields; the path of the runs folder on the disk is left out."""

    def __init__(self, error: GlassError, root: Path) -> None:
        parts = (_without(text, root) for text in (error.what, error.where, error.hint))
        what, where, hint = parts
        self.error = type(error)(what, where=where, hint=hint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the error's status."""
        await refuse(send, self.error)


def _without(text: str, root: Path) -> str:
    return text.replace(f"{root}/", "").replace(str(root), "runs")


class _Lines(Response):
    """NDJSON: one line per value, as it is made."""

    def __init__(self, values: Iterator[Mapping[str, Any]], workspace: Workspace) -> None:
        self.values = values
        self.workspace = workspace
        self.gone = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines; the first value decides the status, later errors are a last line."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, receive)
            await anyio.to_thread.run_sync(self._write, send)
            group.cancel_scope.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    def _write(self, asgi_send: Send) -> None:
        async def send(message: Mapping[str, object]) -> None:
            await asgi_send(dict(message))

        start = {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"application/x-ndjson")],
        }
        begun = False
        try:
            for value in self.values:
                if self.gone.is_set():
                    return
                if self.workspace.closing.is_set():
                    raise Busy("the explorer was stopped while this was being made")
                if not begun:
                    anyio.from_thread.run(send, start)
                    begun = True
                self._line(send, value)
        except Exception as error:
            glass_error = error if isinstance(error, GlassError) else _mistake(error)
            shown = _Problem(glass_error, self.workspace.root).error
            if not begun:
                anyio.from_thread.run(refuse, asgi_send, shown)
                return
            self._line(send, problem(shown))
        finally:
            close = getattr(self.values, "close", None)
            if close is not None:
                close()
        if not begun:
            anyio.from_thread.run(send, start)
        last = {"type": "http.response.body", "body": b"", "more_body": False}
        anyio.from_thread.run(send, last)

    def _line(self, send: Sender, value: Mapping[str, Any]) -> None:
        body = to_json(value) + b"\n"
        message = {"type": "http.response.body", "body": body, "more_body": True}
        anyio.from_thread.run(send, message)


class Connection(H11Protocol):
    """uvicorn's connection with a timer: closed if no complete request arrives in time.

    uvicorn limits how long a connection may stay idle after a response, not how long a request may
    take to arrive; enough connections with half a request each would use up all file descriptors.
    The body has a limit of its own, in the guard.
    """

    def connection_made(self, transport: Any) -> None:
        """Start the timer."""
        super().connection_made(transport)
        self._seen: Any = None
        self._clock = self._later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._clock.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, which the guard never sees, with the guard's headers."""
        body = to_json(problem(InputError("this is not HTTP")))
        ends = {"content-type": "application/json", "content-length": len(body)}
        named = {**HEADERS, **ends, "connection": "close"}
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {text}" for name, text in named.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        self.transport.close()

    def _later(self) -> asyncio.TimerHandle:
        return self.loop.call_later(limits.HEAD_SECONDS, self._check)

    def _check(self) -> None:
        """Close the connection if no new request came since the last check and none is in work."""
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._clock = self._later()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return _Problem(NotAllowed(f"{request.method} is not accepted here"), Path("/nowhere"))
    return _Problem(Unknown("there is nothing here"), Path("/nowhere"))


def _mistake(error: Exception) -> GlassError:
    """Print the traceback on the terminal; the page shows one line."""
    traceback.print_exception(error, file=sys.stderr)
    return Mistake("the server has a bug", hint="its terminal shows the traceback")


ROUTES: tuple[Route, ...] = (
    *runs.ROUTES,
    *errors.ROUTES,
    *inspect.ROUTES,
    *model.ROUTES,
    *design.ROUTES,
    *generate.ROUTES,
    *quantize.ROUTES,
    *sweeps.ROUTES,
)
