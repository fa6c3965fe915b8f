"""The page Generate over a server: the tokens and probabilities of the model itself."""

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from glassformer.adapters.load import load
from glassformer.generation.streaming import generate_batch
from glassformer.serve.app import Limits, create_app
from glassformer.serve.engine import Engine, Served
from glassformer.serve.http import TimedConnection
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError
from glassformer.web.app.query import Query, Unreachable, to_json
from glassformer.web.app.relay import Relay
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages import generate as page

KEY = "a-long-key"


@dataclass(frozen=True)
class Running:
    """A server over a socket."""

    served: Served
    address: str


@pytest.fixture(scope="module")
def running(talkers: Workspace) -> Iterator[Running]:
    """`glass serve` of the run `text`, in a thread."""
    served = Served("text", load(talkers.root / "text"), slots=2)
    engine = Engine([served], threads=1)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(engine, api_key=KEY, limits=Limits(seconds=20)),
            http=TimedConnection,
            lifespan="off",
            log_level="critical",
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield Running(served, f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
    server.should_exit = True
    thread.join(10)
    engine.stop()
    assert engine.join(10)


@pytest.fixture
def lab(talkers: Workspace, running: Running) -> Workspace:
    return Workspace(talkers.root, relay=Relay(running.address, key=KEY))


def said(lab: Workspace, **body: Any) -> list[dict[str, Any]]:
    """All lines, as the page reads them."""
    asked = {"run": "server:text", "prompt": "so it", **body}
    return [json.loads(to_json(line)) for line in page.generate(Query(body=asked), lab)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"mode": "sample", "seed": 5, "temperature": 0.8, "top_k": 9, "top_p": 0.9}],
    ids=str,
)
def test_tokens_are_those_of_the_model_itself(lab: Workspace, settings: dict[str, Any]) -> None:
    start, *lines, end = said(lab, max_new_tokens=9, **settings)
    model = load(lab.root / "text")
    own = {name: value for name, value in settings.items() if name != "mode"}
    spec = DecodeSpec(max_new_tokens=9, eos=model.end_ids(), **own)
    (made,) = generate_batch(
        model.stepper(), model.prompt("so it"), spec=spec, tokenizer=model.tokenizer
    )
    assert (end["text"], end["finish"]) == (made.text, made.finish)
    assert "".join(line["text"] for line in lines) == made.text
    assert [line["logprob"] for line in lines] == pytest.approx(list(made.logprobs), abs=2e-6)
    assert [line["position"] for line in lines] == list(range(1, len(lines) + 1))
    assert start["served"]["max_tokens"] == 9 and start["prompt"][0]["word"] == "so it"
    for line in lines:
        shares = [one["probability"] for one in line["alternatives"]]
        assert shares == sorted(shares, reverse=True) and len(shares) == page.ALTERNATIVES
        assert math.isclose(line["probability"], math.exp(line["logprob"]))


def test_the_page_learns_what_is_served(lab: Workspace, talkers: Workspace) -> None:
    told = page.server(Query(), lab)
    assert (told["models"], told["address"]) == (["text"], lab.relay.address)
    names = {one["name"] for controls in told["options"].values() for one in controls}
    assert (
        "temperature" in names and "min_new_tokens" not in names and "beam" not in told["options"]
    )
    assert page.server(Query(), talkers)["models"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "beam"},
        {"cached": False},
        {"forced": "1,2"},
        {"min_new_tokens": 3},
        {"run": "server:other"},
        {"mode": "sample", "temperature": 7.0},
        {"prompt": ""},
    ],
    ids=str,
)
def test_what_a_server_does_not_have_is_refused(lab: Workspace, change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        said(lab, **change)


def test_who_goes_away_frees_the_servers_slot(lab: Workspace, running: Running) -> None:
    asked = {"run": "server:text", "prompt": "so", "max_new_tokens": 1_000}
    lines = page.generate(Query(body=asked), lab)
    assert next(lines)["kind"] == "start"
    lines.close()
    ends = time.monotonic() + 20
    while running.served.batcher.busy:
        assert time.monotonic() < ends, "the slot is still taken"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "address",
    [
        "http://example.com/v1", "http://10.0.0.1:8000/v1", "http://169.254.169.254/latest",
        "http://127.0.0.1.evil.example/v1", "https://127.0.0.1/v1", "file:///etc/passwd",
        "http://user@127.0.0.1/v1", "http://127.0.0.1/v1?x=1", "http://0.0.0.0/v1",
        "http://", "http://[::2]/v1", "http://127.0.0.1:99999/v1", "http://127.0.0.1/v1\r\nx: y",
        "http://2130706433/v1", "127.0.0.1:8000",
    ],
)  # fmt: skip
def test_only_this_machine_is_pointed_at(address: str) -> None:
    with pytest.raises(InputError):
        Relay(address)


def test_this_machine_has_three_names() -> None:
    for address in ("http://127.0.0.1:8000/v1/", "http://localhost/v1", "http://[::1]:8000/v1"):
        assert Relay(address).address == address.rstrip("/")


def test_a_silent_server_and_a_wrong_key_are_named(running: Running, lab: Workspace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unreachable, match="no server answers"):
        Relay(f"http://127.0.0.1:{port}/v1").models()
    with pytest.raises(InputError, match="API key"):
        Relay(running.address, key="wrong-key").models()
    with pytest.raises(InputError, match="points at no server"):
        said(Workspace(lab.root))
