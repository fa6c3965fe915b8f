"""What the page Generate may ask for: a prompt, a way to decode, and the numbers of that way.

The page Generate: a model's continuation as it is made, a line for each token or step.

Every line says what was chosen, how likely it was and what else could have come. The tokens are
those of `decode` and `beam_search`; a reader who goes away ends the work at the next token.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route, TooLarge
from glassformer.web.app.workspace import Lab

if TYPE_CHECKING:
    from torch import Tensor

    from glassformer.adapters.base import BaseAdapter
    from glassformer.generation.prompts import Prompts
    from glassformer.generation.stepper import Stepper

MODES = ("greedy", "sample", "beam")
#: A search draws its whole tree: longer ones are for the command.
BEAM_TOKENS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What the page asked for, within the limits."""

    run: str
    step: str
    prompt: str
    mode: str
    cached: bool
    beams: int
    length_penalty: float
    settings: dict[str, Any]

    def draws(self, adapter: "BaseAdapter") -> DecodeSpec:
        """Token after token."""
        return DecodeSpec(eos=adapter.end_ids(), forbidden=adapter.nameless_ids(), **self.settings)

    def search(self, adapter: "BaseAdapter") -> BeamSpec:
        """Beams; what belongs to draws was refused."""
        return BeamSpec(
            width=self.beams,
            alpha=self.length_penalty,
            max_new_tokens=self.settings["max_new_tokens"],
            eos=adapter.end_ids(),
            forbidden=adapter.nameless_ids(),
        )


def asked(query: Query) -> Ask:
    """The question, checked; settings of another mode are refused, not ignored."""
    query.only(
        *("run", "step", "prompt", "mode", "max_tokens", "temperature", "top_k", "top_p"),
        *("seed", "beams", "length_penalty", "forced", "cached"),
    )
    mode = query.choice("mode", MODES, default="greedy")
    own = {
        "greedy": ("forced",),
        "sample": ("temperature", "top_k", "top_p", "seed", "forced"),
        "beam": ("beams", "length_penalty"),
    }
    for name in {name for names in own.values() for name in names} - {*own[mode]}:
        if query.has(name):
            raise InputError(f"{name} says nothing to {mode}", hint="leave it out")
    most = BEAM_TOKENS if mode == "beam" else limits.NEW_TOKENS
    forced = _forced(query.text("forced", default="", most=8 * limits.NEW_TOKENS))
    settings: dict[str, Any] = {
        "max_new_tokens": query.integer("max_tokens", low=1, high=most, default=64),
        "forced": forced,
    }
    if mode == "sample":
        settings |= {
            "temperature": query.number("temperature", low=0.01, high=100.0, default=1.0),
            "top_p": query.number("top_p", low=0.001, high=1.0, default=1.0),
            "seed": query.integer("seed", low=0, high=(1 << 53) - 1, default=0),
        }
        if query.has("top_k"):
            settings["top_k"] = query.integer("top_k", low=1, high=1 << 20)
    return Ask(
        run=query.text("run"),
        step=query.text("step", default="best", most=20),
        prompt=query.text("prompt", most=limits.PROMPT_CHARACTERS),
        mode=mode,
        cached=query.flag("cached", default=True),
        beams=query.integer("beams", low=1, high=limits.BEAMS, default=4),
        length_penalty=query.number("length_penalty", low=-40.0, high=40.0, default=0.6),
        settings=settings,
    )


def _forced(text: str) -> tuple[int, ...]:
    """Ids that a branch begins with: `12,5,7`."""
    parts = [part for part in text.split(",") if part]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise InputError("forced holds more than token ids", hint="numbers with commas: 12,5,7")
    return tuple(map(int, parts))


# B rows (one), V vocab

#: The likeliest tokens that are told beside each chosen one.
ALTERNATIVES = 8


def generate(query: Query, lab: Lab) -> Iterator[dict[str, Any]]:
    """Lines: `start`, then `token` or `tree` lines, then `end`; or one `answer`."""
    return _lines(asked(query), lab)


def _lines(ask: Ask, lab: Lab) -> Iterator[dict[str, Any]]:
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
            yield from _drawn(adapter, ask, prompts, stepper)


def _check_length(prompts: "Prompts") -> None:
    length = max(map(len, (*prompts.tokens, *(prompts.sources or ()))))
    if length > limits.PROMPT_TOKENS:
        raise TooLarge(f"{length:,} tokens, at most {limits.PROMPT_TOKENS:,} are continued")


def _stepper(adapter: "BaseAdapter", *, cached: bool) -> "Stepper":
    from glassformer.generation.stepper import NaiveStepper
    from glassformer.models.model import Model

    own = adapter.stepper()
    if cached:
        return own
    if not isinstance(adapter.model, Model):
        return own  # which has no cache: `_started` says so
    return NaiveStepper(adapter.model)


def _caches(stepper: "Stepper") -> bool:
    from glassformer.generation.stepper import TorchStepper

    return isinstance(stepper, TorchStepper)


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
        "room": prompts.room(stepper, ask.settings["max_new_tokens"])[0],
    }


def _words(adapter: "BaseAdapter", ids: "tuple[int, ...] | list[int]") -> list[dict[str, Any]]:
    return [{"id": i, "word": _word(adapter, i)} for i in ids]


def _word(adapter: "BaseAdapter", i: int) -> str:
    from glassformer.adapters.text_inputs import Words
    from glassformer.lens.show.token_text import shown

    return shown(Words(adapter.tokenizer)(i))


# --- a model that answers -------------------------------------------------------------------------


def _answered(adapter: "BaseAdapter", ask: Ask) -> Iterator[dict[str, Any]]:
    """One answer for a whole sequence: there is nothing to draw, to search or to branch from."""
    if ask.mode != "greedy" or ask.settings["forced"]:
        raise InputError(
            "this model gives one answer: there is nothing to draw or to search",
            hint="ask for it with greedy",
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


class Watched:
    """A stepper that keeps the logits each choice was made of, until they are asked for."""

    def __init__(self, stepper: "Stepper") -> None:
        self._stepper = stepper
        self.vocab_size = stepper.vocab_size
        self.source_vocab = stepper.source_vocab
        self.max_seq_len = stepper.max_seq_len
        self.logits: deque[Tensor] = deque()

    @property
    def encoder_calls(self) -> int:
        """Runs of the encoder."""
        return self._stepper.encoder_calls

    @property
    def positions(self) -> int:
        """Columns read."""
        return self._stepper.positions

    def start(self, prompts: "Prompts", *, room: int) -> "tuple[Tensor, Any]":
        """As the stepper does."""
        logits_BV, past = self._stepper.start(prompts, room=room)
        self.logits.append(logits_BV)
        return logits_BV, past

    def step(self, tokens_B: "Tensor", *, past: Any) -> "Tensor":
        """As the stepper does."""
        logits_BV = self._stepper.step(tokens_B, past=past)
        self.logits.append(logits_BV)
        return logits_BV


def _drawn(
    adapter: "BaseAdapter", ask: Ask, prompts: "Prompts", stepper: "Stepper"
) -> Iterator[dict[str, Any]]:
    from glassformer.generation.loop import decode
    from glassformer.generation.streaming import text_of
    from glassformer.generation.text_stream import TextStream

    spec, watched = ask.draws(adapter), Watched(stepper)
    stream, tokens, spent = TextStream(adapter.tokenizer), list[int](), list[float]()
    columns = decode(watched, prompts, spec=spec, tokenizer=adapter.tokenizer)
    finish: str | None = None
    while True:
        begin = time.perf_counter()
        column = next(columns, None)
        if column is None:
            break
        spent.append(time.perf_counter() - begin)
        token = int(column.tokens_B[0])
        finish, piece = column.finish[0], "" if token in spec.eos else stream.push(token)
        tokens.append(token)
        yield {
            "kind": "token",
            "place": len(tokens),
            "id": token,
            "word": _word(adapter, token),
            "text": piece,
            "logprob": float(column.logprobs_B[0]),
            "probability": math.exp(column.logprobs_B[0]),
            "forced": len(tokens) <= len(spec.forced),
            "end": token in spec.eos,
            "alternatives": _alternatives(adapter, watched.logits.popleft()),
        }
    yield {
        "kind": "end",
        "finish": finish,
        "text": text_of(tokens, spec=spec, tokenizer=adapter.tokenizer),
        **_timing(spent, watched.positions),
    }


def _alternatives(adapter: "BaseAdapter", logits_BV: "Tensor") -> list[dict[str, Any]]:
    """The likeliest tokens by the model's own distribution, before temperature and cuts."""
    chance_V = logits_BV[0].double().softmax(-1)
    best = chance_V.topk(min(ALTERNATIVES, len(chance_V)))
    return [
        {"id": i, "word": _word(adapter, i), "probability": share}
        for i, share in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _timing(spent: list[float], positions: int) -> dict[str, Any]:
    """The first token pays for the prompt; the rate is that of the others."""
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
    """The tree as it grows: new nodes with each step, and at last the hypotheses."""
    from glassformer.generation.beam import Beams, beam_steps

    spec = ask.search(adapter)
    told, spent = 0, list[float]()
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
                | {"place": node.place, "probability": math.exp(node.logprob)}
                | {"total": node.total, "finish": node.finish}
                for node in found.tree[told:]
            ],
        }
        told = len(found.tree)
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


ROUTES: tuple[Route, ...] = (("POST", "/api/generate", generate),)
