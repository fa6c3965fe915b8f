"""The page Generate: a continuation as it is generated, a line for each token or step.

A line has the chosen token, its probability and the likeliest alternatives. The tokens are those of
`stream` and `beam_search`, or of the server that the explorer was started with, whose models have
ids that begin with `server:`. A reader who goes away ends the work at the next token. The controls
are made from the options that `spec.decoding` declares; what comes back is checked here.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from glassformer.lens.show.text import shown
from glassformer.spec.decoding import BeamSpec, DecodeSpec, StepSpec
from glassformer.spec.errors import InputError
from glassformer.spec.options import Option, options_of
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route, TooLarge
from glassformer.web.app.workspace import Workspace

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter
    from glassformer.models.prompts import Prompts
    from glassformer.models.stepping import Stepper

T = TypeVar("T")

# --- what is asked --------------------------------------------------------------------------------

MODES = ("greedy", "sample", "beam")
#: The page shows the complete tree of a search: longer ones are for the command.
BEAM_TOKENS = 128
#: The largest number that JavaScript counts with, and a limit for numbers that have none.
LARGEST, WIDEST = (1 << 53) - 1, 1e9
#: Values that the page starts with, where they are not the specs' defaults.
INITIAL = {"max_new_tokens": 64, "temperature": 1.0}
#: The number of likeliest tokens that are listed beside each chosen one.
ALTERNATIVES = 8


def options(query: Query, lab: Workspace) -> dict[str, Any]:
    """The options of every mode, for the page to draw its controls and to write commands."""
    query.only()
    return {mode: [control(each, mode) for each in controls(mode)] for mode in MODES}


def controls(mode: str) -> list[Option]:
    """The options of a mode that the page offers: numbers and choices."""
    own = options_of(BeamSpec if mode == "beam" else DecodeSpec)
    return [
        each
        for each in own
        if (each.typed in (int, float) or each.choices)
        and (mode == "sample" or each.group != "sampling")
    ]


def control(each: Option, mode: str) -> dict[str, Any]:
    """An option with the page's limits and its first value."""
    low, high = _range(each, mode)
    bounds = {} if each.choices else {"min": low, "max": high}
    return each.to_dict() | bounds | {"default": INITIAL.get(each.name, each.default)}


def _range(each: Option, mode: str) -> tuple[float, float]:
    """The page's limits: the option's own, and what the server is willing to compute."""
    beam = mode == "beam"
    most = {"max_new_tokens": BEAM_TOKENS if beam else limits.NEW_TOKENS, "width": limits.BEAMS}
    low = each.above if each.at_least is None else each.at_least
    high = most.get(each.name, each.below if each.at_most is None else each.at_most)
    widest = LARGEST if each.type is int else WIDEST
    return -widest if low is None else low, widest if high is None else high


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A checked question of the page; `options` by the names of the specs' fields."""

    run: str
    step: str
    prompt: str
    mode: str
    cached: bool
    options: dict[str, Any]

    def sampling(self, adapter: "BaseAdapter") -> DecodeSpec:
        """The settings of greedy decoding and sampling."""
        return DecodeSpec(eos=adapter.end_ids(), forbidden=adapter.nameless_ids(), **self.options)

    def search(self, adapter: "BaseAdapter") -> BeamSpec:
        """The settings of a beam search."""
        return BeamSpec(eos=adapter.end_ids(), forbidden=adapter.nameless_ids(), **self.options)


def read_ask(query: Query) -> Ask:
    """Check the question; options of another mode are refused, not ignored."""
    known = {each.name: each for mode in MODES for each in controls(mode)}
    query.only("run", "step", "prompt", "mode", "cached", "forced", *known)
    mode = query.choice("mode", MODES, default="greedy")
    own = {each.name for each in controls(mode)}
    for name in {*known, "forced"} - own:
        if query.has(name) and not (name == "forced" and mode != "beam"):
            raise InputError(f"{name} has no effect in mode {mode}", hint="leave it out")
    values = {name: _value(query, known[name], mode) for name in own if query.has(name)}
    initial = {name: value for name, value in INITIAL.items() if name in own}
    forced = _forced(query.text("forced", default="", most=8 * limits.NEW_TOKENS))
    return Ask(
        run=query.text("run"),
        step=query.text("step", default="best", most=20),
        prompt=query.text("prompt", most=limits.PROMPT_CHARACTERS),
        mode=mode,
        cached=query.flag("cached", default=True),
        options=initial | values | ({"forced": forced} if forced else {}),
    )


def _value(query: Query, each: Option, mode: str) -> Any:
    low, high = _range(each, mode)
    if each.choices:
        return query.choice(each.name, each.choices)
    if each.type is int:
        return query.integer(each.name, low=int(low), high=int(high))
    return query.number(each.name, low=low, high=high)


def _forced(text: str) -> tuple[int, ...]:
    """The ids that a branch begins with: `12,5,7`."""
    parts = [part for part in text.split(",") if part]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise InputError("forced holds more than token ids", hint="numbers with commas: 12,5,7")
    return tuple(map(int, parts))


# --- a model here ---------------------------------------------------------------------------------


def generate(query: Query, lab: Workspace) -> Iterator[dict[str, Any]]:
    """Lines: `start`, then `token` or `tree` lines, then `end`; or one `answer`."""
    return _lines(read_ask(query), lab)


def _lines(ask: Ask, lab: Workspace) -> Iterator[dict[str, Any]]:
    if ask.run.startswith(SERVER):
        yield from relayed(ask, lab)
        return
    with lab.working(ask.run, ask.step) as adapter:
        if "next" not in adapter.spec.head_names():
            yield from _answered(adapter, ask)
            return
        from glassformer.adapters.generate import make_stepper

        prompts = adapter.prompt(ask.prompt)
        _check_length(prompts)
        stepper = make_stepper(adapter, StepSpec(cached=ask.cached))
        yield _started(adapter, ask, prompts, stepper)
        if ask.mode == "beam":
            yield from _searched(adapter, ask, prompts, stepper)
        else:
            yield from _generated(adapter, ask, prompts, stepper)


def _check_length(prompts: "Prompts") -> None:
    length = max(map(len, (*prompts.tokens, *(prompts.sources or ()))))
    if length > limits.PROMPT_TOKENS:
        raise TooLarge(f"{length:,} tokens, at most {limits.PROMPT_TOKENS:,} are continued")


def _caches(stepper: "Stepper") -> bool:
    from glassformer.generation.native.stepper import NativeStepper
    from glassformer.generation.stepper import TorchStepper
    from glassformer.gpu.recorded_stepper import RecordedStepper

    return isinstance(stepper, (TorchStepper, NativeStepper, RecordedStepper))


def _started(
    adapter: "BaseAdapter", ask: Ask, prompts: "Prompts", stepper: "Stepper"
) -> dict[str, Any]:
    source = None if prompts.sources is None else _words(adapter, prompts.sources[0])
    what = "continues the text, a token at a time"
    if source is not None:
        what = "reads the text with its encoder, and writes its own sequence"
    return {
        "kind": "start",
        "mode": ask.mode,
        "what": f"This model {what}.",
        "prompt": _words(adapter, prompts.tokens[0]),
        "source": source,
        "cached": _caches(stepper),
        "room": prompts.room(stepper, ask.options["max_new_tokens"])[0],
    }


def _words(adapter: "BaseAdapter", ids: "tuple[int, ...] | list[int]") -> list[dict[str, Any]]:
    return [{"id": i, "word": _word(adapter, i)} for i in ids]


def _word(adapter: "BaseAdapter", i: int) -> str:
    from glassformer.adapters.text_inputs import Words

    return shown(Words(adapter.tokenizer)(i))


# --- a model that answers -------------------------------------------------------------------------


def _answered(adapter: "BaseAdapter", ask: Ask) -> Iterator[dict[str, Any]]:
    """One answer for a complete sequence: there is nothing to sample or to branch from."""
    if ask.mode != "greedy" or "forced" in ask.options:
        raise InputError(
            "this model gives one answer: there is nothing to sample or to search",
            hint="use the mode greedy",
        )
    begin = time.perf_counter()
    seen = adapter.inspect(ask.prompt)
    if seen.answer is None:
        raise InputError(
            "this model has no head that answers or continues a text",
            hint=f"it has: {', '.join(adapter.spec.head_names())}",
        )
    count = min(ALTERNATIVES, adapter.spec.head_size(seen.head))
    yield {
        "kind": "answer",
        "what": "This model reads the whole text and gives one answer: there is nothing to stream.",
        "prompt": _words(adapter, list(seen.ids)),
        "answers": [
            {"id": i, "word": shown(word), "probability": share}
            for i, word, share in seen.next(None, count)
        ],
        "seconds": time.perf_counter() - begin,
    }


# --- token after token ----------------------------------------------------------------------------


def _generated(
    adapter: "BaseAdapter", ask: Ask, prompts: "Prompts", stepper: "Stepper"
) -> Iterator[dict[str, Any]]:
    from glassformer.generation.streaming import Collected, stream

    spec, tokenizer, made = ask.sampling(adapter), adapter.tokenizer, Collected()
    steps = stream(stepper, prompts, spec=spec, tokenizer=tokenizer, top_logprobs=ALTERNATIVES)
    spent = list[float]()
    for (new,) in _timed(steps, spent):
        made.add(new)
        yield {
            "kind": "token",
            "position": len(made.tokens),
            "id": new.token,
            "word": _word(adapter, new.token),
            "text": new.text,
            "logprob": new.logprob,
            "probability": math.exp(new.logprob),
            "forced": len(made.tokens) <= len(spec.forced),
            "end": new.is_end,
            "alternatives": [
                {"id": i, "word": _word(adapter, i), "probability": math.exp(logprob)}
                for i, logprob in new.top
            ],
        }
    timing = _timing(spent, stepper.positions)
    yield {"kind": "end", "finish": made.finish, "text": made.text, **timing}


def _timed(steps: Iterator[T], spent: list[float]) -> Iterator[T]:
    """Yield the steps, and note the seconds that each took to make."""
    begin = time.perf_counter()
    for step in steps:
        spent.append(time.perf_counter() - begin)
        yield step
        begin = time.perf_counter()


def _timing(spent: list[float], positions: int) -> dict[str, Any]:
    """Seconds and rate; the first token includes the prompt, so the rate is that of the others."""
    later = sum(spent[1:])
    return {
        "first_seconds": spent[0] if spent else None,
        "seconds": sum(spent),
        "tokens_per_second": len(spent[1:]) / later if later else None,
        "positions": positions,
    }


# --- beams ----------------------------------------------------------------------------------------


def _searched(
    adapter: "BaseAdapter", ask: Ask, prompts: "Prompts", stepper: "Stepper"
) -> Iterator[dict[str, Any]]:
    """The tree as it grows: new nodes with each step, and finally the hypotheses."""
    from glassformer.generation.beam import Beams, beam_steps

    spec = ask.search(adapter)
    sent, spent = 0, list[float]()
    found = Beams(())
    for (found,) in _timed(beam_steps(stepper, prompts, spec=spec), spent):
        yield {
            "kind": "tree",
            "nodes": [
                {"parent": node.parent, "id": node.token, "word": _word(adapter, node.token)}
                | {"position": node.position, "probability": math.exp(node.logprob)}
                | {"total": node.total, "finish": node.finish}
                for node in found.tree[sent:]
            ],
        }
        sent = len(found.tree)
    yield {
        "kind": "end",
        "finish": "beams",
        "hypotheses": [
            {"text": adapter.tokenizer.decode([t for t in one.tokens if t not in spec.eos])}
            | {"words": [_word(adapter, t) for t in one.tokens], "node": one.node}
            | {"logprob": one.logprob, "score": one.score, "finish": one.finish}
            for one in found.hypotheses
        ],
        **_timing(spent, stepper.positions),
    }


# --- a model of a server --------------------------------------------------------------------------

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
                yield _served_token(*entry, position=self.tokens, text=text)

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


def _served_token(
    token: str, logprob: float, top: Mapping[str, float], *, position: int, text: str
) -> dict[str, Any]:
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


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/generate/options", options),
    ("POST", "/api/generate", generate),
    ("GET", "/api/generate/server", server),
)
