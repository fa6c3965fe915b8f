"""Every planted fault turns its named check red."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glassformer.web.app.query import Busy
from tests.planting import Fault, If, Unary, mutate, planted
from tests.web import test_guard, test_workspace
from tests.web.conftest import Client, Opener

RED = (AssertionError, KeyError, ValueError, Busy, pytest.fail.Exception)


@dataclass(frozen=True)
class Bench:
    """What checks are made with."""

    client: Client
    runs: Path
    open_app: Opener
    tmp_path: Path
    monkeypatch: pytest.MonkeyPatch


def depth(bench: Bench) -> None:
    answer = bench.client.post("/api/inspect", b'{"a":' * 40 + b"1" + b"}" * 40)
    assert "deeper" in answer.what


CHECKS: dict[str, Callable[[Bench], Any]] = {
    "hosts": lambda b: [
        test_guard.test_other_hosts_are_refused(b.client, host)
        for host in ("evil.example:7337", "127.0.0.1:7338", "127.0.0.1.evil.example:7337")
    ],
    "json only": lambda b: test_guard.test_a_post_is_json(b.client, "text/plain"),
    "depth": depth,
    "traversal": lambda b: test_workspace.test_no_name_leads_out(b.runs, b.client, "../secret"),
    "links": lambda b: test_workspace.test_a_run_that_is_a_link_out_is_refused(
        b.runs, b.tmp_path, b.open_app
    ),
}

FAULTS = (
    Fault("hosts not looked at", mutate("serve.http:Guard._check", If("host"), to="False"), "hosts"),
    Fault("forms are let in", mutate("serve.http:Guard._check", If("post"), to="False"), "json only"),
    Fault("any name", mutate("web.app.workspace:Workspace.folder", Unary("not"), to="False"), "traversal"),
    Fault("links lead out", mutate("web.app.workspace:Workspace.folder", If("_inside"), to="False"), "links"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(
    fault: Fault,
    client: Client,
    runs: Path,
    open_app: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(client, runs, open_app, tmp_path, monkeypatch)
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by](bench)


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_is_green_without_one(
    check: str,
    client: Client,
    runs: Path,
    open_app: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CHECKS[check](Bench(client, runs, open_app, tmp_path, monkeypatch))
