"""Every planted fault turns its named check red."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glassformer.store.rundir import RunDirectory
from glassformer.web.app.query import Busy
from tests.checks.faults import Fault, planted
from tests.web import test_errors, test_guard, test_runs, test_server, test_workspace
from tests.web.conftest import Client, Opener
from tests.web.faults import FAULTS

RED = (AssertionError, KeyError, ValueError, Busy, pytest.fail.Exception)


@dataclass(frozen=True)
class Bench:
    """What checks are made with."""

    client: Client
    runs: Path
    open_app: Opener
    tmp_path: Path
    monkeypatch: pytest.MonkeyPatch

    def growing(self) -> Path:
        """A run that says it is running."""
        return test_runs.growing.__wrapped__(self.runs, self.tmp_path / "growing")

    @contextmanager
    def written(self) -> Iterator[Path]:
        """A run that is being written, under its lock."""
        run = self.growing()
        with RunDirectory(run).locked():
            yield run


def depth(bench: Bench) -> None:
    answer = bench.client.post("/api/inspect", b'{"a":' * 40 + b"1" + b"}" * 40)
    assert "deeper" in answer.what


def linked_files(bench: Bench) -> None:
    for name in ("config.json", "run.json"):
        place = bench.tmp_path / name.partition(".")[0]
        place.mkdir()
        test_workspace.test_a_file_that_is_a_link_out_is_refused(
            name, bench.runs, place, bench.open_app
        )


def running(bench: Bench) -> None:
    with bench.written() as run:
        test_runs.test_a_run_that_is_written_is_running(run, bench.open_app)


def silent(bench: Bench) -> None:
    with bench.written() as run:
        test_runs.test_a_run_that_is_silent_is_stalled(run, bench.open_app)


CHECKS: dict[str, Callable[[Bench], Any]] = {
    "hosts": lambda b: [
        test_guard.test_other_hosts_are_refused(b.client, host)
        for host in ("evil.example:7337", "127.0.0.1:7338", "127.0.0.1.evil.example:7337")
    ],
    "own names": lambda b: test_guard.test_our_own_names_are_let_in(b.client, "[::1]:7337"),
    "token": lambda b: [
        test_guard.test_no_call_without_the_token(b.client, token) for token in (None, "the", "x")
    ],
    "origin": lambda b: [
        test_guard.test_a_post_comes_from_our_page(b.client, origin)
        for origin in (None, "null", "https://127.0.0.1:7337")
    ],
    "json only": lambda b: test_guard.test_a_post_is_json(b.client, "text/plain"),
    "two headers": lambda b: test_guard.test_two_headers_of_one_name_are_refused(b.client),
    "length": lambda b: test_guard.test_a_huge_body_is_refused_by_its_length(b.client),
    "streamed": lambda b: test_guard.test_a_huge_body_is_refused_while_it_streams(b.client),
    "headers": lambda b: test_guard.test_every_answer_carries_the_headers(b.client),
    "depth": depth,
    "not finite": lambda b: test_server.test_numbers_that_are_not_finite_are_null(),
    "traversal": lambda b: test_workspace.test_no_name_leads_out(b.runs, b.client, "../secret"),
    "links": lambda b: test_workspace.test_a_run_that_is_a_link_out_is_refused(
        b.runs, b.tmp_path, b.open_app
    ),
    "linked files": linked_files,
    "one job": lambda b: test_workspace.test_one_heavy_job_at_a_time(b.runs, b.monkeypatch),
    "stalled": lambda b: test_runs.test_a_run_whose_process_is_gone_is_stalled(
        b.growing(), b.open_app
    ),
    "silent": silent,
    "running": running,
    "cut back": lambda b: test_runs.test_a_run_that_was_cut_back_is_read_anew(b.growing()),
    "band": lambda b: test_runs.test_seeds_become_a_mean_and_a_band(b.client, b.runs),
    "differ": lambda b: test_runs.test_only_the_settings_that_differ(b.client),
    "cell": lambda b: test_errors.test_a_cell_shows_the_examples_that_it_counts(b.client, b.runs),
    "once": lambda b: test_errors.test_a_checkpoint_is_measured_once(
        b.runs, b.open_app, b.monkeypatch
    ),
}


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


def test_every_check_has_a_fault() -> None:
    assert {fault.caught_by for fault in FAULTS} == set(CHECKS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
