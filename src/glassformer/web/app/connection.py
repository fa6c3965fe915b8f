"""A connection that has to say what it wants: one that does not is closed.

uvicorn bounds how long a connection may stay idle after an answer, not how long a question may take
to arrive; half a question each from enough of them, and the server could open no file any more.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from glassformer.spec.errors import InputError
from glassformer.web.app import limits
from glassformer.web.app.guard import HEADERS
from glassformer.web.app.query import problem, to_json


class Connection(H11Protocol):
    """uvicorn's, looked at from time to time; a body has a limit of its own, in the guard."""

    def connection_made(self, transport: Any) -> None:
        """Someone has come."""
        super().connection_made(transport)
        self._seen: Any = None
        self._clock = self._later()

    def connection_lost(self, exc: Exception | None) -> None:
        """They went away."""
        self._clock.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered before the guard sees it, with the headers that it gives."""
        body = to_json(problem(InputError("this is no HTTP")))
        ends = {"content-type": "application/json", "content-length": len(body)}
        named = {**HEADERS, **ends, "connection": "close"}
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {text}" for name, text in named.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        self.transport.close()

    def _later(self) -> asyncio.TimerHandle:
        return self.loop.call_later(limits.HEAD_SECONDS, self._look)

    def _look(self) -> None:
        """Close it where nothing new was asked since the last look, and nothing is answered."""
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._clock = self._later()
