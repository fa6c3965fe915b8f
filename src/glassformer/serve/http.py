"""What both of our HTTP servers need: a guard, names of hosts, a socket, connections with limits.

The explorer and the OpenAI-compatible server listen on this machine unless told otherwise, refuse
names that are not theirs (a page may rebind a name to a loopback address), and give nobody
unlimited time: not for a request's head, not for its body. `Guard` is the one place where that is
decided; each server adds its secret and the shape of its errors. `EndingServer` ends both.
"""

import asyncio
import errno
import ipaddress
import os
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, ClassVar
from urllib.parse import unquote

import anyio
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from glassformer.spec.errors import InputError, MachineError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")
#: Seconds in which a request must have begun.
HEAD_SECONDS = 10.0
#: Bytes of an answer that the system keeps for a client that does not read, and as many that this
#: process keeps; by itself the system keeps megabytes, and a server learns late that nobody reads.
UNSENT_BYTES = 1 << 15
#: Seconds that a server has to end after SIGTERM; those who send it wait for 10 or more.
GRACE_SECONDS = 8.0


# --- names ----------------------------------------------------------------------------------------


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


def plain_host(host: str) -> str:
    """Return a host as `split_host` spells it: `0:0:0:0:0:0:0:1` is `::1`."""
    found = split_host(f"[{host}]" if ":" in host else host)
    return host.lower() if found is None else found[0]


def is_address(name: str) -> bool:
    """Return True for an IP address, False for a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def reachable_host(host: str) -> str:
    """Write a host as part of an address; for "all interfaces", the one that works here."""
    name = host.strip("[]")
    if name in EVERYWHERE:
        return "127.0.0.1" if name == "0.0.0.0" else "[::1]"
    return f"[{name}]" if ":" in name else name


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket, before anything heavy is loaded."""
    name = host.strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind)
    except OSError as error:
        raise InputError(f"cannot listen at {host}: {error.strerror}") from error
    except UnicodeError as error:  # a name with an empty part, or with one of 64 letters
        raise InputError(f"cannot listen at {host[:80]}: that is no name of a machine") from error
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(128)
    except OSError as error:
        opened.close()
        if error.errno == errno.EADDRINUSE:
            raise MachineError(
                f"port {port} is in use (perhaps by another explorer)",
                hint="--port 0 takes a free one",
            ) from error
        raise MachineError(f"cannot listen at {host}:{port}: {error.strerror}") from error
    return opened


# --- requests -------------------------------------------------------------------------------------


class Refusal(InputError):
    """A request that is refused before any route, with HTTP's status; the connection may close."""

    status: ClassVar[int] = 400
    closes: ClassVar[bool] = False


class UnclearEnd(Refusal):
    """A request whose end a proxy may see elsewhere: what follows it is nobody's request."""

    closes = True


class WrongKey(Refusal):
    """The secret is missing or wrong, in a header that HTTP has for it."""

    status = 401


class Forbidden(Refusal):
    """A name that is not the server's, a page of another origin, no token."""

    status = 403


class WrongMethod(Refusal):
    """A method that no address here accepts."""

    status = 405


class TooSlow(Refusal):
    """A body that did not arrive in time."""

    status = 408


class TooLong(Refusal):
    """A body of more bytes than the limit."""

    status = 413


class LongAddress(Refusal):
    """A path with its query string of more bytes than the limit."""

    status = 414


class NotJson(Refusal):
    """A body of another type; a form of another page could send it."""

    status = 415


def single_headers(scope: Scope, decisive: Iterable[str]) -> dict[str, str] | str:
    """Return headers by name, or the name of a decisive one that is there twice."""
    found: dict[str, str] = {}
    names = frozenset(decisive)
    for raw, value in scope["headers"]:
        name: str = raw.decode("latin-1").lower()
        if name in found and name in names:
            return name
        found[name] = value.decode("latin-1")
    return found


async def complete_body(
    receive: Receive, headers: dict[str, str], *, most: int, seconds: float
) -> Receive:
    """Read the body within its limits, with or without a length; the app reads it from memory."""
    length = headers.get("content-length", "0")
    digits = length.isascii() and length.isdigit() and len(length) <= 12
    if not digits or int(length) > most:
        raise TooLong(f"the body is larger than {most:,} bytes")
    data, more, gone = bytearray(), True, False
    with anyio.move_on_after(seconds) as clock:
        while more and not gone:
            message = await receive()
            gone = message["type"] == "http.disconnect"
            data += message.get("body", b"")
            more = message.get("more_body", False)
            if len(data) > most:
                raise TooLong(f"the body is larger than {most:,} bytes")
    if clock.cancelled_caught:
        raise TooSlow(f"the body did not come within {seconds:.0f} seconds")
    first: list[Message] = [{"type": "http.request", "body": bytes(data), "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


# --- the guard ------------------------------------------------------------------------------------

METHODS = ("GET", "HEAD", "POST")


class Guard(ABC):
    """An ASGI middleware around a complete app: what is refused before any route.

    hosts: names allowed in Host. `any_address` also allows every IP literal, for a server that
    listens on all addresses: a name rebound by DNS is still refused. `port` must be the one in
    Host; None allows any, as behind a proxy or a tunnel; `proxied` are the names among them that
    such a proxy has. Headers that decide something are refused if they come twice.
    """

    decisive: ClassVar[tuple[str, ...]]
    #: Schemes of pages that may send requests; whether a POST must name its page.
    schemes: ClassVar[tuple[str, ...]]
    names_page: ClassVar[bool]
    #: What to do about a name that is not ours.
    host_hint: ClassVar[str]

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Iterable[str],
        any_address: bool,
        port: int | None,
        body_bytes: int,
        body_seconds: float,
        path_bytes: int,
        proxied: Iterable[str] = (),
    ) -> None:
        self.app = app
        self._hosts = frozenset(plain_host(host.strip("[]")) for host in hosts)
        self._any_address = any_address
        self._port = port
        self._proxied = frozenset(plain_host(host.strip("[]")) for host in proxied)
        self._body_bytes, self._body_seconds = body_bytes, body_seconds
        self._path_bytes = path_bytes

    @abstractmethod
    def check_secret(self, scope: Scope, headers: dict[str, str]) -> None:
        """Refuse a request without the server's key or token, compared in constant time."""

    @abstractmethod
    async def refuse(self, error: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then pass it on or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no WebSockets
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            headers = single_headers(scope, self.decisive)
            if isinstance(headers, str):
                raise Refusal(f"two headers called {headers}")
            scope = _in_origin_form(scope, headers)
            self._check(scope, headers)
            if scope["method"] == "POST":
                receive = await complete_body(
                    receive, headers, most=self._body_bytes, seconds=self._body_seconds
                )
        except Refusal as error:
            answer = _closing(send) if error.closes else send
            await self.refuse(error, scope, receive, answer)
            return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        if "transfer-encoding" in headers and (
            "content-length" in headers or scope["http_version"] == "1.0"
        ):  # RFC 9112, 6.1
            raise UnclearEnd("a body has a length or a transfer encoding, not both")
        host = split_host(headers.get("host", ""))
        if host is None or not self._is_ours(host):
            raise Forbidden("this name is not one of the server's", hint=self.host_hint)
        if scope["method"] not in METHODS:
            raise WrongMethod(f"{scope['method'][:20]} is not accepted here")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > self._path_bytes:
            raise LongAddress("the address is too long")
        post = scope["method"] == "POST"
        origin = headers.get("origin")
        needed = origin is not None or (post and self.names_page)
        if needed and not self._is_our_origin(origin, headers["host"]):
            raise Forbidden("the request comes from another page")
        self.check_secret(scope, headers)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if post and kind != "application/json":
            raise NotJson("a request with a body must be application/json")

    def _is_ours(self, host: tuple[str, int]) -> bool:
        name, port = host
        return self._port in (None, port) and (
            name in self._hosts or (self._any_address and is_address(name))
        )

    def _is_our_origin(self, origin: str | None, host: str) -> bool:
        """Return True for a page of the server that the request names, seen under either name.

        Another port is another server's. A proxy that changes Host is known by its name alone.
        """
        scheme, _, rest = (origin or "").partition("://")
        if scheme not in self.schemes:
            return False
        default = 443 if scheme == "https" else 80
        page, own = (split_host(text, default_port=default) for text in (rest, host))
        if page is None or own is None or not self._is_ours(page):
            return False
        if page[0] in self._proxied and page[1] == default:
            return True
        same_name = page[0] == own[0] or (page[0] in LOOPBACK and own[0] in LOOPBACK)
        return same_name and page[1] == own[1]


def _in_origin_form(scope: Scope, headers: dict[str, str]) -> Scope:
    """Return a request for `http://host/path` as one for `/path` of this host (RFC 9112, 3.2.2)."""
    target: bytes = scope.get("raw_path") or b""
    scheme, mark, rest = target.partition(b"://")
    if not mark or scheme.lower() not in (b"http", b"https"):
        return scope
    authority, _, path = rest.partition(b"/")
    headers["host"] = authority.decode("latin-1")
    return {**scope, "raw_path": b"/" + path, "path": "/" + unquote(path.decode("latin-1"))}


def _closing(send: Send) -> Send:
    """Return a `send` whose response ends the connection."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    return sent


# --- connections ----------------------------------------------------------------------------------


class TimedConnection(H11Protocol):
    """uvicorn's connection with a timer: closed if no complete request arrives in time.

    uvicorn limits how long a connection may stay idle after a response, not how long a request may
    take to arrive; enough connections with half a request each would use up all file descriptors.
    The body has a limit of its own: `complete_body`. `refusal` is the answer to what is not HTTP,
    with `extra_headers`: the app never sees it.
    """

    refusal = b'{"error": {"message": "this is not HTTP", "type": "invalid_request_error"}}'
    extra_headers: dict[str, str] = {}  # noqa: RUF012  subclasses replace it

    def connection_made(self, transport: Any) -> None:
        """Start the timer, and bound what is kept for the client."""
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES
        )
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._seen: Any = None
        self._probe: asyncio.TimerHandle | None = None
        self._clock = self._later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._clock.cancel()
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that has sent its request and still reads."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        if self._probe is None:
            begun = _Begun(self.transport)
            cycle: Any = self.cycle
            cycle.transport = begun
            self._look(begun, list(PROBES))
        return True

    def _look(self, begun: "_Begun", waits: list[float]) -> None:
        """Find out whether the client has only stopped sending, or is gone.

        Both look the same until something is sent, and what is sent to one that is gone comes back
        as an error. So the first bytes of an answer, which are always the same, are sent one by one
        while it is being computed.
        """
        if begun.get_error():
            self.transport.abort()
        elif waits and not self.transport.is_closing():
            begun.send_one()
            self._probe = self.loop.call_later(waits.pop(0), self._look, begun, waits)

    def on_response_complete(self) -> None:
        """Close the connection behind the last answer to a client that sends no more."""
        super().on_response_complete()
        if self._probe is not None:
            self._probe.cancel()
            if self.cycle.response_complete:
                self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, and close."""
        ends = {"content-type": "application/json", "content-length": len(self.refusal)}
        named = {**self.extra_headers, **ends, "connection": "close"}
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {text}" for name, text in named.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + self.refusal)
        self.transport.close()

    def _later(self) -> asyncio.TimerHandle:
        return self.loop.call_later(HEAD_SECONDS, self._check)

    def _check(self) -> None:
        """Close the connection if no new request came since the last check and none is in work."""
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._clock = self._later()


#: How every answer begins, and the seconds between its bytes while the client may be gone.
BEGINNING = b"HTTP/1.1 "
PROBES = (0.05, 0.2, 1.0, 4.0, 15.0, 30.0, 60.0, 120.0, 240.0)


class _Begun:
    """A transport to a client that sends no more: the answer's beginning may be sent ahead."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._ahead = 0
        self._is_open = True  # no answer has begun

    def get_error(self) -> int:
        """Return the socket's pending error, 0 if there is none."""
        code: int = self._transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_ERROR
        )
        return code

    def send_one(self) -> None:
        """Send the next byte of an answer that has not begun."""
        if self._is_open and self._ahead < len(BEGINNING):
            self._transport.write(BEGINNING[self._ahead : self._ahead + 1])
            self._ahead += 1

    def write(self, data: bytes) -> None:
        """Write an answer without the bytes that were sent already."""
        if self._is_open and data:
            assert data.startswith(BEGINNING), "an answer begins with its version"
            data, self._is_open = data[self._ahead :], False
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Return True if the connection is closed or will be."""
        closing: bool = self._transport.is_closing()
        return closing

    def close(self) -> None:
        """Close the connection when everything is written."""
        self._transport.close()


# --- the end --------------------------------------------------------------------------------------


class EndingServer(uvicorn.Server):
    """uvicorn's server with an end: the first signal finishes what is running, the second ends.

    After SIGTERM what is running has GRACE_SECONDS. `closing` is called at the first signal.
    """

    def __init__(self, config: uvicorn.Config, closing: Callable[[], None]) -> None:
        super().__init__(config)
        self._closing = closing
        self._is_ending = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop what runs, then shut down; end at once at the second signal."""
        if self._is_ending:  # nothing is written here that an end could cut
            os._exit(128 + sig)
        self._is_ending = True
        if sig == signal.SIGTERM:
            clock = threading.Timer(GRACE_SECONDS, os._exit, [128 + sig])
            clock.daemon = True
            clock.start()
        self._closing()
        super().handle_exit(sig, frame)
