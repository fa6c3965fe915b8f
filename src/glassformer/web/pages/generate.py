"""The pages Generate and Quantize: a model's text, and what fewer bits change of it.

Generate: a continuation as it is generated, a line for each token or step, with the chosen token,
its probability and the likeliest alternatives. The page draws its controls from the options that
`spec.decoding` declares (`GET /api/generate/options`). The tokens are those of `stream` and
`beam_search`; a reader who goes away ends the work at the next token. A model whose id begins with
`server:` belongs to the server that the explorer was started with, which then makes the tokens.

Quantize: float32 beside every quantization scheme, on the same text. Nothing is written: the copies
live in memory, and their sizes are those of the files that `glass quantize` would write. Speed is
asked for apart, since measuring it takes a while.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from glassformer.spec.decoding import BeamSpec, DecodeSpec, StepSpec
from glassformer.spec.errors import InputError
from glassformer.spec.options import Option, options_of
from glassformer.spec.quantization import coverage
from glassformer.spec.schemes import SCHEMES
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route, TooLarge, Unreachable
from glassformer.web.app.workspace import Workspace

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter
    from glassformer.generation.prompts import Prompts
    from glassformer.generation.stepper import Stepper
    from glassformer.lab.measure.precision import Precision, Prompted, Speed

MODES = ("greedy", "sample", "beam")
#: The page shows the complete tree of a search: longer ones are for the command.
BEAM_TOKENS = 128
#: The largest number that JavaScript counts with, and a limit for numbers that have none.
LARGEST, WIDEST = (1 << 53) - 1, 1e9
#: Values that the page starts with, where they are not the specs' defaults.
INITIAL = {"max_new_tokens": 64, "temperature": 1.0}


def options(query: Query, lab: Workspace) -> dict[str, Any]:
    """The options of every mode, for the page to draw its controls and to write commands."""
    query.only()
    return {mode: [_control(each, mode) for each in controls(mode)] for mode in MODES}


def controls(mode: str) -> list[Option]:
    """The options of a mode that the page offers: numbers and choices."""
    own = options_of(BeamSpec if mode == "beam" else DecodeSpec)
    return [
        each
        for each in own
        if (each.typed in (int, float) or each.choices)
        and (mode == "sample" or each.group != "sampling")
    ]


def _control(each: Option, mode: str) -> dict[str, Any]:
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


#: The number of likeliest tokens that are listed beside each chosen one.
ALTERNATIVES = 8


def generate(query: Query, lab: Workspace) -> Iterator[dict[str, Any]]:
    """Lines: `start`, then `token` or `tree` lines, then `end`; or one `answer`."""
    return _lines(read_ask(query), lab)


def _lines(ask: Ask, lab: Workspace) -> Iterator[dict[str, Any]]:
    if ask.run.startswith(SERVER):
        yield from _relayed(ask, lab)
        return
    with lab.working(ask.run, ask.step) as adapter:
        if "next" not in adapter.spec.head_names():
            yield from _answered(adapter, ask)
            return
        prompts = adapter.prompt(ask.prompt)
        _check_length(prompts)
        stepper = _stepper(adapter, cached=ask.cached)
        yield _started(adapter, ask, prompts, stepper)
        if ask.mode == "beam":
            yield from _searched(adapter, ask, prompts, stepper)
        else:
            yield from _generated(adapter, ask, prompts, stepper)


def _check_length(prompts: "Prompts") -> None:
    length = max(map(len, (*prompts.tokens, *(prompts.sources or ()))))
    if length > limits.PROMPT_TOKENS:
        raise TooLarge(f"{length:,} tokens, at most {limits.PROMPT_TOKENS:,} are continued")


def _stepper(adapter: "BaseAdapter", *, cached: bool) -> "Stepper":
    from glassformer.generation.generate import make_stepper

    return make_stepper(adapter, StepSpec(cached=cached))


def _caches(stepper: "Stepper") -> bool:
    from glassformer.generation.fast.native import NativeStepper
    from glassformer.generation.fast.stepper import FastStepper
    from glassformer.generation.stepper import TorchStepper

    return isinstance(stepper, (TorchStepper, NativeStepper, FastStepper))


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
    from glassformer.lens.show.text import shown

    return shown(Words(adapter.tokenizer)(i))


# --- a model of a server --------------------------------------------------------------------------

#: What an id of a server's model begins with; no name of a run does.
SERVER = "server:"
#: Options of ours that a server does not have, and other names of those that it has.
NOT_SERVED, SERVED_AS = ("min_new_tokens",), {"max_new_tokens": "max_tokens"}


def server(query: Query, lab: Workspace) -> dict[str, Any]:
    """The server's address and models, with the options that it takes; no address without one."""
    query.only()
    if lab.relay is None:
        return {"address": None, "models": [], "options": {}}
    offered = {
        mode: [_control(each, mode) for each in controls(mode) if each.name not in NOT_SERVED]
        for mode in MODES
        if mode != "beam"
    }
    return {"address": lab.relay.address, "models": lab.relay.models(), "options": offered}


def _relayed(ask: Ask, lab: Workspace) -> Iterator[dict[str, Any]]:
    """The lines of a model here, from a server's stream: `/v1/completions` with logprobs."""
    if lab.relay is None:
        raise InputError("the explorer points at no server", hint="glass explore --server ADDRESS")
    if ask.mode == "beam" or not ask.cached or "forced" in ask.options:
        raise InputError(
            "a server continues a prompt with its cache: no beams, no branches",
            hint="open the model itself for these",
        )
    for name in NOT_SERVED:
        if ask.options.get(name):
            raise InputError(f"a server has no {name}", hint="leave it out")
    given = {k: v for k, v in ask.options.items() if v is not None and k not in NOT_SERVED}
    request = {
        "model": ask.run.removeprefix(SERVER),
        "prompt": ask.prompt,
        "temperature": 0.0,
        **{SERVED_AS.get(name, name): value for name, value in given.items()},
    }
    sent = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": ALTERNATIVES}
    events = lab.relay.events("/completions", request | sent)
    start = {
        "kind": "start",
        "mode": ask.mode,
        "what": f"The server at {lab.relay.address} continues the text, a token at a time.",
        "prompt": [{"id": None, "word": ask.prompt}],
        "source": None,
        "cached": True,
        "served": request,
    }
    position, finish, texts, read = 0, None, list[str](), 0
    begin, begun = time.perf_counter(), False
    first = last = None
    try:
        for event in events:
            if not begun:
                begun = True
                yield start  # a refusal comes before it
            read = (event.get("usage") or {}).get("prompt_tokens", read)
            for choice in event["choices"]:
                texts.append(str(choice["text"]))
                finish = choice["finish_reason"] or finish
                for line in _served_tokens(choice, position):
                    last = time.perf_counter()
                    first = last if first is None else first
                    position += 1
                    yield line
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        what = "the server's events are not OpenAI's"
        raise Unreachable(what, where=lab.relay.address) from error
    finally:
        events.close()
    later = 0.0 if first is None or last is None else last - first
    yield {
        "kind": "end",
        "finish": "eos" if finish == "stop" else finish,
        "text": "".join(texts),
        "first_seconds": None if first is None else first - begin,
        "seconds": time.perf_counter() - begin,
        "tokens_per_second": (position - 1) / later if later else None,
        "positions": read + max(position - 1, 0),
    }


def _served_tokens(choice: Mapping[str, Any], position: int) -> Iterator[dict[str, Any]]:
    """The tokens of one event; a server tells their texts, not their ids."""
    found = choice["logprobs"]
    if found is None:
        return
    tokens, tops = found["tokens"], found["top_logprobs"]
    for at, (token, logprob, top) in enumerate(
        zip(tokens, found["token_logprobs"], tops, strict=True)
    ):
        yield {
            "kind": "token",
            "position": position + at + 1,
            "id": token,
            "word": _shown(token),
            "text": choice["text"] if at + 1 == len(tokens) else "",
            "logprob": float(logprob),
            "probability": math.exp(logprob),
            "forced": False,
            "end": False,
            "alternatives": [
                {"id": text, "word": _shown(text), "probability": math.exp(value)}
                for text, value in sorted(top.items(), key=lambda pair: -pair[1])
            ],
        }


def _shown(text: str) -> str:
    from glassformer.lens.show.text import shown

    return shown(text)


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
            {"id": i, "word": _word(adapter, i), "probability": share}
            for i, _, share in seen.next(None, count)
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
    while True:
        begin = time.perf_counter()
        step = next(steps, None)
        if step is None:
            break
        spent.append(time.perf_counter() - begin)
        (new,) = step
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
    steps = beam_steps(stepper, prompts, spec=spec)
    while True:
        begin = time.perf_counter()
        step = next(steps, None)
        if step is None:
            break
        spent.append(time.perf_counter() - begin)
        (found,) = step
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


# --- the page Quantize ----------------------------------------------------------------------------


#: Tokens that are compared: each is a row of every table.
MOST_TOKENS = 512
#: Positions that are listed as the worst.
WORST = 8
TWINS = "quantize: the copies"


def quantize(query: Query, lab: Workspace) -> dict[str, Any]:
    """What each precision says of a text, how far they are apart, and what they weigh."""
    query.only("run", "step", "text")
    from glassformer.lab.measure.precision import prompted

    run, step = query.text("run"), query.text("step", default="best", most=20)
    text = query.text("text", most=limits.PROMPT_CHARACTERS)
    with lab.working(run, step) as adapter:
        length = len(adapter.tokenizer.encode(text))
        if length > MOST_TOKENS:
            raise TooLarge(f"{length:,} tokens, at most {MOST_TOKENS:,} are compared")
        precisions = _copies(adapter, lab)
        return _told(prompted(adapter, precisions, text))


def quantize_speed(query: Query, lab: Workspace) -> dict[str, Any]:
    """Tokens a second of each, measured in turn, some rounds; slower is said to be slower."""
    query.only("run", "step")
    from glassformer.lab.measure.precision import NEW, PREFILL, ROUNDS, precision_speeds

    run, step = query.text("run"), query.text("step", default="best", most=20)
    with lab.working(run, step) as adapter:
        found = precision_speeds(_copies(adapter, lab))
        limit = adapter.spec.max_seq_len
        return {
            "rounds": ROUNDS,
            "prefill_tokens": min(PREFILL, limit),
            "new_tokens": min(NEW, limit - 1),
            "speeds": {
                name: {"prefill": _speed(prefill), "decode": decode and _speed(decode)}
                for name, (prefill, decode) in found.items()
            },
        }


def _speed(speed: "Speed") -> dict[str, Any]:
    return asdict(speed) | {"slower": speed.ratio > 1.0}


def _copies(adapter: "BaseAdapter", lab: Workspace) -> "tuple[Precision, ...]":
    """Made once for the model in view; those of the one before are let go."""
    from glassformer.lab.measure.precision import in_precisions

    kept = lab.results.find(TWINS)
    if kept is None or kept[0] is not adapter:
        kept = (adapter, in_precisions(adapter))
        lab.results.put(kept, key=TWINS, model=adapter)
    copies: tuple[Precision, ...] = kept[1]
    return copies


def _told(found: "Prompted") -> dict[str, Any]:
    from glassformer.lens.show.text import shown

    look, reading = found.look, found.look.readout
    spec = found.precisions[0].model.spec
    names = [one.name for one in found.precisions]
    source = look.source_words
    return {
        "head": look.head,
        "words": [shown(word) for word in look.words],
        "source_words": None if source is None else [shown(word) for word in source],
        "positions": list(found.positions),
        "precisions": [
            {
                "name": one.name,
                "scheme": one.scheme,
                "schemes": one.schemes,
                "backends": list(one.backends),
            }
            | {"file_bytes": one.file_bytes, "resident_bytes": one.resident_bytes}
            for one in found.precisions
        ],
        "missing": [
            f"{scheme.name} is not possible: {coverage(spec, scheme()).why()}"
            for scheme in SCHEMES
            if scheme.name not in {one.scheme for one in found.precisions}
        ],
        "answers": [
            [
                {"id": i, "word": shown(reading.word(i)), "p": dict(zip(names, p, strict=True))}
                for i, p in at.items()
            ]
            for at in found.answers
        ],
        "against": {
            name: {
                "there": list(one.there),
                "back": list(one.back),
                "same": list(one.same),
                "layers": one.layers,
                "worst": _worst(found, one.there),
            }
            for name, one in found.against.items()
        },
    }


def _worst(found: "Prompted", there: tuple[float, ...]) -> list[int]:
    """Indices into `positions`, the largest divergence first."""
    return sorted(range(len(there)), key=lambda i: (-there[i], i))[:WORST]


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/generate/options", options),
    ("POST", "/api/generate", generate),
    ("GET", "/api/generate/server", server),
    ("POST", "/api/quantize", quantize),
    ("POST", "/api/quantize/speed", quantize_speed),
)
