"""The app: static files, JSON, bytes, streams; errors and faults as three fields."""

import asyncio
import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route
from uvicorn.server import ServerState

from glassformer.serve import http
from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.web.app import server
from glassformer.web.app.query import Bytes, Query, to_json
from glassformer.web.app.server import HEADERS, Connection, ExplorerGuard
from glassformer.web.app.workspace import Workspace
from tests.web.conftest import PORT, TOKEN, Client

STATIC = Path(server.__file__).parents[1] / "static"


def app_of(handler: Any, lab: Workspace, method: str = "GET") -> Client:
    """An app with one question."""
    app = Starlette(routes=[Route("/api/it", server._endpoint(handler, lab), methods=[method])])
    app.add_middleware(ExplorerGuard, token=TOKEN, port=PORT)
    return Client(app)


@pytest.fixture
def lab(runs: Path) -> Workspace:
    return Workspace(runs)


def test_the_page_comes_without_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from glassformer.web.app.server import create_app;"
        "create_app(Path('nowhere'), token='t', port=1); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_static_files_are_a_fixed_list(client: Client) -> None:
    served = dict(server.static_files())
    assert served["/"] == (STATIC / "index.html").read_bytes()
    for path in (*STATIC.glob("*.css"), *STATIC.glob("js/*.js")):
        name = f"/static/{path.relative_to(STATIC).as_posix()}"
        answer = client.ask(name, token=None)
        assert answer.body == path.read_bytes()
        assert answer.headers["content-type"].startswith(server.KINDS[path.suffix])
    for path in (
        "/static/",
        "/static/index.html",
        "/static/js",
        "/index.html",
        "//",
        "/static//app.css",
    ):
        assert client.ask(path).status == 404


def test_numbers_that_are_not_finite_are_null() -> None:
    made = to_json(
        {"a": [float("nan"), float("inf"), -float("inf"), 1.5], "b": ({"c": float("nan")},)}
    )
    assert made == b'{"a":[null,null,null,1.5],"b":[{"c":null}]}'
    assert to_json({"word": "é\u2028</script>"}).isascii()


def test_bytes_come_with_their_shape(lab: Workspace) -> None:
    answer = app_of(lambda query, lab: Bytes(b"\x00\x3c" * 6, (2, 3), "float16"), lab).ask(
        "/api/it"
    )
    assert answer.body == b"\x00\x3c" * 6
    assert answer.headers["content-type"] == "application/octet-stream"
    assert (answer.headers["x-shape"], answer.headers["x-dtype"]) == ("2,3", "float16")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("a", where="b", hint="c"), 400),
        (FileError("a", where="b", hint="c"), 400),
        (MachineError("a", where="b", hint="c"), 503),
    ],
)
def test_errors_are_three_fields(lab: Workspace, error: Exception, status: int) -> None:
    def raising(query: Query, lab: Workspace) -> dict:
        raise error

    answer = app_of(raising, lab).ask("/api/it")
    assert answer.status == status
    assert answer.json == {"error": {"what": "a", "where": "b", "hint": "c"}}


def test_an_error_does_not_say_where_the_runs_lie(lab: Workspace) -> None:
    def raising(query: Query, lab: Workspace) -> dict:
        raise FileError(f"{lab.root}/digits-0 is bad", where=str(lab.root / "digits-0"))

    answer = app_of(raising, lab).ask("/api/it")
    assert answer.json["error"] == {"what": "digits-0 is bad", "where": "digits-0", "hint": ""}


def test_a_fault_of_ours_is_a_line_on_the_page(
    lab: Workspace, capsys: pytest.CaptureFixture
) -> None:
    def broken(query: Query, lab: Workspace) -> dict:
        raise ZeroDivisionError("the secret of the stack")

    answer = app_of(broken, lab).ask("/api/it")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert "content-security-policy" in answer.headers


def test_a_stream_is_a_line_for_each_value(lab: Workspace) -> None:
    threads = set()

    def lines(query: Query, lab: Workspace) -> Iterator[dict]:
        for number in range(3):
            threads.add(threading.get_ident())
            yield {"n": number, "x": float("nan")}

    answer = app_of(lines, lab).ask("/api/it")
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body == b'{"n":0,"x":null}\n{"n":1,"x":null}\n{"n":2,"x":null}\n'
    assert len(threads) == 1, "torch's modes belong to a thread"


def test_a_stream_that_fails(lab: Workspace, capsys: pytest.CaptureFixture) -> None:
    def first(query: Query, lab: Workspace) -> Iterator[dict]:
        raise InputError("at once")
        yield {}

    def later(query: Query, lab: Workspace) -> Iterator[dict]:
        yield {"n": 1}
        raise ZeroDivisionError

    assert app_of(first, lab).ask("/api/it").status == 400
    assert app_of(lambda query, lab: iter(()), lab).ask("/api/it").body == b""
    answer = app_of(later, lab).ask("/api/it")
    assert answer.status == 200
    assert answer.body.split(b"\n")[1].startswith(b'{"error":')
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_reader_who_leaves_ends_the_work(lab: Workspace) -> None:
    made, closed = [], threading.Event()

    def endless(query: Query, lab: Workspace) -> Iterator[dict]:
        try:
            with lab.heavy():
                while True:
                    made.append(1)
                    yield {"n": len(made)}
        finally:
            closed.set()

    async def leave_early() -> None:
        sent, enough = [], asyncio.Event()

        async def receive() -> dict:
            await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)
            if len(sent) > 3:
                enough.set()
            await asyncio.sleep(0)

        headers = [(b"host", b"127.0.0.1:7337"), (b"x-glass-token", TOKEN.encode())]
        scope = {"type": "http", "method": "GET", "path": "/api/it", "query_string": b"",
                 "headers": headers, "raw_path": b"/api/it", "root_path": ""}  # fmt: skip
        await app_of(endless, lab).app(scope, receive, send)

    asyncio.run(leave_early())
    assert closed.is_set()
    with lab.heavy():
        pass


def test_a_closing_server_ends_its_streams(lab: Workspace) -> None:
    def endless(query: Query, lab: Workspace) -> Iterator[dict]:
        yield {"n": 1}
        lab.closing.set()
        while True:
            yield {"n": 2}

    first, last = app_of(endless, lab).ask("/api/it").body.splitlines()
    assert first == b'{"n":1}'
    assert b"the explorer was stopped" in last  # and not as if it were all


def test_questions_are_checked() -> None:
    query = Query(
        {"id": "a"}, {"n": "5", "flag": "1", "list": "a,b", "bad": "٣"}, {"x": 0.5, "deep": True}
    )
    assert (query.text("id"), query.integer("n", low=0, high=9), query.flag("flag")) == (
        "a",
        5,
        True,
    )
    assert query.texts("list", most=2) == ("a", "b")
    assert query.number("x", low=0, high=1) == 0.5
    assert query.text("none", default="d") == "d"
    for ask in (
        lambda: query.text("none"),
        lambda: query.text("x"),
        lambda: query.integer("n", low=6, high=9),
        lambda: query.integer("bad", low=0, high=9),
        lambda: query.integer("deep", low=0, high=9),
        lambda: query.number("deep", low=0, high=9),
        lambda: query.texts("list", most=1),
        lambda: query.choice("id", ("b", "c")),
        lambda: query.only("n", "flag", "list", "x", "deep"),
        lambda: Query(body={"a": "\ud800"}).text("a"),
        lambda: Query(body={"a": ["x", 1]}).texts("a", most=3),
        lambda: Query(options={"a": "nan"}).number("a", low=0, high=1),
        lambda: Query(options={"a": "yes"}).flag("a"),
        lambda: Query(body={"a": "1"}).integer("a", low=0, high=1),
    ):
        with pytest.raises(InputError):
            ask()


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf"), True, "1"])
def test_a_number_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="must be a number from 0 to 1"):
        Query(body={"x": value}).number("x", low=0.0, high=1.0)


def test_no_script_makes_markup_from_text() -> None:
    for path in STATIC.rglob("*"):
        if path.suffix in (".js", ".html"):
            text = path.read_text(encoding="utf-8")
            for word in (
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
            ):
                assert word not in text, f"{path.name}: {word}"
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), path.name
            assert "https://" not in text, path.name
            assert " style=" not in text or path.suffix == ".js", path.name


def test_the_page_travels_in_the_wheel() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["glassformer.web"]
    packed = {path for pattern in patterns for path in STATIC.parent.glob(pattern)}
    assert {path for path in STATIC.rglob("*") if path.is_file()} <= packed


def over_sockets(lab: Workspace, *questions: bytes) -> list[bytes]:
    """Each question on a connection of its own, and all that came back until it was closed."""
    app = app_of(lambda query, lab: {"n": 1}, lab).app
    config = uvicorn.Config(app, lifespan="off", log_level="critical", timeout_keep_alive=600)
    config.load()
    state = ServerState()

    async def ask(port: int, words: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(words)
        answered = await asyncio.wait_for(reader.read(), timeout=30)
        writer.close()
        return answered

    async def all_of_them() -> list[bytes]:
        made = lambda: Connection(config=config, server_state=state, app_state={})  # noqa: E731
        listening = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        found = [await ask(port, words) for words in questions]
        listening.close()
        return found

    return asyncio.run(all_of_them())


def test_who_asks_nothing_is_let_go(lab: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a question, no question, half of a second one: none of them holds a connection."""
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.05)
    whole = f"GET /api/it HTTP/1.1\r\nHost: 127.0.0.1:{PORT}\r\nX-Glass-Token: {TOKEN}\r\n\r\n"
    begun = b"GET /api/it HT"
    nothing, half, one, more = over_sockets(lab, b"", begun, whole.encode(), whole.encode() + begun)
    assert nothing == half == b""
    assert one.endswith(b'{"n":1}') and more.endswith(b'{"n":1}')


def test_what_is_no_http_gets_the_same_headers(lab: Workspace) -> None:
    asked = (
        b"\x16\x03\x01\r\n\r\n",
        b"GET / HTP\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    )
    for words, answered in zip(asked, over_sockets(lab, *asked), strict=True):
        head, _, body = answered.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        named = dict(line.split(": ", 1) for line in lines)
        assert status == "HTTP/1.1 400 Bad Request", words
        assert {name: named[name] for name in HEADERS} == HEADERS
        assert int(named["content-length"]) == len(body)
        assert json.loads(body)["error"]["what"] == "this is not HTTP"
