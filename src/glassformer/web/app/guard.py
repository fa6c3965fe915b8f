"""Requests that are refused before any route, and the headers of every response.

Three attackers are considered: a web page the user visits (Host, Origin, token, content type),
another user of the machine (token on every request, reads too), and one who sends too much
(limits). There are no cookies and no CORS headers: nothing is granted to another origin.
"""

import hmac
import ipaddress
from collections.abc import Iterable
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glassformer.spec.errors import GlassError, InputError
from glassformer.web.app import limits
from glassformer.web.app.query import NotAllowed, Refused, TooLarge, problem, status_of, to_json

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
