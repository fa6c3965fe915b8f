"""Extraction: from a trained model to the finite machine that it computes, if it computes one.

The model is asked, string by string, what it predicts: which symbols may follow (a probability of
`threshold` or more), whether the string may end, and its class. `data.automata.construct` makes a
machine of the answers; machine and model are then compared on held-out strings, and the machine
with the true one by the test of equivalence. The head that was trained on the states themselves is
never asked.
"""

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glassformer.adapters.load import AnyModel
from glassformer.data.automata.construct import (
    BEYOND,
    Answer,
    Hypothesis,
    Seen,
    Word,
    agree,
    disagreements,
    hypotheses,
)
from glassformer.data.automata.machine import NOWHERE, Machine, counterexample
from glassformer.data.batch import Batch
from glassformer.data.rng import stream
from glassformer.data.task import Task
from glassformer.data.tasks.fsm import BOS, EOS, FIRST, Fsm
from glassformer.kernels.threads import taking, threads_of_decoding
from glassformer.lab.api import engine_for, opened
from glassformer.lab.plots.figures import Edge, dot_text, machine_picture
from glassformer.lab.runs.run import TrainingRun
from glassformer.lens.show.element import Element
from glassformer.spec.checks import at_least, one_of
from glassformer.spec.errors import InputError
from glassformer.spec.machines import MachineTable, machine_of
from glassformer.spec.tasks import Task as TaskSpec
from glassformer.training.engine import Engine, log_softmax

# N strings, T tokens, V vocabulary, Q states, E events (the symbols, then the end)

By = Literal["class", "next"]
ENDINGS = ("svg", "json", "dot")
#: A symbol may follow if the model gives it this probability.
THRESHOLD = 0.01
#: Next-symbol distributions farther apart than this (total variation) are of different states.
APART = 0.1
MOST_STATES = 16
#: All strings up to a length are asked, as long as they are no more than this; then random ones.
ALL_STRINGS, WALKS = 4_000, 500
#: Strings asked at once.
CHUNK = 512
#: A larger machine must agree on this much more of the validation strings to be preferred.
WORTH = 0.02


#: Share of the held-out strings from which on a model is said to follow its machine.
FOLLOWED = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """How often machine and model agree: on complete strings, and at single positions."""

    split: str
    strings: int
    agreed: int
    positions: int
    positions_agreed: int

    @property
    def share(self) -> float:
        """The share of strings on which they agree at every position."""
        return self.agreed / self.strings


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """A string after which machine and model differ, and what each predicts, in words."""

    string: tuple[str, ...]
    model: str
    machine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Extraction:
    """The machine of a model, and how good a description of the model it is.

    `probabilities` is the mean of the model's P(event | state), (Q, E), the end last. `true` is the
    task's own machine, and `difference` a shortest string that tells the two apart, None if they
    are equivalent. `disagreement` is the first of the searched strings on which the model is not
    described by the machine, None if there is none; `explained_by` is the number of states that
    would describe all of them, None if that is more than `most_states`.
    """

    name: str
    by: By
    machine: Machine
    probabilities: NDArray[np.float64]
    access: tuple[tuple[str, ...], ...]
    true: Machine
    difference: tuple[str, ...] | None
    probability_error: float | None
    fidelity: tuple[Fidelity, ...]
    disagreement: Disagreement | None
    explained_by: int | None
    tried: tuple[tuple[int, float], ...]
    all_up_to: int
    searched: int
    length: int
    most_states: int

    @property
    def is_true_machine(self) -> bool:
        """True if no string tells the extracted machine and the true one apart."""
        return self.difference is None

    @property
    def is_exact(self) -> bool:
        """True if the machine describes the model on every string that was searched."""
        return self.disagreement is None

    @property
    def is_followed(self) -> bool:
        """True if the model agrees with its machine on nearly all of the held-out strings."""
        return self.fidelity[0].share >= FOLLOWED

    # --- for people -----------------------------------------------------------------------------

    def text(self, *, width: int = 100) -> str:
        """Return the result in words, no wider than `width` columns, and the machine as a table."""
        words = [
            line
            for sentence in self.sentences()
            for line in textwrap.wrap(sentence, width, subsequent_indent="  ")
        ]
        return "\n".join([*words, *self._table()])

    def sentences(self) -> list[str]:
        """Return what was found, in sentences."""
        states = f"{self.machine.n_states} state{'s' * (self.machine.n_states != 1)}"
        if self.is_exact:
            lines = [f"{self.name}: the model computes a machine of {states}."]
        elif self.explained_by is not None:
            lines = [
                f"{self.name}: the model nearly computes a machine of {states}; it takes "
                f"{self.explained_by} to explain every string that was searched."
            ]
        else:
            lines = [
                f"{self.name}: no machine of at most {self.most_states} states explains the model "
                f"completely; the best one has {states}."
            ]
        if self.difference is None:
            lines.append("It is the true machine: no string tells the two apart.")
            if not self.is_followed:
                share = self.fidelity[0].share
                lines.append(
                    f"But the model does not follow it reliably: on {share:.1%} of the held-out "
                    f"strings ({FOLLOWED:.0%} would be)."
                )
        else:
            lines.append(
                f"It is not the true machine, of {self.true.n_states} states: after "
                f"{_string(self.difference)} they differ."
            )
        for one in self.fidelity:
            kind = (
                "longer strings than in training" if one.split == "longer" else "held-out strings"
            )
            lines.append(
                f"It agrees with the model on {one.agreed:,} of {one.strings:,} {kind} "
                f"({one.share:.1%}), at {one.positions_agreed / one.positions:.2%} of their "
                "positions."
            )
        if self.disagreement is None:
            lines.append(
                f"No disagreement on {self.searched:,} strings: all of up to {self.all_up_to} "
                f"symbols, and random ones of up to {self.length}."
            )
        else:
            found = self.disagreement
            lines.append(
                f"The shortest disagreement is after {_string(found.string)}: the model predicts "
                f"{found.model}; the machine, {found.machine}."
            )
        if self.probability_error is not None:
            lines.append(
                "The model's mean probabilities on the edges are within "
                f"{self.probability_error:.3f} of the true ones."
            )
        return lines

    def _table(self) -> list[str]:
        names = (*self.machine.alphabet, "end")
        rows = [["state", "class", *names]]
        for state, row in enumerate(self.machine.transitions):
            kind = self.machine.class_names[self.machine.classes[state]]
            cells = [f"{'→' if state == self.machine.start else ' '} {state}", kind]
            for event, target in enumerate(row):
                chance = f"{self.probabilities[state, event]:.3f}"
                cells.append("-" if target == NOWHERE else f"{chance} → {target}")
            chance = f"{self.probabilities[state, -1]:.3f}"
            cells.append(chance if self.machine.ends[state] else "-")
            rows.append(cells)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        words = "".join(f"<div>{line}</div>" for line in self.sentences())
        return {"text/plain": self.text(), "text/html": f"<div>{words}{self.svg()}</div>"}

    # --- as a file ------------------------------------------------------------------------------

    def edges(self) -> list[Edge]:
        """Return the edges with the model's mean probabilities."""
        return [
            Edge(state, target, symbol, float(self.probabilities[state, number]))
            for state, row in enumerate(self.machine.transitions)
            for number, (symbol, target) in enumerate(zip(self.machine.alphabet, row, strict=True))
            if target != NOWHERE
        ]

    def picture(self) -> Element:
        """Return a drawing of the machine."""
        ends = [float(chance) for chance in self.probabilities[:, -1]]
        return machine_picture(self.machine, self.edges(), ends, label=self.sentences()[0])

    def svg(self) -> str:
        """Return the drawing as SVG."""
        return self.picture().svg()

    def dot(self) -> str:
        """Return the machine in Graphviz's language."""
        return dot_text(self.machine, self.edges())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        machine = self.machine
        found = self.disagreement
        return {
            "task": self.name,
            "by": self.by,
            "is_true_machine": self.is_true_machine,
            "is_exact": self.is_exact,
            "is_followed": self.is_followed,
            "states": machine.n_states,
            "machine": {
                "alphabet": list(machine.alphabet),
                "start": machine.start,
                "transitions": [list(row) for row in machine.transitions],
                "classes": [machine.class_names[kind] for kind in machine.classes],
                "ends": list(machine.ends),
                "access": [list(word) for word in self.access],
                "probabilities": self.probabilities.round(6).tolist(),
            },
            "true_states": self.true.n_states,
            "difference": None if self.difference is None else list(self.difference),
            "probability_error": self.probability_error,
            "fidelity": {
                one.split: {k: v for k, v in asdict(one).items() if k != "split"}
                for one in self.fidelity
            },
            "disagreement": None
            if found is None
            else asdict(found) | {"string": list(found.string)},
            "explained_by": self.explained_by,
            "tried": [{"states": states, "fidelity": share} for states, share in self.tried],
            "searched": self.searched,
            "all_up_to": self.all_up_to,
            "length": self.length,
        }

    def table(self) -> MachineTable:
        """Return the machine with its probabilities, to train on: the `machine` of a task."""
        return machine_of(self.to_dict(), name="extracted")

    def can_be_trained_on(self) -> bool:
        """Return True if strings of this machine can be sampled: some of them end."""
        try:
            self.table()
        except InputError:
            return False
        return True

    def encoded(self, ending: str) -> bytes:
        """Return the bytes of a file with that ending: svg, json or dot."""
        match ending:
            case "svg":
                return self.svg().encode()
            case "dot":
                return self.dot().encode()
            case "json":
                return (json.dumps(self.to_dict(), ensure_ascii=False, indent=1) + "\n").encode()
        raise InputError(f"cannot save as '.{ending}'", hint=f"use {', '.join(ENDINGS)}")

    def save(self, path: str | Path) -> Path:
        """Write the machine to a file: .svg, .json or .dot."""
        target = Path(path)
        target.write_bytes(self.encoded(target.suffix.lower().removeprefix(".")))
        return target


def _string(words: Sequence[str]) -> str:
    return f"'{' '.join(words)}'" if words else "the empty string"


# --- asking the model -----------------------------------------------------------------------------


class _Asked:
    """A model as a teacher: P(event) and class after every string asked so far, by string."""

    def __init__(self, engine: Engine, task: Fsm, *, by: By, threshold: float) -> None:
        self.engine, self.task, self.by, self.threshold = engine, task, by, threshold
        self.symbols = len(task.machine.alphabet)
        self.longest = engine.spec.max_seq_len - 1  # symbols after BOS
        self.chances: dict[Word, NDArray[np.float64]] = {}
        self.kinds: dict[Word, int] = {}
        self.centres: NDArray[np.float64] = np.zeros((0, self.symbols))
        self._answers: dict[Word, Answer] = {}

    def read(self, words: Iterable[Word]) -> None:
        """Run the model on these strings; a causal model answers for all of their beginnings."""
        fresh = [word for word in dict.fromkeys(words) if word not in self.chances]
        for first in range(0, len(fresh), CHUNK):
            part = fresh[first : first + CHUNK]
            batch = Batch.of([(BOS, *(symbol + FIRST for symbol in word)) for word in part])
            logits = self.engine.logits(batch)
            chances_NTV = np.exp(log_softmax(logits["next"]))
            events = [*range(FIRST, FIRST + self.symbols), EOS]
            chances_NTE = chances_NTV[:, :, events]
            kinds_NT = logits["class"].argmax(-1) if self.by == "class" else None
            for row, word in enumerate(part):
                for place in range(len(word) + 1):
                    start = word[:place]
                    if start not in self.chances:
                        self.chances[start] = chances_NTE[row, place]
                        self.kinds[start] = 0 if kinds_NT is None else int(kinds_NT[row, place])

    def __call__(self, word: Word) -> Answer:
        """Answer as the learner's teacher does."""
        if word not in self._answers:
            self._answers[word] = self._answer(word)
        return self._answers[word]

    def _answer(self, word: Word) -> Answer:
        if len(word) > self.longest:
            return BEYOND
        if word:
            before = self(word[:-1])
            if before is None or not before.allowed[word[-1]]:
                return None
        if word not in self.chances:
            self.read([word])
        chance_E = self.chances[word]
        may = chance_E >= self.threshold
        ends = bool(may[-1]) if len(word) >= self.task.spec.min_length else None
        label = self.kinds[word] if self.by == "class" else self.nearest(chance_E)
        return Seen(label, tuple(map(bool, may[:-1])), ends)

    def nearest(self, chance_E: NDArray[np.float64]) -> int:
        """Return the number of the centre that is nearest to a distribution."""
        return int(_apart(self.centres, _conditional(chance_E)).argmin())

    def cluster(self, words: Sequence[Word]) -> None:
        """Choose the distributions that count as different, for `by` next.

        A distribution far from all others begins a cluster; clusters whose means are close become
        one, and one of less than a hundredth of the strings is no state's distribution.
        """
        points = np.stack([_conditional(self.chances[word]) for word in words])
        centres = points[:1]
        for point in points:
            if _apart(centres, point).min() > APART:
                centres = np.vstack([centres, point])
        nearest = np.array([_apart(centres, point).argmin() for point in points])
        sums: list[NDArray[np.float64]] = []
        sizes: list[int] = []
        for number in np.argsort(-np.bincount(nearest), kind="stable"):  # the largest first
            inside = points[nearest == number]
            if len(inside) * 100 < len(points):
                continue
            means = np.array([total / size for total, size in zip(sums, sizes, strict=True)])
            gaps = _apart(means, inside.mean(axis=0)) if sums else np.ones(1)
            if gaps.min() > APART:
                sums.append(inside.sum(axis=0))
                sizes.append(len(inside))
            else:
                sums[int(gaps.argmin())] += inside.sum(axis=0)
                sizes[int(gaps.argmin())] += len(inside)
        self.centres = np.array([total / size for total, size in zip(sums, sizes, strict=True)])
        self._answers.clear()


def _apart(many: NDArray[np.float64], one: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the total variation between each of many distributions and one."""
    distance: NDArray[np.float64] = np.abs(many - one).sum(axis=-1) / 2
    return distance


def _conditional(chance_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return P(symbol | the string goes on): no string ends before the walk's min_length.

    Where a string can only end, all are 0.
    """
    goes_on = float(chance_E[:-1].sum())
    whole: NDArray[np.float64] = chance_E[:-1] * (1 / goes_on if goes_on >= THRESHOLD else 0.0)
    return whole


def _all_words(asked: _Asked, *, length: int) -> tuple[list[Word], int]:
    """Return every string that the model holds possible, shortest first, and their length."""
    words: list[Word] = [()]
    level: list[Word] = [()]
    asked.read(level)
    for place in range(length):
        further = []
        for word in level:
            may = asked.chances[word][:-1] >= asked.threshold
            further += [(*word, int(symbol)) for symbol in np.flatnonzero(may)]
        if not further or len(words) + len(further) > ALL_STRINGS:
            return words, place
        asked.read(further)
        words += further
        level = further
    return words, length


def _walks(asked: _Asked, *, length: int) -> list[Word]:
    """Sample strings from the model, as long as it goes on; return them with all beginnings."""
    rng = stream(0, "extract", "walks")
    level: list[Word] = [()] * WALKS
    found: dict[Word, None] = {}
    for _ in range(length):
        asked.read(level)
        further = []
        for word in level:
            chance = asked.chances[word][:-1]
            chance = np.where(chance >= asked.threshold, chance, 0.0)
            if chance.sum() > 0:
                further.append((*word, int(rng.choice(asked.symbols, p=chance / chance.sum()))))
        found |= dict.fromkeys(further)
        level = further
    asked.read(level)
    return list(found)


# --- the machine ----------------------------------------------------------------------------------


def extract(
    model: str | Path | TrainingRun | AnyModel,
    task: Task | TaskSpec | str | None = None,
    *,
    by: By | None = None,
    most_states: int = MOST_STATES,
    threshold: float = THRESHOLD,
    length: int | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> Extraction:
    """Return the machine that a model computes: of a run (`RUN`, `RUN@120`) on its own task.

    `task` is needed for anything but a run. The other options are those of `extract_machine`.
    """
    model = model.path if isinstance(model, TrainingRun) else model
    if task is None and isinstance(model, str | Path):
        engine, built = opened(model, device=device or "cpu")
    else:
        engine, built = engine_for(model, task, device=device)
    with taking(threads_of_decoding(engine.spec, asked=threads, device=device or "cpu")):
        return extract_machine(
            engine, built, by=by, most_states=most_states, threshold=threshold, length=length
        )


def extract_machine(
    engine: Engine,
    task: Task,
    *,
    by: By | None = None,
    most_states: int = MOST_STATES,
    threshold: float = THRESHOLD,
    length: int | None = None,
) -> Extraction:
    """Return the machine that a model computes on strings of up to `length` symbols.

    `by` decides what a state shows besides what may follow: `class`, the class that the model
    predicts, or `next`, the distribution of the next symbol; without it, the class if the model has
    that head. `length` is by default that of the training strings.
    """
    if not isinstance(task, Fsm):
        raise InputError(
            f"the task '{task.name}' has no machine to compare with",
            hint="extraction reads models of parity, mod-3, brackets, fsm and other machines",
        )
    heads = engine.spec.head_names()
    by = by or ("class" if "class" in heads else "next")
    one_of("by", by, ("class", "next"))
    if by not in heads:
        raise InputError(f"the model has no head '{by}'", hint=f"it has {', '.join(heads)}")
    at_least("most_states", most_states, 1)
    if not 0 < threshold < 0.5:
        raise InputError(f"threshold {threshold} is not between 0 and 0.5", hint=f"{THRESHOLD}")
    asked = _Asked(engine, task, by=by, threshold=threshold)
    length = min(asked.longest, task.spec.max_length if length is None else length)
    at_least("length", length, 1)
    short, all_up_to = _all_words(asked, length=length)
    random = _walks(asked, length=length)
    words = sorted({*short, *random}, key=lambda word: (len(word), word))
    if by == "next":
        asked.cluster(words)
    val, test = (_held_out(task, split) for split in ("val", "test"))
    asked.read([*val, *test])
    found = list(hypotheses(asked, symbols=asked.symbols, words=words, most_states=most_states))
    shares = [_fidelity(asked, one, val, split="val").share for one in found]
    # The smallest machine that a larger one does not clearly surpass: a model that errs on a few
    # strings would otherwise be described by as many states as allowed.
    best = next(o for o, s in zip(found, shares, strict=True) if s >= max(shares) - WORTH)
    true = _true_machine(task, asked)
    machine = best.machine(alphabet=task.machine.alphabet, class_names=_names(asked, task))
    probabilities = _mean_probabilities(asked, best, [*words, *_beginnings(test)])
    difference = counterexample(machine, true)
    fidelity = [_fidelity(asked, best, test, split="test")]
    if "longer" in task.sizes():
        further = [word for word in _held_out(task, "longer") if len(word) <= asked.longest]
        if further:
            fidelity.append(_fidelity(asked, best, further, split="longer"))
    error = None
    if difference is None:
        error = _probability_error(task, machine, probabilities)
    return Extraction(
        name=task.name,
        by=by,
        machine=machine,
        probabilities=probabilities,
        access=tuple(tuple(task.machine.alphabet[s] for s in word) for word in best.access),
        true=true,
        difference=difference,
        probability_error=error,
        fidelity=tuple(fidelity),
        disagreement=_disagreement(asked, best, machine),
        explained_by=found[-1].n_states if found[-1].wrong is None else None,
        tried=tuple((one.n_states, share) for one, share in zip(found, shares, strict=True)),
        all_up_to=all_up_to,
        searched=len(words),
        length=length,
        most_states=most_states,
    )


def _held_out(task: Fsm, split: str) -> list[Word]:
    """Return the distinct strings of a split."""
    batch = task.batch(split, np.arange(task.sizes()[split]))
    rows = zip(batch.tokens, batch.valid, strict=True)
    return list(dict.fromkeys(tuple(int(t) - FIRST for t in row[real][1:]) for row, real in rows))


def _beginnings(words: Iterable[Word]) -> list[Word]:
    """Return every beginning of every string, shortest first."""
    found = {word[:place] for word in words for place in range(len(word) + 1)}
    return sorted(found, key=lambda word: (len(word), word))


def _fidelity(asked: _Asked, found: Hypothesis, words: list[Word], *, split: str) -> Fidelity:
    asked.read(words)
    wrong = set(disagreements(found, asked, _beginnings(words)))
    bad = [sum(word[:place] in wrong for place in range(len(word) + 1)) for word in words]
    positions = sum(len(word) + 1 for word in words)
    return Fidelity(
        split=split,
        strings=len(words),
        agreed=sum(not count for count in bad),
        positions=positions,
        positions_agreed=positions - sum(bad),
    )


def _names(asked: _Asked, task: Fsm) -> list[str]:
    """Return the names of the labels: the classes, or the distributions of the next symbol."""
    if asked.by == "class":
        return list(task.machine.class_names)
    return [" ".join(f"{chance:.2f}" for chance in centre) for centre in asked.centres]


def _true_machine(task: Fsm, asked: _Asked) -> Machine:
    """Return the task's machine, minimised; for `by` next, the labels are those of the model."""
    true = task.machine.trimmed()
    if asked.by == "class":
        return true.minimised()
    # The rows of the walk are those of the machine before it was trimmed.
    order = [q for q in task.machine.reachable() if task.machine.live()[q]]
    chances_QE = task.walk.probabilities_MQE[-1][order]
    names = _names(asked, task)
    exact = {row: len(names) + i for i, row in enumerate(dict.fromkeys(map(tuple, chances_QE)))}
    names += [f"exactly {' '.join(f'{chance:.2f}' for chance in row)}" for row in exact]
    seen = {row: asked.nearest(np.array(row)) for row in exact}

    def labelled(labels: dict[tuple[float, ...], int]) -> Machine:
        return Machine(
            alphabet=true.alphabet,
            transitions=true.transitions,
            classes=tuple(labels[tuple(chance_E)] for chance_E in chances_QE),
            class_names=tuple(names),
            ends=true.ends,
            start=true.start,
        ).minimised()

    # Labels that merge true states are no labels of the true machine: then nothing is equal to it.
    ours, complete = labelled(seen), labelled(exact)
    return ours if ours.n_states == complete.n_states else complete


def _mean_probabilities(
    asked: _Asked, found: Hypothesis, words: Iterable[Word]
) -> NDArray[np.float64]:
    """Return the mean of the model's probabilities over the strings that lead to each state."""
    sums = np.zeros((found.n_states, asked.symbols + 1))
    counts = np.zeros((found.n_states, 1))
    for word in words:
        state = found.state(word)
        # No string ends before the walk's min_length: those count only where there is no other.
        weight = 1.0 if len(word) >= asked.task.spec.min_length else 1e-9
        if state != NOWHERE:
            sums[state] += weight * asked.chances[word]
            counts[state] += weight
    mean: NDArray[np.float64] = sums / counts
    return mean


def _probability_error(task: Fsm, machine: Machine, probabilities: NDArray[np.float64]) -> float:
    """Return the largest difference of an edge's mean probability from the true walk's."""
    pairs = [(machine.start, task.machine.start)]
    for ours, theirs in pairs:  # grows while it is read
        for mine, other in zip(
            machine.transitions[ours], task.machine.transitions[theirs], strict=True
        ):
            if mine != NOWHERE and other != NOWHERE and (mine, other) not in pairs:
                pairs.append((mine, other))
    true_QE = task.walk.probabilities_MQE[-1]
    return max(float(np.abs(probabilities[a] - true_QE[b]).max()) for a, b in pairs)


def _disagreement(asked: _Asked, found: Hypothesis, machine: Machine) -> Disagreement | None:
    if found.wrong is None:
        return None
    word, alphabet = found.wrong, asked.task.machine.alphabet

    def words(answer: Answer) -> str:
        if answer is None:
            return "nothing: it holds the string to be impossible"
        events = [s for s, may in zip(alphabet, answer.allowed, strict=True) if may]
        following = " ".join([*events, *(["end"] if answer.ends else [])]) or "nothing"
        return f"{machine.class_names[answer.label]}, then {following}"

    claimed = found.answer(word)
    assert not agree(claimed, asked(word)), "a disagreement"
    return Disagreement(
        string=tuple(alphabet[symbol] for symbol in word),
        model=words(asked(word)),
        machine=words(claimed),
    )
