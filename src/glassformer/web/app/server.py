"""The app: static files from a fixed list, requests by a table of routes, errors as three fields.

Each page's module lists its own `ROUTES`; here they are joined. Handlers run in worker threads and
know nothing of HTTP. An iterator runs in one thread from its first line to its last (torch's modes
belong to a thread); when the client disconnects it is closed.

Some requests are refused before any route. Three attackers are considered: a web page the user
visits (Host, Origin, token, content type), another user of the machine (token on every request,
reads too), and one who sends too much (limits). There are no cookies and no CORS headers: nothing
is granted to another origin.
"""

import hmac
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

from glassformer.lens.show.block_picture import STYLE
from glassformer.serve.http import (
    EVERYWHERE,
    LOOPBACK,
    METHODS,
    Forbidden,
    Guard,
    Refusal,
    TimedConnection,
    WrongMethod,
)
from glassformer.spec.errors import GlassError, InputError
from glassformer.web.app import limits
from glassformer.web.app.query import (
    Answer,
    Busy,
    Bytes,
    Handler,
    Mistake,
    Query,
    Route,
    Unknown,
    parse_body,
    problem,
    status_of,
    to_json,
)
from glassformer.web.app.relay import Relay
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages import design, errors, generate, inspect, model, quantize, runs

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


class ExplorerGuard(Guard):
    """The explorer's guard: our own page alone, and its token on every request of the API."""

    decisive = ("host", "origin", "content-type", "content-length", TOKEN_HEADER)
    schemes = ("http",)
    names_page = True
    host_hint = "open the printed link"

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str,
        port: int,
        hosts: Iterable[str] = LOOPBACK,
        any_address: bool = False,
    ) -> None:
        super().__init__(
            app,
            hosts=hosts,
            any_address=any_address,
            port=port,
            body_bytes=limits.BODY_BYTES,
            body_seconds=limits.BODY_SECONDS,
            path_bytes=limits.PATH_BYTES,
        )
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request; every response has the explorer's headers, errors too."""
        await super().__call__(scope, receive, _with_headers(send))

    def check_secret(self, scope: Scope, headers: dict[str, str]) -> None:
        """Compare the token; the page itself, which asks for it, needs none."""
        if not scope["path"].startswith("/api"):
            return
        given = headers.get(TOKEN_HEADER, "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self._token):
            raise Forbidden(
                "the token is missing or wrong",
                hint="open the link that `glass explore` printed; each start has its own",
            )

    async def refuse(self, error: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the error's three fields."""
        await refuse(send, error)


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
Sender = Callable[[Mapping[str, object]], Coroutine[Any, Any, None]]


def create_app(
    runs: Path,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int,
    extra_models: Mapping[str, Path] | None = None,
    device: str = "cpu",
    relay: Relay | None = None,
) -> Starlette:
    """Make the explorer of a runs folder, a run or a model; see `app.state.workspace`."""
    workspace = Workspace(runs, extra_models=extra_models, device=device, relay=relay)
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
        ExplorerGuard,
        token=token,
        port=port,
        hosts=(*LOOPBACK, host),
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
        told = error.in_command()  # which is how the page was started
        what, where, hint = (
            text.replace(f"{root}/", "").replace(str(root), "runs")
            for text in (told.what, told.where, told.hint)
        )
        self.error = type(error)(what, where=where, hint=hint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the error's status."""
        await refuse(send, self.error)


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


class Connection(TimedConnection):
    """A connection whose answer to what is not HTTP is the explorer's, with the guard's headers."""

    refusal = to_json(problem(InputError("this is not HTTP")))
    extra_headers = HEADERS


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return _Problem(WrongMethod(f"{request.method} is not accepted here"), Path("/nowhere"))
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
)
