"""Evaluation of a model against the truth, broken down by the task's groups.

One pass over a split: loss and accuracy of every head, exact match of complete sequences by group,
the distance to the oracle where there is one, and confusion tables as text, rows and CSV.
"""

import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch
from glassformer.data.task import Oracle, Task, check_split
from glassformer.spec.csv_text import csv_text
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import json_numbers
from glassformer.spec.units import plain_digits
from glassformer.store.rundir import RunDirectory
from glassformer.training.engine import (
    Engine,
    Judged,
    judge_logits,
    log_softmax,
    loss_weights,
)

# B batch, T length, V logits

#: Examples evaluated at once at most; only speed and memory depend on it.
CHUNK = 256
#: Wrong rows that are kept; tokens of each that are shown, and of running text before the first.
ERRORS, TOKENS, BEFORE = 20, 48, 24
#: Pairs of right and predicted tokens that are kept, the most frequent ones.
CONFUSED = 12
#: Bits of a token in a number that stands for two.
PAIR = 32
#: Positions of an answer that are counted one by one; beyond, each range is as long as all before.
SINGLE = 16

Value = TypeVar("Value")

#: What examples are, and so how predictions of them are scored.
Kind = Literal["answers", "text", "process"]
#: Tokens of a distribution that are listed, and the least probability of one.
LISTED, RARE = 4, 1e-3


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """Results of one split. `loss` is the plain mean a token of the first head, in nats.

    kind: what the examples are. `answers` can be right or wrong, and are scored by exact match.
    Running `text` and samples of a random `process` cannot: even a perfect model does not predict
    them. There exact_match is None, by is empty, and errors are the rows with the prediction that
    is farthest off, the farthest first: of a text the token with the least probability, of a
    process the largest excess over the truth, with both distributions.

    by: {group: {label: exact match}}; heads: {head: {loss, accuracy}}; oracle: the truth's
    entropy, the excess over it (divergence from the truth, free of the sample's luck), and legal
    (probability given to what can occur). wrong: the number of rows that are not completely right,
    of a process those with a prediction that cannot occur, of a text None;
    errors: the first wrong rows, with the right tokens and the predicted ones. pairs: target and
    prediction of each row, by group, from row 0 on; `confusion` counts them. tokens: of answers of
    several tokens, the share that is right at each position and the most frequent confusions.
    decoded: the same answers with only the model's own tokens before each, where the task has a
    source.
    """

    split: str
    examples: int
    loss: float
    accuracy: float
    exact_match: float | None
    heads: Mapping[str, Mapping[str, float]]
    by: Mapping[str, Mapping[str, float]]
    counts: Mapping[str, Mapping[str, int]]
    oracle: Mapping[str, float]
    confusion: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    wrong: int | None = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    pairs: Mapping[str, list[tuple[str, str]]] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    decoded: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = "answers"

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        return {
            "split": self.split,
            "examples": self.examples,
            "loss": self.loss,
            "accuracy": self.accuracy,
            **({} if self.exact_match is None else {"exact_match": self.exact_match}),
            "heads": {head: dict(values) for head, values in self.heads.items()},
            "by": {group: dict(values) for group, values in self.by.items()},
            "oracle": dict(self.oracle),
            **({"decoded": dict(self.decoded)} if self.decoded else {}),
        }

    def to_json(self) -> str:
        """Return one JSON object; a number that is not finite is written as a string."""
        return json.dumps(json_numbers(self.to_dict()), allow_nan=False)

    def text(self, *, width: int = 80) -> str:
        """Return the results as a table for people, no wider than `width` columns."""
        lines = self._summary(width)
        for group, labels in self.by.items():
            lines.append(f"by {group}")
            for label, share in labels.items():
                count = self.counts[group][label]
                lines.append(f"  {label:<12}{share:>9.2%}  of {count:,}")
        lines += _decoded_lines(self.decoded)
        for group, table in self.confusion.items():
            lines += ["", confusion_text(group, table, width=width)]
        return "\n".join(lines)

    def headline(self) -> str:
        """Return the numbers that count most, in words."""
        if self.kind == "text":
            return (
                f"loss {self.loss:.4f} nats a token  perplexity {perplexity(self.loss)}  "
                f"accuracy {self.accuracy:.2%} of single tokens"
            )
        if self.kind == "answers":
            return (
                f"loss {self.loss:.4f}  accuracy {self.accuracy:.2%}  "
                f"exact match {self.exact_match:.2%}"
            )
        excess = max(0.0, self.oracle["excess"])
        return (
            f"The model's predictions cost {excess:.4f} nats a token above the entropy of the "
            f"machine itself, {self.oracle['entropy']:.4f}; 0 would be perfect. It gives "
            f"{self.oracle['legal']:.2%} of its probability to what can occur. In "
            f"{self.wrong:,} of {self.examples:,} strings it predicts a token that cannot occur."
        )

    def _summary(self, width: int) -> list[str]:
        """Return what counts most, first."""
        lines = [f"{self.split}: {self.examples:,} examples"]
        words = textwrap.wrap(self.headline(), width - 2)
        lines += [f"  {line}" for line in words]
        for head, values in self.heads.items():
            if len(self.heads) > 1 or self.kind == "process":
                score = f"loss {values['loss']:.4f}, accuracy {values['accuracy']:.2%}"
                lines.append(f"  {head}: {score}")
        if "bits_per_byte" in self.oracle:
            lines.append(f"  bits per byte {self.oracle['bits_per_byte']:.4f}")
        return lines

    def __repr__(self) -> str:
        more = [f"by {group}" for group in self.by]
        more += [f"confusion by {group}" for group in self.confusion]
        more += ["decoded"] if self.decoded else []
        rest = [f"  print(_.text()) adds: {', '.join(more)}"] if more else []
        return "\n".join([*self._summary(80), *rest])

    def write(self, directory: RunDirectory) -> None:
        """Write the results, some errors and the confusion tables to a run's `eval/` folder."""
        directory.write_json(f"eval/{self.split}.json", self.to_dict())
        lines = "".join(f"{json.dumps(json_numbers(error))}\n" for error in self.errors)
        directory.write(f"eval/{self.split}-errors.jsonl", lines)
        for group, table in self.confusion.items():
            directory.write(f"eval/{self.split}-confusion-{group}.csv", confusion_csv(table))


def perplexity(loss: float) -> str:
    """Return e to the loss, the number of equally likely tokens that are as hard to predict."""
    return f"{math.exp(loss):,.2f}" if loss < 20 else "above 4.8e+08"


def _decoded_lines(decoded: Mapping[str, Any]) -> list[str]:
    """Return the scores of answers decoded from the source alone; empty if none were decoded."""
    if not decoded:
        return []
    names = {"chrf": "chrF", "bleu": "BLEU"}
    scores = "".join(f"  {names[key]} {decoded[key]:.2f}" for key in names if key in decoded)
    lines = [
        "decoded, from the source alone",
        f"  exact match {decoded['exact_match']:.2%}{scores}",
    ]
    for group, labels in decoded["by"].items():
        shares = ", ".join(f"{label} {share:.1%}" for label, share in labels.items())
        lines.append(f"  by {group}: {shares}")
    return lines


class _Tally:
    """Sums over the batches so far."""

    def __init__(self, primary: str) -> None:
        self.primary = primary
        self.heads: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.by: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        self.confusion: dict[str, dict[str, dict[str, int]]] = {}
        self.pairs: dict[str, list[tuple[str, str]]] = {}
        self.matches = 0
        self.asked = 0
        self.entropy = 0.0
        self.excess = 0.0
        self.legal = 0.0
        self.judged = 0.0
        self.impossible = 0
        self.errors: list[dict[str, Any]] = []
        self.far: list[tuple[float, int, dict[str, Any]]] = []
        self.places = np.zeros((0, 2), dtype=np.int64)  # right and all, by position in the answer
        # Wrong tokens: each pair of target and prediction as one number, and how often it occurs.
        self.confused: tuple[NDArray[np.int64], NDArray[np.int64]] = (
            np.zeros(0, dtype=np.int64),
            np.zeros(0, dtype=np.int64),
        )

    def add(
        self, batch: Batch, judged: Mapping[str, Judged]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Count every head; return which sequences the first head predicts completely, and which
        have any position that counts.
        """
        exact: NDArray[np.bool_] = np.zeros(len(batch.tokens), dtype=np.bool_)
        asked = exact
        for head, (nll, predicted) in judged.items():
            weights = loss_weights(batch, head).astype(np.float64)
            target = batch.targets[head]
            right = predicted == target
            sums = self.heads[head]
            sums[0] += float((nll * weights).sum())
            sums[1] += float((right * weights).sum())
            sums[2] += float(weights.sum())
            if head == self.primary:
                counted = (weights > 0).reshape(len(exact), -1)
                wrong = counted & ~right.reshape(len(exact), -1)
                asked = cast(NDArray[np.bool_], counted.any(axis=1))
                exact = asked & ~wrong.any(axis=1)
                if target.ndim > 1:
                    self._add_tokens(counted, wrong, target, predicted)
        self.matches += int(exact.sum())
        self.asked += int(asked.sum())
        return exact, asked

    def _add_tokens(
        self,
        counted_BT: NDArray[np.bool_],
        wrong_BT: NDArray[np.bool_],
        target_BT: NDArray[Any],
        predicted_BT: NDArray[Any],
    ) -> None:
        """Count the right tokens by their position in the answer, and which are confused."""
        place_BT = counted_BT.cumsum(axis=1) - 1
        longer = int(place_BT.max(initial=-1)) + 1 - len(self.places)
        self.places = np.pad(self.places, ((0, max(0, longer)), (0, 0)))
        for column, chosen_BT in ((1, counted_BT), (0, counted_BT & ~wrong_BT)):
            self.places[:, column] += np.bincount(place_BT[chosen_BT], minlength=len(self.places))
        pairs = (target_BT[wrong_BT].astype(np.int64) << PAIR) + predicted_BT[wrong_BT]
        new, counts = np.unique(pairs, return_counts=True)
        known, before = self.confused
        every, place = np.unique(np.concatenate([known, new]), return_inverse=True)
        sums = np.bincount(place, weights=np.concatenate([before, counts]), minlength=len(every))
        self.confused = every, sums.astype(np.int64)

    def add_groups(
        self,
        groups: Mapping[str, list[str]],
        exact: NDArray[np.bool_],
        asked: NDArray[np.bool_],
    ) -> None:
        """Count right ones and all, by group and label, over sequences that count anywhere."""
        for group, labels in groups.items():
            for label, right, counts_too in zip(labels, exact, asked, strict=True):
                if counts_too:
                    counts = self.by[group][label]
                    counts[0] += int(right)
                    counts[1] += 1

    def add_confusions(self, pairs: Mapping[str, list[tuple[str, str]]]) -> None:
        """Count how often each target was predicted as each label."""
        for group, found in pairs.items():
            self.pairs.setdefault(group, []).extend(found)
            table = self.confusion.setdefault(group, {})
            for asked, answered in found:
                row = table.setdefault(asked, {})
                row[answered] = row.get(answered, 0) + 1

    def add_truth(
        self, truth: Oracle, batch: Batch, logits: NDArray[Any]
    ) -> NDArray[np.floating[Any]]:
        """Add the distance to the truth and the probability of what can occur, where it counts.

        Return the excess of each prediction.
        """
        weights = loss_weights(batch, self.primary).astype(np.float64)
        logp = log_softmax(logits)
        if truth.probabilities is not None:  # a model may have more classes than the task
            logp = logp[..., : truth.probabilities.shape[-1]]
        self.judged += float(weights.sum())
        self.entropy += float((truth.entropy * weights).sum())
        excess = truth.excess(logp)
        self.excess += float((excess * weights).sum())
        self.legal += float((truth.legal_mass(logp) * weights).sum())
        best = logits.argmax(axis=-1)
        possible = truth.is_legal(best)
        self.impossible += int(((weights > 0) & ~possible).reshape(len(best), -1).any(axis=1).sum())
        return excess

    def add_far(
        self,
        task: Task,
        batch: Batch,
        rows: NDArray[np.int64],
        off: NDArray[np.floating[Any]],
        judged: Judged,
        *,
        split: str,
        most: int,
        truth: tuple[Oracle, NDArray[Any]] | None = None,
    ) -> None:
        """Keep the rows with the prediction that is farthest off, by `off` at each position."""
        counted = (loss_weights(batch, self.primary) > 0).reshape(len(rows), -1)
        off_BT = np.where(counted, off.reshape(len(rows), -1), -np.inf)
        worst_B = off_BT.max(axis=1)
        for i in np.argsort(-worst_B, kind="stable"):
            full = len(self.far) >= most
            if not counted[i].any() or (full and (not most or worst_B[i] <= self.far[-1][0])):
                break  # the others are no farther off
            row, at = int(rows[i]), int(off_BT[i].argmax())
            told = {"row": row, "example": task.describe(split, row)}
            told |= _far(task, batch, self.primary, judged, int(i), at)
            if any(one["input"] == told["input"] for _, _, one in self.far):
                continue  # strings that begin alike
            if truth is not None:
                told |= _distributions(task, self.primary, *truth, int(i), at)
                told["excess"] = float(worst_B[i])
            self.far.append((float(worst_B[i]), row, told))
            self.far.sort(key=lambda one: (-one[0], one[1]))
            del self.far[most:]


def evaluate(
    engine: Engine,
    task: Task,
    *,
    split: str | None = None,
    examples: int | None = None,
    errors: int = ERRORS,
) -> Evaluation:
    """Measure one split, or its first `examples`; without a name the test split, else val.

    At most `errors` rows are described: wrong ones, or those whose prediction is farthest off.
    """
    sizes = task.sizes()
    split = split or ("test" if "test" in sizes else "val")
    check_split(split, sizes)
    count = sizes[split] if examples is None else min(examples, sizes[split])
    if count == 0:
        raise InputError(f"the split '{split}' has no examples")
    tally = None
    size = int(task.lengths(split)[:count].max()) * max(
        map(engine.spec.head_size, engine.spec.head_names())
    )
    for rows in _chunks(count, max(1, min(CHUNK, engine.logits_at_once // size))):
        batch = task.batch(split, rows)
        truth = task.oracle(split, rows)
        # Complete logits leave the device only where the truth is a distribution.
        logits = None if truth is None else engine.logits(batch)
        judged = engine.judge(batch) if logits is None else judge_logits(logits, batch)
        if tally is None:
            heads = engine.spec.head_names()
            tally = _Tally(next(head for head in heads if head in batch.targets))
        exact, asked = tally.add(batch, judged)
        tally.add_groups(task.groups(split, rows), exact, asked)
        answers = judged[tally.primary].predicted
        tally.add_confusions(task.confusions(split, rows, answers))
        if task.is_running_text:
            nll = judged[tally.primary].nll
            tally.add_far(task, batch, rows, nll, judged[tally.primary], split=split, most=errors)
            continue
        if truth is not None and logits is not None:
            excess = tally.add_truth(truth, batch, logits[tally.primary])
            if truth.entropy.any():
                tally.add_far(
                    task,
                    batch,
                    rows,
                    excess,
                    judged[tally.primary],
                    split=split,
                    most=errors,
                    truth=(truth, logits[tally.primary]),
                )
        for i in np.flatnonzero(asked & ~exact)[: errors - len(tally.errors)]:
            row = int(rows[i])
            told = {"row": row, "example": task.describe(split, row)}
            tally.errors.append(told | _mistake(task, batch, tally.primary, judged, int(i)))
    assert tally is not None
    return _evaluation(tally, task, split, count)


def _mistake(
    task: Task, batch: Batch, head: str, judged: Mapping[str, Judged], row: int
) -> dict[str, Any]:
    """Return what a row asks, its right tokens and the predicted ones, each after the right ones
    before it; of running text only the first wrong token. `right_probability` is what the right
    token had where the first wrong one was predicted, `wrong` and `of` count tokens.
    """
    target, predicted = batch.targets[head][row], judged[head].predicted[row]
    counted = np.atleast_1d(loss_weights(batch, head)[row] > 0)
    wrong = np.flatnonzero(counted & np.atleast_1d(predicted != target))
    first = int(wrong[0])
    told = _far(task, batch, head, judged[head], row, first)
    told |= {"wrong": len(wrong), "of": int(counted.sum())}
    if target.ndim == 0 or batch.source is None:
        return told
    named = token_namer(task, head)
    source = batch.source.tokens[row][batch.source.valid[row]].tolist()
    kept = np.flatnonzero(counted)
    kept = kept[max(0, int(np.searchsorted(kept, first)) - TOKENS // 2) :][:TOKENS]
    return told | {
        "input": task.tokenizer.decode(source),
        "target": [named(int(target[t])) for t in kept],
        "predicted": [named(int(predicted[t])) for t in kept],
    }


def _far(task: Task, batch: Batch, head: str, judged: Judged, row: int, at: int) -> dict[str, Any]:
    """Return what one prediction asked, the token that followed, and the most probable one."""
    named = token_namer(task, head)
    target = int(np.atleast_1d(batch.targets[head][row])[at])
    predicted = int(np.atleast_1d(judged.predicted[row])[at])
    real = batch.valid[row]
    tokens = batch.tokens[row][real].tolist()
    if batch.targets[head].ndim > 1:
        until = int(real[: at + 1].sum())
        tokens = tokens[max(0, until - BEFORE) : until]
    return {
        "input": task.tokenizer.decode(tokens),
        "target": [named(target)],
        "predicted": [named(predicted)],
        "right_probability": float(np.exp(-np.atleast_1d(judged.nll[row])[at])),
        "wrong": int(predicted != target),
        "of": 1,
    }


def _distributions(
    task: Task, head: str, truth: Oracle, logits: NDArray[Any], row: int, at: int
) -> dict[str, Any]:
    """Return the true distribution and the model's, the most probable tokens of each."""
    named = token_namer(task, head)
    assert truth.probabilities is not None
    ours_V = np.exp(log_softmax(logits[row].reshape(-1, logits.shape[-1])[at]))
    true_V = truth.probabilities[row].reshape(-1, truth.probabilities.shape[-1])[at]

    def listed(p_V: NDArray[Any]) -> dict[str, float]:
        best = np.argsort(-p_V, kind="stable")[:LISTED]
        return {named(int(token)): float(p_V[token]) for token in best if p_V[token] >= RARE}

    return {"truth": listed(true_V), "model": listed(ours_V)}


def token_namer(task: Task, head: str) -> Callable[[int], str]:
    """Return a function from a class of a head to its name: a token's text, else the number."""

    def name(token: int) -> str:
        known = task.predicts_tokens(head) and token < task.tokenizer.vocab_size
        return task.tokenizer.decode([token]) if known else str(token)

    return name


def _tokens(tally: _Tally, task: Task) -> dict[str, Any]:
    """Return the share of right tokens by position in the answer, and the commonest confusions."""
    if not len(tally.places):
        return {}
    length = len(tally.places)
    ends = [*range(1, min(SINGLE, length) + 1)]
    while ends[-1] < length:
        ends.append(min(length, 2 * ends[-1]))
    positions = []
    for first, end in zip([0, *ends], ends, strict=False):
        right, all_ = tally.places[first:end].sum(axis=0).tolist()
        label = str(end) if end == first + 1 else f"{first + 1} to {end}"
        positions.append({"position": label, "accuracy": right / max(1, all_), "count": all_})
    named = token_namer(task, tally.primary)
    pairs, counts = tally.confused
    most = np.lexsort((pairs, -counts))[:CONFUSED]
    return {
        "positions": positions,
        "confused": [
            {
                "target": named(pair >> PAIR),
                "predicted": named(pair & ((1 << PAIR) - 1)),
                "count": count,
            }
            for pair, count in zip(pairs[most].tolist(), counts[most].tolist(), strict=True)
        ],
    }


def natural(label: str) -> tuple[int, str]:
    """Return a sorting key: numbers by their size, then words, so 4 comes before 10."""
    number = plain_digits(label)
    return (1 << 62, label) if number is None else (number, label)


def in_order(by_label: Mapping[str, Value]) -> list[tuple[str, Value]]:
    """Return the items of a table, its labels sorted by `natural`."""
    return sorted(by_label.items(), key=lambda item: natural(item[0]))


def _chunks(count: int, size: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count), dtype=np.int64)


def _evaluation(tally: _Tally, task: Task, split: str, count: int) -> Evaluation:
    heads = {
        head: {"loss": loss / weight, "accuracy": right / weight}
        for head, (loss, right, weight) in tally.heads.items()
        if weight > 0
    }
    if tally.primary not in heads:
        raise InputError(
            f"nothing counts in the first {count} examples of '{split}'", hint="take more of them"
        )
    first = heads[tally.primary]
    kind: Kind = "text" if task.is_running_text else "process" if tally.entropy > 0 else "answers"
    scored = kind == "answers"
    oracle = {}
    if tally.judged:
        oracle = {
            "entropy": tally.entropy / tally.judged,
            "excess": tally.excess / tally.judged,
            "legal": tally.legal / tally.judged,
        }
    width = task.facts().get("bytes_per_token", {}).get(split)
    if width:
        oracle["bits_per_byte"] = first["loss"] / math.log(2) / width
    return Evaluation(
        split=split,
        examples=count,
        loss=first["loss"],
        accuracy=first["accuracy"],
        exact_match=tally.matches / max(1, tally.asked) if scored else None,
        heads=heads,
        by={
            group: {label: right / all_ for label, (right, all_) in in_order(labels)}
            for group, labels in tally.by.items()
            if scored
        },
        counts={
            group: {label: all_ for label, (_, all_) in in_order(labels)}
            for group, labels in tally.by.items()
            if scored
        },
        oracle=oracle,
        confusion=tally.confusion,
        wrong={"answers": tally.asked - tally.matches, "text": None, "process": tally.impossible}[
            kind
        ],
        errors=tally.errors if scored else [told for _, _, told in tally.far],
        pairs=tally.pairs,
        tokens={} if kind == "process" else _tokens(tally, task),
        kind=kind,
    )


# --- confusion tables -----------------------------------------------------------------------------
#
# A row is a target and adds up to 100 %; a column is the label that the prediction looks like. The
# count is printed beside each row, since a share of three examples means little.

#: {target: {prediction: count}}
Table = Mapping[str, Mapping[str, int]]

#: The caption of each group's table.
READINGS = {
    "operation": "the operation whose answer was given; none: no operation gives it",
    "answer": "the token that was answered",
}
#: The heading of the rows.
ROWS = {"operation": "operation asked", "answer": "right answer"}


def order(table: Table) -> tuple[list[str], list[str]]:
    """Return rows and columns in one order, so that right predictions lie on the diagonal."""
    rows = sorted(table, key=natural)
    others = {column for row in table.values() for column in row} - set(rows)
    return rows, [*rows, *sorted(others, key=natural)]


def shares(table: Table) -> list[list[float]]:
    """Return the cells in that order, each as a share of its row."""
    rows, columns = order(table)
    return [
        [table[row].get(column, 0) / max(1, sum(table[row].values())) for column in columns]
        for row in rows
    ]


def confusion_text(group: str, table: Table, *, width: int = 80) -> str:
    """Return a table of per cents for a terminal; columns beyond its width go below, under the same
    rows.
    """
    rows, columns = order(table)
    cells = [[f"{100 * share:.1f}" for share in row] for row in shares(table)]
    counts = [f"{sum(table[row].values()):,}" for row in rows]
    margin = max(len(name) for name in ("", *rows))
    size = max(5, *(len(name) for name in columns)) + 1
    last = max(map(len, (*counts, "n"))) + 2
    room = max(1, (width - margin - last) // size)
    lines = [f"{ROWS.get(group, group)} (rows), answered as (columns), per cent of the row"]
    if group in READINGS:
        lines.append(f"({READINGS[group]})")
    for start in range(0, len(columns), room):
        shown = columns[start : start + room]
        heading = "".join(f"{name:>{size}}" for name in shown)
        lines.append(f"{'':{margin}}{heading}{'n':>{last}}")
        for name, row, count in zip(rows, cells, counts, strict=True):
            values = "".join(f"{cell:>{size}}" for cell in row[start : start + room])
            lines.append(f"{name:<{margin}}{values}{count:>{last}}")
    return "\n".join(lines)


def confusion_rows(confusion: Mapping[str, Table]) -> list[dict[str, Any]]:
    """Return every cell, the empty ones too: group, target, prediction, count, share."""
    made = []
    for group, table in confusion.items():
        rows, columns = order(table)
        for row, line in zip(rows, shares(table), strict=True):
            for column, share in zip(columns, line, strict=True):
                count = table[row].get(column, 0)
                cell = {"group": group, "asked": row, "answered": column}
                made.append(cell | {"count": count, "share": share})
    return made


def confusion_csv(table: Table) -> str:
    """Return one table of counts: rows are targets, columns predictions."""
    rows, columns = order(table)
    lines = [[row, *(table[row].get(column, 0) for column in columns)] for row in rows]
    return csv_text(["", *columns], lines)


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV of dicts that share their keys."""
    heading = list(rows[0]) if rows else []
    return csv_text(heading, [[row[name] for name in heading] for row in rows])
