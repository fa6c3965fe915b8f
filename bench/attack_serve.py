"""Bad requests, crowds and dying clients against `glass serve`, as the command runs it.

Allowed answers are 2xx for what is well formed, 4xx and 503. Between them come the events: 200
clients at once, 50 processes killed while their answers stream, 1,000 idle connections, clients
that send a byte now and then or read nothing, and the model's files deleted. After every fiftieth
request and every event a good request must get the answer that it got from the fresh server.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.attack import Found, Plan, chance, crowding
from bench.attack_files import make_models
from bench.attack_server import CROWD, GROWTH, HOST, PATIENCE, Server
from bench.serve import bad_bodies

#: Clients that are killed, connections that say nothing, and the cases between two events.
KILLED, IDLE, EVERY = 50, 1_000, 250
#: Seconds in which the places of clients that have gone must be free again.
FREED = 20.0
GOOD = {"model": "m", "prompt": "the cat sat", "max_tokens": 12, "temperature": 0}
LONG = {**GOOD, "max_tokens": 1_800, "stream": True}


class Endpoint(Server):
    """`glass serve` of one small model, in a process of its own."""

    def __init__(self, folder: Path, *, queue: int = 256) -> None:
        from glassformer.cli.verbs.serve import Server as Options
        from glassformer.cli.verbs.serve import serve_models
        from glassformer.spec.decoding import StepSpec

        self.folder = folder
        given = Options(port=0, host=HOST, queue=queue, timeout=120.0)
        text = self.start(lambda: serve_models({"m": str(folder)}, given, step=StepSpec()))
        self.port = int(text.rstrip().removesuffix("/v1").rpartition(":")[2])

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
        """Return a well-formed request, some headers replaced."""
        given = {"Host": f"{HOST}:{self.port}", "Connection": "close"}
        if body or method == "POST":
            given |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items())]
        return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + body

    def completion(self, body: dict[str, Any]) -> bytes:
        """Return a request for a completion."""
        return self.request("POST", "/v1/completions", json.dumps(body).encode())

    def answer(self) -> tuple[int, str]:
        """Return the status and the text of the good request."""
        status, body = self.read(self.completion(GOOD))
        return status, json.loads(body)["choices"][0]["text"] if status == 200 else ""

    def read(self, data: bytes) -> tuple[int, bytes]:
        """Send a request; return its status and its whole body."""
        with socket.create_connection((HOST, self.port), timeout=PATIENCE) as connection:
            connection.sendall(data)
            reply = b""
            while piece := connection.recv(1 << 16):
                reply += piece
        head, _, body = reply.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), body

    def gauge(self, name: str) -> float:
        """Return one of the numbers of /metrics."""
        _, body = self.read(self.request("GET", "/metrics"))
        lines = body.decode().splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith(f"glass_{name}{{"))


def make_folder(place: Path) -> Path:
    """Write the small world's language model with a longer context, so that answers last."""
    folder = Path(shutil.copytree(make_models() / "exported", place / "model"))
    (folder / "SHA256SUMS").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 2_048
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- requests -------------------------------------------------------------------------------------


def bad_request(server: Endpoint, seed: int, r: random.Random) -> tuple[bytes, bool, bool]:
    """Return a request, whether the client then hangs up, and whether it sends it slowly."""
    ((method, path, body),) = bad_bodies("m", 1, seed)
    match r.randrange(14):
        case 0:
            return server.request(method, path, body, Host="evil.example"), False, False
        case 1:
            return server.request(method, path, body, Origin="http://evil.example"), False, False
        case 2:
            size = r.choice(("-1", "99999999999999", "abc", "5000000"))
            return server.request("POST", path, body, Content_Length=size), True, False
        case 3:
            return r.randbytes(r.choice((1, 100, 5_000))) + b"\r\n\r\n", True, False
        case 4:
            return server.request(method, path, body)[: r.randrange(1, 200)], True, False
        case 5:
            return server.request(method, path, body), False, True
        case 6:
            return server.request("GET", "/" + "a" * r.choice((3_000, 70_000))), False, False
        case 7:
            many = {f"H{number}": "x" * 50 for number in range(r.choice((50, 500)))}
            return server.request(method, path, body, **many), False, False
        case 8:
            return server.request("POST", path, body, Transfer_Encoding="chunked"), True, False
        case 9:
            return server.request("POST", path, b"x" * (5 << 20)), False, False
        case _:
            return server.request(method, path, body), False, False


def judged(server: Endpoint, seed: int, r: random.Random) -> Found:
    """Send one request; say what came back."""
    data, hang_up, slowly = bad_request(server, seed, r)
    began = time.monotonic()
    status = server.ask(data, hang_up=hang_up, slowly=slowly)
    seconds = time.monotonic() - began
    if status is None:
        return Found("hung up", seconds=seconds)
    fine = 200 <= status < 300 or 400 <= status < 500 or status == 503
    text = "" if fine else data[:300].decode("utf-8", "replace")
    return Found(f"{status}" if status > 0 else "no answer", not fine, seconds, text)


# --- events ---------------------------------------------------------------------------------------


def crowd(server: Endpoint) -> str:
    """Let 200 clients ask at once: each is answered, or told that the house is full."""
    seen: list[int | None] = []
    clients = [
        threading.Thread(target=lambda: seen.append(server.ask(server.completion(GOOD))))
        for _ in range(CROWD)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    wrong = {status for status in seen if status not in (200, 429, 503)}
    return f"{CROWD} at once: {wrong}" if wrong else ""


def killed(server: Endpoint) -> str:
    """Kill 50 processes while their answers stream; their places must be free soon after."""
    reading, writing = os.pipe()
    children = []
    for _ in range(KILLED):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                connection = socket.create_connection((HOST, server.port), timeout=PATIENCE)
                connection.sendall(server.completion(LONG))
                if connection.recv(1):
                    os.write(writing, b"x")
                while connection.recv(1 << 16):
                    pass
            os._exit(0)
        children.append(child)
    os.read(reading, 1)  # one streams; the others stream or wait for a slot
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    return freed(server, f"{KILLED} clients killed")


def freed(server: Endpoint, what: str) -> str:
    """Return the fault where places of clients that have gone stay taken."""
    began = time.monotonic()
    while server.gauge("running") + server.gauge("waiting"):
        if time.monotonic() - began > FREED * crowding(server.child):
            return f"{what}: their places are still taken"
        time.sleep(0.05)
    return ""


def idle(server: Endpoint) -> str:
    """Hold 1,000 connections that say nothing: others are still served."""
    with contextlib.ExitStack() as held:
        for _ in range(IDLE):
            held.enter_context(socket.create_connection((HOST, server.port), timeout=PATIENCE))
        status, _ = server.answer()
    return "" if status == 200 else f"among {IDLE} idle connections: {status}"


def slow(server: Endpoint) -> str:
    """Send heads and bodies a byte at a time, and read nothing of an answer: all are cut off."""
    data = server.completion(GOOD)
    with contextlib.ExitStack() as held:
        begun = []
        for number in range(20):
            connection = held.enter_context(socket.create_connection((HOST, server.port)))
            connection.settimeout(PATIENCE)
            connection.sendall(data[:10] if number % 2 else data[:-5])
            begun.append(connection)
        for _ in range(4):
            held.enter_context(socket.create_connection((HOST, server.port))).sendall(
                server.completion(LONG)
            )
        if server.answer()[0] != 200:
            return "not served beside slow clients"
        for connection in begun:
            try:
                reply = connection.recv(4096)
            except OSError as error:
                if isinstance(error, TimeoutError):
                    return f"a slow client is still waited for after {PATIENCE:.0f} s"
                continue
            if reply and b" 408 " not in reply.split(b"\r\n")[0] + b" ":
                return f"a slow client got {reply[:40]!r}"
    return freed(server, "clients that read nothing")


def deleted(server: Endpoint) -> str:
    """Delete the files of the model: what is loaded goes on."""
    for file in server.folder.glob("*"):
        file.unlink()
    return ""


EVENTS: tuple[Callable[[Endpoint], str], ...] = (crowd, killed, idle, slow, deleted)


def attack(plan: Plan, cases: Iterable[int]) -> Iterator[tuple[int, Found]]:
    """Ask, and let things happen; the good request's answer never changes."""
    with tempfile.TemporaryDirectory() as name:
        server = Endpoint(make_folder(Path(name)))
        try:
            yield from _asked(plan, cases, server)
        finally:
            server.end()


def _asked(plan: Plan, cases: Iterable[int], server: Endpoint) -> Iterator[tuple[int, Found]]:
    first = server.answer()
    assert first[0] == 200, first
    warm: float | None = None
    for place, case in enumerate(cases):
        event = EVENTS[case // EVERY % len(EVENTS)] if case % EVERY == EVERY - 1 else None
        began = time.monotonic()
        if event is None:
            found = judged(server, case, chance("serve", plan.seed, case))
        else:
            wrong = event(server)
            name = f"event: {event.__name__}"
            found = Found(wrong or name, bool(wrong), time.monotonic() - began)
        if not server.is_alive():
            yield case, Found("the server is gone", fault=True, detail=found.detail)
            return
        if case % 50 == 49 and (again := server.answer()) != first:
            found = Found("the good request got another answer", True, detail=f"{first} {again}")
        used = server.megabytes()
        if place == EVERY * len(EVENTS):
            warm = used
        if warm is not None and used > warm + GROWTH:
            found = Found(f"grew by {used - warm:.0f} MB", fault=True, detail=found.detail)
            warm = used
        yield case, Found(found.outcome, found.fault, found.seconds, found.detail, round(used))
