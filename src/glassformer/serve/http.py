"""What both of our HTTP servers need: names of hosts, a socket, bodies and connections with limits.

The explorer and the OpenAI-compatible server listen on this machine unless told otherwise, refuse
names that are not theirs (a page may rebind a name to a loopback address), and give nobody
unlimited time: not for a request's head, not for its body.
"""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

import anyio
from starlette.types import Message, Receive, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from glassformer.spec.errors import InputError, MachineError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")
#: Seconds in which a request must have begun.
HEAD_SECONDS = 10.0


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


class TooLong(InputError):
    """A body of more bytes than the limit."""


class TooSlow(InputError):
    """A body that did not arrive in time."""


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
        """Start the timer."""
        super().connection_made(transport)
        self._seen: Any = None
        self._clock = self._later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._clock.cancel()
        super().connection_lost(exc)

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
