"""What a run gets right and wrong: by group, what was taken for what, and some examples of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from glassformer.data.batch import Batch
from glassformer.data.task import Task
from glassformer.lab.measure.confusion import READINGS, ROWS, order, shares
from glassformer.lab.measure.evaluate import Evaluation, evaluate, log_softmax
from glassformer.lab.measure.exact_match import answers, wanted
from glassformer.lens.show.token_text import shown
from glassformer.training.engine import Engine, loss_weights
from glassformer.web.report.page import Shaded, Text, beside, folded, missing, say, table
from glassformer.web.report.run import Subject

# B examples, T positions, V answers

#: Examples measured, examples searched for right and wrong ones, and how many are shown of each.
MEASURED, SEARCHED, SHOWN = 2_000, 200, 6
LONG = 16  # lines of a table that is shown unfolded
FEW = 8  # of those that are answered at every position
#: What an evaluation against the truth calls its numbers.
TRUTHS = {
    "entropy": "entropy of the truth, nats",
    "excess": "divergence from the truth, nats",
    "legal": "probability on what can occur",
    "bits_per_byte": "bits per byte",
}
#: Tokens shown before the one that was asked for, in a running text.
BEFORE = 24


@dataclass(frozen=True, slots=True)
class Answer:
    """An example, what should have come, what came, and the probability of that."""

    asked: str
    wanted: str
    answered: str
    probability: float | None
    right: bool


def errors(run: Subject) -> Iterator[str]:
    """Loss and shares on the test split, by the task's groups, with confusion where it has one."""
    engine, task = run.measured
    found = evaluate(engine, task, examples=MEASURED)
    yield say(
        f"{found.examples:,} examples of the split '{found.split}': loss {found.loss:.4f} nats, "
        f"accuracy {found.accuracy:.2%}, wholly right {found.exact_match:.2%}."
    )
    rows = [[head, v["loss"], f"{v['accuracy']:.2%}"] for head, v in found.heads.items()]
    if len(rows) > 1:
        yield table(["head", "loss", "accuracy"], rows, caption="by head")
    if found.oracle:
        lines = [[TRUTHS.get(name, name), f"{value:.4f}"] for name, value in found.oracle.items()]
        yield table(["measure", "value"], lines, caption="against what is known of the truth")
    yield beside(_groups(found))
    if not found.confusion:
        yield missing(
            f"The task {task.name} has no table of what was taken for what: a wrong token is no "
            "other question's answer."
        )
    for group, cells in found.confusion.items():
        rows_of, columns = order(cells)
        lines = [
            [name, *(Shaded(f"{100 * s:.1f}", s) for s in line), sum(cells[name].values())]
            for name, line in zip(rows_of, shares(cells), strict=True)
        ]
        reading = READINGS.get(group, group)
        caption = f"{ROWS.get(group, group)} in the rows, per cent of the row; columns: {reading}"
        yield table(["", *columns, "n"], lines, caption=caption)


def _groups(found: Evaluation) -> Iterator[str]:
    for group, labels in found.by.items():
        lines = [
            [label, Shaded(f"{share:.1%}", share), found.counts[group][label]]
            for label, share in labels.items()
        ]
        made = table([group, "wholly right", "n"], lines, caption=f"by {group}")
        yield made if len(lines) <= LONG else folded(f"by {group}: {len(lines)} lines", made)


def examples(run: Subject) -> Iterator[str]:
    """Some that came out right, and those wrong ones of which the model was surest."""
    engine, task = run.measured
    split = "test" if "test" in task.sizes() else "val"
    searched, found = answered(run, engine, task, split)
    right = [one for one in found if one.right]
    wrong = sorted((one for one in found if not one.right), key=lambda one: -(one.probability or 0))
    yield say(f"{len(found):,} answers to the first {searched} examples of '{split}'.")
    sure = any(one.probability is not None for one in found)
    heading = ["", "asked", "wanted", "answered", *(["probability"] if sure else [])]
    for name, kept, all_ in (("right", right[:SHOWN], right), ("wrong", wrong[:SHOWN], wrong)):
        if not kept:
            yield missing(f"None of these {len(found)} answers is {name}.")
            continue
        rows = [
            [
                str(number + 1),
                Text(one.asked),
                Text(one.wanted),
                Text(one.answered, kind=name),
                *([f"{one.probability:.2%}"] if sure else []),
            ]
            for number, one in enumerate(kept)
        ]
        order_text = ", the surest first" if name == "wrong" and sure else ""
        caption = f"{name}: {len(kept)} of {len(all_):,}{order_text}"
        yield table(heading, rows, caption=caption)


def answered(run: Subject, engine: Engine, task: Task, split: str) -> tuple[int, list[Answer]]:
    """How many examples were asked, and every answer, in the way that the task asks for them."""
    rows = np.arange(min(SEARCHED, task.sizes()[split]), dtype=np.int64)
    batch = task.batch(split, rows)
    if batch.source is not None:
        return len(rows), list(_decoded(run, task, batch))
    head = next(name for name in engine.spec.head_names() if name in batch.targets)
    if batch.targets[head].ndim > 1:  # one a position: a few rows give thousands of them
        rows = rows[:FEW]
        batch = task.batch(split, rows)
    logits = engine.logits(batch)[head]
    places = zip(*np.nonzero(loss_weights(batch, head) > 0), strict=True)
    made = [_answer(task, batch, head, logits, tuple(map(int, place))) for place in places]
    return len(rows), made


def _answer(task: Task, batch: Batch, head: str, logits: Any, place: tuple[int, ...]) -> Answer:
    row = place[0]
    wanted_id, said = int(batch.targets[head][place]), int(logits[place].argmax())
    share = float(np.exp(log_softmax(logits[place])[said]))
    real = batch.tokens[row][batch.valid[row]].tolist()
    if len(place) > 1:
        until = int(batch.valid[row][: place[1] + 1].sum())
        real = real[max(0, until - BEFORE) : until]
    asked = task.tokenizer.decode(real)

    def name(token: int) -> str:
        known = head in ("next", "answer") and token < task.tokenizer.vocab_size
        return shown(task.tokenizer.decode([token])) if known else str(token)

    return Answer(asked, name(wanted_id), name(said), share, wanted_id == said)


def _decoded(run: Subject, task: Task, batch: Batch) -> Iterator[Answer]:
    """Whole answers, greedily, without help."""
    assert batch.source is not None
    tokenizer = task.tokenizer
    made = answers(run.adapter.stepper(), batch, eos=tokenizer.eos, beams=None)
    for row, (said, truth) in enumerate(zip(made, wanted(batch), strict=True)):
        source = batch.source.tokens[row][batch.source.valid[row]].tolist()
        yield Answer(
            tokenizer.decode(source),
            tokenizer.decode(list(truth)),
            tokenizer.decode(list(said)),
            None,
            said == truth,
        )
