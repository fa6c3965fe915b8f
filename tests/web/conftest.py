"""A few tiny real runs, and the app over them in process."""

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from starlette.applications import Starlette

from glassformer.lab.api import train
from glassformer.web.app.server import create_app
from glassformer.web.app.workspace import Workspace

TOKEN, PORT = "the-right-token", 7337
TINY = (
    "task.examples=300",
    "train.batch_size=8",
    "train.evaluate_every=4",
    "train.checkpoint_every=4",
    "train.keep=9",
    "model.d_model=16",
    "train.evaluate_examples=40",
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """digits-0 and digits-1 (which differ in their seed), and one with another rate."""
    folder = tmp_path_factory.mktemp("web") / "runs"
    for seed in (0, 1):
        train("digits", name=f"digits-{seed}", runs=folder, seed=seed, steps=12, overrides=TINY)
    quick = (*TINY, "train.lr=0.01")
    train("digits", name="quick", runs=folder, steps=8, overrides=quick)
    return folder


@pytest.fixture(scope="session")
def talkers(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """One that answers (digits), one that translates (reverse), one that continues (text)."""
    place = tmp_path_factory.mktemp("talkers")
    folder, book = place / "runs", place / "book.txt"
    book.write_text("so it goes, and so it goes on.\n" * 60, encoding="utf-8")
    train("digits", name="digits", runs=folder, steps=8, overrides=TINY)
    reverse = (*TINY, "task.vocab_size=13", "task.max_length=5")
    train("reverse", name="reverse", runs=folder, steps=8, overrides=reverse)
    text = ("task.tokenizer=characters", "task.length=24", "train.batch_size=8")
    text += ("train.steps=30", "train.evaluate_examples=8", f"task.path={book}")
    train("text", name="text", runs=folder, overrides=text)
    return Workspace(folder)


@dataclass(frozen=True)
class Answer:
    """What came back: the status, headers by lower-cased name, the body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def what(self) -> str:
        """An error's first line."""
        return str(self.json["error"]["what"])


@dataclass(frozen=True)
class Client:
    """Speaks ASGI itself, so that a request can be as wrong as a test wants it."""

    app: Starlette

    def ask(
        self,
        target: str,
        *,
        method: str = "GET",
        headers: Iterable[tuple[str, str]] | None = None,
        body: Iterable[bytes] = (b"",),
        token: str | None = TOKEN,
        host: str | None = f"127.0.0.1:{PORT}",
    ) -> Answer:
        """One request; `body` in as many pieces as given, without a length unless one is named."""
        given = list(headers or ())
        given += [("host", host)] if host is not None else []
        given += [("x-glass-token", token)] if token is not None else []
        return asyncio.run(self._send(target, method, given, list(body)))

    def get(self, target: str, **options: Any) -> Any:
        """The JSON of a question that must be answered."""
        answer = self.ask(target, **options)
        assert answer.status == 200, answer.body
        return answer.json

    def post(self, target: str, body: Any, **options: Any) -> Answer:
        """A question with a body, as the page asks it."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [("origin", f"http://127.0.0.1:{PORT}"), ("content-type", "application/json")]
        return self.ask(target, method="POST", headers=headers, body=[data], **options)

    async def _send(
        self, target: str, method: str, headers: list[tuple[str, str]], body: list[bytes]
    ) -> Answer:
        parts = urlsplit(target)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(parts.path),
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
            "server": ("127.0.0.1", PORT),
            "client": ("127.0.0.1", 4711),
        }
        pieces = [
            {"type": "http.request", "body": part, "more_body": index + 1 < len(body)}
            for index, part in enumerate(body)
        ]
        sent: list[Any] = []
        done = asyncio.Event()

        async def receive() -> Any:
            if pieces:
                return pieces.pop(0)
            await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                done.set()

        await self.app(scope, receive, send)
        start = sent[0]
        found = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], found, b"".join(part.get("body", b"") for part in sent[1:]))


Opener = Callable[..., Client]


@pytest.fixture(scope="session")
def open_app() -> Opener:
    """open_app(folder): the app over any folder."""

    def opened(folder: Path, **options: Any) -> Client:
        return Client(create_app(folder, token=TOKEN, port=PORT, **options))

    return opened


@pytest.fixture(scope="session")
def client(runs: Path, open_app: Opener) -> Client:
    """The app over the tiny runs."""
    return open_app(runs)
