"""The models that are served, and the one thread that computes for all of them.

Requests are checked and tokenized elsewhere; what reaches this thread is a prepared continuation.
After each step the new tokens go back to the event loop in one call. The thread also runs what else
needs the model (embeddings), so that nothing competes with a step for the processor's cores.
"""

import asyncio
import functools
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.chat.template import ChatTemplate, read_chat, read_templates
from glassformer.adapters.embed import Embeddings, embed, no_vectors, vector_limit
from glassformer.adapters.executors import make_slots
from glassformer.adapters.folder.files import generation_defaults
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.batching import (
    GPU_STEP_TOKENS,
    STEP_TOKENS,
    Batcher,
    Continuation,
)
from glassformer.generation.streaming import NewToken
from glassformer.models.model import Model
from glassformer.models.prompts import text_prompt
from glassformer.models.stepping import AheadSlots
from glassformer.spec.decoding import LONGEST_ANSWER, KVCache
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.model import ModelSpec, Readout

T = TypeVar("T")

#: Seconds that a busy thread sleeps at most before it looks for a reason to end.
LOOK_SECONDS = 1.0
#: Seconds that the event loop takes to write an event to one client, about.
EVENT_SECONDS = 1e-4
#: Seconds between two events of a stream at least: nobody reads faster, and one that is written for
#: each token costs a small model a tenth of its speed.
READING_SECONDS = 0.02
#: Characters that a token is taken to stand for, before its tokenizer is looked at.
LEAST_CHARACTERS = 16
#: Upper ends of the histograms' buckets, in seconds.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Served:
    """A model under its name, with its tokenizer, chat template, sampling settings and batch.

    `slots` sequences at once, each of at most `context` tokens; `memory_bytes` is the bound that
    follows for keys and values. A model that cannot continue text (an encoder) gives vectors alone:
    `no_text` says why, and there is no `batcher`. `no_vectors` says why there are no vectors.
    """

    def __init__(
        self,
        name: str,
        adapter: BaseAdapter,
        *,
        slots: int,
        context: int | None = None,
        step_tokens: int | None = None,
        invariant: bool | None = None,
        kv_cache: KVCache = "float",
    ) -> None:
        if not re.fullmatch(r"[\w.@:+/-]{1,200}", name, re.ASCII):
            raise InputError(
                f"{name[:60]!r} is no name for a model",
                hint="letters, digits and . _ - @ : + /; --name gives another",
            )
        self.name = name
        self.adapter = adapter.eval()
        self.spec = adapter.spec
        self.tokenizer: Tokenizer | None = adapter.get_tokenizer()
        bare = "" if self.tokenizer is not None else "it has no tokenizer, so it reads no text"
        self.no_text, self.no_vectors = _no_text(adapter.spec), bare or no_vectors(adapter)
        if self.no_text and self.no_vectors:
            raise InputError(
                f"{name} has nothing to serve: {self.no_text}, and {self.no_vectors}",
                hint="a model that continues text, or whose hidden states can be read",
            )
        self.created = int(time.time())
        self.kv_cache = kv_cache
        self.eos: tuple[int, ...] = ()
        self.nameless: tuple[int, ...] = ()
        if self.tokenizer is not None:
            self.eos, self.nameless = adapter.end_ids(), adapter.nameless_ids()
        # OpenAI's default is 1; the model's folder may suggest others.
        self.settings: Mapping[str, Any] = {"temperature": 1.0}
        self.template: ChatTemplate | None = None
        if adapter.origin is not None:
            self._read_folder(adapter.origin)
        self._batcher: Batcher | None = None
        if not self.no_text:
            inner = adapter.model
            made = make_slots(
                inner if isinstance(inner, Model) else None,
                adapter.stepper,
                self.spec,
                slots=slots,
                context=context,
                invariant=invariant,
                kv_cache=kv_cache,
            )
            if step_tokens is None:
                step_tokens = GPU_STEP_TOKENS if isinstance(made, AheadSlots) else STEP_TOKENS
            self._batcher = Batcher(made, tokenizer=self.tokenizer, step_tokens=step_tokens)

    def _read_folder(self, folder: Path) -> None:
        defaults = generation_defaults(folder)
        greedy = {"temperature": 0.0} if defaults.do_sample is False else {}
        self.settings = {**self.settings, **defaults.settings, **greedy}
        if self.tokenizer is None:
            self.eos = tuple(one for one in defaults.eos if one < self.spec.vocab_size)
        elif read_templates(folder):
            self.template = read_chat(folder)
            own = self.tokenizer.eos  # any end of the model or of its tokenizer stops an answer
            self.eos = tuple(dict.fromkeys((*self.eos, *([] if own is None else [own]))))

    def capabilities(self) -> list[str]:
        """Return what can be requested of it, beside OpenAI's fields of a model."""
        text = [] if self.no_text else ["tokens"] if self.tokenizer is None else ["text"]
        chat = [] if self.no_text or self.template is None else ["chat"]
        return [*text, *chat, *([] if self.no_vectors else ["embeddings"])]

    def described(self) -> str:
        """Return what is served, in a line: how many at once, and the most memory it takes."""
        if self._batcher is None:
            return (
                f"{self.name}: vectors ({self.no_text}); texts of at most {self.context} tokens, "
                "one at a time"
            )
        slots = self._batcher.slots
        chat = "chat and text" if self.template is not None else "text (it has no chat template)"
        chat = "token ids (it has no tokenizer)" if self.tokenizer is None else chat
        form = "" if self.kv_cache == "float" else f" (keys and values in {self.kv_cache})"
        share = "" if slots.cuts_prompts else "; one sequence at a time"
        alone = "" if slots.invariant else "; answers may depend on company (--invariant)"
        kept = f"at most {slots.memory_bytes / 2**20:,.1f} MiB{form}"
        if not isinstance(self.adapter.model, Model):
            kept = "no keys and values are kept"
        return (
            f"{self.name}: {chat}; {slots.slots} slots of {self.context} tokens, "
            f"{kept}{share}{alone}"
        )

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its continuation, or of a text that is embedded."""
        if self._batcher is None:
            return vector_limit(self.adapter)
        return self._batcher.slots.max_seq_len

    @property
    def batcher(self) -> Batcher:
        """What continues texts; only where `no_text` is empty."""
        assert self._batcher is not None
        return self._batcher

    @functools.cached_property
    def longest_token(self) -> int:
        """The most characters that one token of a text stands for; at least LEAST_CHARACTERS."""
        assert self.tokenizer is not None
        decode, ids = self.tokenizer.decode, range(self.tokenizer.vocab_size)
        return max(LEAST_CHARACTERS, max(len(decode([token])) for token in ids))

    def most_characters(self, text: str, tokens: int) -> int | None:
        """Return how long a text of so many tokens can be, if this one is longer; else None."""
        if len(text) <= tokens * LEAST_CHARACTERS or len(text) <= tokens * self.longest_token:
            return None
        return tokens * self.longest_token

    def text_ids(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the ids of a text to continue, and those that an encoder reads."""
        assert self.tokenizer is not None
        prompts = text_prompt(self.spec, self.tokenizer, text)
        return prompts.tokens[0], None if prompts.sources is None else prompts.sources[0]

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text, with the beginning of the model's turn."""
        assert self.template is not None
        return self.template.render(messages, tools=tools, options=options)

    def embedding(self, text: str, *, pooling: Readout | None) -> Embeddings:
        """Return the vector of one text, which is not shortened: too long a one is refused."""
        found = embed(self.adapter, text, pooling=pooling)
        if found.shortened:
            raise InputError(f"a text of more than {found.limit} tokens", hint="cut it")
        return found


def _no_text(spec: ModelSpec) -> str:
    """Return why a model cannot continue a text, or ""."""
    heads = spec.head_names()
    return "" if "next" in heads else f"it predicts no next token, only: {', '.join(heads)}"


#: New tokens of an answer where none are requested.
LONGEST = LONGEST_ANSWER


# --- figures --------------------------------------------------------------------------------------


class Histogram:
    """Counts of seconds by bucket, as Prometheus reads them."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one observation."""
        place = sum(seconds > bound for bound in BUCKETS)
        self.counts[place] += 1
        self.total += seconds


@dataclass(slots=True)
class Figures:
    """What `/metrics` shows of one model, besides its batcher's own counts."""

    requests: dict[str, int] = field(default_factory=dict)  # by finish or refusal
    embedded_tokens: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    step_seconds: float = 0.0


# --- the thread -----------------------------------------------------------------------------------


class Listener:
    """One request's side of the event loop: the new tokens of its continuations, in order."""

    def __init__(self) -> None:
        self._new: list[tuple[Continuation, NewToken]] = []
        self._arrived = asyncio.Event()
        self.error: BaseException | None = None

    def put(self, new: Sequence[tuple[Continuation, NewToken]]) -> None:
        """Called by the event loop after a step or several."""
        self._new += new
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """End the waiting with an error."""
        self.error = error
        self._arrived.set()

    async def get(self) -> list[tuple[Continuation, NewToken]]:
        """Return all tokens that have arrived, as soon as there is one."""
        while not self._new and self.error is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self.error is not None:
            raise self.error
        arrived, self._new = self._new, []
        return arrived


class Engine:
    """The thread, its inbox, and what it tells the event loop."""

    def __init__(self, models: Sequence[Served], *, threads: int | None = None) -> None:
        names = [one.name for one in models]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"two models are named {name!r}", hint="--name gives other names")
        self.models = {one.name: one for one in models}
        self.writers = {one.name: one.batcher for one in models if not one.no_text}
        self.figures = {one.name: Figures() for one in models}
        self.threads = threads
        self.closing = False
        self.failed: BaseException | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._work = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._made: list[tuple[Continuation, NewToken]] = []  # not yet passed on
        self._passed_on = 0.0
        # What the event loop sent and what this thread took: each is written by one thread alone.
        self._sent = dict.fromkeys(self.models, 0)
        self._taken = dict.fromkeys(self.models, 0)

    # Called by the event loop:

    def start(self) -> None:
        """Begin to compute; must be called inside the event loop that is told of new tokens."""
        self._loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="glass-engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Let the thread end when nothing is running; new requests are refused from now on."""
        self.closing = True
        self._work.set()

    def join(self, seconds: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def waiting(self, name: str) -> int:
        """Return the number of continuations and texts to embed that nobody works on yet."""
        pending = self._sent[name] - self._taken[name]
        return pending + (self.writers[name].waiting if name in self.writers else 0)

    def count(self, name: str, outcome: str) -> None:
        """Count how a choice of a model's ended."""
        counts = self.figures[name].requests
        counts[outcome] = counts.get(outcome, 0) + 1

    def add(self, name: str, continuations: Sequence[Continuation]) -> None:
        """Queue continuations; the `data` of each is its `Listener`."""
        if self.failed is not None:
            raise MachineError("the server's engine has stopped", hint="its terminal shows why")
        self._sent[name] += len(continuations)

        def take() -> None:
            self._taken[name] += len(continuations)
            for one in continuations:
                if one.finish is None:
                    self.writers[name].add(one)

        self._send(take)

    def cancel(self, name: str, continuations: Sequence[Continuation]) -> None:
        """Take continuations out, wherever they are; those that have ended stay as they are."""

        self._each(self.writers[name].cancel, continuations)

    def hold(self, name: str, continuations: Sequence[Continuation]) -> None:
        """Make no more tokens of continuations until `go_on`, and give their slots to others."""
        self._each(self.writers[name].hold, continuations)

    def go_on(self, name: str, continuations: Sequence[Continuation]) -> None:
        """Go on with continuations that were on hold."""
        self._each(self.writers[name].go_on, continuations)

    async def call(self, name: str, work: Callable[[], T]) -> T:
        """Run a function of a model on the engine's thread, between two steps."""
        if self.failed is not None:
            raise MachineError("the server's engine has stopped", hint="its terminal shows why")
        answer: Future[T] = Future()
        self._sent[name] += 1

        def run() -> None:
            self._taken[name] += 1
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        self._send(run)
        return await asyncio.wrap_future(answer)

    def _each(
        self, work: Callable[[Continuation], None], continuations: Sequence[Continuation]
    ) -> None:
        def run() -> None:
            for one in continuations:
                work(one)

        self._send(run)

    def _send(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._work.set()

    # The thread:

    def _run(self) -> None:
        try:
            if self.threads is not None:
                torch.set_num_threads(self.threads)  # OpenMP's number belongs to the thread
            while self._advance():
                pass
        except BaseException as error:
            self.failed = error
            self._tell(self._fail_all, error)
            raise

    def _advance(self) -> bool:
        """Take the inbox, then step every model that has work; False when it is time to end."""
        self._work.clear()
        while self._inbox:
            self._inbox.popleft()()
        busy = {name: batcher for name, batcher in self.writers.items() if batcher.busy}
        if not busy:
            self._pass_on(0)
            if self.closing and not self._inbox:
                return False
            self._work.wait(LOOK_SECONDS)
            return True
        for name, batcher in busy.items():
            begin = time.perf_counter()
            new = batcher.step()
            self.figures[name].step_seconds += time.perf_counter() - begin
            self._made += new
        self._pass_on(sum(batcher.running for batcher in busy.values()))
        return True

    def _pass_on(self, running: int) -> None:
        """Tell the event loop of new tokens; not oftener than it can write them to so many.

        What someone waits for, the first token of an answer and its last, is told at once.
        """
        if not self._made:
            return
        now = time.perf_counter()
        pause = running * EVENT_SECONDS
        if pause < READING_SECONDS and not any(_is_awaited(*one) for one in self._made):
            pause = READING_SECONDS
        if now - self._passed_on >= pause or not running:
            self._tell(_deliver, self._made)
            self._made, self._passed_on = [], now

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.closing = True

    def _fail_all(self, error: BaseException) -> None:
        for batcher in self.writers.values():
            for one in batcher.everyone():
                one.data.fail(error)


def _is_awaited(row: Continuation, new: NewToken) -> bool:
    return new.finish is not None or len(row.tokens) == 1


def _deliver(new: Sequence[tuple[Continuation, NewToken]]) -> None:
    for_each: dict[Listener, list[tuple[Continuation, NewToken]]] = {}
    for one in new:
        for_each.setdefault(one[0].data, []).append(one)
    for listener, theirs in for_each.items():
        listener.put(theirs)


# --- what /metrics shows --------------------------------------------------------------------------


def metrics_text(engine: Engine) -> str:
    """Return the figures of all models in Prometheus' text format."""
    counters = (
        ("tokens_read", "counter", "Tokens of prompts and answers that went through the model."),
        ("tokens_reused", "counter", "Tokens of prompts that a slot held already."),
        ("tokens_generated", "counter", "Tokens that were sampled."),
        ("tokens_embedded", "counter", "Tokens of texts that vectors were made of."),
        ("steps", "counter", "Passes over the weights."),
        ("step_seconds", "counter", "Seconds in these passes and in sampling."),
        ("running", "gauge", "Sequences with a slot."),
        ("waiting", "gauge", "Sequences that wait for a slot."),
        ("slots", "gauge", "Slots."),
        ("cache_bytes", "gauge", "The most bytes that keys and values take."),
    )
    lines = []
    for name, kind, help_text in counters:
        full = f"glass_{name}_total" if kind == "counter" else f"glass_{name}"
        lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}"]
        for served in engine.models.values():
            found = _figures(engine, served).get(name)
            if found is not None:
                lines.append(f'{full}{{model="{served.name}"}} {found}')
    full = "glass_requests_total"
    lines += [f"# HELP {full} Choices by how they ended.", f"# TYPE {full} counter"]
    for name, figures in engine.figures.items():
        for outcome, count in sorted(figures.requests.items()):
            lines.append(f'{full}{{model="{name}",outcome="{outcome}"}} {count}')
    full = "glass_first_token_seconds"
    lines += [f"# HELP {full} From a request to its first token.", f"# TYPE {full} histogram"]
    for name, figures in engine.figures.items():
        lines += _histogram(full, name, figures.first_token)
    return "\n".join(lines) + "\n"


def _figures(engine: Engine, served: Served) -> dict[str, float]:
    """Return the figures of one model by name; those of the batch where it continues text."""
    own = engine.figures[served.name]
    figures: dict[str, float] = {
        "tokens_embedded": own.embedded_tokens,
        "waiting": engine.waiting(served.name),
    }
    if served.no_text:
        return figures
    batcher = served.batcher
    return figures | {
        "tokens_read": batcher.read_tokens,
        "tokens_reused": batcher.reused_tokens,
        "tokens_generated": batcher.made_tokens,
        "steps": batcher.steps,
        "step_seconds": own.step_seconds,
        "running": batcher.running,
        "slots": batcher.slots.slots,
        "cache_bytes": batcher.slots.memory_bytes,
    }


def _histogram(full: str, name: str, found: Histogram) -> list[str]:
    lines, sum_ = [], 0
    for bound, count in zip((*BUCKETS, math.inf), found.counts, strict=True):
        sum_ += count
        shown = "+Inf" if math.isinf(bound) else f"{bound:g}"
        lines.append(f'{full}_bucket{{model="{name}",le="{shown}"}} {sum_}')
    lines.append(f'{full}_sum{{model="{name}"}} {found.total}')
    lines.append(f'{full}_count{{model="{name}"}} {sum_}')
    return lines
