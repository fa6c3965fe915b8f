"""Sections about what a run gets right and wrong: by group, confusion matrices, some examples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch
from glassformer.data.task import Task
from glassformer.data.tasks.fsm import Fsm
from glassformer.lab.extract import extract_machine
from glassformer.lab.measure.evaluate import (
    READINGS,
    ROWS,
    Evaluation,
    evaluate,
    order,
    perplexity,
    shares,
    token_namer,
)
from glassformer.lab.measure.scores import answers, wanted
from glassformer.lens.show.html import folded
from glassformer.lens.show.report_page import (
    Cell,
    Shaded,
    Text,
    beside,
    missing,
    say,
    table,
)
from glassformer.lens.show.text import shown
from glassformer.training.engine import Engine, log_softmax, loss_weights
from glassformer.web.report.run import Subject

# B examples, T positions, V vocabulary

#: Examples evaluated, those searched for right ones; right and wrong ones that are shown.
MEASURED, SEARCHED, SHOWN, MOST_WRONG = 2_000, 200, 6, 12
LONG = 16  # lines of a table that is shown unfolded
FEW = 8  # rows searched if every position has a prediction
#: Names of the numbers of an evaluation against the oracle.
TRUTHS = {
    "entropy": "entropy of the truth, nats",
    "excess": "divergence from the truth, nats",
    "legal": "probability on what can occur",
    "bits_per_byte": "bits per byte",
}
#: What a table of accuracy by position is about.
PLACES = {"answers": "by position in the answer", "text": "by position in the window"}
#: Tokens shown before the target, in a running text.
BEFORE = 24


@dataclass(frozen=True, slots=True)
class Prediction:
    """An example: its input, target and prediction, and the probability of the prediction."""

    input: str
    target: str
    predicted: str
    probability: float | None
    right: bool


def errors(run: Subject) -> Iterator[str]:
    """Loss and accuracy on the test split, by the task's groups, and confusion matrices."""
    found, task = measured(run), run.task
    examples = f"{found.examples:,} examples of the split '{found.split}'"
    if found.kind == "answers":
        yield say(
            f"{examples}: loss {found.loss:.4f} nats, accuracy {found.accuracy:.2%}, "
            f"exact match {found.exact_match:.2%}."
        )
    elif found.kind == "text":
        yield say(
            f"{examples}: loss {found.loss:.4f} nats a token, perplexity "
            f"{perplexity(found.loss)}; {found.accuracy:.2%} of the tokens are the most probable "
            "ones."
        )
    else:
        yield say(f"{examples}. {found.headline()}")
    rows: list[list[Cell]] = [
        [head, v["loss"], f"{v['accuracy']:.2%}"] for head, v in found.heads.items()
    ]
    if len(rows) > 1:
        yield table(["head", "loss", "accuracy"], rows, caption="by head")
    if found.oracle:
        truths: list[list[Cell]] = [
            [TRUTHS.get(name, name), f"{value:.4f}"] for name, value in found.oracle.items()
        ]
        yield table(["measure", "value"], truths, caption="against the oracle")
    if found.kind != "process":  # whose strings are matched by luck
        yield beside([*_groups(found), *_tokens(found)])
    if not found.confusion and not found.tokens:
        yield missing(
            f"The task {task.name} has no confusion matrix: a wrong token is not the answer to "
            "another question."
        )
    for group, cells in found.confusion.items():
        rows_of, columns = order(cells)
        lines: list[list[Cell]] = [
            [name, *(Shaded(f"{100 * s:.1f}", s) for s in line), sum(cells[name].values())]
            for name, line in zip(rows_of, shares(cells), strict=True)
        ]
        reading = READINGS.get(group, group)
        caption = f"{ROWS.get(group, group)} in the rows, per cent of the row; columns: {reading}"
        yield table(["", *columns, "n"], lines, caption=caption)


def measured(run: Subject) -> Evaluation:
    """Evaluate the checkpoint, once for all sections."""
    if "evaluation" not in run.memory:
        run.memory["evaluation"] = evaluate(*run.measured, examples=MEASURED)
    found: Evaluation = run.memory["evaluation"]
    return found


def _tokens(found: Evaluation) -> Iterator[str]:
    """Show where answers of several tokens go wrong: by position, and which token for which."""
    if not found.tokens:
        return
    lines: list[list[Cell]] = [
        [one["position"], Shaded(f"{one['accuracy']:.1%}", one["accuracy"]), one["count"]]
        for one in found.tokens["positions"]
    ]
    yield table(["position", "accuracy", "n"], lines, caption=PLACES[found.kind])
    pairs: list[list[Cell]] = [
        [shown(one["target"]), Text(shown(one["predicted"])), one["count"]]
        for one in found.tokens["confused"]
    ]
    if pairs:
        heading = ["right token", "predicted", "times"]
        yield table(heading, pairs, caption="tokens confused most often")


def _groups(found: Evaluation) -> Iterator[str]:
    for group, labels in found.by.items():
        lines: list[list[Cell]] = [
            [label, Shaded(f"{share:.1%}", share), found.counts[group][label]]
            for label, share in labels.items()
        ]
        part = table([group, "exact match", "n"], lines, caption=f"by {group}")
        yield part if len(lines) <= LONG else folded(f"by {group}: {len(lines)} lines", part)


def machine(run: Subject) -> Iterator[str]:
    """The finite-state machine that the model computes; nothing for other tasks."""
    engine, task = run.measured
    if not isinstance(task, Fsm):
        return
    found = extract_machine(engine, task)
    yield f'<div class="scroll">{found.svg()}</div>'
    yield say(" ".join(found.sentences()))
    yield say(
        "A double circle: a string may end here. On the edges, a symbol and the model's mean "
        f"probability of it. As a file: glass extract {run.name} -o machine.svg",
        kind="note",
    )


def examples(run: Subject) -> Iterator[str]:
    """The wrong predictions first, then some right ones."""
    engine, task = run.measured
    found = measured(run)
    if found.kind != "answers":
        yield from _farthest(found)
        return
    split, size = found.split, task.sizes()[found.split]
    rows = np.array([error["row"] for error in found.errors[:MOST_WRONG]], dtype=np.int64)
    some = np.arange(min(SEARCHED, size), dtype=np.int64)
    several = found.tokens and task.batch(split, some[:1]).source is None  # one at every position
    looked = predictions(run, engine, task, split, some[:FEW] if several else some)
    right = [one for one in looked if one.right]
    if several:
        wrong = [one for one in looked if not one.right]
        total, of = len(wrong), f"{len(looked):,} predictions for the first {FEW} examples"
    else:
        wrong = [one for one in predictions(run, engine, task, split, rows) if not one.right]
        total, of = found.wrong or 0, f"{found.examples:,} examples"
    wrong.sort(key=lambda one: -(one.probability or 0))
    yield say(f"{total:,} of {of} of '{split}' are wrong.")
    sure = any(one.probability is not None for one in looked)
    heading = ["", "input", "right answer", "predicted", *(["probability"] if sure else [])]
    parts = []
    kinds = (("wrong", wrong[:MOST_WRONG], total), ("right", right[:SHOWN], len(right)))
    for name, kept, all_ in kinds:
        if not kept:
            parts.append(missing(f"No prediction is {name}."))
            continue
        lines: list[list[Cell]] = [
            [
                str(number + 1),
                Text(one.input),
                Text(one.target),
                Text(one.predicted, kind=name),
                *([f"{one.probability:.2%}"] if sure else []),
            ]
            for number, one in enumerate(kept)
        ]
        order_text = ", the most probable first" if name == "wrong" and sure else ""
        some_of = f"{len(kept)} of {all_:,}" if len(kept) < all_ else f"all {all_:,}"
        parts.append(table(heading, lines, caption=f"{name}: {some_of}{order_text}"))
    yield beside(parts)


def _farthest(found: Evaluation) -> Iterator[str]:
    """Where nothing is right or wrong: the predictions that are farthest off."""
    process = found.kind == "process"
    if process:
        yield say(
            "What follows is decided by chance, so a token that differs from the most probable one "
            "is no mistake. Listed are the predictions farthest from the true distribution; in "
            f"{found.wrong:,} of {found.examples:,} strings of '{found.split}' the most probable "
            "token cannot occur at all."
        )
        heading = ["", "input", "the truth", "the model", "nats too many"]
    else:
        yield say(
            "A text can go on in many ways, so a token that differs from the most probable one is "
            "no mistake. Listed are the least expected tokens."
        )
        heading = [
            "",
            "text before",
            "followed by",
            "most probable",
            "probability of what followed",
        ]
    lines: list[list[Cell]] = []
    for number, one in enumerate(found.errors[:MOST_WRONG]):
        if process:
            cells: list[Cell] = [
                Text(_distribution(one["truth"])),
                Text(_distribution(one["model"])),
                f"{one['excess']:.4f}",
            ]
        else:
            cells = [
                Text(shown(one["target"][0])),
                Text(shown(one["predicted"][0])),
                f"{one['right_probability']:.2e}",
            ]
        lines.append([str(number + 1), Text(one["input"]), *cells])
    caption = "farthest from the truth" if process else "least expected"
    yield table(heading, lines, caption=f"{caption}: {len(lines)}")


def _distribution(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{shown(token)} {share:.1%}" for token, share in shares.items())


def predictions(
    run: Subject, engine: Engine, task: Task, split: str, rows: NDArray[np.int64]
) -> list[Prediction]:
    """Return every prediction for these rows."""
    if not len(rows):
        return []
    batch = task.batch(split, rows)
    if batch.source is not None:
        return list(_decoded(run, task, batch))
    head = next(name for name in engine.spec.head_names() if name in batch.targets)
    logits = engine.logits(batch)[head]
    counted = zip(*np.nonzero(loss_weights(batch, head) > 0), strict=True)
    return [_prediction(task, batch, head, logits, tuple(map(int, at))) for at in counted]


def _prediction(
    task: Task, batch: Batch, head: str, logits: Any, at: tuple[int, ...]
) -> Prediction:
    row = at[0]
    target, predicted = int(batch.targets[head][at]), int(logits[at].argmax())
    share = float(np.exp(log_softmax(logits[at])[predicted]))
    real = batch.tokens[row][batch.valid[row]].tolist()
    if len(at) > 1:
        until = int(batch.valid[row][: at[1] + 1].sum())
        real = real[max(0, until - BEFORE) : until]
    text = task.tokenizer.decode(real)
    name = token_namer(task, head)
    told = shown(name(target)), shown(name(predicted))
    return Prediction(text, *told, share, target == predicted)


def _decoded(run: Subject, task: Task, batch: Batch) -> Iterator[Prediction]:
    """Yield complete sequences, decoded greedily."""
    assert batch.source is not None
    tokenizer = task.tokenizer
    decoded = answers(run.adapter.stepper(), batch, eos=tokenizer.eos, beams=None)
    for row, (predicted, target) in enumerate(zip(decoded, wanted(batch), strict=True)):
        source = batch.source.tokens[row][batch.source.valid[row]].tolist()
        yield Prediction(
            tokenizer.decode(source),
            tokenizer.decode(list(target)),
            tokenizer.decode(list(predicted)),
            None,
            predicted == target,
        )
