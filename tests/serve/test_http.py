"""How a server ends: the first signal, its deadline, the second signal."""

import signal
import time

import pytest
import uvicorn

from glassformer.serve import http
from glassformer.serve.http import EndingServer


async def nothing(scope, receive, send):
    """An app that is never called."""


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes that a process would have ended with."""
    found: list[int] = []
    monkeypatch.setattr(http.os, "_exit", found.append)
    monkeypatch.setattr(http, "GRACE_SECONDS", 0.05)
    return found


def test_sigterm_has_a_deadline_and_a_second_signal_ends_at_once(codes: list[int]) -> None:
    told: list[bool] = []
    server = EndingServer(uvicorn.Config(nothing), lambda: told.append(True))
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit
    assert told == [True]
    assert not codes
    latest = time.monotonic() + 30
    while not codes and time.monotonic() < latest:
        time.sleep(0.01)
    assert codes == [143], "SIGTERM has no deadline"
    server.handle_exit(signal.SIGTERM, None)
    server.handle_exit(signal.SIGINT, None)
    assert codes == [143, 143, 130]


def test_ctrl_c_has_no_deadline(codes: list[int]) -> None:
    server = EndingServer(uvicorn.Config(nothing), lambda: None)
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit
    time.sleep(0.2)  # four times the deadline
    assert not codes
