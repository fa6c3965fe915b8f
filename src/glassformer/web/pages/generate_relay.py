"""The page Generate over a server: the lines of a model here, from the events of its stream.

A model whose id begins with `server:` belongs to the server that the explorer was started with.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from glassformer.spec.errors import InputError
from glassformer.web.app.query import Query
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages.generate_form import ALTERNATIVES, MODES, Ask, control, controls

#: What an id of a server's model begins with; no name of a run does.
SERVER = "server:"
#: Options of ours that a server does not have, and other names of those that it has.
NOT_SERVED, SERVED_AS = ("min_new_tokens",), {"max_new_tokens": "max_tokens"}
#: What the page needs of a stream.
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": ALTERNATIVES}


def server(query: Query, lab: Workspace) -> dict[str, Any]:
    """The server's address and models, with the options that it takes; no address without one."""
    query.only()
    if lab.relay is None:
        return {"address": None, "models": [], "options": {}}
    offered = {
        mode: [control(each, mode) for each in controls(mode) if each.name not in NOT_SERVED]
        for mode in MODES
        if mode != "beam"
    }
    return {"address": lab.relay.address, "models": lab.relay.models(), "options": offered}


def relayed(ask: Ask, lab: Workspace) -> Iterator[dict[str, Any]]:
    """The lines of the page, from `/v1/completions` with log-probabilities."""
    if lab.relay is None:
        raise InputError("the explorer points at no server", hint="glass explore --server ADDRESS")
    request = _request(ask)
    seen = _Seen()
    events = lab.relay.events("/completions", request | STREAMED)
    try:
        with lab.relay.reading():
            for number, event in enumerate(events):
                if number == 0:  # a refusal comes before it
                    yield {
                        "kind": "start",
                        "mode": ask.mode,
                        "what": f"The server at {lab.relay.address} continues the text, a token at "
                        "a time.",
                        "prompt": [{"id": None, "word": ask.prompt}],
                        "source": None,
                        "cached": True,
                        "served": request,
                    }
                yield from seen.lines(event)
    finally:
        events.close()
    yield seen.end()


def _request(ask: Ask) -> dict[str, Any]:
    """The page's options by the server's names; what it does not have is refused."""
    if ask.mode == "beam" or not ask.cached or "forced" in ask.options:
        raise InputError(
            "a server continues a prompt with its cache: no beams, no branches",
            hint="open the model itself for these",
        )
    for name in NOT_SERVED:
        if ask.options.get(name):
            raise InputError(f"a server has no {name}", hint="leave it out")
    given = {k: v for k, v in ask.options.items() if v is not None and k not in NOT_SERVED}
    return {
        "model": ask.run.removeprefix(SERVER),
        "prompt": ask.prompt,
        "temperature": 0.0,
        **{SERVED_AS.get(name, name): value for name, value in given.items()},
    }


@dataclass(slots=True)
class _Seen:
    """What has come of a stream: its text, its counts, and when its tokens came."""

    begun: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    text: str = ""
    finish: str | None = None

    def lines(self, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The tokens of one event; a server tells their texts, not their ids."""
        usage = event.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        for choice in event["choices"]:
            self.text += str(choice["text"])
            self.finish = choice["finish_reason"] or self.finish
            found = choice["logprobs"] or {"tokens": (), "token_logprobs": (), "top_logprobs": ()}
            names = ("tokens", "token_logprobs", "top_logprobs")
            entries = list(zip(*(found[name] for name in names), strict=True))
            for place, entry in enumerate(entries, start=1):
                self.last = time.perf_counter()
                self.first = self.last if self.first is None else self.first
                self.tokens += 1
                text = choice["text"] if place == len(entries) else ""
                yield _token(*entry, position=self.tokens, text=text)

    def end(self) -> dict[str, Any]:
        """The last line: why it ended, and how long it took."""
        later = 0.0 if self.first is None else self.last - self.first
        return {
            "kind": "end",
            "finish": "eos" if self.finish == "stop" else self.finish,
            "text": self.text,
            "first_seconds": None if self.first is None else self.first - self.begun,
            "seconds": time.perf_counter() - self.begun,
            "tokens_per_second": (self.tokens - 1) / later if later else None,
            "positions": self.prompt_tokens + max(self.tokens - 1, 0),
        }


def _token(
    token: str, logprob: float, top: Mapping[str, float], *, position: int, text: str
) -> dict[str, Any]:
    from glassformer.lens.show.text import shown

    return {
        "kind": "token",
        "position": position,
        "id": token,
        "word": shown(token),
        "text": text,
        "logprob": float(logprob),
        "probability": math.exp(logprob),
        "forced": False,
        "end": False,
        "alternatives": [
            {"id": other, "word": shown(other), "probability": math.exp(value)}
            for other, value in sorted(top.items(), key=lambda pair: -pair[1])
        ],
    }
