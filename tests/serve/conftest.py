"""A tiny Qwen2 with a chat template behind the server, in process; OpenAI's own client in front."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import httpx2
import openai
import pytest

from glassformer.adapters.load import load
from glassformer.serve.app import Limits, create_app
from glassformer.serve.engine import Engine, Served
from tests.adapters.folders import CHATML, write_model, write_names
from tests.adapters.test_encoders import sentence_folder

T = TypeVar("T")
HELLO = [{"role": "user", "content": "the cat sat"}]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model's folder."""
    return write_model(tmp_path_factory.mktemp("served"))


#: A template like Qwen's: tools before the conversation, earlier calls as they are read here.
HERMES = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}{% endfor %}"
) + CHATML


class House:
    """An engine with its app, and clients that reach it without a socket."""

    def __init__(
        self, folder, *others, slots: int = 4, limits: Limits | None = None, **app: Any
    ) -> None:
        self.served = Served("tiny", load(folder), slots=slots)
        more = [Served(path.name, load(path), slots=slots) for path in others]
        self.engine = Engine([self.served, *more], threads=1)
        self.app = create_app(self.engine, limits=limits or Limits(), **app)

    def raw(self) -> httpx2.AsyncClient:
        """An HTTP client."""
        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=True)
        return httpx2.AsyncClient(transport=transport, base_url="http://localhost")

    def run(self, work: Callable[[openai.AsyncOpenAI], Awaitable[T]], *, key: str = "none") -> T:
        """Run something with OpenAI's client."""

        async def whole() -> T:
            async with openai.AsyncOpenAI(
                base_url="http://localhost/v1",
                api_key=key,
                http_client=self.raw(),
                max_retries=0,
            ) as client:
                return await work(client)

        return asyncio.run(whole())

    def ask(self, work: Callable[[httpx2.AsyncClient], Awaitable[T]]) -> T:
        """Run something with a bare HTTP client."""

        async def whole() -> T:
            async with self.raw() as client:
                return await work(client)

        return asyncio.run(whole())

    def close(self) -> None:
        """End the thread."""
        self.engine.stop()
        assert self.engine.join(30)


@pytest.fixture(scope="session")
def house(folder) -> Iterator[House]:
    """One for all tests that leave it as it is."""
    made = House(folder)
    yield made
    made.close()


@pytest.fixture(scope="session")
def zoo(tmp_path_factory) -> Iterator[House]:
    """A decoder, an encoder and a model with tools behind one server."""
    place = tmp_path_factory.mktemp("zoo")
    for name in ("tiny", "bert", "tools"):
        (place / name).mkdir()
    write_model(place / "tiny")
    sentence_folder(place / "bert")
    write_names(write_model(place / "tools"), chat_template=HERMES)
    made = House(place / "tiny", place / "bert", place / "tools")
    yield made
    made.close()
