"""A task's examples as something to look at: by split and number, in words and as a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glassformer.data.batch import Batch
from glassformer.data.build_task import build_task
from glassformer.data.task import Task
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.lab.runs.provenance import check_data, recorded_hash
from glassformer.lab.runs.record import load_run_spec
from glassformer.lens.show.token_text import shown
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import FinetuneTask
from glassformer.store.rundir import cache_folder
from glassformer.web.app.query import Unknown
from glassformer.web.app.workspace import Lab

#: Examples that the page offers of a split, and how many signs of each it shows.
OFFERED, SIGNS = 40, 80
#: Tokens of a text that are offered as its beginning.
OPENING = 64


@dataclass(frozen=True, eq=False)
class Asked:
    """What is looked at: a text with its target, or one row of a task."""

    text: str
    target: str | None
    batch: Batch | None = None


def task_of(run: str, lab: Lab) -> Task | None:
    """The task of a run, built once; None for one whose examples are its base model's chats."""
    directory = lab.run(run)
    spec = load_run_spec(directory).task
    if isinstance(spec, FinetuneTask):
        return None
    recorded = recorded_hash(directory.folder, spec)
    key = ("task", spec)
    found: Task | None = lab.remembered(key)
    if found is None:
        cache = cache_folder(directory.folder.parent)
        found = build_task(spec, cache=cache if cache.is_dir() else None)
        lab.remember(key, found)
    check_data(found, recorded)
    return found


def listed(task: Task, split: str, *, first: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Some examples of a split, number and text: those of `first`, then from the beginning."""
    size = task.sizes()[split]
    rows = dict.fromkeys([*(row for row in first if row < size), *range(min(OFFERED, size))])
    return [
        {
            "row": row,
            "text": shown_line(task.describe(split, row), most=SIGNS),
            "prompt": opening(written(task, split, row), task.tokenizer),
        }
        for row in rows
    ]


def opening(asked: Asked, tokenizer: Tokenizer) -> str:
    """What a model is given of an example, to go on from there by itself.

    The source, or the question; of a sequence the part before the first token that counts, and
    its first half where every token counts: there must be something left to say.
    """
    batch = asked.batch
    if batch is None or batch.source is not None or "next" not in batch.targets:
        return asked.text
    size = int(batch.valid[0].sum())
    given = 0 if batch.weights is None else int((batch.weights[0] > 0).argmax())
    kept = given + 1 if given else min(OPENING, -(-size // 2))
    return tokenizer.decode([int(i) for i in batch.tokens[0][_begin(batch, tokenizer) : kept]])


def _begin(batch: Batch, tokenizer: Tokenizer) -> int:
    """Where the text of a sequence begins: a BOS is put before it again by whoever reads it."""
    return int("next" in batch.targets and batch.tokens[0][0] == tokenizer.bos)


def written(task: Task | None, split: str, row: int) -> Asked:
    """One example, with the text and target by which it can be asked for again."""
    if task is None or split not in task.sizes():
        raise Unknown(f"this run has no examples called '{split[:40]}'")
    if not 0 <= row < task.sizes()[split]:
        raise InputError(f"no example {row}", hint=f"0 to {task.sizes()[split] - 1}")
    batch = task.batch(split, np.array([row]))
    tokenizer = task.tokenizer
    if batch.source is not None:
        source = _real(tokenizer, batch.source.tokens[0], batch.source.valid[0])
        return Asked(source, _real(tokenizer, batch.targets["next"][0], batch.valid[0]), batch)
    begin = _begin(batch, tokenizer)
    text = _real(tokenizer, batch.tokens[0][begin:], batch.valid[0][begin:])
    answer = batch.targets.get("answer")
    return Asked(text, None if answer is None else tokenizer.decode([int(answer[0])]), batch)


def _real(tokenizer: Tokenizer, ids: Sequence[int], valid: Sequence[bool]) -> str:
    kept = [int(i) for i, real in zip(ids, valid, strict=True) if real]
    while len(kept) > 1 and kept[-1] == tokenizer.eos:
        kept.pop()
    return tokenizer.decode(kept)


def shown_line(text: str, *, most: int) -> str:
    """A line for a list: its blanks are blanks, the rest as it can be seen."""
    line = " ".join(shown(part) for part in text.split(" ") if part)
    return line if len(line) <= most else line[: most - 1] + "…"
