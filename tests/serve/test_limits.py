"""What is refused, what is bounded, and who goes away: over ASGI, and once over a socket."""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time

import openai
import pytest
import uvicorn
from bench.serve import bad_bodies

from glassformer.serve import answers, app
from glassformer.serve.app import Limits
from glassformer.serve.http import TimedConnection
from tests.planting import Assign, If, catches
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
    own = {"host": "localhost:8000"}
    for origin in ("http://localhost:8000", "http://127.0.0.1:8000"):  # two names of one page
        assert get(house, "/v1/models", **own, origin=origin).status_code == 200
    for origin in (
        "http://localhost:3000",
        "http://localhost",
        "http://127.0.0.1:1",
        "http://[::1]:8001",
        "https://localhost",
        "http://localhost.evil.example:8000",
        "file://",
    ):
        assert get(house, "/v1/models", **own, origin=origin).status_code == 403, origin
    assert get(house, "/v1/models", host="localhost", origin="http://localhost").status_code == 200
    assert post(house, CHAT, **{"content-type": "text/plain"}).status_code == 415


@catches(
    "the beginning of the key is enough",
    "serve.app:_Guard.check_secret",
    Assign("right"),
    to="{args[0]}[:0] == {args[1]}[:0]",
)
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


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "a-long-key"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer\ta-long-key"},
        {"authorization": "Bearera-long-key"},
        {"authorization": "Bearer a-long-keyy"},
        {"authorization": "Bearer A-LONG-KEY"},
        {"authorization": 'Bearer "a-long-key"'},
        {"authorization": "Bearer a-long-key, Bearer b"},
        {"authorization": "Bearer other a-long-key"},
        {"authorization": "Token a-long-key"},
        {"authorization": "Basic YS1sb25nLWtleQ=="},
        {"authorization": b"Bearer a-long-ke\xe9"},
        {"authorization": b"Bearer " + b"\xff" * 5_000},
        {"proxy-authorization": "Bearer a-long-key"},
        {"api-key": "a-long-key"},
        {"x-api-key": "a-long-key"},
        {"cookie": "api_key=a-long-key"},
    ],
)
def test_a_key_in_another_form_is_no_key(locked, headers, capfd):
    for path in (
        "/v1/models",
        "/v1/models?api_key=a-long-key",
        "/health/../v1/models",
        "//v1/models",
    ):
        found = get(locked, path, **headers)
        assert found.status_code == 401, path
        assert "a-long-key" not in found.text.replace("api_key=a-long-key", "")
    out, err = capfd.readouterr()
    assert "a-long-k" not in out + err


def test_a_key_that_comes_twice_is_refused(locked):
    async def work(client):
        both = [("authorization", "Bearer a-long-key"), ("authorization", "Bearer other")]
        return await client.get("/v1/models", headers=both)

    assert locked.ask(work).status_code == 400


def test_the_right_key_may_be_written_as_rfc_6750_lets_it_be(locked):
    for text in ("Bearer a-long-key", "bearer a-long-key", "BEARER   a-long-key"):
        assert get(locked, "/v1/models", authorization=text).status_code == 200


def test_keys_are_compared_in_constant_time(locked, monkeypatch):
    """By their hashes, of one length, whatever comes; the scheme does not shorten it."""
    seen = []

    def compare(a, b):
        seen.append((len(a), len(b)))
        return hmac_compare(a, b)

    hmac_compare = app.hmac.compare_digest
    monkeypatch.setattr(app.hmac, "compare_digest", compare)
    for text in ("", "Basic a-long-key", "Bearer a", "Bearer a-long-key", "Bearer " + "x" * 4_000):
        get(locked, "/v1/models", authorization=text)
    assert seen == [(32, 32)] * 5


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


@catches(
    "an unread answer keeps its slot",
    "serve.answers:Events._write",
    If("cancelled_caught"),
    to="False",
)
def test_a_client_that_does_not_read_loses_its_slot(folder, monkeypatch):
    """Its answer ends with an error that says so, and another client is served meanwhile."""
    monkeypatch.setattr(answers, "UNREAD_SECONDS", 0.0)
    made = House(folder, slots=1)
    body = {"model": "tiny", "prompt": ["the"] * 3, "max_tokens": 100, "n": 16, "stream": True}

    async def work(client):
        sent, reads = [], asyncio.Event()
        first = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive():
            if not first:
                await asyncio.Event().wait()
            return first.pop()

        async def send(message):
            if sent:
                await reads.wait()
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "http_version": "1.1",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 1),
        }
        stuck = asyncio.create_task(made.app(scope, receive, send))
        other = {**body, "prompt": "a", "n": 1, "stream": False, "max_tokens": 3}
        assert (await client.post("/v1/completions", json=other)).status_code == 200
        ended = made.engine.figures["tiny"].requests
        while "unread" not in ended and sum(ended.values()) < 49:  # it reads nothing of any choice
            await asyncio.sleep(0.01)
        while made.served.batcher.busy:
            await asyncio.sleep(0.01)
        assert "unread" in ended
        assert not stuck.done()
        reads.set()
        await stuck
        return b"".join(message.get("body", b"") for message in sent).decode()

    text = made.ask(work)
    made.close()
    assert '"code": "unread"' in text and "The client read nothing for 0 seconds" in text
    assert "[DONE]" not in text
    ended = made.engine.figures["tiny"].requests
    assert ended.pop("unread") == 1
    assert sum(ended.values()) < 48  # of all choices of both clients


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


@contextlib.contextmanager
def listening(made):
    """A house behind a socket; its port and its server."""
    opened = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(made.app, http=TimedConnection, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    try:
        yield opened.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def request(port, path="/v1/completions", body=None, version="1.1", **headers):
    """The bytes of a request."""
    data = b"" if body is None else json.dumps(body).encode()
    given = {"host": f"127.0.0.1:{port}", **headers}
    if body is not None:
        given = {"content-type": "application/json", "content-length": len(data), **given}
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/{version}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in given.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


def send(port, data):
    opened = socket.create_connection(("127.0.0.1", port), timeout=30)
    opened.sendall(data)
    return opened


def rest(opened):
    """Everything until the server closes the connection."""
    found = b""
    while piece := opened.recv(65_536):
        found += piece
    opened.close()
    return found


def until(condition, what):
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.01)


@pytest.fixture(scope="module")
def live(folder):
    """A house behind a socket, for all tests that leave it as it is."""
    made = House(folder, slots=1)
    with listening(made) as (port, _):
        yield made, port
    made.close()


def test_who_vanishes_frees_the_slot_and_a_stop_finishes_what_runs(folder):
    """Over a socket: a reset mid-stream, then a server that is told to end while it answers."""
    made = House(folder, slots=1)
    with listening(made) as (port, server):

        def ask(**more):
            body = {"model": "tiny", "prompt": "the", "stream": True, "temperature": 0, **more}
            return send(port, request(port, body=body, connection="close"))

        client = ask(max_tokens=150, n=2)
        seen = b""
        while b"data: " not in seen:
            seen += client.recv(100)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        until(lambda: not made.served.batcher.busy, "the slot is still taken")

        client = ask(max_tokens=100)
        while b"data: " not in seen[-100:] + client.recv(10):
            pass
        server.should_exit = True
        assert b"[DONE]" in rest(client)
    made.close()


def test_who_sends_no_more_is_answered(live):
    """A client that closes its side behind a request: alone, streamed, and two in one write."""
    _, port = live
    body = {"model": "tiny", "prompt": "the", "max_tokens": 60, "temperature": 0}
    for one in ({}, {"stream": True}, {"response_format": {"type": "regex", "pattern": "(a|t)*"}}):
        client = send(port, request(port, body={**body, **one}))
        client.shutdown(socket.SHUT_WR)
        found = rest(client)
        assert found.startswith(b"HTTP/1.1 200 OK\r\n")
        assert found.count(b"HTTP/1.1") == 1
    client = send(port, 2 * request(port, body=body) + request(port, "/health"))
    client.shutdown(socket.SHUT_WR)
    assert rest(client).count(b"HTTP/1.1 200 OK\r\n") == 3
    client = send(port, request(port, body=body)[:-3])  # what has no end has no answer
    client.shutdown(socket.SHUT_WR)
    assert b" 200 " not in rest(client)


def test_who_closes_completely_is_dropped(live):
    """The same end of input as above, and nobody there: found before the answer is complete."""
    made, port = live
    before = sum(made.engine.figures["tiny"].requests.values())
    body = {"model": "tiny", "prompt": "the", "max_tokens": 150, "n": 16, "logprobs": 5}
    client = send(port, request(port, body={**body, "stop": ["no such text"]}))
    until(lambda: made.served.batcher.running, "it does not run")
    client.close()
    until(lambda: not made.served.batcher.busy, "the slot is still taken")
    assert sum(made.engine.figures["tiny"].requests.values()) < before + 16


def test_a_body_with_two_ends_closes_the_connection(live):
    _, port = live
    hidden = b"0\r\n\r\n" + request(port, "/v1/models")
    body = {"model": "tiny", "prompt": "the"}
    for head in (
        request(port, body=body, transfer_encoding="chunked").partition(b"\r\n\r\n")[0],
        request(port, body=body, transfer_encoding="chunked", content_length=len(hidden)).partition(
            b"\r\n\r\n"
        )[0],
        request(port, transfer_encoding="chunked", content_length=len(hidden)).partition(
            b"\r\n\r\n"
        )[0],
        request(port, version="1.0", transfer_encoding="chunked").partition(b"\r\n\r\n")[0],
    ):
        found = rest(send(port, head + b"\r\n\r\n" + hidden))
        assert found.count(b"HTTP/1.1 ") == 1, found
        assert found.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in found.lower()


def test_an_address_may_be_complete(live):
    """`GET http://host/path`, as to a proxy; its host is the one that counts."""
    _, port = live
    for path in (f"http://127.0.0.1:{port}/health", f"HTTP://localhost:{port}/health?a=1"):
        found = rest(send(port, request(port, path, connection="close")))
        assert found.startswith(b"HTTP/1.1 200 ")
        assert b'"ok"' in found
    for path in ("http://evil.example/health", f"http://me@127.0.0.1:{port}/health", "http:///x"):
        found = rest(send(port, request(port, path, connection="close")))
        assert found.startswith(b"HTTP/1.1 403 "), path


def test_a_long_text_is_refused_before_it_is_tokenized(zoo, monkeypatch):
    """By its characters: no token stands for more than the longest one."""
    counted = []
    for served in zoo.engine.models.values():
        encode = served.tokenizer.encode
        monkeypatch.setattr(
            type(served.tokenizer),
            "encode",
            lambda self, text, encode=encode: counted.append(len(text)) or encode(text),
        )
    long = "the cat " * 100_000

    async def work(client):
        asked = (
            ("completions", {"model": "tiny", "prompt": long}, "prompt"),
            ("completions", {"model": "tiny", "prompt": ["a", long]}, "prompt"),
            ("embeddings", {"model": "bert", "input": ["the", long]}, "input"),
            (
                "chat/completions",
                {"model": "tiny", "messages": [{"role": "user", "content": long}]},
                "messages",
            ),
        )
        return [(await client.post(f"/v1/{path}", json=body), param) for path, body, param in asked]

    for found, param in zoo.ask(work):
        assert found.status_code == 400
        assert found.json()["error"]["code"] == "context_length_exceeded"
        assert found.json()["error"]["param"] == param
        assert "characters" in found.json()["error"]["message"]
    assert max(counted, default=0) < 1_000


def test_a_body_of_many_texts_is_refused_before_it_is_parsed(house):
    """A mark within a text begins none."""
    many = {
        **CHAT,
        "response_format": {"type": "json_schema", "json_schema": {"x": ["a"] * 20_000}},
    }
    found = post(house, many)
    assert found.status_code == 400
    assert "20,0" in found.json()["error"]["message"]
    quoted = {**CHAT, "messages": [{"role": "user", "content": '"' * 60_000}]}
    assert post(house, quoted).json()["error"]["code"] == "context_length_exceeded"


def test_errors_quote_the_beginning_of_a_long_value(house):
    begin = time.process_time()
    for body in (
        {"x" * 3_000_000: 1},
        {**CHAT, "seed": "x" * 3_000_000},
        {**CHAT, "stop": [1] * 10**6},
    ):
        found = post(house, body)
        assert found.status_code == 400
        assert len(found.text) < 1_000
    assert time.process_time() - begin < 3


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
