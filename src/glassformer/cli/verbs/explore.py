"""`glass explore`: the page over your runs, from a local server protected by a token.

Listening on other addresses takes two options, because anyone with the link can read every run
and use this machine's time. The link reaches the browser in a private file, not in the arguments of
a process, which every user of the machine can read.
"""

import html
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import Device, Runs
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import tell
from glassformer.spec.errors import InputError
from glassformer.spec.options import check_options, option


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Where the page is served, and with what."""

    port: int = option(7337, at_least=0, at_most=65535, help="0 takes a free one.")
    host: str = option("127.0.0.1", help="The address to listen at.")
    allow_remote: bool = option(False, help="Let --host be reachable by others.")
    opens: bool = option(True, flag="--no-open", help="Print the link and open no browser.")
    server: str | None = option(
        None,
        metavar="ADDRESS",
        help="The page Generate also offers the models of this server, on this machine: what "
        "`glass serve` printed. Its key is read from GLASS_API_KEY.",
    )
    device: Device = "cpu"

    def __post_init__(self) -> None:
        check_options(self, has_flags=True)


def explore(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="RUNS", help="A folder of runs, one run, or a model; by default --runs."
        ),
    ] = None,
    *,
    server: Server,
    runs: Runs = "runs",
) -> None:
    """Inspect, compare, design, generate and quantize in a browser.

    The page is local and fetches nothing; Ctrl-C ends it. Examples:

      glass explore

      glass explore runs/digits --port 0

      glass explore path/to/Qwen3-0.6B --no-open

      glass explore --server http://127.0.0.1:8000/v1
    """
    serve(_place(what, Path(runs)), server)


def _checked(place: Path) -> Path:
    """Require a folder, which may still be empty, or a model in one file."""
    from glassformer.web.app.workspace import kind_of

    if kind_of(place) is None and not place.is_dir():
        raise InputError(f"{place} is neither a folder nor a .gguf file")
    if kind_of(place) is None and (place / "config.json").is_file():
        raise InputError(
            f"{place} has a config.json, but neither a run.json nor .safetensors",
            hint="weights in any other form are not opened",
        )
    return place


def _place(what: str | None, runs: Path) -> Path:
    """Return the folder to show. The runs folder may be empty or missing: Design needs none."""
    if what is None:
        return runs
    if Path(what).exists():
        return _checked(Path(what))
    from glassformer.store.rundir import RunRef

    if RunRef.parse(what).step:
        raise InputError(f"{what} names a checkpoint", hint="the page lets you choose the step")
    from glassformer.cli.shell.resolve import find_model

    return Path(find_model(what, runs=runs))


def serve(place: Path, given: Server) -> None:
    """Serve the page over `place` until Ctrl-C."""
    import uvicorn

    from glassformer.serve.http import EndingServer, is_loopback, listen, reachable_host
    from glassformer.web.app.relay import Relay
    from glassformer.web.app.server import Connection, create_app

    host = given.host
    check_host(host, allow_remote=given.allow_remote)
    device, relay = check_device(given.device), None
    if given.server is not None:
        relay = Relay(given.server, key=os.environ.get("GLASS_API_KEY"))
    listening = listen(host, given.port)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    app = create_app(place, token=token, host=host, port=port, device=device, relay=relay)
    link = f"http://{reachable_host(host)}:{port}/#t={token}"
    if not is_loopback(host):
        tell(f"warning: whoever can reach {host}:{port} and has this link reads these runs")
        tell(f"safer: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, and no --host")
    tell(f"showing {place}; Ctrl-C ends it")
    print(link, flush=True)
    config = uvicorn.Config(
        app,
        http=Connection,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    with tempfile.TemporaryDirectory(prefix="glass-") as private:
        if given.opens and has_screen():
            webbrowser.open(_doorway(Path(private), link))

        def closing() -> None:
            app.state.workspace.closing.set()
            # what is cut off from now on is no fault of the app that uvicorn would have to print
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            shutil.rmtree(private, ignore_errors=True)  # it holds the token; SIGTERM returns not

        try:
            EndingServer(config, closing).run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn has closed up and passes the signal on
            tell("")
    sys.stdout.flush()
    os._exit(0)  # a worker thread may still compute; nothing is written here, so nothing is lost


def check_host(host: str, *, allow_remote: bool) -> None:
    """Refuse an address other than loopback unless it is also allowed explicitly."""
    from glassformer.serve.http import is_loopback

    if is_loopback(host) and allow_remote:
        raise InputError(
            f"--allow-remote, but {host} is reached from this machine only",
            hint="name the address with --host, or leave out --allow-remote",
        )
    if not is_loopback(host) and not allow_remote:
        raise InputError(
            f"{host} can be reached from other machines",
            hint="ssh -L is safer; if you mean it, add --allow-remote",
        )


def has_screen(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if a browser can open a window; a text browser would take over the terminal."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def _doorway(folder: Path, link: str) -> str:
    """Write a file that only this user can read, and that redirects to the page."""
    file = folder / "open.html"
    file.touch(mode=0o600)
    target = html.escape(link, quote=True)
    file.write_text(
        f'<!doctype html><meta charset="utf-8"><title>glass explorer</title>'
        f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">open</a>\n',
        encoding="utf-8",
    )
    return file.as_uri()
