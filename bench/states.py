"""Random sequences of what a state can do, each answer against a fresh computation.

A sequence reads prompts, steps, reads several tokens, forks, takes rows back, reorders, saves and
loads, and reads prompts that begin as others did, with several states alive at once. After each
operation the logits of every row are those of its tokens read at once by a stepper that has read
nothing else: the same bits on the native step, and within rounding in float64 by torch and NumPy.
"""

import argparse
import functools
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.clock import Row, said
from glassformer.byhand.model import Model as HandModel
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.stepper import HandStepper, TorchStepper
from glassformer.generation.turns import Turns
from glassformer.models.model import Model, build
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Stepper
from glassformer.models.weights import weights_of
from glassformer.spec.decoding import KVCache
from glassformer.spec.presets import preset

VOCAB, CONTEXT = 23, 640
#: Columns that a state may need beyond its prompt, with what padding of rows taken back wastes.
ROOM = 320
#: The kinds of memory: a preset, its sizes, and how keys and values are kept.
KINDS: Mapping[str, tuple[str, dict[str, Any], KVCache]] = {
    "full": ("core", {"n_heads": 2}, "float"),
    "grouped": ("qwen", {"n_heads": 4, "n_kv_heads": 2}, "float"),
    "window": ("qwen-sliding", {"n_heads": 4, "n_kv_heads": 2}, "float"),
    "capped": ("gemma", {"n_heads": 4, "n_kv_heads": 2}, "float"),
    "distance": ("alibi-lm", {"n_heads": 4}, "float"),
    "8 bits": ("qwen", {"n_heads": 4, "n_kv_heads": 1}, "int8"),
    "cross": ("seq2seq", {"n_heads": 2}, "float"),
    "cross, 8 bits": ("seq2seq", {"n_heads": 2}, "int8"),
}
#: How a row may differ from a fresh computation, as a share of the largest logit: no bit, or this.
ROUNDING = 1e-9

#: What a row has read: its source, if there is one, and its tokens.
Read = tuple[tuple[int, ...] | None, tuple[int, ...]]


@functools.cache
def model_of(kind: str, *, wide: bool) -> Model:
    """Return a tiny model with such a memory, `wide`: in float64."""
    name, sizes, _ = KINDS[kind]
    small = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "max_seq_len": CONTEXT} | sizes
    model = build(preset(name, **small), generator=torch.Generator().manual_seed(7))
    return model.double() if wide else model


def _by_hand(kind: str) -> Stepper:
    model = model_of(kind, wide=True)
    return HandStepper(HandModel(model.spec, params=weights_of(model)))


#: Steppers by name; None: it has no such memory.
STEPPERS: Mapping[str, Callable[[str], Stepper | None]] = {
    "native": lambda kind: NativeStepper(model_of(kind, wide=False), kv_cache=KINDS[kind][2]),
    "torch": lambda kind: TorchStepper(model_of(kind, wide=True), kv_cache=KINDS[kind][2]),
    "growing": lambda kind: TorchStepper(
        model_of(kind, wide=True), kv_cache=KINDS[kind][2], cache="growing"
    ),
    "numpy": lambda kind: _by_hand(kind) if KINDS[kind][2] == "float" else None,
}


@dataclass(slots=True)
class Branch:
    """A state and what its rows have read."""

    past: Any
    rows: list[Read]


class Machine:
    """Some states of one stepper that are alive at once, and the operations that change them."""

    def __init__(self, stepper: Stepper, draw: random.Random, folder: Path) -> None:
        self.stepper, self.draw, self.folder = stepper, draw, folder
        self.exact = isinstance(stepper, NativeStepper)
        self.branches: list[Branch] = []
        self.done: list[str] = []
        self.compared = 0
        self._fresh: dict[Read, Tensor] = {}
        self._turns = None if stepper.source_vocab is not None else Turns(stepper)

    def run(self, count: int) -> None:
        """Do so many operations, then add a token to every state that is left."""
        for _ in range(count):
            self.one()
        for branch in self.branches:
            self.step(branch)

    def one(self) -> None:
        """Do an operation that is drawn."""
        offered = {
            "prefill": len(self.branches) < 4,
            "step": True,
            "several": True,
            "fork": len(self.branches) < 4,
            "rewind": True,
            "reorder": True,
            "saved": True,
            "prefix": True,
            "turn": self._turns is not None,
        }
        names = [name for name, is_offered in offered.items() if is_offered]
        name = self.draw.choice(names) if self.branches else "prefill"
        self.done.append(name)
        if name in ("prefill", "turn"):
            getattr(self, name)()
        else:
            getattr(self, name)(self.draw.choice(self.branches))

    def prefill(self) -> None:
        """Read prompts of different lengths, some longer than a page."""
        rows = [(self._source(), self._tokens(40)) for _ in range(self.draw.randint(1, 3))]
        logits_BV, past = self._start(rows)
        self.branches.append(Branch(past, rows))
        self._compare(logits_BV, rows)

    def step(self, branch: Branch) -> None:
        """Add a token to each row."""
        new = [self.draw.randrange(VOCAB) for _ in branch.rows]
        logits_BV = self.stepper.step(torch.tensor(new), past=branch.past)
        branch.rows = [
            (source, (*row, token)) for (source, row), token in zip(branch.rows, new, strict=True)
        ]
        self._compare(logits_BV, branch.rows)

    def several(self, branch: Branch) -> None:
        """Add several tokens to a state's first row, which goes on alone."""
        self._reorder(branch, [0])
        new, (source, row) = self._tokens(20), branch.rows[0]
        logits_TV = self.stepper.extend(new, past=branch.past, every=True)
        branch.rows = [(source, row + new)]
        each = [(source, row + new[:n]) for n in range(1, len(new) + 1)]
        self._compare(logits_TV, each)

    def fork(self, branch: Branch) -> None:
        """Make another state of some of its rows; both go on."""
        rows = self._some(branch)
        self.branches.append(Branch(branch.past.fork(rows), [branch.rows[row] for row in rows]))
        self.step(branch)  # the new one must not notice

    def rewind(self, branch: Branch) -> None:
        """Take each row back by a length of its own."""
        lengths = [self.draw.randint(0, len(row)) for _, row in branch.rows]
        assert branch.past.lengths == [len(row) for _, row in branch.rows]
        assert branch.past.rewind(lengths) == lengths
        branch.rows = [
            (source, row[:length])
            for (source, row), length in zip(branch.rows, lengths, strict=True)
        ]
        self.step(branch)

    def reorder(self, branch: Branch) -> None:
        """Move, repeat and drop rows."""
        self._reorder(branch, self._some(branch))
        self.step(branch)

    def saved(self, branch: Branch) -> None:
        """Go on with what was written to a file, beside the state that was."""
        path = self.folder / "state.safetensors"
        self.stepper.save(path, past=branch.past)
        again = self.stepper.load(path, room=ROOM)
        assert again.lengths == branch.past.lengths
        self.branches[self.branches.index(branch)] = loaded = Branch(again, list(branch.rows))
        self.step(branch)
        self.step(loaded)

    def prefix(self, branch: Branch) -> None:
        """Read another text that begins as one of the rows does, from where it differs."""
        place = self.draw.randrange(len(branch.rows))
        source, row = branch.rows[place]
        other = Branch(branch.past.fork([place]), [branch.rows[place]])
        (shared,) = other.past.rewind([self.draw.randint(0, len(row))])
        other.rows = [(source, row[:shared])]
        new = self._tokens(20)
        logits_1V = self.stepper.extend(new, past=other.past)
        other.rows = [(source, row[:shared] + new)]
        self._compare(logits_1V, other.rows)
        self.branches[self.draw.randrange(len(self.branches))] = other

    def turn(self) -> None:
        """Read a prompt as a conversation's next turn: it begins as the last one did, or not."""
        assert self._turns is not None
        held = () if self._turns.turn is None else tuple(self._turns.turn.ids)
        prompt = held[: self.draw.randint(0, len(held))] + self._tokens(20)
        logits_1V, past = self._turns.start(Prompts((prompt,)), room=ROOM)
        self._compare(logits_1V, [(None, prompt)])
        token = self.draw.randrange(VOCAB)
        logits_1V = self._turns.step(torch.tensor([token]), past=past)
        self._compare(logits_1V, [(None, (*prompt, token))])

    # --- what they need

    def _tokens(self, most: int) -> tuple[int, ...]:
        return tuple(self.draw.randrange(VOCAB) for _ in range(self.draw.randint(1, most)))

    def _source(self) -> tuple[int, ...] | None:
        return None if self.stepper.source_vocab is None else self._tokens(20)

    def _some(self, branch: Branch) -> list[int]:
        count = self.draw.randint(1, 4)
        return [self.draw.randrange(len(branch.rows)) for _ in range(count)]

    def _reorder(self, branch: Branch, rows: list[int]) -> None:
        branch.past.reorder(rows)
        branch.rows = [branch.rows[row] for row in rows]

    def _start(self, rows: Sequence[Read]) -> tuple[Tensor, Any]:
        sources = tuple(source for source, _ in rows if source is not None)
        prompts = Prompts(tuple(row for _, row in rows), sources or None)
        return self.stepper.start(prompts, room=ROOM)

    def _compare(self, logits_RV: Tensor, rows: Sequence[Read]) -> None:
        found_RV = logits_RV.clone()  # the next step may use this memory
        for found_V, row in zip(found_RV, rows, strict=True):
            if row not in self._fresh:
                self._fresh[row] = self._start([row])[0][0].clone()
            want_V = self._fresh[row]
            self.compared += 1
            apart = float((found_V - want_V).abs().max() / want_V.abs().max())
            same = torch.equal(found_V, want_V) if self.exact else apart <= ROUNDING
            assert same, f"{' '.join(self.done)}: {row} is off by {apart:.1e}"


def run_sequence(stepper: Stepper, draw: random.Random, *, operations: int = 12) -> int:
    """Run one sequence; return how many rows of logits were compared."""
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(stepper, draw, Path(folder))
        machine.run(operations)
    return machine.compared


def options(parser: argparse.ArgumentParser) -> None:
    """How many."""
    parser.add_argument("--sequences", type=int, default=1_000, help="of each kind and stepper")
    parser.add_argument("--seed", type=int, default=0)


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[Row]:
    """Every kind of memory by every stepper that has it; a difference ends with its sequence."""
    for kind in KINDS:
        for name, make in STEPPERS.items():
            stepper, compared = make(kind), 0
            if stepper is None:
                continue
            count = 3 if quick else asked.sequences
            for number in range(count):
                compared += run_sequence(stepper, random.Random(f"{asked.seed} {number}"))
            limit = "no bit" if name == "native" else f"at most {ROUNDING:.0e}"
            text = f"{count:,} sequences, {compared:,} rows of logits: {limit} apart"
            yield said("states", f"{kind}, {name}", text)
