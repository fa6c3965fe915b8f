"""The page Generate: a continuation as it is generated, a line for each token or step.

A line has the chosen token, its probability and the likeliest alternatives. The tokens are those of
`stream` and `beam_search`, or of a server (`generate_relay`); a reader who goes away ends the work
at the next token.
"""

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from glassformer.spec.decoding import StepSpec
from glassformer.spec.errors import InputError
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route, TooLarge
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages.generate_form import ALTERNATIVES, Ask, options, read_ask
from glassformer.web.pages.generate_relay import SERVER, relayed, server

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter
    from glassformer.models.prompts import Prompts
    from glassformer.models.stepping import Stepper

T = TypeVar("T")


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
    from glassformer.adapters.generate import make_stepper

    return make_stepper(adapter, StepSpec(cached=cached))


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
    from glassformer.lens.show.text import shown

    return shown(Words(adapter.tokenizer)(i))


# --- a model that answers -------------------------------------------------------------------------


def _answered(adapter: "BaseAdapter", ask: Ask) -> Iterator[dict[str, Any]]:
    """One answer for a complete sequence: there is nothing to sample or to branch from."""
    from glassformer.lens.show.text import shown

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


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/generate/options", options),
    ("POST", "/api/generate", generate),
    ("GET", "/api/generate/server", server),
)
