"""Bad requests, slow clients and crowds against the explorer's server, as `glass explore` runs it.

Allowed answers are those of the documented errors: 4xx and 503; 200 for what is well formed. A 500,
a server that is gone, an unanswered good request or memory that grows is a fault.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.attack import Found, Plan, chance
from bench.attack_files import make_models

HOST = "127.0.0.1"
#: Clients of a crowd, how often one comes, and the seconds that an answer may take.
CROWD, EVERY, PATIENCE = 200, 1_000, 60.0
#: Megabytes by which the server may grow once it is warm.
GROWTH = 150.0
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2**31, 2**63, 10**30, 1e308, -0.0, "", "a", "x" * 5_000, None, True, [], {}, [[]]),
    *(
        "../..",
        "\x00",
        "\x1b[2J",
        "digits",
        "lm",
        "digits@last",
        "0",
        "nan",
        "<script>",
        [1] * 5_000,
    ),
)
FIELDS = (
    *("model", "run", "id", "text", "prompt", "params", "vocab", "heads", "layer", "head", "top"),
    *(
        "max_new_tokens",
        "temperature",
        "width",
        "seed",
        "ids",
        "runs",
        "x",
        "smooth",
        "ablate",
        "bits",
    ),
)


class Server:
    """The explorer in a process of its own."""

    child: int
    port: int

    def __init__(self, runs: Path) -> None:
        from glassformer.cli.verbs.explore import Server as Options
        from glassformer.cli.verbs.explore import serve

        given = Options(port=0, host=HOST, opens=False)
        text = self.start(lambda: serve(runs, given))
        found = re.search(r"http://[^:]+:(\d+)/[^\s]*?([\w-]{16,})", text)
        assert found is not None, text
        self.port, self.token = int(found[1]), found[2]

    def start(self, work: Callable[[], None]) -> str:
        """Fork a process that serves; return the first line that it prints."""
        reading, writing = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(reading)
            os.dup2(writing, 1)
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 2)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            with contextlib.suppress(BaseException):
                work()
            os._exit(0)
        os.close(writing)
        text = b""
        while not text.endswith(b"\n"):
            piece = os.read(reading, 4096)
            assert piece, "the server ended before it printed its link"
            text += piece
        return text.decode()

    def megabytes(self) -> float:
        """Return its resident memory."""
        status = Path(f"/proc/{self.child}/status").read_text()
        return float(status.partition("VmRSS:")[2].split()[0]) / 1024

    def is_alive(self) -> bool:
        """Return True while the process runs."""
        return os.waitpid(self.child, os.WNOHANG)[0] == 0

    def end(self) -> None:
        """Stop it."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)

    def ask(self, data: bytes, *, hang_up: bool = False, slowly: bool = False) -> int | None:
        """Send raw bytes; return the status, None where none came."""
        try:
            with socket.create_connection((HOST, self.port), timeout=PATIENCE) as connection:
                if slowly:
                    connection.sendall(data[: len(data) // 2])
                    time.sleep(0.05)
                    data = data[len(data) // 2 :]
                connection.sendall(data)
                if hang_up:
                    return None
                reply = b""
                while b"\r\n" not in reply:
                    piece = connection.recv(4096)
                    if not piece:
                        break
                    reply += piece
        except TimeoutError:
            return -1
        except OSError:  # it hung up on us
            return None
        words = reply.split(b" ", 2)
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else None

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
        """Return a well-formed request, some headers replaced."""
        given = {
            "Host": f"{HOST}:{self.port}",
            "X-Glass-Token": self.token,
            "Origin": f"http://{HOST}:{self.port}",
            "Connection": "close",
        }
        if body or method == "POST":
            given |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items() if v != "-")]
        return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + body


def _address(path: str, r: random.Random) -> str:
    made = re.sub(
        r"\{\w+\}", lambda _: r.choice(("digits", "lm", "copy", "x", "..", "%2e%2e")), path
    )
    query = "&".join(
        f"{r.choice(FIELDS)}={str(r.choice(VALUES))[:300]}" for _ in range(r.randrange(4))
    )
    made = f"{made}?{query}" if query else made
    return re.sub(r"[\s\x00-\x1f]", "%20", made)


def bad_request(server: Server, r: random.Random) -> tuple[bytes, bool, bool]:
    """Return the bytes of a request that is wrong in some way, and how it is sent."""
    from glassformer.web.app.server import ROUTES

    method, path, _ = r.choice(list(ROUTES))
    address = _address(path, r)
    body = b""
    if method == "POST":
        value: Any = {r.choice(FIELDS): r.choice(VALUES) for _ in range(r.randrange(5))}
        body = json.dumps(value).encode()
        body = r.choice(
            (
                body,
                body,
                body,
                b"[" * 50_000,
                b"",
                b"{",
                b'{"a": NaN}',
                b"9" * 100_000,
                b"\xff" * 50,
            )
        )
    match r.randrange(12):
        case 0:
            return server.request(method, address, body, X_Glass_Token="wrong"), False, False
        case 1:
            return server.request(method, address, body, Host="evil.example"), False, False
        case 2:
            return server.request(method, address, body, Origin="http://evil.example"), False, False
        case 3:
            word = r.choice(("PUT", "DELETE", "CONNECT", "get", "X" * 5000, "\x00"))
            return server.request(word, address, body), False, False
        case 4:
            return server.request(method, "/" + "a" * r.choice((3_000, 70_000)), body), False, False
        case 5:
            size = r.choice(("-1", "99999999999999", "abc", "5000000"))
            return server.request("POST", address, b"{}", Content_Length=size), True, False
        case 6:
            return r.randbytes(r.choice((1, 100, 5_000))) + b"\r\n\r\n", True, False
        case 7:
            return server.request(method, address, body)[: r.randrange(1, 200)], True, False
        case 8:
            return (
                server.request(method, address, body, **{f"H{i}": "x" for i in range(200)}),
                False,
                False,
            )
        case 9:
            return server.request(method, address, body), False, True
        case _:
            return server.request(method, address, body), False, False


def judged(server: Server, r: random.Random) -> Found:
    """Send one request; say what came back."""
    data, hang_up, slowly = bad_request(server, r)
    began = time.monotonic()
    status = server.ask(data, hang_up=hang_up, slowly=slowly)
    seconds = time.monotonic() - began
    text = data[:300].decode("utf-8", "replace")
    if status is None:
        return Found("hung up", seconds=seconds)
    fine = 200 <= status < 300 or 400 <= status < 500 or status == 503
    return Found(
        f"{status}" if status > 0 else "no answer", not fine, seconds, "" if fine else text
    )


def crowd(server: Server) -> Found:
    """Let 200 clients ask at once; every one must be answered."""
    seen: list[int | None] = []
    request = server.request("GET", "/api/runs")
    clients = [
        threading.Thread(target=lambda: seen.append(server.ask(request))) for _ in range(CROWD)
    ]
    began = time.monotonic()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    good = sum(status == 200 for status in seen)
    fault = any(status not in (200, 503) for status in seen)
    name = f"{CROWD} at once: all answered" if not fault else f"{CROWD} at once: {set(seen)}"
    return Found(name, fault, time.monotonic() - began, f"{good} served")


def attack(plan: Plan, cases: Iterable[int]) -> Iterator[tuple[int, Found]]:
    """Ask, and ask again; a good request follows every fiftieth bad one."""
    world = make_models()
    with tempfile.TemporaryDirectory() as name:
        runs = Path(shutil.copytree(world / "runs", Path(name) / "runs"))
        for number in range(20):
            shutil.copytree(runs / "digits", runs / f"copy-{number}")
        server = Server(runs)
        try:
            yield from _asked(plan, cases, server, runs)
        finally:
            server.end()


def _asked(
    plan: Plan, cases: Iterable[int], server: Server, runs: Path
) -> Iterator[tuple[int, Found]]:
    warm: float | None = None
    for place, case in enumerate(cases):
        r = chance("server", plan.seed, case)
        found = crowd(server) if case % EVERY == EVERY - 1 else judged(server, r)
        if case % 250 == 100:
            shutil.rmtree(runs / f"copy-{case // 250 % 20}", ignore_errors=True)
        if place == 500:
            warm = server.megabytes()
        if not server.is_alive():
            yield case, Found("the server is gone", fault=True, detail=found.detail)
            return
        if case % 50 == 49:
            good = server.ask(server.request("GET", "/api/runs"))
            if good != 200:
                found = Found(f"a good request got {good}", fault=True)
        used = server.megabytes()
        if warm is not None and used > warm + GROWTH:
            found = Found(f"grew by {used - warm:.0f} MB", fault=True, detail=found.detail)
            warm = used
        yield case, Found(found.outcome, found.fault, found.seconds, found.detail, round(used))
