"""A server of OpenAI's interface that the page Generate may point at: its models, their tokens.

The address is given when the explorer starts, never by a page, and must be of this machine: whoever
has the link cannot make the explorer talk to anything else. No redirect is followed and no proxy of
the environment is used.
"""

import contextlib
import http.client
import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from glassformer.serve.http import is_loopback
from glassformer.spec.errors import InputError
from glassformer.web.app.query import Busy, Unreachable

#: Seconds without a byte: of the list of models, and of a stream, whose prompt may be long.
LIST_SECONDS, STREAM_SECONDS = 5.0, 600.0
#: Bytes of the list of models or of an error, and of one event of a stream.
MOST_BYTES, EVENT_BYTES = 1 << 20, 1 << 20


class Relay:
    """The address of a server on this machine, with its key."""

    def __init__(self, address: str, *, key: str | None = None) -> None:
        hint = "as `glass serve` prints it: http://127.0.0.1:8000/v1"
        try:
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port or 80
        except ValueError:
            raise InputError(f"{address[:80]!r} is no address", hint=hint) from None
        plain = parts.scheme == "http" and not (parts.username or parts.query or parts.fragment)
        if not plain or not host or not address.isascii() or not address.isprintable():
            raise InputError(f"{address[:80]!r} is no address of a server", hint=hint)
        if not is_loopback(host):
            raise InputError(
                f"{host} is another machine",
                hint=f"the explorer talks to this one alone; ssh -L {port}:127.0.0.1:{port} {host}",
            )
        self.address = address.rstrip("/")
        self._host, self._port, self._path = host, port, parts.path.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"

    def models(self) -> list[str]:
        """Return the names of the models that continue text."""
        with self._connected(LIST_SECONDS) as connection:
            found = json.loads(self._ask(connection, "GET", "/models").read(MOST_BYTES))
            return [
                str(one["id"])
                for one in found["data"]
                if "text" in one.get("capabilities", ["text"])  # else it gives vectors alone
            ]

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a stream; closing the iterator ends the server's work."""
        with self._connected(STREAM_SECONDS) as connection:
            response = self._ask(connection, "POST", path, json.dumps(body).encode())
            while line := response.readline(EVENT_BYTES):
                text = line.decode("utf-8", "replace").strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data:"):
                    event = json.loads(text.removeprefix("data:"))
                    if "error" in event:
                        raise InputError(_message(event), where=self.address)
                    yield event
            raise Unreachable("the server went away", where=self.address, hint="try again")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Let silence, and what is not OpenAI's, be errors that name the server."""
        try:
            yield
        except InputError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            what = "the server's answer is not OpenAI's"
            raise Unreachable(what, where=self.address) from error
        except (OSError, http.client.HTTPException) as error:
            what = "no server answers"
            raise Unreachable(what, where=self.address, hint="glass serve MODEL") from error

    @contextlib.contextmanager
    def _connected(self, seconds: float) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        with contextlib.closing(connection), self.reading():
            yield connection

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None = None,
    ) -> http.client.HTTPResponse:
        """Send a request; what is no success is an error with the server's own words."""
        connection.request(method, self._path + path, body=body, headers=self._headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        try:
            what = _message(json.loads(response.read(MOST_BYTES)))
        except (ValueError, KeyError, TypeError):
            what = f"the server answers with status {response.status}"
        hint = "GLASS_API_KEY has its key" if response.status == 401 else ""
        kind = Busy if response.status in (429, 503) else InputError
        raise kind(what, where=self.address, hint=hint)


def _message(answer: Mapping[str, Any]) -> str:
    return str(answer["error"]["message"])[:500]
