"""What is refused, what is bounded, and who goes away: over ASGI, and once over a socket."""

import asyncio
import json
import socket
import struct
import threading
import time

import openai
import pytest
import uvicorn
from bench.serve import bad_bodies

from glassformer.serve.app import Limits
from glassformer.serve.http import TimedConnection
from tests.serve.conftest import HELLO, House

CHAT = {"model": "tiny", "messages": HELLO, "max_tokens": 3}


def post(house, body, **headers):
    async def work(client):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", **headers}
        return await client.post("/v1/chat/completions", content=data, headers=given)

    return house.ask(work)


def get(house, path, **headers):
    async def work(client):
        return await client.get(path, headers=headers)

    return house.ask(work)


@pytest.fixture(scope="module")
def locked(folder):
    made = House(
        folder,
        api_key="a-long-key",
        slots=1,
        limits=Limits(body_bytes=2_000, output_tokens=8, queue=2, seconds=30),
    )
    yield made
    made.close()


def test_other_hosts_and_pages_are_refused(house):
    assert get(house, "/v1/models").status_code == 200
    assert get(house, "/v1/models", host="[::1]:99").status_code == 200
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", ""):
        assert get(house, "/v1/models", host=host).status_code == 403
    assert get(house, "/v1/models", origin="http://evil.example").status_code == 403
    assert get(house, "/v1/models", origin="null").status_code == 403
    assert get(house, "/v1/models", origin="http://localhost:3000").status_code == 200
    assert post(house, CHAT, **{"content-type": "text/plain"}).status_code == 415


def test_the_key_is_needed_everywhere_but_for_health(locked):
    assert get(locked, "/health").json() == {"status": "ok"}
    for path in ("/v1/models", "/metrics"):
        assert get(locked, path).status_code == 401
        assert get(locked, path, authorization="Bearer a-long-ke").status_code == 401
        assert get(locked, path, authorization="Basic a-long-key").status_code == 401
        assert get(locked, path, authorization="Bearer a-long-key").status_code == 200

    async def work(client):
        return await client.chat.completions.create(**CHAT)

    assert locked.run(work, key="a-long-key").choices
    with pytest.raises(openai.AuthenticationError) as caught:
        locked.run(work, key="another")
    assert caught.value.code == "invalid_api_key"


def test_bodies_and_answers_have_limits(locked):
    key = {"authorization": "Bearer a-long-key"}
    long = {**CHAT, "messages": [{"role": "user", "content": "x" * 3_000}]}
    assert post(locked, long, **key).status_code == 413
    more = post(locked, {**CHAT, "max_tokens": 9}, **key)
    assert (more.status_code, more.json()["error"]["param"]) == (400, "max_tokens")
    many = post(locked, {**CHAT, "n": 4}, **key)
    assert many.status_code == 429
    assert many.headers["retry-after"] == "1"
    assert many.json()["error"]["code"] == "rate_limit_exceeded"
    assert post(locked, {**CHAT, "n": 3}, **key).status_code == 200


def test_an_answer_that_takes_too_long_is_given_up(folder):
    made = House(folder, limits=Limits(seconds=0.0))
    found = post(made, CHAT)
    assert found.status_code == 503
    assert found.json()["error"]["code"] == "timeout"
    stream = post(made, {**CHAT, "stream": True})
    assert '"timeout"' in stream.text
    made.close()
    assert made.served.batcher.running == made.served.batcher.waiting == 0


def test_bad_requests_are_4xx_and_nothing_is_printed(house, capfd):
    async def work(client):
        statuses = []
        for method, path, body in bad_bodies("tiny", 300):
            found = await client.request(
                method, path, content=body, headers={"content-type": "application/json"}
            )
            statuses.append(found.status_code)
            assert found.json()["error"]["message"]
        return statuses

    assert all(400 <= status < 500 for status in house.ask(work))
    out, err = capfd.readouterr()
    assert "Traceback" not in err + out


def test_figures_are_prometheus_text(house):
    post(house, CHAT)
    lines = get(house, "/metrics").text.splitlines()
    found = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"
    }
    assert found['glass_slots{model="tiny"}'] == 4
    assert found['glass_running{model="tiny"}'] == 0
    count = found['glass_first_token_seconds_count{model="tiny"}']
    assert count == found['glass_first_token_seconds_bucket{model="tiny",le="+Inf"}'] > 0
    assert found['glass_tokens_generated_total{model="tiny"}'] > 0


def test_who_vanishes_frees_the_slot_and_a_stop_finishes_what_runs(folder):
    """Over a socket: a reset mid-stream, then a server that is told to end while it answers."""
    made = House(folder, slots=1)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(made.app, http=TimedConnection, lifespan="off", log_level="critical")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()

    def ask(**more) -> socket.socket:
        body = json.dumps({"model": "tiny", "prompt": "the", "stream": True, **more}).encode()
        opened = socket.create_connection(("127.0.0.1", port), timeout=30)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        opened.sendall(head.encode() + body)
        return opened

    client = ask(max_tokens=150, temperature=0, n=2)
    seen = b""
    while b"data: " not in seen:
        seen += client.recv(100)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    ends = time.monotonic() + 30
    while made.served.batcher.busy:
        assert time.monotonic() < ends, "the slot is still taken"
        time.sleep(0.01)

    client = ask(max_tokens=100, temperature=0)
    while b"data: " not in seen[-100:] + client.recv(10):
        pass
    server.should_exit = True
    rest = b""
    while piece := client.recv(65_536):
        rest += piece
    client.close()
    assert b"[DONE]" in rest
    thread.join(30)
    assert not thread.is_alive()
    made.close()


def test_a_stopping_server_takes_no_more(folder):
    made = House(folder)
    made.engine.closing = True
    found = post(made, CHAT)
    assert found.status_code == 503
    assert "retry-after" in found.headers
    assert get(made, "/health").status_code == 503


def test_one_client_does_not_hold_up_another(house):
    """Two owners: the queue of the one does not come before the other's single request."""

    async def work(client):
        many = [
            client.chat.completions.create(**{**CHAT, "max_tokens": 30}, user="a", n=8)
            for _ in range(3)
        ]
        begin = asyncio.gather(*many)
        await asyncio.sleep(0)
        order = []

        async def noted(name, one):
            await one
            order.append(name)

        await asyncio.gather(
            noted("many", begin), noted("one", client.chat.completions.create(**CHAT, user="b"))
        )
        return order

    assert house.run(work) == ["one", "many"]
