"""A base model for fine-tuning, and how records become examples in its tokens.

An answer is tokenized apart from the prompt, as it is when the model generates it. A chat template
may rewrite the past once there is more of it (Qwen3 drops old thoughts); then the conversation
becomes several examples, each as it stood when its answer was given, so that every answer is
learned once, in the context in which it will be requested.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import numpy as np

from glassformer.adapters.chat.template import read_chat, read_templates
from glassformer.adapters.load import load
from glassformer.adapters.native import NativeAdapter
from glassformer.data.tasks.finetune import (
    Chat,
    Example,
    Examples,
    Message,
    Plain,
    Prompted,
    Record,
    read_records,
)
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.models.model import Model
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import stored
from glassformer.spec.tasks import FinetuneTask


class Render(Protocol):
    """A chat template."""

    def __call__(self, messages: Sequence[Message], *, begin: bool) -> str:
        """Return the text of some messages; `begin` opens the assistant's turn at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speech:
    """A base's text format: its tokenizer, the ids that end a text, its chat template if any."""

    tokenizer: Tokenizer
    ends: tuple[int, ...] = ()
    render: Render | None = None

    @property
    def end(self) -> list[int]:
        """The ids that are appended to a text."""
        own = self.tokenizer.eos
        return [own] if own is not None else list(self.ends[:1])


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of text that is read, or learned."""

    text: str
    learned: bool


def examples_of(
    records: Sequence[Record], speech: Speech, *, answers_only: bool = True
) -> list[Example]:
    """Return every record in tokens; refuse one that cannot be tokenized, by its line."""
    made: list[Example] = []
    for record in records:
        try:
            for ids, learned in _parts(record, speech):
                made.append(
                    Example(
                        ids_N=np.array(ids, dtype=np.int64),
                        learned_N=np.array(learned, dtype=np.bool_) | (not answers_only),
                        where=record.where,
                        goes_on=isinstance(record, Plain),
                    )
                )
        except InputError as error:
            raise InputError(error.what, where=record.where, hint=error.hint) from error
    return made


def _parts(record: Record, speech: Speech) -> Iterator[tuple[list[int], list[bool]]]:
    """Return ids and which of them are learned, for each example of a record."""
    bos = speech.tokenizer.bos
    begin = [] if bos is None else [bos]
    match record:
        case Plain(text=text):
            ids = begin + speech.tokenizer.encode(text) + speech.end
            yield ids, [True] * len(ids)
        case Prompted(prompt=prompt, completion=completion):
            asked = begin + speech.tokenizer.encode(prompt)
            answer = speech.tokenizer.encode(completion)
            answer += speech.end if answer else []
            yield asked + answer, [False] * len(asked) + [True] * len(answer)
        case Chat(messages=messages):
            for pieces in conversations(messages, speech.render):
                yield _tokens(pieces, speech)


def conversations(messages: Sequence[Message], render: Render | None) -> list[list[_Piece]]:
    """Return the pieces of one example, or of several if the template rewrites the past."""
    if render is None:
        raise InputError(
            "a chat, and the base has no chat template",
            hint='a base model learns {"prompt": ..., "completion": ...} or {"text": ...}',
        )
    made: list[list[_Piece]] = []
    said = ""
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = render(messages[:place], begin=True)
        answered = render(messages[: place + 1], begin=False)
        if not answered.startswith(asked):
            raise InputError(
                f"the chat template writes the prompt of message {place} anew once it is answered",
                hint="its answers cannot be told from its prompts; use prompt and completion",
            )
        if not made or not asked.startswith(said):
            made.append([])
            said = ""
        made[-1] += [_Piece(asked[len(said) :], False), _Piece(answered[len(asked) :], True)]
        said = answered
    return made


def _tokens(pieces: Sequence[_Piece], speech: Speech) -> tuple[list[int], list[bool]]:
    """Return the ids of the pieces; what follows an answer's end is read but not learned."""
    ids: list[int] = []
    learned: list[bool] = []
    for piece in pieces:
        own = speech.tokenizer.encode(piece.text)
        ends = [place + 1 for place, token in enumerate(own) if token in speech.ends]
        told = (ends[-1] if ends else len(own)) if piece.learned else 0
        ids += own
        learned += [True] * told + [False] * (len(own) - told)
    return ids, learned


#: The date that a template takes for today: a date in a prompt must not change from run to run.
PRESENT = datetime(2025, 1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The model, its text format, and the files of it that every checkpoint includes."""

    model: Model
    speech: Speech
    files: Mapping[str, bytes]

    def task(self, spec: FinetuneTask) -> Examples:
        """Return the data of a file as a task in this model's tokens."""
        records = read_records(spec.path, seed=spec.seed)
        examples = examples_of(records, self.speech, answers_only=spec.answers_only)
        return Examples(spec, examples, tokenizer=self.speech.tokenizer)


def open_base(path: str) -> Base:
    """Open a run, a checkpoint or a Hugging Face folder, ready to be fine-tuned."""
    adapter = load(path)
    if not isinstance(adapter, NativeAdapter):
        raise InputError(f"{path} is not computed by our own parts, so it cannot be tuned here")
    if adapter.spec.encoder is not None or "next" not in adapter.spec.head_names():
        raise InputError(
            f"{path} does not continue a text: fine-tuning needs a decoder with a next-token head"
        )
    if not set(stored(adapter.spec)) <= {name for name, _ in adapter.model.named_parameters()}:
        raise InputError(
            f"the weights of {path} are quantized, so they cannot be trained",
            hint="fine-tune the model that it was made of, and quantize afterwards",
        )
    speech = Speech(tokenizer=adapter.tokenizer, ends=adapter.end_ids(), render=_render(adapter))
    return Base(model=adapter.model, speech=speech, files=adapter.files())


def _render(adapter: NativeAdapter) -> Render | None:
    """Return the chat template of the folder that the base came from, if it has one."""
    if adapter.origin is None or not read_templates(adapter.origin):
        return None
    chat = read_chat(adapter.origin)

    def render(messages: Sequence[Message], *, begin: bool) -> str:
        return chat.render(messages, add_generation_prompt=begin, now=PRESENT)

    return render
