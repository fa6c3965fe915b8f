"""Clients that do not read: the seconds of another client beside answers that nobody takes.

Real sockets against `glass serve` in a process of its own, one model of eight slots. Clients ask
for long streamed answers, eight choices each, and read nothing, or a byte a second; another client
asks for short answers meanwhile. Until what is kept for a client is full it cannot be told from one
that reads; then its answer is on hold, and five seconds later it ends. Two figures of the other
client: before, and from the moment at which the crowd asks until its answers have ended.
"""

import argparse
import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.attack_serve import GOOD, LONG, Endpoint, make_folder
from bench.attack_server import HOST
from bench.patterns import Other, as_text

CHOICES = 8


def options(parser: argparse.ArgumentParser) -> None:
    """Add what the benchmark can be told."""
    parser.add_argument("--seconds", type=float, default=15.0, help="of each crowd, at most")


class Crowd:
    """Clients that ask and do not read; `drips`: they read a byte a second."""

    def __init__(self, server: Endpoint, count: int, *, drips: bool, owners: int) -> None:
        body = {**LONG, "n": CHOICES, "logprobs": 5}
        self.held = []
        for number in range(count):
            opened = socket.create_connection((HOST, server.port))
            opened.sendall(server.completion({**body, "user": f"crowd {number % owners}"}))
            self.held.append(opened)
        self.over = threading.Event()
        self.reader = threading.Thread(target=self._drip, daemon=True)
        if drips:
            self.reader.start()

    def _drip(self) -> None:
        while not self.over.wait(1.0):
            for one in self.held:
                with contextlib.suppress(OSError):
                    one.recv(1)

    def end(self) -> None:
        """Hang up."""
        self.over.set()
        if self.reader.ident is not None:
            self.reader.join()
        for one in self.held:
            one.close()


def _watched(server: Endpoint, seconds: float, *, crowd: bool) -> tuple[list[float], int]:
    """Return the other client's seconds, sorted, and how many of its requests were refused."""
    other = Other(server, {**GOOD, "user": "other"})
    other.start()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not (crowd and _is_over(server)):
        time.sleep(0.5)
    return other.end(), other.wrong


def _is_over(server: Endpoint) -> bool:
    return server.gauge("running") + server.gauge("waiting") <= 1  # the other client's


def run(
    *, quick: bool = False, asked: argparse.Namespace | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each crowd and figure."""
    seconds = 3.0 if quick else 15.0 if asked is None else asked.seconds
    crowds = ((1, False, 1), (30, False, 1), (30, True, 30))
    for count, drips, owners in crowds[:1] if quick else crowds:
        name = f"{count} of {owners} users, {'a byte a second' if drips else 'nothing read'}"
        with tempfile.TemporaryDirectory() as place:
            server = Endpoint(make_folder(Path(place)))
            try:
                server.answer()
                found = {"before": _watched(server, min(seconds, 5.0), crowd=False)}
                crowd = Crowd(server, count, drips=drips, owners=owners)
                found["meanwhile"] = _watched(server, seconds, crowd=True)
                crowd.end()
            finally:
                server.end()
        for when, (times, wrong) in found.items():
            shared = {"median_ms": None, "ratio": None, "of_limit": None}
            text = f"{as_text(times)}, {wrong} refused"
            yield {"bench": "readers", "case": f"{name}: {when}", "name": text, **shared}
