"""Continuous batching: sequences join and leave between steps, and share the pass over the weights.

A `Batcher` has a queue and some slots of memory. A step takes one new token of every sequence that
is being continued, and parts of the prompts that are being read, up to `step_tokens` together: a
long prompt is read in pieces while the others go on. What a slot holds stays after its sequence
has ended, so that a prompt that begins alike is read from where it differs, also when the other
one is still going on (the positions are copied).

No sequence depends on its company: random numbers come from its own seed, its logits from `slots`,
which see there, and it is sampled alone. There are no threads here and no clock.

An owner who has no slot waits for no other one's answer to end: where slots read a prompt in any
pieces to the same bits, a sequence of the owner with the most slots is put back into the queue. It
gets the next free slot, and is read again, prompt and tokens, but for what a spare slot kept. A
sequence on `hold` (its reader does not keep up) takes no part in a step, and gives its slot to
whoever waits.

Over `AheadSlots` (a GPU) a step is launched before the tokens of the one before it are seen, so
that the device never waits for this code: what ended meanwhile is dropped. Sequences with the same
settings are sampled together there. The steps of one sequence are the same, and so are its random
numbers; its logits may differ in the last bits with the size of the batch.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.choosing import NOTHING, is_plain, uniforms
from glassformer.generation.constraint import Constraint
from glassformer.generation.loop import Row, allowed, check_something_left, check_tokens
from glassformer.generation.samplers import (
    Together,
    as_array,
    likeliest_of,
    logprobs_of,
    make_sampler,
    seen_in,
    settings_of,
)
from glassformer.generation.slots import OneByOneSlots
from glassformer.generation.streaming import NewToken, RowText
from glassformer.generation.text_stream import TextStream
from glassformer.models.prompts import Prompts, shared_length
from glassformer.models.stepping import AheadSlots, Slots, Span
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError

# V vocab

#: Tokens that a step reads at most; the sequences that go on come first.
STEP_TOKENS = 128
#: Prompts get at least this many of these tokens, however many sequences go on.
LEAST_OF_PROMPTS = 16
#: What a step reads at most on a GPU, which needs more rows to be busy.
GPU_STEP_TOKENS = 4_096
#: Tokens of a prompt that are scored in a step at most: each takes a row of logits.
MOST_SCORED = 128
#: Samplers of different settings that are kept.
MOST_SETTINGS = 256
#: Tokens that must be saved before a prompt waits for another one that begins alike.
WORTH_WAITING = 16
#: New tokens after which an owner's only sequence may be put back; several may be at any time.
TURN = 64
#: Seconds that greedy sequences go on in one call: what arrives meanwhile waits for its end.
GREEDY_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Shift:
    """What is added to logits before any other rule, by token, as OpenAI's interface defines it.

    `bias` is added always; `presence` is taken away from tokens that the continuation has so far,
    `frequency` once for each time that it has them. Prompts do not count.
    """

    bias: tuple[tuple[int, float], ...] = ()
    presence: float = 0.0
    frequency: float = 0.0

    def start(self, vocab_size: int) -> Tensor | None:
        """Return (1, V), to be added to the first logits; None if nothing ever is."""
        if not (self.bias or self.presence or self.frequency):
            return None
        shift_1V = torch.zeros(1, vocab_size)
        for token, value in self.bias:
            if not 0 <= token < vocab_size:
                raise InputError(f"a bias on token {token}", hint=f"0 to {vocab_size - 1}")
            shift_1V[0, token] = value
        return shift_1V

    def taken(self, shift_1V: Tensor, token: int, *, is_first: bool) -> None:
        """Change (1, V) after a token; `is_first`: it was not there before."""
        shift_1V[0, token] -= self.frequency + (self.presence if is_first else 0.0)


@dataclass(eq=False, slots=True)
class Continuation:
    """One prompt and its continuation, from `Batcher.add` until `finish` is set.

    `owner` shares the queue fairly with other owners; `data` is the caller's. `scores` are the
    log-probabilities of the prompt's tokens from the second on, each with the likeliest ones, where
    they were requested: then the prompt is read from its beginning, whatever a slot holds.
    """

    prompt: tuple[int, ...]
    spec: DecodeSpec
    row: Row
    text: RowText | None
    logprobs: bool
    top_logprobs: int
    source: tuple[int, ...] | None
    owner: str
    data: Any
    sample: Callable[..., Tensor]
    together: Together | None  # its sampler with others, if only logits decide the next token
    seen_1V: NDArray[np.bool_] | None
    shift: Shift
    shift_1V: Tensor | None
    tokens: list[int] = field(default_factory=list)
    slot: int | None = None
    since: int = 0  # tokens that it had when it got the slot
    was_put_back: bool = False
    on_hold: bool = False
    read: int = 0  # tokens whose keys and values are in the slot
    reused: int = 0  # of these, the ones that were there already
    scores: "list[Extra] | None" = None
    ahead: int = 0  # tokens that were launched and not seen yet
    finish: str | None = None

    def shown(self, new: Sequence[NewToken]) -> str:
        """Return the text that the next tokens, in order, let be shown; "" without a tokenizer.

        A step makes no texts: whoever shows them does, several tokens at once where that is enough.
        """
        if self.text is None:
            return ""
        last = new[-1]
        ids = [one.token for one in new]
        return self.text.push(*ids, is_end=last.is_end, is_last=last.finish is not None)

    @property
    def unread(self) -> int:
        """Tokens that are not in the slot yet."""
        return len(self.prompt) + len(self.tokens) - self.read

    @property
    def is_reading(self) -> bool:
        """True if tokens must be read before the next one can be sampled."""
        return not self.tokens or self.unread > 1

    @property
    def known(self) -> tuple[int, ...]:
        """The prompt and the tokens so far."""
        return (*self.prompt, *self.tokens)


@dataclass(slots=True)
class _Held:
    """What a slot holds: the ids of its positions, who uses it, and when it was last used."""

    ids: list[int] = field(default_factory=list)
    user: Continuation | None = None
    used: int = 0


class Batcher:
    """A queue and a batch over `slots`; `step` advances every sequence that has a slot.

    A sequence whose logits are not numbers ends with the finish `error`; the others go on.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        tokenizer: Tokenizer | None = None,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        if step_tokens < 1:
            raise InputError(f"step_tokens {step_tokens}", hint="at least 1")
        self.slots = slots
        self.tokenizer = tokenizer
        self.step_tokens = step_tokens
        self.read_tokens = self.reused_tokens = self.made_tokens = self.steps = 0
        self._held = [_Held() for _ in range(slots.slots + slots.spare)]
        self._queue: OrderedDict[str, deque[Continuation]] = OrderedDict()
        self._aside: set[Continuation] = set()  # on hold, and without a slot
        #: The number of sequences without a slot; another thread may read it.
        self.waiting = 0
        self._flight: _Flight | None = None
        self._together: dict[tuple[object, ...], Together] = {}

    # --- the queue --------------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Sequence[int],
        *,
        spec: DecodeSpec = DecodeSpec(),  # noqa: B008  frozen
        constraint: Constraint | None = None,
        shift: Shift = Shift(),  # noqa: B008  frozen
        row: int = 0,
        logprobs: bool = False,
        top_logprobs: int = 0,
        score_prompt: bool = False,
        is_continued: bool = True,
        source: Sequence[int] | None = None,
        owner: str = "",
        data: Any = None,
    ) -> Continuation:
        """Check a prompt and its options, and return the sequence, which `add` puts in the queue.

        `row` and the spec's seed decide the random numbers: row 0 samples as `generate` does.
        `score_prompt` fills `scores`; a prompt that is not continued is read alone, and ends with
        the finish `length` and no token.
        """
        prompts = Prompts.of([list(prompt)], sources=None if source is None else [list(source)])
        prompts.check(self.slots)
        vocab_size = self.slots.vocab_size
        check_tokens(vocab_size, forbidden=spec.forbidden, forced=spec.forced, eos=spec.eos)
        early_end = set(spec.eos) if spec.min_new_tokens > 1 else set()
        check_something_left(vocab_size, {*spec.forbidden, *early_end})
        if spec.stop and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer", hint="use eos")
        (limit,) = prompts.room(self.slots, spec.max_new_tokens)
        bounded = None
        if constraint is not None:
            bounded = constraint.within(
                shortest=spec.min_new_tokens,
                longest=limit,
                vocab_size=vocab_size,
                eos=spec.eos,
                forbidden=spec.forbidden,
                forced=spec.forced,
            )
        stops = TextStream(self.tokenizer) if spec.stop and self.tokenizer is not None else None
        seen_1V = None
        if spec.repetition_penalty != 1.0:
            seen_1V = seen_in(prompts, vocab_size)
        shift_1V = shift.start(vocab_size)
        together = None
        alone = bounded is not None or shift_1V is not None or logprobs or top_logprobs
        if is_plain(spec) and not alone:
            together = self._sampler_of(spec)
        return Continuation(
            prompt=prompts.tokens[0],
            spec=spec,
            row=Row(row, limit if is_continued else 0, spec, bounded, stops),
            text=None if self.tokenizer is None else RowText(spec, self.tokenizer),
            logprobs=logprobs or top_logprobs > 0,
            top_logprobs=min(top_logprobs, vocab_size),
            source=None if prompts.sources is None else prompts.sources[0],
            owner=owner,
            data=data,
            sample=make_sampler(spec),
            together=together,
            seen_1V=seen_1V,
            shift=shift,
            shift_1V=shift_1V,
            scores=[] if score_prompt else None,
        )

    def _sampler_of(self, spec: DecodeSpec) -> Together:
        """Return the one sampler of all sequences with these settings; called by any thread."""
        key = settings_of(spec)
        if len(self._together) >= MOST_SETTINGS:
            self._together.clear()
        return self._together.setdefault(key, Together(spec))

    def add(self, sequence: Continuation) -> Continuation:
        """Put a prepared sequence at the end of its owner's queue."""
        self._queue.setdefault(sequence.owner, deque()).append(sequence)
        self.waiting += 1
        return sequence

    def cancel(self, sequence: Continuation) -> None:
        """Take a sequence out of the queue or the batch; its slot is free from now on."""
        if sequence.finish is not None:
            return
        sequence.finish = "cancelled"
        if sequence.slot is not None:
            self._release(sequence)
            return
        self._aside.discard(sequence)
        line = self._queue.get(sequence.owner)
        if line is not None and sequence in line:
            line.remove(sequence)
            self.waiting -= 1
            if not line:
                del self._queue[sequence.owner]

    @property
    def _puts_back(self) -> bool:
        return self.slots.cuts_prompts and not isinstance(self.slots, AheadSlots)

    def hold(self, sequence: Continuation) -> None:
        """Make no tokens of a running sequence until `go_on`; nothing where it keeps its slot."""
        if self._puts_back and sequence.slot is not None and sequence.finish is None:
            sequence.on_hold = True

    def go_on(self, sequence: Continuation) -> None:
        """Go on with a sequence that was on hold."""
        sequence.on_hold = False
        if sequence in self._aside:
            self._aside.remove(sequence)
            self._wait_first(sequence)

    @property
    def running(self) -> int:
        """The number of sequences with a slot."""
        return sum(held.user is not None for held in self._held)

    @property
    def busy(self) -> bool:
        """True if a step has something to do."""
        going = any(held.user is not None and not held.user.on_hold for held in self._held)
        return bool(self._queue) or going or self._flight is not None

    def everyone(self) -> list[Continuation]:
        """Return the sequences that wait or run."""
        running = [held.user for held in self._held if held.user is not None]
        return [*running, *self._aside, *(one for line in self._queue.values() for one in line)]

    # --- a step -----------------------------------------------------------------------------------

    def step(self) -> list[tuple[Continuation, NewToken]]:
        """Give free slots to the queue, read, and sample: the new tokens of those who got one."""
        self._admit()
        if isinstance(self.slots, AheadSlots):
            before, self._flight = self._flight, self._launch(self.slots)
            return [] if before is None else self._landed(before)
        users = [one.user for one in self._held if one.user is not None and not one.user.on_hold]
        spans = list(self._spans(users))
        if not spans:
            return []
        if _all_greedy(users) and (new := self._greedy_steps(spans)):
            return new
        logits_RV = self.slots.read([span for _, span in spans])
        self.steps += 1
        new, end = [], 0
        for user, span in spans:
            begin, end = end, end + span.rows
            self._read(user, span, logits_RV[begin:end])
            if user.unread == 0:
                new.append((user, self._sampled(user, logits_RV[end - 1 : end])))
                if user.finish is not None:
                    self._release(user)
        return new

    def _read(self, user: Continuation, span: Span, logits_RV: Tensor) -> None:
        """Record that a span is in its slot; score the prompt's tokens that follow its own."""
        self._held_by(user).ids += span.tokens
        user.read += len(span.tokens)
        self.read_tokens += len(span.tokens)
        if span.scored:
            assert user.scores is not None
            following = user.prompt[span.start + 1 : span.start + 1 + len(span.tokens)]
            for token, logits_V in zip(following, logits_RV, strict=False):  # the last has none
                user.scores.append(_logprob(logits_V, token, user.top_logprobs))

    def _greedy_steps(
        self, spans: Sequence[tuple[Continuation, Span]]
    ) -> list[tuple[Continuation, NewToken]]:
        """Make several steps in one call of the slots, where they offer it: until someone ends."""
        spec = spans[0][0].spec
        made = self.slots.run_greedy(
            [span for _, span in spans],
            count=min(user.row.limit - user.row.made for user, _ in spans),
            ends=spec.eos,
            closed=spec.forbidden,
            seconds=GREEDY_SECONDS,
        )
        self.steps += len(made)
        self.read_tokens += len(made) * len(spans)
        new = []
        for tokens in made:
            for (user, _), token in zip(spans, tokens, strict=True):
                self._held_by(user).ids.append(user.tokens[-1])
                user.read += 1
                new.append((user, self._taken(user, token)))
                if user.finish is not None:
                    self._release(user)
        return new

    def run(self) -> Iterator[tuple[Continuation, NewToken]]:
        """Step until nothing is left."""
        while self.busy:
            yield from self.step()

    def _spans(self, users: Sequence[Continuation]) -> Iterator[tuple[Continuation, Span]]:
        """Yield the next token of those who go on, then shares of the prompts."""
        prompts = []
        for user in users:
            if user.is_reading:
                prompts.append(user)
            else:
                yield user, self._span(user, 1)
        yield from self._shares(prompts, self.step_tokens - (len(users) - len(prompts)))

    def _shares(
        self, prompts: Sequence[Continuation], room: int
    ) -> Iterator[tuple[Continuation, Span]]:
        """Yield parts of prompts that together fill the room, or a little of each."""
        room = max(room, LEAST_OF_PROMPTS)
        if not self.slots.cuts_prompts:  # one prompt in a step, complete
            prompts, room = prompts[:1], max((len(user.prompt) for user in prompts), default=0)
        # The shortest first, so that what they leave goes to the others.
        for left, user in zip(
            range(len(prompts), 0, -1), sorted(prompts, key=lambda one: one.unread), strict=True
        ):
            count = min(user.unread, max(room // left, 1))
            if user.scores is not None and self.slots.cuts_prompts:
                count = min(count, MOST_SCORED)
            room = max(room - count, 0)
            yield user, self._span(user, count)

    def _span(self, user: Continuation, count: int) -> Span:
        assert user.slot is not None
        if user.tokens:  # what was put back is read again, and its prompt is scored already
            unread = user.known[user.read :] if user.unread > 1 else (user.tokens[-1],)
            return Span(user.slot, user.read, unread[:count])
        tokens = user.prompt[user.read : user.read + count]
        return Span(user.slot, user.read, tokens, scored=user.scores is not None)

    def _sampled(self, user: Continuation, logits_1V: Tensor) -> NewToken:
        """Choose the next token of one sequence; set its `finish` if it was the last."""
        token, extra = self._chosen(user, logits_1V)
        return self._taken(user, token, *extra)

    def _chosen(self, user: Continuation, logits_1V: Tensor) -> "tuple[int, Extra]":
        """Return the next token of one sequence, its log-probability and the likeliest ones."""
        row = user.row
        shifted_1V = logits_1V
        if user.shift_1V is not None:
            shifted_1V = logits_1V.float() + user.shift_1V.to(logits_1V.device)
        found_1 = user.sample(
            as_array(shifted_1V),
            step=row.made,
            rows=[row.name],
            seen_BV=user.seen_1V,
            allow_BV=allowed([row], made=row.made),
        )
        token = int(found_1[0])
        if not user.logprobs or token == NOTHING:
            return token, (float("nan"), ())
        return token, _logprob(logits_1V[0], token, user.top_logprobs)

    def _taken(
        self,
        user: Continuation,
        token: int,
        logprob: float = float("nan"),
        top: tuple[tuple[int, float], ...] = (),
    ) -> NewToken:
        """Add a token to a sequence; set its `finish` if it was the last."""
        row = user.row
        if token == NOTHING or row.limit == 0:
            user.finish = "error" if token == NOTHING else "length"
            return NewToken(row.name, NOTHING, logprob, "", True, user.finish)
        row.take(token)
        self.made_tokens += 1
        user.finish = row.finish
        if user.shift_1V is not None:
            user.shift.taken(user.shift_1V, token, is_first=token not in user.tokens)
        user.tokens.append(token)
        if user.seen_1V is not None:
            user.seen_1V[0, token] = True
        return NewToken(row.name, token, logprob, "", token in user.spec.eos, user.finish, top)

    # --- a step ahead -----------------------------------------------------------------------------

    @torch.inference_mode()
    def _launch(self, slots: AheadSlots) -> "_Flight | None":
        """Start the next step of everyone whose next token is decided by the device alone."""
        users = [held.user for held in self._held if held.user is not None]
        going = []
        for user in users:
            ready = user.read >= len(user.prompt) and (user.together is not None or not user.ahead)
            if ready and user.row.made + user.ahead < user.row.limit:
                going.append(user)
        prompts = [user for user in users if user.read < len(user.prompt)]
        spans = list(self._shares(prompts, self.step_tokens - len(going)))
        if not (going or spans):
            return None
        self.steps += 1
        done, parts = [], []
        if spans:
            logits_RV = slots.read([span for _, span in spans])
            lines, end = [], 0
            for user, span in spans:
                begin, end = end, end + span.rows
                self._read(user, span, logits_RV[begin:end])
                if user.read == len(user.prompt):
                    done.append(user)
                    lines.append(end - 1)
            if lines:
                parts.append(logits_RV[slots.there(lines)])
        if going:
            ends = [user.read + 1 for user in going]
            parts.append(slots.advance([_slot(user) for user in going], ends))
            self.read_tokens += len(going)
            for user in going:
                user.read += 1
        made = [*done, *going]
        if not made:
            return _Flight([], [], list)
        logits_RV = parts[0] if len(parts) == 1 else torch.cat(parts)
        tokens_R, extra = self._sampled_together(slots, made, logits_RV)
        slots.keep([_slot(user) for user in made], tokens_R)
        for user in made:
            user.ahead += 1
        return _Flight(made, extra, _fetched(tokens_R))

    def _sampled_together(
        self, slots: AheadSlots, made: Sequence[Continuation], logits_RV: Tensor
    ) -> tuple[Tensor, "list[Extra]"]:
        """Choose everyone's next token: plain ones by group of settings, the others alone."""
        groups: dict[int, list[int]] = {}
        others = []
        for line, user in enumerate(made):
            if user.together is not None:
                groups.setdefault(id(user.together), []).append(line)
            else:
                others.append(line)
        tokens_R = torch.empty(len(made), dtype=torch.long, device=slots.device)
        for lines in groups.values():
            users = [made[line] for line in lines]
            sample = users[0].together
            assert sample is not None
            share_B1 = None
            if not sample.spec.greedy:
                shares = uniforms(
                    [user.spec.seed for user in users],
                    [user.row.name for user in users],
                    [user.row.made + user.ahead for user in users],
                )
                share_B1 = slots.there(np.array(shares)[:, None])
            if len(lines) == len(made):
                tokens_R = sample(logits_RV, share_B1)
            else:
                lines_B = slots.there(lines)
                tokens_R[lines_B] = sample(logits_RV[lines_B], share_B1)
        extra: list[Extra] = [(float("nan"), ())] * len(made)
        for line in others:
            user = made[line]
            tokens_R[line], extra[line] = self._chosen(user, logits_RV[line : line + 1])
        return tokens_R, extra

    def _landed(self, flight: "_Flight") -> list[tuple[Continuation, NewToken]]:
        """See what a launched step chose; who had ended before it is passed over."""
        new = []
        for user, token, extra in zip(flight.users, flight.tokens(), flight.extra, strict=True):
            if user.finish is not None:
                continue
            user.ahead -= 1
            if user.tokens:  # it was read by this step
                self._held_by(user).ids.append(user.tokens[-1])
            new.append((user, self._taken(user, token, *extra)))
            if user.finish is not None:
                self._release(user)
        return new

    def _held_by(self, user: Continuation) -> _Held:
        return self._held[_slot(user)]

    # --- slots ------------------------------------------------------------------------------------

    def _release(self, user: Continuation) -> None:
        assert user.slot is not None
        held = self._held[user.slot]
        assert held.user is user
        held.user, held.used = None, self.steps

    def _admit(self) -> None:
        """Give free slots to waiting sequences, owner by owner; make room for new owners."""
        passed: set[str] = set()  # owners whose first one waits for another prompt's beginning
        while self._queue:
            users = [held.user for held in self._held if held.user is not None]
            is_full = len(users) == self.slots.slots
            counts = Counter(user.owner for user in users)
            back = self._least_loss(users, counts) if is_full else None
            if is_full and back is None:
                return
            owner = next(
                (
                    owner
                    for owner, line in self._queue.items()
                    if owner not in passed
                    and (
                        back is None or back.on_hold or not (counts[owner] or line[0].was_put_back)
                    )
                ),
                None,
            )
            if owner is None:
                return
            line = self._queue[owner]
            if self._should_wait(line[0]):
                passed.add(owner)
                continue
            new = line.popleft()
            self._queue.move_to_end(owner)
            if not line:
                del self._queue[owner]
            if back is not None:
                self._put_back(back)
            self._place(new)
            self.waiting -= 1

    def _least_loss(self, users: list[Continuation], counts: Counter[str]) -> Continuation | None:
        """Return the sequence to put back for an owner who has no slot; None if none may be."""
        if not self._puts_back:
            return None
        able = [
            user
            for user in users
            if (user.on_hold or counts[user.owner] > 1 or len(user.tokens) - user.since >= TURN)
            and (user.tokens or user.scores is None)
        ]

        def loss(user: Continuation) -> tuple[bool, int, int]:
            return not user.on_hold, -counts[user.owner], len(user.prompt) + len(user.tokens)

        return min(able, key=loss, default=None)

    def _put_back(self, user: Continuation) -> None:
        """Take a sequence's slot; unless it is on hold, it is the next one to get a slot."""
        self._release(user)
        user.slot, user.was_put_back = None, True
        if user.on_hold:
            self._aside.add(user)
        else:
            self._wait_first(user)

    def _wait_first(self, user: Continuation) -> None:
        """Let a sequence wait for the next free slot."""
        self._queue.setdefault(user.owner, deque()).appendleft(user)
        self._queue.move_to_end(user.owner, last=False)
        self.waiting += 1

    def _should_wait(self, user: Continuation) -> bool:
        """Return whether another sequence reads the beginning of this prompt."""
        if not self._reuses(user):
            return False
        shared = max(shared_length(held.ids, user.prompt[:-1]) for held in self._held)
        return any(
            shared_length(held.user.prompt, user.prompt[:-1]) >= shared + WORTH_WAITING
            for held in self._held
            if held.user is not None
            and not held.user.on_hold
            and held.user.read < len(held.user.prompt)
        )

    def _reuses(self, user: Continuation) -> bool:
        return self.slots.cuts_prompts and (user.scores is None or bool(user.tokens))

    def _place(self, user: Continuation) -> None:
        """Give a sequence the slot in which it reads least."""
        free = [place for place, held in enumerate(self._held) if held.user is None]
        target = min(
            free, key=lambda place: (len(self._held[place].ids) > 0, self._held[place].used)
        )
        shared, source = 0, target
        known = user.known
        if self._reuses(user):
            # The last token is always read: its logits are the result.
            for place, held in enumerate(self._held):
                found = shared_length(held.ids, known[:-1])
                if found > shared:
                    shared, source = found, place
        if source in free and 2 * shared >= len(self._held[source].ids):
            target = source
        elif shared < self.slots.worth_copying:
            shared = 0
        if source != target and shared:
            self.slots.copy(source, target, length=shared)
        if isinstance(self.slots, OneByOneSlots):
            self.slots.begin(target, user.source)
        self._held[target] = _Held(list(known[:shared]), user, self.steps)
        user.slot, user.read, user.since = target, shared, len(user.tokens)
        if not user.was_put_back:
            user.reused = shared
        self.reused_tokens += shared


#: A log-probability and the likeliest tokens with theirs.
Extra = tuple[float, tuple[tuple[int, float], ...]]


def _logprob(logits_V: Tensor, token: int, top: int) -> Extra:
    """Return a token's log-probability, and the `top` likeliest tokens with theirs."""
    x_1V = as_array(logits_V)[None]
    (best,) = likeliest_of(x_1V, top) if top else [()]
    return logprobs_of(x_1V, [token]).item(), best


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step: whose tokens it makes, and a function that waits for them."""

    users: Sequence[Continuation]
    extra: Sequence[Extra]
    tokens: Callable[[], list[int]]


def _fetched(tokens_R: Tensor) -> Callable[[], list[int]]:
    """Start the copy from a device; return a function that waits for it."""
    here_R = tokens_R.to("cpu", non_blocking=True)
    arrived = None
    if tokens_R.is_cuda:
        arrived = torch.cuda.Event()
        arrived.record()

    def tokens() -> list[int]:
        if arrived is not None:
            arrived.synchronize()
        found: list[int] = here_R.tolist()
        return found

    return tokens


def _slot(user: Continuation) -> int:
    assert user.slot is not None
    return user.slot


def _all_greedy(users: Sequence[Continuation]) -> bool:
    """Return True if everyone goes on with the likeliest token, and only its id ends a sequence."""
    spec = users[0].spec
    return all(
        not user.is_reading
        and user.together is not None
        and user.spec.greedy
        and user.row.stream is None
        and user.spec.eos == spec.eos
        and user.spec.forbidden == spec.forbidden
        for user in users
    )
