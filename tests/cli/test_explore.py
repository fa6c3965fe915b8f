"""`glass explore`: who can reach it, what it prints, how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from glassformer.cli.main import app
from glassformer.cli.verbs import explore
from glassformer.spec.errors import GlassError, InputError
from tests.command import glass

LINK = re.compile(r"http://127\.0\.0\.1:(\d+)/#t=([A-Za-z0-9_-]{32})\n")


@contextmanager
def exploring_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A running explorer: its process, port and token."""
    command = [sys.executable, "-m", "glassformer", "explore", *arguments, "--port", "0"]
    environment = {key: value for key, value in os.environ.items() if "DISPLAY" not in key}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            found = LINK.fullmatch(process.stdout.readline())
            assert found, process.stderr.read()
            yield process, int(found[1]), found[2]
        finally:
            process.kill()


def asked(port: int, token: str, path: str) -> dict:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    request.add_header("X-Glass-Token", token)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_it_prints_a_link_answers_and_ends_quietly(tmp_path: Path) -> None:
    with exploring_process(str(tmp_path)) as (process, port, token):
        assert asked(port, token, "/api/runs")["runs"] == []
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as page:
            assert b"<title>glass explorer</title>" in page.read()
            assert "server" not in {name.lower() for name in page.headers}
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps, "the page is up before torch"
        second = glass("explore", str(tmp_path), "--port", str(port))
        assert second.returncode == 5
        assert f"port {port} is in use" in second.stderr
        assert "--port 0" in second.stderr
        assert "Traceback" not in second.stderr
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert token.encode() not in arguments
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in err
    assert "KeyboardInterrupt" not in err


def test_a_model_folder_is_shown_without_curves(tmp_path: Path) -> None:
    folder = tmp_path / "a model (v2)"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    with exploring_process(str(folder)) as (_, port, token):
        runs = asked(port, token, "/api/runs")["runs"]
        [model] = runs
        path = Path(model.pop("path"))  # for commands to copy: a few names, no place of the disk
        assert path.name == folder.name
        assert not path.is_absolute()
        assert (model.pop("date"), model.pop("time")) == (
            None,
            None,
        )  # it has not been trained here
        assert model == {"id": "a-model--v2-", "kind": "model", "status": "model"}
        assert asked(port, token, f"/api/runs/{runs[0]['id']}")["checkpoints"] == []


TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("signals", "codes"),
    [((INT,), (0,)), ((TERM, INT), (128 + TERM, 128 + INT))],  # two of a kind may become one
    ids=["ctrl-c", "two signals"],
)
def test_it_ends_quietly_whatever_it_computes(
    signals: tuple[int, ...], codes: tuple[int, ...], tmp_path: Path
) -> None:
    """A request waits for a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with exploring_process(str(tmp_path), "--server", address) as (process, port, token):
            body = b'{"run": "server:any", "prompt": "so it"}'
            head = (
                f"POST /api/generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
                f"Origin: http://127.0.0.1:{port}\r\nX-Glass-Token: {token}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(head.encode() + body)
                computing, _ = silent.accept()
                with computing:
                    for each in signals:
                        process.send_signal(each)
                    assert process.wait(timeout=30) in codes
                    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", "localhost.evil"])
def test_another_address_takes_two_options(host: str) -> None:
    with pytest.raises(InputError, match="other machines"):
        explore.check_host(host, allow_remote=False)
    explore.check_host(host, allow_remote=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_takes_none(host: str) -> None:
    explore.check_host(host, allow_remote=False)
    with pytest.raises(InputError, match="this machine only"):
        explore.check_host(host, allow_remote=True)


def test_a_remote_address_is_warned_of(tmp_path: Path) -> None:
    command = ["--host", "0.0.0.0", "--allow-remote", "--no-open"]
    with exploring_process(str(tmp_path), *command) as (process, port, token):
        asked(port, token, "/api/runs")  # before it listens, a shell's background job is deaf
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert "warning" in err
    assert f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}" in err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["no-such-run"], "there is no folder no-such-run"),
        (["digits@best"], "names a checkpoint"),
        (["book.txt"], "neither a folder"),
        (["pickled"], "neither a run.json nor .safetensors"),
        (["--host", "a..b", "--allow-remote", "--port", "0"], "no name of a machine"),
        (["--port", "70000"], "above 65535"),
        (["--host", "0.0.0.0"], "other machines"),
        (["--host", "no.such.host.invalid", "--allow-remote", "--port", "0"], "cannot listen"),
        (["--host", "192.0.2.1", "--allow-remote", "--port", "0"], "cannot listen"),
    ],
)
def test_what_cannot_be_is_told(
    arguments: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").touch()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    made = CliRunner().invoke(app, ["explore", *arguments, "--no-open", "--runs", str(tmp_path)])
    assert isinstance(made.exception, GlassError)
    assert what in made.exception.what


def test_a_browser_needs_a_screen() -> None:
    assert explore.has_screen({"DISPLAY": ":0"}) or sys.platform in ("darwin", "win32")
    if sys.platform == "linux":
        assert not explore.has_screen({})


def test_the_link_goes_to_the_browser_in_a_private_file(tmp_path: Path) -> None:
    address = explore._doorway(tmp_path, "http://127.0.0.1:1/#t=secret&x")
    file = tmp_path / "open.html"
    assert address == file.as_uri()
    assert file.stat().st_mode & 0o077 == 0
    assert "url=http://127.0.0.1:1/#t=secret&amp;x" in file.read_text(encoding="utf-8")
