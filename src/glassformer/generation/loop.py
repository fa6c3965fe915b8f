"""`decode`: a generator of token columns, over any `Stepper`.

Everything that can be refused is refused by the call, before the first column is made. A row that
has ended leaves the batch; its random numbers, limits and constraint never depended on the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.choosing import NOTHING, Likeliest
from glassformer.generation.constraint import Bounded, Constraint
from glassformer.generation.samplers import make_chooser
from glassformer.generation.text_stream import TextStream
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import DivergedError, InputError

# B prompts or rows that go on, V vocab, K likeliest tokens

#: Seconds that a reader may wait for tokens which are chosen several at once.
PATIENCE = 0.03


@dataclass(slots=True)
class Row:
    """One prompt while a batch is decoded: its limit, its constraint's state, its text.

    Nothing here depends on the other rows.
    """

    name: int
    limit: int
    spec: DecodeSpec
    bounded: Bounded | None
    stream: TextStream | None
    made: int = 0
    state: int = 0
    tail: str = ""
    finish: str | None = None

    def __post_init__(self) -> None:
        if self.bounded is not None:
            self.state = self.bounded.start

    def take(self, token: int) -> None:
        """Add a token; set `finish` if it was the last."""
        self.made += 1
        if token in self.spec.eos:
            self.finish = "eos"
            return
        if self.bounded is not None:
            self.state = self.bounded.advance(self.state, token)
            if self.made < self.limit and self.bounded.over(self.state, self.made):
                self.finish = "constraint"
        if self.stream is not None:
            text = self.tail + self.stream.push(token)
            if any(stop in text for stop in self.spec.stop):
                self.finish = "stop"
            self.tail = text[-max(map(len, self.spec.stop)) :]
        if self.made >= self.limit and self.finish is None:
            self.finish = "length"


def allowed(rows: Sequence[Row], *, made: int) -> NDArray[np.bool_] | None:
    """Return the tokens (B, V) that constraints allow after `made` new ones; None without any."""
    masks = []
    for row in rows:
        if row.bounded is None:
            return None
        masks.append(row.bounded.allow(row.state, made))
    return np.stack(masks)


@dataclass(frozen=True, slots=True)
class Column:
    """One step: a token for each row that had not ended, NOTHING for the others.

    `logprobs_B` are the model's own, before temperature and masks; NaN where there is no token or
    they were not requested. `finish` says why a row has ended: eos, stop, length, constraint.
    `likeliest` has the K likeliest tokens of each row with their log-probabilities, if requested.
    """

    tokens_B: NDArray[np.int64]
    logprobs_B: NDArray[np.float64]
    finished_B: NDArray[np.bool_]
    finish: tuple[str | None, ...]
    likeliest: Mapping[int, tuple[tuple[int, float], ...]]

    def top(self, row: int) -> tuple[tuple[int, float], ...]:
        """Return the likeliest tokens of a row with their log-probabilities, best first."""
        return self.likeliest.get(row, ())


def decode(
    stepper: Stepper,
    prompts: Prompts | Sequence[Sequence[int]],
    *,
    spec: DecodeSpec = DecodeSpec(),  # noqa: B008  frozen
    constraint: Constraint | None = None,
    tokenizer: Tokenizer | None = None,
    rows: Sequence[int] | None = None,
    logprobs: bool = True,
    top_logprobs: int = 0,
) -> Iterator[Column]:
    """Yield columns of new tokens until every row has ended, or the caller stops iterating.

    `rows` names the prompts for the random numbers (0, 1, … by default), so that a row alone
    samples as it does in a batch. `tokenizer` is needed for stop strings only. `top_logprobs` is
    the number of likeliest tokens to report beside each chosen one.
    """
    prompts = prompts if isinstance(prompts, Prompts) else Prompts.of(prompts)
    prompts.check(stepper)
    check_tokens(stepper.vocab_size, forbidden=spec.forbidden, forced=spec.forced, eos=spec.eos)
    early_end = set(spec.eos) if spec.min_new_tokens > 1 else set()
    check_something_left(stepper.vocab_size, {*spec.forbidden, *early_end})
    if spec.stop and tokenizer is None:
        raise InputError("stop strings need a tokenizer", hint="give `tokenizer`, or use eos")
    names = tuple(range(len(prompts))) if rows is None else tuple(rows)
    if len(names) != len(prompts):
        raise InputError(f"{len(names)} row names for {len(prompts)} prompts")
    bounded: dict[int, Bounded] = {}
    made = []
    for name, limit in zip(names, prompts.room(stepper, spec.max_new_tokens), strict=True):
        if constraint is not None and limit not in bounded:
            bounded[limit] = constraint.within(
                shortest=spec.min_new_tokens,
                longest=limit,
                vocab_size=stepper.vocab_size,
                eos=spec.eos,
                forbidden=spec.forbidden,
                forced=spec.forced,
            )
        stream = TextStream(tokenizer) if spec.stop and tokenizer is not None else None
        made.append(Row(name, limit, spec, bounded.get(limit), stream))
    count = min(top_logprobs, stepper.vocab_size)
    return _columns(stepper, prompts, made, spec, logprobs=logprobs, count=count)


def check_tokens(
    vocab_size: int,
    *,
    forbidden: Sequence[int] = (),
    forced: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> None:
    """Refuse ids outside the vocabulary."""
    for name, ids in (("forbidden", forbidden), ("forced", forced), ("eos", eos)):
        for token in ids:
            if token >= vocab_size:
                raise InputError(
                    f"{name} token id {token} is outside the vocabulary of {vocab_size}",
                    hint=f"ids run from 0 to {vocab_size - 1}",
                )


def check_something_left(vocab_size: int, closed: set[int]) -> None:
    """Refuse settings that leave no token."""
    if len(closed) >= vocab_size:
        raise InputError(
            f"all {vocab_size} tokens are forbidden", hint="leave at least one to choose"
        )


class _Batch:
    """The rows that go on, one for each line of the logits, and tokens that were chosen ahead."""

    def __init__(
        self,
        stepper: Stepper,
        prompts: Prompts,
        rows: list[Row],
        spec: DecodeSpec,
        *,
        logprobs: bool,
        count: int,
    ) -> None:
        self.stepper, self.rows, self.spec, self.logprobs = stepper, rows, spec, logprobs
        self.going = list(range(len(rows)))
        self.longest = max(row.limit for row in rows)
        self.logits_BV, self.past = stepper.start(prompts, room=self.longest)
        self.chooser = make_chooser(stepper, spec, prompts, logprobs=logprobs, count=count)
        self.plain = _only_greedy(spec, rows) and not count
        self.ready: list[tuple[list[int], list[float]]] = []  # chosen ahead, the last one first
        self.stepped = False  # the logits are already those after the tokens of this column

    def runs(self, step: int) -> bool:
        """Return True if the stepper may choose the tokens after this column by itself."""
        spec = self.spec
        return self.plain and step + 2 >= spec.min_new_tokens and step + 1 >= len(spec.forced)

    def choose(self, step: int) -> tuple[list[int], list[float], list[Likeliest]]:
        """Return each line's token, its log-probability and the likeliest ones."""
        self.stepped = False
        if self.ready:
            return *self.ready.pop(), []
        going = [self.rows[i] for i in self.going]
        found = self.chooser.choose(
            self.logits_BV,
            step=step,
            rows=[row.name for row in going],
            allow_BV=allowed(going, made=step),
        )
        # A GPU computes the next step meanwhile; rows that turn out to have ended are dropped.
        if found.is_remote and step + 1 < self.longest and not self.runs(step):
            self.logits_BV = self.stepper.step(found.tokens_B, past=self.past)
            self.stepped = True
        return found.fetch()

    def keep(self, stay: list[int]) -> None:
        """Go on with these lines."""
        if len(stay) == len(self.going):
            return
        self.past.reorder(stay)
        kept = self.chooser.array(np.array(stay, dtype=np.int64))
        if self.stepped:
            self.logits_BV = self.chooser.lines(self.logits_BV, kept)
        self.chooser.keep(kept)
        self.going = [self.going[line] for line in stay]
        self.ready = [
            ([t[line] for line in stay], [v[line] for line in stay]) for t, v in self.ready
        ]

    def advance(self, tokens: list[int], step: int) -> None:
        """Add each line's token: choose more of them in one run, or compute the next logits."""
        if self.stepped or self.ready:
            return
        tokens_B = self.chooser.array(np.array(tokens, dtype=np.int64))
        if self.runs(step):
            made = self.stepper.run_greedy(
                tokens_B,
                past=self.past,
                count=min(self.rows[i].limit - self.rows[i].made for i in self.going),
                ends=self.spec.eos,
                closed=self.spec.forbidden,
                logprobs=self.logprobs,
                seconds=PATIENCE,
            )
            self.ready = list(zip(*made, strict=True))[::-1]
            self.plain = bool(self.ready)
        if not self.ready:
            self.logits_BV = self.stepper.step(tokens_B, past=self.past)


def _columns(
    stepper: Stepper,
    prompts: Prompts,
    rows: list[Row],
    spec: DecodeSpec,
    *,
    logprobs: bool,
    count: int,
) -> Iterator[Column]:
    batch = _Batch(stepper, prompts, rows, spec, logprobs=logprobs, count=count)
    for step in range(batch.longest):
        chosen, values, likeliest = batch.choose(step)
        _check_numbers(chosen, values if logprobs else [])
        for i, token in zip(batch.going, chosen, strict=True):
            rows[i].take(token)
        yield _column(rows, batch.going, chosen, values, likeliest)
        stay = [line for line, i in enumerate(batch.going) if rows[i].finish is None]
        if not stay:
            return
        batch.chooser.note(chosen)
        batch.keep(stay)
        batch.advance([chosen[line] for line in stay], step)


def _only_greedy(spec: DecodeSpec, rows: list[Row]) -> bool:
    """Return True if each token is the likeliest allowed one, and only its id decides what ends."""
    free = all(row.bounded is None for row in rows)
    return spec.greedy and free and spec.repetition_penalty == 1.0 and not spec.stop


def _check_numbers(tokens: list[int], values: list[float]) -> None:
    if NOTHING in tokens or any(value != value for value in values):
        raise DivergedError(
            "the model's logits are not numbers", hint="its weights hold NaN or infinity"
        )


def _column(
    rows: list[Row],
    going: list[int],
    chosen: list[int],
    values: list[float],
    likeliest: list[tuple[tuple[int, float], ...]],
) -> Column:
    tokens_B = np.full(len(rows), NOTHING, dtype=np.int64)
    logprobs_B = np.full(len(rows), np.nan)
    tokens_B[going] = chosen
    logprobs_B[going] = values
    finish = tuple(row.finish for row in rows)
    finished_B = np.array([why is not None for why in finish])
    by_row = dict(zip(going, likeliest, strict=True)) if likeliest else {}
    return Column(tokens_B, logprobs_B, finished_B, finish, by_row)
