"""A connection that is closed if no complete request arrives in time.

uvicorn limits how long a connection may stay idle after a response, not how long a request may take
to arrive; enough connections with half a request each would use up all file descriptors.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from glassformer.spec.errors import InputError
from glassformer.web.app import limits
from glassformer.web.app.guard import HEADERS
from glassformer.web.app.query import problem, to_json


class Connection(H11Protocol):
    """uvicorn's connection with a timer; the body has a limit of its own, in the guard."""

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
