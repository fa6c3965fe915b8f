"""Scores of complete answers that a model decodes on its own: exact match, chrF and BLEU.

An evaluation gives the model the right answer so far at every position; here it has only its own
tokens. chrF and BLEU are sacrebleu's, as papers report them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from glassformer.data.batch import Batch
from glassformer.data.task import Task
from glassformer.generation.beam import beam_search
from glassformer.generation.prompts import Prompts
from glassformer.generation.stepper import Stepper
from glassformer.generation.streaming import generate_batch
from glassformer.lab.measure.evaluate import in_order
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.spec.errors import InputError, MachineError


def corpus_scores(ours: Sequence[str], truths: Sequence[str]) -> dict[str, float]:
    """Return scores from 0 to 100: chrF by characters (F2 of 1- to 6-grams), BLEU by words."""
    if len(ours) != len(truths) or not ours:
        raise InputError(
            f"{len(ours)} texts beside {len(truths)} right ones", hint="one for each, at least one"
        )
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise MachineError(
            "chrF and BLEU need sacrebleu, which is not installed",
            hint="pip install 'glassformer[translate]'",
        ) from error
    references = [list(truths)]
    return {
        "chrf": float(CHRF().corpus_score(list(ours), references).score),
        "bleu": float(BLEU().corpus_score(list(ours), references).score),
    }


#: Rows decoded at once; only speed depends on it.
CHUNK = 250

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The number of complete right answers of a split, the rows of the others, and what was
    generated for each row, the end included.
    """

    split: str
    examples: int
    right: int
    wrong: list[int] = field(default_factory=list)
    said: list[Ids] = field(default_factory=list)

    @property
    def exact_match(self) -> float:
        """The share of answers that is right from the first token to the end."""
        return self.right / self.examples


def decode_split(
    stepper: Stepper,
    task: Task,
    *,
    split: str = "test",
    examples: int | None = None,
    beams: int | None = None,
) -> Decoded:
    """Answer the first `examples` sources of a split, greedily or with the best of `beams`.

    For tasks with a source: the decoder starts from the first token alone.
    """
    sizes = task.sizes()
    if split not in sizes:
        raise InputError(f"no split '{split}'", hint=f"this task has: {', '.join(sizes)}")
    count = sizes[split] if examples is None else min(examples, sizes[split])
    if count < 1:
        raise InputError(f"{count} examples of '{split}'", hint="ask for at least one")
    wrong: list[int] = []
    said: list[Ids] = []
    for first in range(0, count, CHUNK):
        rows = np.arange(first, min(first + CHUNK, count), dtype=np.int64)
        batch = task.batch(split, rows)
        if batch.source is None:
            raise InputError(
                f"the task '{task.name}' has no source to answer",
                hint="copy, reverse and sort have one",
            )
        found = answers(stepper, batch, eos=task.tokenizer.eos, beams=beams)
        said += found
        for row, ours, truth in zip(rows.tolist(), found, wanted(batch), strict=True):
            if ours != truth:
                wrong.append(row)
    return Decoded(split, count, count - len(wrong), wrong, said)


def decoded_scores(stepper: Stepper, task: Task, *, split: str) -> dict[str, Any]:
    """Decode a split greedily; return exact match, also by group, and for texts chrF and BLEU."""
    found = decode_split(stepper, task, split=split)
    rows = np.arange(found.examples, dtype=np.int64)
    wrong = set(found.wrong)
    by: dict[str, dict[str, float]] = {}
    for group, labels in task.groups(split, rows).items():
        marks: dict[str, list[bool]] = {}
        for row, label in enumerate(labels):
            marks.setdefault(label, []).append(row not in wrong)
        ordered = in_order(marks)
        by[group] = {label: sum(right) / len(right) for label, right in ordered}
    scores = text_scores(found, task) if task.answers_are_sentences else {}
    return {"examples": found.examples, "exact_match": found.exact_match, **scores, "by": by}


def text_scores(found: Decoded, task: Task) -> dict[str, float]:
    """Return chrF and BLEU of the decoded answers against the right ones, both as texts."""
    ends = {task.tokenizer.eos, task.tokenizer.pad}

    def text(ids: Ids) -> str:
        return task.tokenizer.decode([token for token in ids if token not in ends])

    truths: list[Ids] = []
    for first in range(0, found.examples, CHUNK):
        rows = np.arange(first, min(first + CHUNK, found.examples), dtype=np.int64)
        truths += wanted(task.batch(found.split, rows))
    return corpus_scores([text(ids) for ids in found.said], [text(ids) for ids in truths])


def answers(stepper: Stepper, batch: Batch, *, eos: int | None, beams: int | None) -> list[Ids]:
    """Return what the model generates for each source of a batch, the end included."""
    assert batch.source is not None
    prompts = Prompts.of(
        batch.tokens[:, :1], sources=batch.source.tokens, source_valid=batch.source.valid
    )
    # One token more than any truth has: an answer that goes on is wrong whatever follows.
    longest = batch.tokens.shape[1] + 1
    ends = () if eos is None else (eos,)
    if beams is None:
        greedy = DecodeSpec(max_new_tokens=longest, eos=ends)
        return [one.tokens for one in generate_batch(stepper, prompts, spec=greedy, logprobs=False)]
    spec = BeamSpec(width=beams, n_best=1, max_new_tokens=longest, eos=ends)
    return [one.hypotheses[0].tokens for one in beam_search(stepper, prompts, spec=spec)]


def wanted(batch: Batch) -> Iterator[Ids]:
    """Return the right answer of each row, without padding."""
    for target, valid in zip(batch.targets["next"], batch.valid, strict=True):
        yield tuple(target[valid].tolist())
