"""Run `glass explore`: a local server that only this machine reaches, protected by a token.

Listening on other addresses takes two options, because anyone with the link can read every run
and use this machine's time. The link reaches the browser in a private file, not in the arguments of
a process, which every user of the machine can read.
"""

import html
import os
import secrets
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import uvicorn

from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import tell
from glassformer.serve.http import is_loopback, listen, reachable_host
from glassformer.spec.errors import InputError
from glassformer.web.app.server import Connection, create_app


def serve(
    place: Path, *, port: int, host: str, allow_remote: bool, open_browser: bool, device: str
) -> None:
    """Serve the page over `place` until Ctrl-C."""
    check_host(host, allow_remote=allow_remote)
    device = check_device(device)
    listening = listen(host, port)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    app = create_app(place, token=token, host=host, port=port, device=device)
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
        if open_browser and has_screen():
            webbrowser.open(_doorway(Path(private), link))
        server = _Server(config, app.state.workspace.closing.set)
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn has closed up and passes the signal on
            tell("")
    sys.stdout.flush()
    os._exit(0)  # a worker thread may still compute; nothing is written here, so nothing is lost


class _Server(uvicorn.Server):
    """A server that stops running requests before it waits for them to end."""

    def __init__(self, config: uvicorn.Config, closing: Callable[[], None]) -> None:
        super().__init__(config)
        self._closing = closing

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._closing()
        super().handle_exit(sig, frame)


def check_host(host: str, *, allow_remote: bool) -> None:
    """Refuse an address other than loopback unless it is also allowed explicitly."""
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
