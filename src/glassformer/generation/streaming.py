"""Tokens with the text that they add: the one loop from columns of `decode` to text.

`stream` yields new tokens as they are chosen, each with its piece of text; `generate_batch` runs it
to the end and returns one result for each prompt. The command line, the chat, the web page and the
evaluations all read from here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.choosing import NOTHING
from glassformer.generation.constraint import Constraint
from glassformer.generation.loop import Column, decode
from glassformer.generation.text_stream import StopFilter, TextStream
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Speculation, Stepper
from glassformer.spec.decoding import DecodeSpec


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that was just chosen for prompt number `row`.

    `text` is what can be shown now: complete characters, nothing that may belong to a stop string.
    `is_end` marks an end token, which has no text. `finish` says why the row has ended, if it has:
    eos, stop, length, constraint. `top` are the likeliest tokens with their log-probabilities.
    """

    row: int
    token: int
    logprob: float
    text: str
    is_end: bool
    finish: str | None
    top: tuple[tuple[int, float], ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Generated:
    """The result for one prompt: new tokens, the end among them, and why they stopped.

    `text` is the text of the tokens without the end and without what a stop string cut off; empty
    without a tokenizer. `speculation` counts passes and right guesses, with `speculate`.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    text: str = ""
    speculation: Speculation | None = None


def stream(
    stepper: Stepper,
    prompts: Prompts | Sequence[Sequence[int]],
    *,
    spec: DecodeSpec = DecodeSpec(),  # noqa: B008  frozen
    constraint: Constraint | None = None,
    tokenizer: Tokenizer | None = None,
    rows: Sequence[int] | None = None,
    logprobs: bool = True,
    top_logprobs: int = 0,
) -> Iterator[list[NewToken]]:
    """Yield the new token of every row that has not ended, step by step.

    The arguments are those of `decode`; bad ones are refused by the call, before the first token.
    Without a tokenizer, all texts are empty.
    """
    columns = decode(
        stepper,
        prompts,
        spec=spec,
        constraint=constraint,
        tokenizer=tokenizer,
        rows=rows,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )
    return _new_tokens(columns, spec, tokenizer)


def generate_batch(
    stepper: Stepper,
    prompts: Prompts | Sequence[Sequence[int]],
    *,
    spec: DecodeSpec = DecodeSpec(),  # noqa: B008  frozen
    constraint: Constraint | None = None,
    tokenizer: Tokenizer | None = None,
    rows: Sequence[int] | None = None,
    logprobs: bool = True,
) -> list[Generated]:
    """Return one finished sequence for each prompt."""
    prompts = prompts if isinstance(prompts, Prompts) else Prompts.of(prompts)
    columns = decode(
        stepper,
        prompts,
        spec=spec,
        constraint=constraint,
        tokenizer=tokenizer,
        rows=rows,
        logprobs=logprobs,
    )
    collected = [Collected() for _ in range(len(prompts))]
    for column in columns:  # texts are decoded once, at the end
        chosen = zip(collected, column.tokens_B.tolist(), column.logprobs_B.tolist(), strict=True)
        for row, token, logprob in chosen:
            if token != NOTHING:
                row.tokens.append(token)
                row.logprobs.append(logprob)
    for row, finish in zip(collected, column.finish, strict=True):
        row.finish = finish
    texts = [text_of(row.tokens, spec=spec, tokenizer=tokenizer) for row in collected]
    facts = stepper.facts
    return [row.result(text, facts) for row, text in zip(collected, texts, strict=True)]


def text_of(tokens: Sequence[int], *, spec: DecodeSpec, tokenizer: Tokenizer | None) -> str:
    """Return the text of new tokens, without the end and up to the first stop string."""
    if tokenizer is None:
        return ""
    ended = bool(tokens) and tokens[-1] in spec.eos
    text = tokenizer.decode(list(tokens[:-1] if ended else tokens))
    cuts = [text.find(stop) for stop in spec.stop if stop in text]
    return text[: min(cuts)] if cuts else text


@dataclass(slots=True)
class Collected:
    """The tokens and the text of one row so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: str | None = None

    def add(self, new: NewToken) -> None:
        """Take one more token."""
        self.tokens.append(new.token)
        self.logprobs.append(new.logprob)
        self.texts.append(new.text)
        self.finish = new.finish

    @property
    def text(self) -> str:
        """The text that was shown."""
        return "".join(self.texts)

    def result(self, text: str, facts: Speculation | None = None) -> Generated:
        """Return what was collected; a row without an end has the finish `length`."""
        finish = self.finish or "length"
        return Generated(tuple(self.tokens), tuple(self.logprobs), finish, text, facts)


class RowText:
    """The text of one row: pieces of complete characters, up to a stop string."""

    def __init__(self, spec: DecodeSpec, tokenizer: Tokenizer) -> None:
        self.characters = TextStream(tokenizer)
        self.visible = StopFilter(spec.stop)

    def push(self, *tokens: int, is_end: bool, is_last: bool) -> str:
        """Return the text that these tokens let be shown; `is_end`: the last one has no text."""
        shown = tokens[:-1] if is_end else tokens
        piece = self.visible.push(self.characters.push(*shown)) if shown else ""
        if is_last:
            piece += self.visible.push(self.characters.flush()) + self.visible.flush()
        return piece


def _new_tokens(
    columns: Iterator[Column], spec: DecodeSpec, tokenizer: Tokenizer | None
) -> Iterator[list[NewToken]]:
    texts: dict[int, RowText] = {}
    for column in columns:
        new = []
        for row, token in enumerate(column.tokens_B.tolist()):
            if token == NOTHING:
                continue
            is_end, finish, text = token in spec.eos, column.finish[row], ""
            if tokenizer is not None:
                if row not in texts:
                    texts[row] = RowText(spec, tokenizer)
                text = texts[row].push(token, is_end=is_end, is_last=finish is not None)
            logprob = float(column.logprobs_B[row])
            new.append(NewToken(row, token, logprob, text, is_end, finish, column.top(row)))
        yield new
