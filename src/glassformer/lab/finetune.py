"""Fine-tuning: files of examples, the base model, and how records become examples in its tokens.

Files are JSON lines of three forms, or text. A bad line is reported by its number. Packing leaks
nothing: an example is shifted on its own before it is packed, so its last token never predicts the
next one's first, and `segments` separates attention and positions. What does not fit is cut or left
out; `notes` and `facts` report it.

An answer is tokenized apart from the prompt, as it is when the model generates it. A chat template
may rewrite the past once there is more of it (Qwen3 drops old thoughts); then the conversation
becomes several examples, each as it stood when its answer was given, so that every answer is
learned once, in the context in which it will be requested.
"""

import bisect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from glassformer.adapters.chat.template import read_chat, read_templates
from glassformer.adapters.load import load
from glassformer.adapters.native import NativeAdapter
from glassformer.data.batch import Batch, Bools, Ints
from glassformer.data.rng import digest, stream
from glassformer.data.task import Task, checked, pick
from glassformer.data.tasks.text import read_corpus
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.models.model import Model
from glassformer.quant.contents import is_model_quantized
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import unique_keys
from glassformer.spec.tasks import FinetuneTask
from glassformer.spec.train import LoRA

#: The number of bad lines that are reported at once; the rest are counted.
TOLD = 5
FORMS = '{"messages": [...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}'
Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A conversation; what the assistant says is learned."""

    where: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompted:
    """A prompt, and what is to follow it."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """Text to be continued anywhere."""

    where: str
    text: str


Record = Chat | Prompted | Plain


def read_records(path: str, *, seed: int = 0) -> list[Record]:
    """Read records of a `.jsonl` file, else the documents of a file or folder as plain text."""
    if not path.endswith((".jsonl", ".json")):
        return [
            Plain(where=document.name, text=document.text())
            for document in read_corpus(path, seed=seed)
        ]
    file = Path(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=path) from error
    records: list[Record] = []
    problems: list[str] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(line, f"line {number}"))
        except InputError as error:
            problems.append(f"line {number}: {error.what}")
    if problems:
        more = f"\n  and {len(problems) - TOLD} more lines" if len(problems) > TOLD else ""
        raise InputError(
            f"{len(problems)} bad lines:\n  " + "\n  ".join(problems[:TOLD]) + more,
            where=path,
            hint=f"each line is {FORMS}",
        )
    if not records:
        raise InputError("the file has no examples", where=path, hint=f"each line is {FORMS}")
    return records


def _record(line: bytes, where: str) -> Record:
    try:
        data = json.loads(line.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # a byte that is not UTF-8 is a ValueError too
        raise InputError(f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"a {type(data).__name__}, not an object")
    forms = {"messages", "prompt", "text"} & set(data)
    if len(forms) != 1:
        found = " and ".join(sorted(forms)) or ", ".join(sorted(map(str, data))[:5]) or "nothing"
        raise InputError(f"one of messages, prompt, text is needed, and it has {found}")
    match forms.pop():
        case "messages":
            return Chat(where=where, messages=_messages(data["messages"]))
        case "prompt":
            return Prompted(
                where=where,
                prompt=_text(data, "prompt"),
                completion=_text(data, "completion"),
            )
        case _:
            return Plain(where=where, text=_text(data, "text"))


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise InputError(f"its '{key}' is {'missing' if value is None else 'not a text'}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"its '{key}' holds half of a character: {error.reason}") from error
    return value


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InputError("its 'messages' is not a list of messages")
    for place, message in enumerate(value):
        if not isinstance(message, dict):
            raise InputError(f"message {place} is not an object with role and content")
        for key in ("role", "content"):
            try:
                _text(message, key)
            except InputError as error:
                raise InputError(f"message {place}: {error.what}") from error
    if not any(message["role"] == "assistant" for message in value):
        raise InputError("no message is the assistant's, so there is nothing to learn")
    return tuple(value)


# B batch, T length, N tokens of one example

#: The number of positions that are listed if examples were cut or left out.
NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Ids of one example, and which of them are to be learned. `where` is its position in the file.

    `goes_on`: what is too long continues in a further example (text); else it is cut (an answer).
    """

    ids_N: NDArray[np.int64]
    learned_N: Bools
    where: str
    goes_on: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One row: tokens, the tokens after them, what counts, and which example each is of."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    counted: Bools
    segments: NDArray[np.int64]


class Examples(Task):
    """Splits `train` and `val`, head `next`; rows of `train` hold several examples if packed.

    Equal examples stay in one split, so that nothing held out was trained on.
    """

    def __init__(
        self, spec: FinetuneTask, examples: Sequence[Example], *, tokenizer: Tokenizer
    ) -> None:
        self.spec = spec
        self.name = "finetune"
        self.tokenizer = tokenizer
        self.heads = {"next": tokenizer.vocab_size}
        self._given = len(examples)
        self._cut: list[str] = []
        self._cut_tokens = 0
        self._left_out: list[str] = []
        fitted = [piece for example in examples for piece in self._fitted(example)]
        if not fitted:
            raise InputError(
                f"none of the {len(examples)} examples has anything to learn",
                where=spec.path,
                hint="an answer that is empty, or begins beyond `task.length`, teaches nothing",
            )
        parts, self._repeated = divided(fitted, held_out=spec.held_out, seed=spec.seed)
        if not parts["val"]:
            raise InputError(
                "all examples are alike, so none can be held out",
                where=spec.path,
                hint="give at least two different ones",
            )
        self._examples = {split: len(part) for split, part in parts.items()}
        self._rows = {
            "train": list(_rows(parts["train"], spec.length if spec.packing else 0)),
            "val": list(_rows(parts["val"], 0)),
        }

    def _fitted(self, example: Example) -> Iterator[Example]:
        """Yield the example in pieces that fit, or its beginning; nothing if none is learned."""
        width, size = self.spec.length + 1, len(example.ids_N)
        starts = range(0, max(1, size - 1), self.spec.length) if example.goes_on else range(1)
        for start in starts:
            piece = Example(
                ids_N=example.ids_N[start : start + width],
                learned_N=example.learned_N[start : start + width],
                where=example.where,
            )
            if piece.learned_N[1:].any():
                yield piece
            elif example.where not in self._left_out:
                self._left_out.append(example.where)
        if size > width and not example.goes_on:
            self._cut.append(example.where)
            self._cut_tokens += size - width

    def sizes(self) -> dict[str, int]:
        """Return the number of rows in each split."""
        return {split: len(rows) for split, rows in self._rows.items()}

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Return the number of positions of each row."""
        return np.array([len(row.tokens) for row in pick(self._rows, split)], dtype=np.int64)

    def batch(self, split: str, rows: Ints) -> Batch:
        """Return these rows, padded; weights are 1 where the next token is learned."""
        made = self._picked(split, rows)
        shape = (len(made), max(len(row.tokens) for row in made))
        tokens_BT, targets_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        weights_BT, valid_BT = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
        segments_BT = np.full(shape, -1, dtype=np.int64)
        for place, row in enumerate(made):
            size = len(row.tokens)
            tokens_BT[place, :size] = row.tokens
            targets_BT[place, :size] = row.targets
            weights_BT[place, :size] = row.counted
            segments_BT[place, :size] = row.segments
            valid_BT[place, :size] = True
        packed = bool((segments_BT > 0).any())
        return Batch(
            tokens=tokens_BT,
            valid=valid_BT,
            targets={"next": targets_BT},
            weights=weights_BT,
            segments=segments_BT if packed else None,
        )

    def describe(self, split: str, row: int) -> str:
        """Return the row's examples, one after another."""
        made = self._picked(split, np.array([row]))[0]
        parts = [
            [*made.tokens[at].tolist(), int(made.targets[at][-1])]
            for at in (made.segments == number for number in range(made.segments[-1] + 1))
        ]
        return "\n---\n".join(self.tokenizer.decode(ids) for ids in parts)

    def facts(self) -> dict[str, Any]:
        """Return examples, rows, tokens, what was not used, and a hash of all training data."""
        rows = [row for split in ("train", "val") for row in self._rows[split]]
        parts = [(row.tokens, row.targets, row.counted, row.segments) for row in rows]
        return {
            "task": self.name,
            "records": self._given,
            "examples": self._examples,
            "sizes": self.sizes(),
            "tokens": {split: int(self.lengths(split).sum()) for split in self._rows},
            "learned_tokens": {
                split: int(sum(row.counted.sum() for row in made))
                for split, made in self._rows.items()
            },
            "repeated": self._repeated,
            "cut": len(self._cut),
            "cut_tokens": self._cut_tokens,
            "left_out": len(self._left_out),
            "sha256": digest(array for part in parts for array in part),
        }

    def notes(self) -> list[str]:
        """Return what a person should know before training: what was cut, left out, or repeated."""
        told = []
        if self._cut:
            told.append(
                f"{len(self._cut)} of {self._given} examples are longer than task.length="
                f"{self.spec.length} and were cut: {self._cut_tokens} tokens are not read "
                f"({_named(self._cut)})"
            )
        if self._left_out:
            told.append(
                f"{len(self._left_out)} of {self._given} examples have nothing to learn within "
                f"{self.spec.length} positions and were left out ({_named(self._left_out)})"
            )
        if self._repeated:
            told.append(f"{self._repeated} examples occur more than once, each within one split")
        return told

    def _picked(self, split: str, rows: Ints) -> list[_Row]:
        held = pick(self._rows, split)
        return [held[row] for row in checked(rows, size=len(held), split=split)]


def divided(
    examples: Sequence[Example], *, held_out: float, seed: int
) -> tuple[dict[str, list[Example]], int]:
    """Return `train` and `val`, equal examples together, and the number of repetitions."""
    alike: dict[bytes, list[Example]] = {}
    for example in examples:
        key = example.ids_N.tobytes() + b"/" + example.learned_N.tobytes()
        alike.setdefault(key, []).append(example)
    groups = list(alike.values())
    count = min(max(1, round(held_out * len(groups))), len(groups) - 1)
    chosen = set(stream(seed, "held out").permutation(len(groups))[:count].tolist())
    parts: dict[str, list[Example]] = {"train": [], "val": []}
    for number, group in enumerate(groups):
        parts["val" if number in chosen else "train"] += group
    return parts, len(examples) - len(groups)


def packed(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the items of each bin: longest first, each into the fullest bin with room for it.

    Whatever is longer than the capacity gets a bin of its own.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, bin), ascending
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        at = bisect.bisect_left(room, (sizes[item], 0))
        if at < len(room):
            free, number = room.pop(at)
        else:
            free, number = capacity, len(bins)
            bins.append([])
        bins[number].append(item)
        bisect.insort(room, (free - sizes[item], number))
    return bins


def _rows(examples: Sequence[Example], capacity: int) -> Iterator[_Row]:
    """Return rows of up to `capacity` positions; each example predicts its own tokens alone."""
    sizes = [len(example.ids_N) - 1 for example in examples]
    for numbers in packed(sizes, capacity):
        chosen = [examples[number] for number in numbers]
        yield _Row(
            tokens=np.concatenate([example.ids_N[:-1] for example in chosen]),
            targets=np.concatenate([example.ids_N[1:] for example in chosen]),
            counted=np.concatenate([example.learned_N[1:] for example in chosen]),
            segments=np.repeat(np.arange(len(chosen)), [sizes[number] for number in numbers]),
        )


def _named(places: Sequence[str]) -> str:
    more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
    return ", ".join(places[:NAMED]) + more


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
    speech = Speech(tokenizer=adapter.tokenizer, ends=adapter.end_ids(), render=_render(adapter))
    return Base(model=adapter.model, speech=speech, files=adapter.files())


def check_trains(model: Model, lora: LoRA | None, *, where: str) -> None:
    """Refuse to train all weights of a quantized base."""
    if lora is None and is_model_quantized(model):
        raise InputError(
            f"the weights of {where} are quantized, so they cannot be trained",
            hint="train a correction of them: {--lora 8|lora=8}; or fine-tune the model that it "
            "was made of",
        )


def _render(adapter: NativeAdapter) -> Render | None:
    """Return the chat template of the folder that the base came from, if it has one."""
    if adapter.origin is None or not read_templates(adapter.origin):
        return None
    chat = read_chat(adapter.origin)

    def render(messages: Sequence[Message], *, begin: bool) -> str:
        return chat.render(messages, add_generation_prompt=begin, now=PRESENT)

    return render
