"""Clients that do not read, over real sockets, against a server in a process of its own."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from glassformer.adapters.load import load
from tests.adapters.folders import write_model
from tests.serve.test_limits import request, rest, send


class Server:
    """A server of its own; `counts` are its answers by how they ended."""

    def __init__(self, port: int, ends: tuple[int, ...]) -> None:
        self.port = port
        self.endless = {str(token): -100 for token in ends}

    def figures(self) -> dict[str, float]:
        """The lines of /metrics."""
        found = rest(send(self.port, request(self.port, "/metrics", connection="close")))
        lines = found.partition(b"\r\n\r\n")[2].decode().splitlines()
        return {
            line.rpartition(" ")[0]: float(line.split()[-1]) for line in lines if line[0] != "#"
        }

    def counts(self) -> Counter[str]:
        """How answers ended so far, and what runs or waits."""
        found: Counter[str] = Counter()
        for name, value in self.figures().items():
            outcome = re.search(r'requests_total\{.*outcome="(\w+)"', name)
            gauge = re.match(r"glass_(running|waiting)\{", name)
            if outcome or gauge:
                found[(outcome or gauge)[1]] = int(value)
        return found

    def answer(self, **more) -> dict:
        """What a client gets who reads."""
        body = {"model": "m", "prompt": "the cat", "max_tokens": 12, "logprobs": 2, **more}
        found = rest(send(self.port, request(self.port, body=body, connection="close")))
        assert found.startswith(b"HTTP/1.1 200 OK\r\n"), found
        (choice,) = json.loads(found.partition(b"\r\n\r\n")[2])["choices"]
        return choice


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """Two slots and a long context."""
    folder = write_model(tmp_path_factory.mktemp("served"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2_048}))
    asked = ["serve", f"m={folder}", "--port", "0", "--slots", "2", "--threads", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "glassformer", *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
            yield Server(int(found[1]), load(folder).end_ids())
        finally:
            process.kill()


def test_who_does_not_read_delays_nobody(server):
    """More unread answers than slots, each longer than what is kept for it; one reads slowly.

    Another client is answered while none of them has ended, with the tokens that it gets alone.
    Those that are not read are put on hold, then ended.
    """
    alone = [server.answer(user="other", seed=n) for n in range(3)]
    long = {"model": "m", "prompt": "a", "max_tokens": 2_000, "n": 4, "logprobs": 5}
    long |= {"stream": True, "logit_bias": server.endless}
    held = [
        send(server.port, request(server.port, body={**long, "user": str(n)})) for n in range(3)
    ]
    over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(1.0):
                held[0].recv(1)

    reader = threading.Thread(target=drip, daemon=True)
    reader.start()
    while server.counts()["running"] < 2:
        time.sleep(0.01)
    for seed, wanted in enumerate(alone):
        assert server.answer(user="other", seed=seed) == wanted
    counts = server.counts()
    assert counts["length"] + counts["stop"] == 2 * len(alone), counts
    assert counts["running"] + counts["waiting"] > 0
    ends = time.monotonic() + 60
    counts = server.counts()
    while counts["unread"] < len(held) or counts["running"] + counts["waiting"]:
        assert time.monotonic() < ends, counts
        time.sleep(0.05)
        counts = server.counts()
    over.set()
    reader.join()
    for one in held:
        assert b'"code": "unread"' in rest(one)
