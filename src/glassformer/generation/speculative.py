"""Exact speculation: read several guessed tokens at once, and use the logits of the right guesses.

`SpeculativeStepper` is a `Stepper` around another one. When a token is added, it guesses the next
ones from the text so far (`Ngrams`) or by a smaller or quantized model (`ModelDraft`), reads all of
them in one pass and keeps the logits after each. While the tokens that decoding then chooses are
the guessed ones, their logits are there already; at the first other token the rest is forgotten.
Whoever chooses gets the logits after the same tokens as without speculation, so the choice is the
same too, greedy or sampled (`samplers.draw` depends on logits, seed, row and step alone): nothing
is accepted by chance, and no distribution has to be corrected.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from glassformer.generation.samplers import forbid, greedy, likeliest, logprobs_of
from glassformer.generation.turns import Turns
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Speculation, Stepper
from glassformer.spec.errors import InputError
from glassformer.spec.state import State

# B rows (1 while guesses are read), R tokens read at once, V vocab

#: Lengths of the n-grams that are looked up, longest first.
LONGEST, SHORTEST = 4, 2

#: Tokens guessed at once: at first, at most.
FIRST, MOST = 4, 16

#: Plain passes that are timed before the first guess.
TIMED = 3

#: Passes with guesses over which the gain is measured.
WINDOW = 8

#: Tokens made without a guess after guesses did not pay: at first, at most (doubled each time).
REST, LONGEST_REST = 32, 512

#: Greedy tokens that are made in one call where nothing can be guessed.
UNGUESSED = 4


class Ngrams:
    """A text that is continued as its own last few tokens were continued before."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # an n-gram's latest continuation
        self.add(ids)

    def add(self, ids: Iterable[int]) -> None:
        """Append tokens; n-grams before each of them now have a continuation."""
        for token in ids:
            place = len(self.ids)
            for n in range(SHORTEST, min(LONGEST, place) + 1):
                self._after[tuple(self.ids[place - n :])] = place
            self.ids.append(token)

    def guess(self, count: int) -> list[int]:
        """Return `count` tokens, or none where no n-gram at the end has been there before.

        A copy may run into itself: after `a b a b` comes `a b a b a ...`.
        """
        for n in range(min(LONGEST, len(self.ids)), SHORTEST - 1, -1):
            place = self._after.get(tuple(self.ids[-n:]))
            if place is not None:
                period = len(self.ids) - place
                return [self.ids[place + i % period] for i in range(count)]
        return []


class Draft(Protocol):
    """A text that can be continued by guessing."""

    def add(self, ids: Iterable[int]) -> None:
        """Append tokens that were chosen."""

    def guess(self, count: int) -> list[int]:
        """Return at most `count` tokens that may follow."""


class ModelDraft:
    """A text that another model of the same vocabulary continues, by its likeliest tokens."""

    def __init__(self, stepper: Stepper, ids: Iterable[int]) -> None:
        self.stepper = Turns(stepper)  # wrong guesses are what a turn does not share with the text
        self.ids = list(ids)

    def add(self, ids: Iterable[int]) -> None:
        self.ids += ids

    def guess(self, count: int) -> list[int]:
        room = self.stepper.max_seq_len - len(self.ids)
        if min(count, room) < 1:
            return []
        logits_1V, past = self.stepper.start(Prompts.of([self.ids]), room=room)
        guesses = [int(greedy(logits_1V))]
        while len(guesses) < min(count, room):
            logits_1V = self.stepper.step(torch.tensor(guesses[-1:]), past=past)
            guesses.append(int(greedy(logits_1V)))
        return guesses


class Pace:
    """How many tokens to guess, by what guesses have brought; none while they do not pay."""

    def __init__(self, facts: Speculation) -> None:
        self.facts = facts
        self.count = FIRST
        self.untimed, self.resting = TIMED, 0
        self._plain = math.inf  # seconds of a token without guesses, the shortest of late
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # tokens, seconds
        self._rest = REST

    @property
    def wanted(self) -> int:
        """The number of tokens to guess now."""
        return 0 if self.untimed or self.resting else self.count

    def plain(self, tokens: int, seconds: float) -> None:
        """Note tokens that were made without guesses."""
        self._plain = min(1.1 * self._plain, seconds / tokens)  # steps of a longer text take longer
        self.untimed = max(0, self.untimed - 1)
        self.resting = max(0, self.resting - tokens)

    def guessed(self, guessed: int, right: int, seconds: float) -> None:
        """Note a pass with guesses; rest if the last ones took longer than plain tokens."""
        self.count = min(2 * self.count, MOST) if right == guessed else max(SHORTEST, right + 1)
        self._recent.append((right + 1, seconds))
        if len(self._recent) < WINDOW:
            return
        tokens = sum(made for made, _ in self._recent)
        if sum(spent for _, spent in self._recent) > tokens * self._plain:
            self._recent.clear()
            self.facts.rests += 1
            self.resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        else:
            self._rest = REST


@dataclass(slots=True)
class SpeculativePast(State):
    """The inner state; for one row also its text and the guesses that were read, with logits.

    `room` is the number of positions left. The last pass had `guessed` guesses, of which `right`
    have been chosen so far, and took `seconds`.
    """

    inner: State
    text: Draft | None
    room: int
    guesses: deque[tuple[int, Tensor]] = field(default_factory=deque)
    guessed: int = 0
    right: int = 0
    seconds: float = 0.0

    @property
    def next_guess(self) -> int | None:
        """The next guess whose logits are known; None without any."""
        return self.guesses[0][0] if self.guesses else None

    def forget(self) -> None:
        """Take back the guesses that were not chosen."""
        if self.guesses:
            (read,) = self.inner.lengths
            self.inner.rewind([read - len(self.guesses)])
            self.guesses.clear()

    def reorder(self, rows: Sequence[int]) -> None:
        if list(rows) != [0]:  # several rows from now on
            self.forget()
            self.text = None
        self.inner.reorder(rows)


class SpeculativeStepper(Stepper):
    """A stepper that reads guesses ahead, for one row at a time; `facts` are of the last prompt.

    An inner stepper whose states only go forward is used as it is, and so it is for several rows;
    `facts.why_not` then says so.
    """

    facts: Speculation

    def __init__(
        self,
        inner: Stepper,
        *,
        draft: Stepper | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # The inner one has checked the spec.
        self.inner, self.clock = inner, clock
        self.draft = draft
        if draft is not None:
            if draft.vocab_size != inner.vocab_size or draft.source_vocab is not None:
                raise InputError(
                    f"a draft model of {draft.vocab_size} tokens for one of {inner.vocab_size}",
                    hint="a decoder of the same tokenizer",
                )
            if draft.forward_only:
                raise InputError(
                    f"a draft by {type(draft).__name__}, which {draft.forward_only}",
                    hint="a decoder of ours",
                )
        self.vocab_size, self.max_seq_len = inner.vocab_size, inner.max_seq_len
        self.source_vocab = inner.source_vocab
        self.facts = Speculation()
        self.pace = Pace(self.facts)
        self._count()

    def _count(self) -> None:
        self.encoder_calls, self.positions = self.inner.encoder_calls, self.inner.positions
        self.reused = self.inner.reused

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, SpeculativePast]:
        """Read the prompts; a source of the same vocabulary is text to guess from, too."""
        self.facts = Speculation()
        self.pace = Pace(self.facts)
        logits_BV, past = self.inner.start(prompts, room=room)
        self._count()
        text: Draft | None = None
        if self.inner.forward_only:
            self.facts.why_not = f"{type(self.inner).__name__} {self.inner.forward_only}"
        elif len(prompts) > 1:
            self.facts.why_not = f"{len(prompts)} rows at once"
        elif self.draft is not None:
            text = ModelDraft(self.draft, prompts.tokens[0])
        else:
            sources = prompts.sources if self.source_vocab == self.vocab_size else None
            text = Ngrams([*(sources[0] if sources else ()), *prompts.tokens[0]])
        return logits_BV, SpeculativePast(past, text, room)

    def step(self, tokens_B: Tensor, *, past: SpeculativePast) -> Tensor:
        """Add one token: by a pass that reads guesses, too, or without one after a right guess."""
        if past.text is None:
            logits_BV = self.inner.step(tokens_B, past=past.inner)
            self._count()
            return logits_BV
        (token,) = tokens_B.tolist()
        if token == past.next_guess:
            self._add(past, token)
            past.right += 1
            self.facts.right += 1
            return past.guesses.popleft()[1]
        self._settle(past)
        self._add(past, token)
        begin = self.clock()
        guesses = past.text.guess(min(self.pace.wanted, past.room - 1))
        return self._pass(tokens_B, past, guesses, begin)

    def _add(self, past: SpeculativePast, *tokens: int) -> None:
        assert past.text is not None
        past.text.add(tokens)
        past.room -= len(tokens)
        self.facts.tokens += len(tokens)

    def _settle(self, past: SpeculativePast) -> None:
        """End the last pass: forget what was guessed wrong, and note what it has brought."""
        past.forget()
        if past.guessed:
            self.pace.guessed(past.guessed, past.right, past.seconds)
        past.guessed = past.right = 0

    def _pass(
        self, tokens_B: Tensor, past: SpeculativePast, guesses: list[int], begin: float
    ) -> Tensor:
        """Read a token and guesses after it; return the logits (1, V) after the token."""
        self.facts.passes += 1
        if guesses:
            read = [*tokens_B.tolist(), *guesses]
            logits_RV = self.inner.extend(read, past=past.inner, every=True)
            past.guesses.extend(zip(guesses, logits_RV[1:].split(1), strict=True))
        else:
            logits_RV = self.inner.step(tokens_B, past=past.inner)
        if logits_RV.is_cuda:
            logits_RV[0, 0].item()  # waits for the pass, which is timed
        self._count()
        past.guessed, past.seconds = len(guesses), self.clock() - begin
        self.facts.guessed += len(guesses)
        if not guesses:
            self.pace.plain(1, past.seconds)
        return logits_RV[:1]

    def run_greedy(
        self,
        tokens_B: Tensor,
        *,
        past: SpeculativePast,
        count: int,
        ends: Sequence[int],
        closed: Sequence[int],
        logprobs: bool,
        seconds: float,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Choose the tokens of one pass, or several by the inner loop where nothing is guessed."""
        begin, guesses, most = self.clock(), [], count
        if past.text is not None:
            self._settle(past)
            self._add(past, *tokens_B.tolist())
            guesses = past.text.guess(min(self.pace.wanted, past.room - 1))
            most = min(count, max(1 if self.pace.untimed else UNGUESSED, self.pace.resting))
        if not guesses:
            made = self.inner.run_greedy(
                tokens_B,
                past=past.inner,
                count=most,
                ends=ends,
                closed=closed,
                logprobs=logprobs,
                seconds=seconds,
            )
            self._count()
            if past.text is None:
                return made
            if made[0]:
                chosen = [token for (token,) in made[0]]
                self._add(past, *chosen[:-1])  # the last one is not added yet
                self.facts.passes += len(chosen)
                self.pace.plain(len(chosen), self.clock() - begin)
                return made
        logits_1V = self._pass(tokens_B, past, guesses, begin)
        tokens: list[list[int]] = []
        values: list[list[float]] = []
        while True:
            best_1 = likeliest(forbid(logits_1V, closed))
            tokens.append(best_1.tolist())
            value_1 = logprobs_of(logits_1V, best_1.clamp(min=0)) if logprobs else None
            values.append([math.nan] if value_1 is None else value_1.tolist())
            (token,) = tokens[-1]
            if len(tokens) == count or token in ends or token != past.next_guess:
                break
            logits_1V = self.step(best_1, past=past)  # a right guess: no pass
        past.seconds = self.clock() - begin
        return tokens, values
