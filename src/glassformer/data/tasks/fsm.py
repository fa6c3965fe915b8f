"""Strings that a machine's random walk wrote, with the truth at every position.

The model reads `BOS a b b`; targets are what comes next (`a b b EOS`), and the class and the state
after what was read. A walk is cut after `max_length` symbols; the last target of a cut string is
the walk's next event. The oracle is the walk itself: P(next | state), exact. `Fsm` explains which
strings are held out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.data.automata.library import (
    Strings,
    Walk,
    given_walk,
    machine_named,
    machine_of_table,
    weighted_walk,
)
from glassformer.data.automata.machine import NOWHERE, Machine
from glassformer.data.batch import Batch, Bools, Ints
from glassformer.data.rng import digest, hash_rows, stream
from glassformer.data.task import (
    Oracle,
    Task,
    check_room,
    checked,
    overlap,
    padded_to_longest,
    pick,
)
from glassformer.data.tokenizers.vocab import Vocab
from glassformer.spec import presets
from glassformer.spec.errors import InputError
from glassformer.spec.machines import MachineTable
from glassformer.spec.model import LayerNorm, ModelSpec
from glassformer.spec.tasks import FsmTask
from glassformer.spec.train import CosineSchedule, TrainSpec

# N strings, T tokens, L symbols, Q states

PAD, BOS, EOS, FIRST = 0, 1, 2, 3  # FIRST is the id of the alphabet's first symbol
ROUNDS = 48  # of `examples` draws each, before a split that stays too small is reported


@dataclass(frozen=True, slots=True)
class Rows:
    """One split: tokens and what comes next, states, which positions count, lengths in tokens."""

    tokens_NT: NDArray[np.int16]
    next_NT: NDArray[np.int16]
    states_NT: NDArray[np.int16]
    counts_NT: Bools
    lengths_N: NDArray[np.int64]


def machine_title(machine: str | MachineTable) -> str:
    """Return the name of a machine, of the library or of one's own."""
    return machine if isinstance(machine, str) else machine.name


def divided(spec: FsmTask, walk: Walk) -> dict[str, Rows]:
    """Return train, val and test, each in the order of sampling.

    If a machine has few rare strings, val and test may be smaller than a tenth.
    """
    tenth = max(1, spec.examples // 10)
    wanted = {"train": spec.examples - 2 * tenth, "val": tenth, "test": tenth}
    kept: dict[str, list[Rows]] = {split: [] for split in wanted}
    rng = stream(spec.seed, "fsm", "walks")
    rest_LQ = walk.likeliest_rest(cut=spec.max_length)
    for _ in range(ROUNDS):
        missing = {split: count - _count(kept[split]) for split, count in wanted.items()}
        if not any(missing.values()):
            break
        strings = walk.draw(rng, count=spec.examples, cut=spec.max_length)
        prefix_NL = walk.prefix_probabilities(strings.symbols_NL)
        states_NL = walk.machine.trajectories(strings.symbols_NL)
        common_N = _probabilities(walk, strings, prefix_NL, states_NL) * spec.examples > 1.0
        # A prefix has left the common strings behind if the likeliest that begins so is rare.
        likeliest_NL = prefix_NL * rest_LQ[np.arange(spec.max_length + 1), states_NL]
        rare_NL = likeliest_NL * spec.examples <= 1.0
        hash_N = hash_rows(strings.symbols_NL, lengths_N=strings.lengths_N, seed=spec.seed)
        dice_N = rng.integers(0, 10, size=len(hash_N))
        part_N = np.where(common_N, dice_N, (hash_N % np.uint64(10)).astype(np.int64))
        for split, chosen_N in {
            "train": part_N < 8,
            "val": (part_N == 8) & ~common_N,
            "test": (part_N == 9) & ~common_N,
        }.items():
            numbers = np.flatnonzero(chosen_N)[: missing[split]]
            counts = np.ones_like(rare_NL) if split == "train" else rare_NL
            kept[split].append(_rows(walk, strings, states_NL, counts, numbers))
    for split, parts in kept.items():
        if _count(parts) < max(1, wanted[split] // 10):
            raise InputError(
                f"{ROUNDS * spec.examples} strings of '{machine_title(spec.machine)}' give "
                f"{_count(parts)} for {split}: nearly all are too common to be held out",
                where=f"max_length {spec.max_length}, examples {spec.examples}",
                hint="raise max_length; or lower examples, which decides what is common",
            )
    return {split: _joined(parts) for split, parts in kept.items()}


def longer(spec: FsmTask, walk: Walk) -> Rows | None:
    """Sample strings that go on beyond max_length, cut after `longer` more symbols."""
    cut = spec.max_length + spec.longer
    wanted = max(1, spec.examples // 10)
    rng = stream(spec.seed, "fsm", "longer")
    parts: list[Rows] = []
    have = 0
    for _ in range(ROUNDS):
        strings = walk.draw(rng, count=spec.examples, cut=cut)
        numbers = np.flatnonzero(strings.lengths_N > spec.max_length)[: wanted - have]
        if len(numbers):
            states_NL = walk.machine.trajectories(strings.symbols_NL)
            # A string is chosen by its first max_length + 1 symbols alone.
            counts = np.broadcast_to(np.arange(cut + 1) > spec.max_length, states_NL.shape)
            parts.append(_rows(walk, strings, states_NL, counts, numbers))
            have += len(numbers)
        if have == wanted:
            break
    return _joined(parts) if parts else None


def _probabilities(
    walk: Walk, strings: Strings, prefix_NL: NDArray[np.float64], states_NL: Ints
) -> NDArray[np.float64]:
    """Return each string's probability as it is read: its symbols, and its end if not cut."""
    cut = strings.symbols_NL.shape[1]
    numbers = np.arange(len(strings.lengths_N))
    last_N = states_NL[numbers, strings.lengths_N]
    phase_N = np.minimum(strings.lengths_N, walk.min_length)
    end_N = np.where(strings.lengths_N < cut, walk.probabilities_MQE[phase_N, last_N, -1], 1.0)
    whole_N: NDArray[np.float64] = prefix_NL[numbers, strings.lengths_N] * end_N
    return whole_N


def _rows(walk: Walk, strings: Strings, states_NL: Ints, counts_NL: Bools, numbers: Ints) -> Rows:
    """Return these strings as tokens: BOS, the symbols, then EOS or the next event."""
    symbols = strings.symbols_NL[numbers].astype(np.int64)
    lengths = strings.lengths_N[numbers]
    words = np.where(symbols == NOWHERE, PAD, symbols + FIRST)
    tokens_NT = np.pad(words, ((0, 0), (1, 0)), constant_values=BOS)
    next_NT = np.pad(words, ((0, 0), (0, 1)), constant_values=PAD)
    following = strings.following_N[numbers].astype(np.int64)
    ended = following == len(walk.machine.alphabet)
    next_NT[np.arange(len(numbers)), lengths] = np.where(ended, EOS, following + FIRST)
    valid_NT = np.arange(tokens_NT.shape[1]) <= lengths[:, None]
    return Rows(
        tokens_NT.astype(np.int16),
        next_NT.astype(np.int16),
        np.where(valid_NT, states_NL[numbers], 0).astype(np.int16),
        counts_NL[numbers] & valid_NT,
        lengths + 1,
    )


def _count(parts: list[Rows]) -> int:
    return sum(len(part.lengths_N) for part in parts)


def _joined(parts: list[Rows]) -> Rows:
    """Concatenate rows."""
    return Rows(
        np.concatenate([part.tokens_NT for part in parts]),
        np.concatenate([part.next_NT for part in parts]),
        np.concatenate([part.states_NT for part in parts]),
        np.concatenate([part.counts_NT for part in parts]),
        np.concatenate([part.lengths_N for part in parts]),
    )


# N strings, B batch, T tokens, L symbols, V vocabulary, Q states, M phases of the walk


class Fsm(Task):
    """Strings of a machine; heads `next`, `class` and `state`, all (B, T).

    Splits. The string that a model reads decides the split, by a hash, eight parts in ten train. A
    string is *common* if one is expected among `examples` draws. Common strings cannot be held out
    without changing what is learned: with `a EOS` in `test`, training would show that nothing ends
    after `a`. So they are all in `train`, thinned to eight in ten like everything else, and `train`
    follows the walk up to the random choice of rare strings by the hash. `val` and `test` hold
    rare strings only, so before a prefix has left the common strings behind, what comes next there
    is not the walk's: those positions have weight 0. Where weights are 1, targets of a held-out
    split are samples from the oracle, and a perfect model's cross-entropy is the entropy, up to
    sampling noise.
    In `longer` strings the weight is 1 once more than `max_length` symbols were read.
    """

    tokenizer: Vocab

    def __init__(self, spec: FsmTask) -> None:
        self.spec = spec
        check_room(spec.examples, spec.max_length + spec.longer)
        self.name = machine_title(spec.machine)
        table = spec.machine if isinstance(spec.machine, MachineTable) else None
        if table is None:
            found = machine_named(str(spec.machine), symbols=spec.symbols, seed=spec.machine_seed)
        else:
            found = machine_of_table(table)
        self.machine: Machine = found
        if table is not None and table.probabilities:
            shares_QE = np.array(table.probabilities)
            self.walk: Walk = given_walk(found, shares_QE, min_length=spec.min_length)
        else:
            self.walk = weighted_walk(
                found,
                min_length=spec.min_length,
                max_length=spec.max_length,
                seed=spec.machine_seed if spec.order == "weighted" else None,
            )
        self.tokenizer = Vocab(("PAD", "BOS", "EOS", *found.alphabet))
        self.heads: Mapping[str, int] = {
            "next": self.tokenizer.vocab_size,
            "class": len(found.class_names),
            "state": found.n_states,
        }
        self._truth_MQV = np.zeros((spec.min_length + 1, found.n_states, len(found.alphabet) + 3))
        self._truth_MQV[:, :, FIRST:] = self.walk.probabilities_MQE[:, :, :-1]
        self._truth_MQV[:, :, EOS] = self.walk.probabilities_MQE[:, :, -1]
        self._nats_MQ = self.walk.entropies()
        self._classes_Q = np.array(found.classes)
        self._splits = divided(spec, self.walk)
        further = longer(spec, self.walk) if spec.longer else None
        if further is not None:
            self._splits["longer"] = further
        self._overlap = overlap({name: rows.tokens_NT for name, rows in self._splits.items()})
        assert self._overlap == 0, f"{self._overlap} strings are in two splits"

    def model(self) -> ModelSpec:
        """Return the probe, with a final norm and an untied head.

        With these two, the excess loss on mod-3 fell from 0.0138 to 0.0055, on brackets from 0.0076
        to 0.0065 (two layers, one seed each).
        """
        model = presets.fsm_probe(
            vocab_size=self.tokenizer.vocab_size,
            num_classes=self.heads["class"],
            num_states=self.heads["state"],
            max_seq_len=self.longest(),
            tied=False,
        )
        return replace(model, decoder=replace(model.decoder, final_norm=LayerNorm()))

    def training(self) -> TrainSpec:
        """Return settings that come close to the machines' own entropy."""
        return TrainSpec(steps=3_000, batch_size=128, lr=2e-3, schedule=CosineSchedule(warmup=100))

    def sizes(self) -> dict[str, int]:
        """Return the number of strings in each split; no `longer` if the machine has none."""
        return {split: len(rows.lengths_N) for split, rows in self._splits.items()}

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Return the number of tokens of each row: BOS and the symbols."""
        return pick(self._splits, split).lengths_N

    def batch(self, split: str, rows: Ints) -> Batch:
        """Return BOS and symbols; what comes next, and class and state after each token."""
        kept = self._take(split, rows)
        tokens_BT, valid_BT = padded_to_longest(kept.tokens_NT, kept.lengths_N)
        width = tokens_BT.shape[1]
        states_BT = kept.states_NT[:, :width].astype(np.int64)
        return Batch(
            tokens=tokens_BT,
            valid=valid_BT,
            targets={
                "next": kept.next_NT[:, :width].astype(np.int64),
                "class": np.where(valid_BT, self._classes_Q[states_BT], 0),
                "state": states_BT,
            },
            weights=kept.counts_NT[:, :width].astype(np.float32),
        )

    def groups(self, split: str, rows: Ints) -> dict[str, list[str]]:
        """Return each row's number of symbols, and the class of the complete string."""
        kept = self._take(split, rows)
        last_B = kept.states_NT[np.arange(len(kept.lengths_N)), kept.lengths_N - 1]
        names = self.machine.class_names
        return {
            "length": [str(length - 1) for length in kept.lengths_N],
            "class": [names[self.machine.classes[state]] for state in last_B],
        }

    def oracle(self, split: str, rows: Ints) -> Oracle:
        """Return P(next | what was read) at every valid position, weighted or not, with entropy."""
        kept = self._take(split, rows)
        tokens_BT, valid_BT = padded_to_longest(kept.tokens_NT, kept.lengths_N)
        width = tokens_BT.shape[1]
        phase_T = np.minimum(np.arange(width), self.spec.min_length)
        states_BT = kept.states_NT[:, :width]
        probabilities_BTV = self._truth_MQV[phase_T, states_BT] * valid_BT[:, :, None]
        return Oracle(
            entropy=self._nats_MQ[phase_T, states_BT] * valid_BT,
            probabilities=probabilities_BTV,
            legal=probabilities_BTV > 0,
        )

    def describe(self, split: str, row: int) -> str:
        """Return `a b b EOS: accept`; a cut string shows the next event in brackets."""
        kept = self._take(split, np.array([row]))
        last = kept.lengths_N[0] - 1
        words = [self.tokenizer.names[token] for token in kept.tokens_NT[0, 1 : last + 1]]
        following = self.tokenizer.names[kept.next_NT[0, last]]
        words.append(following if following == "EOS" else f"[{following} …]")
        state = kept.states_NT[0, last]
        return f"{' '.join(words)}: {self.machine.class_names[self.machine.classes[state]]}"

    def facts(self) -> dict[str, Any]:
        """Return the machine, the walk's exact entropy, sizes, counted positions, a hash."""
        nats, events = self.walk.totals(cut=self.spec.max_length)
        counted = {
            split: float((rows.counts_NT.sum() / rows.lengths_N.sum()).round(6))
            for split, rows in self._splits.items()
        }
        arrays = [
            array
            for rows in self._splits.values()
            for array in (rows.tokens_NT, rows.next_NT, rows.states_NT, rows.counts_NT)
        ]
        return {
            "task": "fsm",
            "machine": self.name,
            "states": self.machine.n_states,
            "alphabet": list(self.machine.alphabet),
            "transitions": [list(row) for row in self.machine.transitions],
            "classes": [self.machine.class_names[kind] for kind in self.machine.classes],
            "next": self._truth_MQV[-1].round(6).tolist(),
            "entropy_per_string": round(nats, 9),
            "tokens_per_string": round(events, 9),
            "entropy_per_token": round(nats / events, 9),
            "sizes": self.sizes(),
            "counted": counted,
            "overlap": self._overlap,
            "vocab": list(self.tokenizer.names),
            "sha256": digest(arrays),
        }

    def _take(self, split: str, rows: Ints) -> Rows:
        kept = pick(self._splits, split)
        rows = checked(rows, size=len(kept.lengths_N), split=split)
        return Rows(
            kept.tokens_NT[rows],
            kept.next_NT[rows],
            kept.states_NT[rows],
            kept.counts_NT[rows],
            kept.lengths_N[rows],
        )
