"""`Row`: one prompt's own affairs while a batch is decoded. None depends on the other rows.

`decode`: a generator of token columns, over any `Stepper`; `generate`: all of them at once.

Everything that can be refused is refused by the call, before the first column is asked for. A row
that has ended leaves the batch; its draws, limits and constraint never depended on the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.constraint import Bounded, Constraint
from glassformer.generation.prompts import Prompts
from glassformer.generation.samplers import NOTHING, make_sampler
from glassformer.generation.stepper import Stepper
from glassformer.generation.streaming import TextStream
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import DivergedError, InputError

# B rows that go on, V vocab


@dataclass(slots=True)
class Row:
    """How long it may be, where its constraint stands, its text."""

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
        """One more token; sets `finish` if it was the last."""
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


def permission(rows: Sequence[Row], *, made: int, device: torch.device) -> Tensor | None:
    """What the rows' constraints allow after so many new tokens, (B, V); None without."""
    masks = []
    for row in rows:
        if row.bounded is None:
            return None
        masks.append(row.bounded.allow(row.state, made))
    return torch.from_numpy(np.stack(masks)).to(device)


# B prompts, V vocab


@dataclass(frozen=True, slots=True)
class Column:
    """One step: a token for each row that had not ended, NOTHING for the others.

    `logprobs` are the model's own, before temperature and masks; NaN where there is no token or
    they were not asked for. `finish` says why a row has ended: eos, stop, length, constraint.
    """

    tokens_B: NDArray[np.int64]
    logprobs_B: NDArray[np.float64]
    finished_B: NDArray[np.bool_]
    finish: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """What became of one prompt: new tokens, the end among them, and why they stopped.

    `text` is theirs without the end and without what a stop string cut off; empty without a
    tokenizer.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    text: str = ""


def decode(
    stepper: Stepper,
    prompts: Prompts | Sequence[Sequence[int]],
    *,
    spec: DecodeSpec = DecodeSpec(),  # noqa: B008  frozen
    constraint: Constraint | None = None,
    tokenizer: Tokenizer | None = None,
    rows: Sequence[int] | None = None,
    logprobs: bool = True,
) -> Iterator[Column]:
    """Columns of new tokens until every row has ended, or the caller stops asking.

    `rows` names the prompts for the random draws (0, 1, … by default), so that a row alone draws as
    it does in a batch. `tokenizer` is needed for stop strings only.
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
    return _columns(stepper, prompts, made, spec, logprobs)


def generate(
    stepper: Stepper,
    prompts: Prompts | Sequence[Sequence[int]],
    *,
    spec: DecodeSpec = DecodeSpec(),  # noqa: B008  frozen
    constraint: Constraint | None = None,
    tokenizer: Tokenizer | None = None,
    rows: Sequence[int] | None = None,
    logprobs: bool = True,
) -> list[Generated]:
    """All columns of `decode`, as one sequence for each prompt."""
    prompts = prompts if isinstance(prompts, Prompts) else Prompts.of(prompts)
    tokens: list[list[int]] = [[] for _ in range(len(prompts))]
    values: list[list[float]] = [[] for _ in range(len(prompts))]
    finish: tuple[str | None, ...] = (None,) * len(prompts)
    for column in decode(
        stepper,
        prompts,
        spec=spec,
        constraint=constraint,
        tokenizer=tokenizer,
        rows=rows,
        logprobs=logprobs,
    ):
        finish = column.finish
        for row, token in enumerate(column.tokens_B.tolist()):
            if token != NOTHING:
                tokens[row].append(token)
                values[row].append(float(column.logprobs_B[row]))
    return [
        Generated(tuple(t), tuple(v), f or "length", text_of(t, spec=spec, tokenizer=tokenizer))
        for t, v, f in zip(tokens, values, finish, strict=True)
    ]


def text_of(tokens: Sequence[int], *, spec: DecodeSpec, tokenizer: Tokenizer | None) -> str:
    """The text of new tokens, without the end and from no stop string on."""
    if tokenizer is None:
        return ""
    ended = bool(tokens) and tokens[-1] in spec.eos
    text = tokenizer.decode(list(tokens[:-1] if ended else tokens))
    cuts = [text.find(stop) for stop in spec.stop if stop in text]
    return text[: min(cuts)] if cuts else text


def check_tokens(
    vocab_size: int,
    *,
    forbidden: Sequence[int] = (),
    forced: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> None:
    """Refuse ids that the model does not know."""
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


def _columns(
    stepper: Stepper, prompts: Prompts, rows: list[Row], spec: DecodeSpec, logprobs: bool
) -> Iterator[Column]:
    sample = make_sampler(spec)
    seen_BV = _seen(prompts, stepper.vocab_size) if spec.repetition_penalty != 1.0 else None
    going = list(range(len(rows)))  # the row that each line of the batch belongs to
    longest = max(row.limit for row in rows)
    logits_BV, past = stepper.start(prompts, room=longest)
    for step in range(longest):
        found_B = sample(
            logits_BV,
            step=step,
            rows=[rows[i].name for i in going],
            seen_BV=None if seen_BV is None else seen_BV.to(logits_BV.device),
            allow_BV=permission([rows[i] for i in going], made=step, device=logits_BV.device),
        )
        tokens_B = found_B.clamp(min=0)  # NOTHING is told below, after a GPU has gone on
        values_B = _logprobs(logits_BV, tokens_B) if logprobs else None
        fetch = _on_its_way(found_B, values_B)
        # A GPU goes on while we read: rows that turn out to have ended are then left out.
        ahead = tokens_B.is_cuda and step + 1 < longest
        if ahead:
            logits_BV = stepper.step(tokens_B, past=past)
        chosen, values = fetch()
        for i, token in zip(going, chosen, strict=True):
            rows[i].take(token)
        yield _column(rows, going, chosen, values)
        stay = [line for line, i in enumerate(going) if rows[i].finish is None]
        if not stay:
            return
        if seen_BV is not None:
            seen_BV.scatter_(1, torch.tensor(chosen)[:, None], True)
        if len(stay) < len(going):
            kept = torch.tensor(stay)
            past.reorder(kept)
            kept_here = kept.to(tokens_B.device)
            tokens_B, logits_BV = tokens_B[kept_here], logits_BV[kept_here]
            seen_BV = None if seen_BV is None else seen_BV[kept]
            going = [going[line] for line in stay]
        if not ahead:
            logits_BV = stepper.step(tokens_B, past=past)


def _on_its_way(
    tokens_B: Tensor, values_B: Tensor | None
) -> Callable[[], tuple[list[int], list[float]]]:
    """Tokens and log-probabilities as lists, when called; from a GPU they set out at once."""
    here_B, there_B = tokens_B, values_B
    arrived = None
    if tokens_B.is_cuda:
        here_B = tokens_B.to("cpu", non_blocking=True)
        there_B = None if values_B is None else values_B.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def fetch() -> tuple[list[int], list[float]]:
        if arrived is not None:
            arrived.synchronize()
        tokens = here_B.tolist()
        values = [float("nan")] * len(tokens) if there_B is None else there_B.tolist()
        unsound = there_B is not None and any(value != value for value in values)
        if unsound or NOTHING in tokens:
            raise DivergedError(
                "the model's logits are not numbers", hint="its weights hold NaN or infinity"
            )
        return tokens, values

    return fetch


def _column(rows: list[Row], going: list[int], chosen: list[int], values: list[float]) -> Column:
    tokens_B = np.full(len(rows), NOTHING, dtype=np.int64)
    logprobs_B = np.full(len(rows), np.nan)
    tokens_B[going] = chosen
    logprobs_B[going] = values
    finish = tuple(row.finish for row in rows)
    finished_B = np.array([why is not None for why in finish])
    return Column(tokens_B, logprobs_B, finished_B, finish)


def _logprobs(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    wide_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    return wide_BV.gather(1, tokens_B[:, None])[:, 0] - wide_BV.logsumexp(-1)


def _seen(prompts: Prompts, vocab_size: int) -> Tensor:
    seen_BV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    for row, tokens in enumerate(prompts.tokens):
        seen_BV[row, list(tokens)] = True
    return seen_BV
