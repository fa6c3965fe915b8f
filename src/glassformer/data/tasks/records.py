"""Files to fine-tune on: JSON lines of three forms, or text. A bad line is named by its number.

A record is what a person wrote; it becomes tokens where the base's tokenizer and chat template are
known.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.data.tasks.corpus import read_corpus
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import unique_keys

#: So many bad lines are told at once; the rest are counted.
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
    """The records of a `.jsonl` file, else the documents of a file or folder as plain text."""
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
    except (ValueError, RecursionError) as error:  # a byte that is no text is a ValueError too
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
