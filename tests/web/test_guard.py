"""The guards: who is let in, what is refused before any route, what every answer carries."""

from pathlib import Path

import pytest

from glassformer.serve.http import split_host
from glassformer.web.app import limits
from glassformer.web.app.server import HEADERS, ExplorerGuard
from tests.planting import If, catches
from tests.web.conftest import PORT, TOKEN, Client, Opener

JSON = ("content-type", "application/json")
OURS = ("origin", f"http://127.0.0.1:{PORT}")


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7337", "localhost:7337", "LOCALHOST:7337", "[::1]:7337"]
)
def test_our_own_names_are_let_in(client: Client, host: str) -> None:
    assert client.ask("/", host=host).status == 200
    assert client.ask("/api/about", host=host).status == 200


@catches(
    "hosts not checked", "serve.http:Guard._check", If("host"), to="False", case="evil.example:7337"
)
@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example:7337",  # a name rebound to 127.0.0.1
        "127.0.0.1.evil.example:7337",
        "localhost.evil.example:7337",
        "127.0.0.1:7338",
        "127.0.0.1",  # port 80
        "localhost.:7337",
        "[::1]",
        "[::2]:7337",
        "[::1]:7337:7337",
        "::1:7337",
        "[::1]7337",
        "[::1",
        "[::1]:",
        "127.0.0.1:",
        "127.0.0.1:07337x",
        "user@127.0.0.1:7337",
        "127.0.0.1:7337 ",
        "127.0.0.1:7337/",
        "2130706433:7337",
        "0x7f.1:7337",
        "0.0.0.0:7337",
        "[::ffff:127.0.0.1]:7337",
        "127.0.0.1,evil.example:7337",
    ],
)
def test_other_hosts_are_refused(client: Client, host: str | None) -> None:
    for path in ("/", "/api/about", "/static/app.css"):
        assert client.ask(path, host=host).status == 403


def test_ipv6_is_parsed() -> None:
    assert split_host("[::1]:8000") == ("::1", 8000)
    assert split_host("[0:0:0:0:0:0:0:1]:8000") == ("::1", 8000)
    assert split_host("[::1]") == ("::1", 80)
    assert split_host("::1") is None
    assert split_host("[localhost]:80") is None


def test_a_server_for_everyone_takes_addresses_and_no_names(runs: Path, open_app: Opener) -> None:
    wide = open_app(runs, host="0.0.0.0")
    for host, status in {
        "10.1.2.3:7337": 200,
        "[fe80::1]:7337": 200,
        "rebound.name:7337": 403,
    }.items():
        assert wide.ask("/", host=host).status == status
    named = open_app(runs, host="lab.example")
    assert named.ask("/", host="lab.example:7337").status == 200
    assert named.ask("/", host="10.1.2.3:7337").status == 403


@pytest.mark.parametrize(
    "token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], TOKEN.upper(), "\xe9"]
)
def test_no_call_without_the_token(client: Client, token: str | None) -> None:
    for path in ("/api/about", "/api/runs", "/api/nothing", "/api", "/api/"):
        answer = client.ask(path, token=token)
        assert answer.status == 403
        assert "token" in answer.what


def test_the_page_itself_needs_none(client: Client) -> None:
    assert client.ask("/", token=None).status == 200
    assert client.ask("/static/js/app.js", token=None).status == 200


@pytest.mark.parametrize(
    "origin",
    [
        None,
        "",
        "null",
        "http://evil.example",
        "http://evil.example:7337",
        "http://127.0.0.1",
        "http://127.0.0.1:7338",
        "https://127.0.0.1:7337",
        "http://127.0.0.1:7337.evil.example",
        "http://127.0.0.1:7337/",
        "file://",
        "http://[::1]",
    ],
)
def test_a_post_comes_from_our_page(client: Client, origin: str | None) -> None:
    headers = [JSON] + ([("origin", origin)] if origin is not None else [])
    answer = client.ask("/api/inspect", method="POST", headers=headers, body=[b"{}"])
    assert answer.status == 403
    assert "another page" in answer.what


def test_a_foreign_origin_may_not_even_read(client: Client) -> None:
    foreign = [("origin", "http://evil.example")]
    assert client.ask("/api/runs", headers=foreign).status == 403
    assert client.ask("/", headers=foreign).status == 403


@catches("forms are let in", "serve.http:Guard._check", If("post"), to="False", case="text/plain")
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
def test_a_post_is_json(client: Client, kind: str | None) -> None:
    headers = [OURS] + ([("content-type", kind)] if kind else [])
    answer = client.ask("/api/inspect", method="POST", headers=headers, body=[b"{}"])
    assert answer.status == 415
    assert "application/json" in answer.what


def test_two_headers_of_one_name_are_refused(client: Client) -> None:
    for name in ("host", "x-glass-token"):
        assert client.ask("/api/about", headers=[(name, "other")]).status == 400
    twice = [OURS, JSON, ("origin", "http://evil.example")]
    assert client.ask("/api/inspect", method="POST", headers=twice, body=[b"{}"]).status == 400


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "X"])
def test_other_methods_are_not_answered(client: Client, method: str) -> None:
    for path in ("/", "/api/runs"):
        answer = client.ask(path, method=method, headers=[OURS, JSON])
        assert answer.status == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_websockets_are_closed() -> None:
    import asyncio

    sent = []

    async def nothing() -> None:
        raise AssertionError("nothing is read")

    async def send(message: dict) -> None:
        sent.append(message)

    guard = ExplorerGuard(None, token=TOKEN, port=PORT)
    asyncio.run(guard({"type": "websocket"}, nothing, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


# --- bodies --------------------------------------------------------------------------------------


def test_a_huge_body_is_refused_by_its_length(client: Client) -> None:
    headers = [OURS, JSON, ("content-length", str(limits.BODY_BYTES + 1))]
    assert client.ask("/api/inspect", method="POST", headers=headers, body=[b"{}"]).status == 413


@pytest.mark.parametrize("length", ["-1", "1e3", "", "9" * 30, "٣", "\xb2"])
def test_a_length_that_is_none(client: Client, length: str) -> None:
    if length == "٣":
        length = length.encode().decode("latin-1")
    headers = [OURS, JSON, ("content-length", length)]
    assert client.ask("/api/inspect", method="POST", headers=headers, body=[b"{}"]).status == 413


def test_a_huge_body_is_refused_while_it_streams(client: Client) -> None:
    pieces = [b'{"text": "'] + [b"x" * 8192] * 1000
    answer = client.ask("/api/inspect", method="POST", headers=[OURS, JSON], body=pieces)
    assert answer.status == 413


def test_a_small_body_may_come_in_pieces(client: Client) -> None:
    body = [b'{"run":', b' "not-here",', b' "text": "a"}']
    answer = client.ask("/api/inspect", method="POST", headers=[OURS, JSON], body=body)
    assert answer.status == 404
    assert "not-here" in answer.what


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 2000 + b"]" * 2000,
        b'{"a":' * 40 + b"1" + b"}" * 40,
        b"[[[[" * 16_000,
        b'{"text": NaN}',
        b'{"text": Infinity}',
        b"[]",
        b'"text"',
        b"null",
        b"",
        b"{",
        b'{"a": 1}{"b": 2}',
        b"\xff\xfe{}",
        b'{"run": ' + b"9" * 5000 + b"}",
        b"{'run': 1}",
        b"\x00",
    ],
)
def test_a_body_that_is_no_question(client: Client, body: bytes) -> None:
    answer = client.post("/api/inspect", body)
    assert answer.status == 400
    assert answer.json["error"]["what"]


def test_brackets_in_a_string_are_no_depth(client: Client) -> None:
    text = "[{" * 100 + '\\"'
    assert client.post("/api/inspect", {"run": "not-here", "text": text}).status == 404


def test_a_long_address_is_refused(client: Client) -> None:
    assert client.ask("/api/runs?x=" + "a" * limits.PATH_BYTES).status == 414


# --- answers -------------------------------------------------------------------------------------


def answers(client: Client) -> dict[str, int]:
    """One of every kind: (target, status)."""
    return {
        "/": 200,
        "/static/app.css": 200,
        "/static/js/app.js": 200,
        "/static/js/nothing.js": 404,
        "/favicon.ico": 404,
        "/api/about": 200,
        "/api/runs": 200,
        "/api/runs/not-here": 404,
        "/api/runs?x=1": 400,
        "/api/curves": 400,
    }


def test_every_answer_carries_the_headers(client: Client) -> None:
    found = [(client.ask(target), status) for target, status in answers(client).items()]
    found += [
        (client.ask("/", host="evil"), 403),
        (client.ask("/api/about", token=None), 403),
        (client.ask("/", method="DELETE"), 405),
        (client.post("/api/about", {}), 405),
        (client.post("/api/inspect", b"{"), 400),
        (client.ask("/", method="HEAD"), 200),
    ]
    for answer, status in found:
        assert answer.status == status
        for name, value in HEADERS.items():
            if name != "cache-control":
                assert answer.headers[name] == value
        assert answer.headers["cache-control"] in ("no-store", "no-cache")
        assert "set-cookie" not in answer.headers
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_policy_lets_nothing_from_elsewhere_run() -> None:
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
        assert part in policy


def test_an_address_is_ours_however_it_is_written(runs: Path, open_app: Opener) -> None:
    client = open_app(runs, host="FD00:0:0:0:0:0:0:1")
    for host in ("[fd00::1]", "[FD00:0::0001]"):
        assert client.ask("/api/about", host=f"{host}:{PORT}").status == 200
    assert client.ask("/api/about", host=f"[fd00::2]:{PORT}").status == 403
