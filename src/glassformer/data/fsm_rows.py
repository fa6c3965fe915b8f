"""The splits of the machine task: strings of a walk, drawn, divided, and written as tokens.

`Fsm` says which strings are held out, and why.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Bools, Ints
from glassformer.data.machine import NOWHERE
from glassformer.data.streams import hash_rows, stream
from glassformer.data.walk import Strings, Walk
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import FsmTask

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


def divided(spec: FsmTask, walk: Walk) -> dict[str, Rows]:
    """train, val and test, each in the order in which it was drawn.

    Where a machine has few rare strings, val and test may stay smaller than a tenth.
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
                f"{ROUNDS * spec.examples} strings of '{spec.machine}' give {_count(parts)} "
                f"for {split}: nearly all are too common to be held out",
                where=f"max_length {spec.max_length}, examples {spec.examples}",
                hint="raise max_length; or lower examples, which decides what is common",
            )
    return {split: _joined(parts) for split, parts in kept.items()}


def longer(spec: FsmTask, walk: Walk) -> Rows | None:
    """Strings that go on beyond max_length, cut after `longer` more symbols."""
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
            # That a string is here depends on its first max_length + 1 symbols, not on more.
            counts = np.broadcast_to(np.arange(cut + 1) > spec.max_length, states_NL.shape)
            parts.append(_rows(walk, strings, states_NL, counts, numbers))
            have += len(numbers)
        if have == wanted:
            break
    return _joined(parts) if parts else None


def _probabilities(
    walk: Walk, strings: Strings, prefix_NL: NDArray[np.float64], states_NL: Ints
) -> NDArray[np.float64]:
    """Of each string as it is read: of its symbols, and of its end where it was not cut."""
    cut = strings.symbols_NL.shape[1]
    numbers = np.arange(len(strings.lengths_N))
    last_N = states_NL[numbers, strings.lengths_N]
    phase_N = np.minimum(strings.lengths_N, walk.min_length)
    end_N = np.where(strings.lengths_N < cut, walk.probabilities_MQE[phase_N, last_N, -1], 1.0)
    whole_N: NDArray[np.float64] = prefix_NL[numbers, strings.lengths_N] * end_N
    return whole_N


def _rows(walk: Walk, strings: Strings, states_NL: Ints, counts_NL: Bools, numbers: Ints) -> Rows:
    """These strings as tokens: BOS before the symbols, EOS or what followed behind them."""
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
    """One after another."""
    return Rows(
        np.concatenate([part.tokens_NT for part in parts]),
        np.concatenate([part.next_NT for part in parts]),
        np.concatenate([part.states_NT for part in parts]),
        np.concatenate([part.counts_NT for part in parts]),
        np.concatenate([part.lengths_N for part in parts]),
    )
