"""Source 000's task: strings that a machine's random walk wrote, and the truth at every position.

The model reads `BOS a b b`; targets are what comes next (`a b b EOS`), and the class and the state
after what was read. A walk is cut after `max_length` symbols; the last target of a cut string is
what the walk did next. The oracle is the walk itself: P(next | state), exact.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch, Ints
from glassformer.data.fsm_rows import EOS, FIRST, Rows, divided, longer
from glassformer.data.machine import Machine
from glassformer.data.machines import machine_named
from glassformer.data.splits import checked, overlap, padded_to_longest, pick
from glassformer.data.streams import digest
from glassformer.data.task import Oracle
from glassformer.data.vocab import Vocab
from glassformer.data.walk import Walk, weighted_walk
from glassformer.spec.tasks import FsmTask

# N strings, B batch, T tokens, L symbols, V vocabulary, Q states, M phases of the walk


class Fsm:
    """Strings of a machine; heads `next`, `class` and `state`, all (B, T).

    Splits. The string that a model reads decides the split, by a hash, eight parts in ten train. A
    string is *common* if one is expected among `examples` draws. Common strings cannot be held out
    without changing what is learned: with `a EOS` in `test`, training would say that nothing ends
    after `a`. So they are all in `train`, thinned to eight in ten like everything else, and `train`
    follows the walk up to the chance of which rare strings the hash kept. `val` and `test` hold
    rare strings only, so before a prefix has left the common strings behind, what comes next there
    is not the walk's: those positions have weight 0. Where weights are 1, targets of a held-out
    split are draws from the oracle, and a perfect model's cross-entropy is the entropy, up to
    chance.
    In `longer` strings the weight is 1 once more than `max_length` symbols were read.
    """

    def __init__(self, spec: FsmTask) -> None:
        self.spec = spec
        self.name = spec.machine
        found = machine_named(spec.machine, symbols=spec.symbols, seed=spec.machine_seed)
        self.machine: Machine = found
        self.walk: Walk = weighted_walk(
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

    def sizes(self) -> dict[str, int]:
        """Strings of each split; `longer` is missing where the machine has no longer strings."""
        return {split: len(rows.lengths_N) for split, rows in self._splits.items()}

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Tokens of each row: BOS and the symbols."""
        return pick(self._splits, split).lengths_N

    def batch(self, split: str, rows: Ints) -> Batch:
        """BOS and symbols; what comes next, and class and state after each token."""
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
        """Each row's number of symbols, and the class of the whole string."""
        kept = self._take(split, rows)
        last_B = kept.states_NT[np.arange(len(kept.lengths_N)), kept.lengths_N - 1]
        names = self.machine.class_names
        return {
            "length": [str(length - 1) for length in kept.lengths_N],
            "class": [names[self.machine.classes[state]] for state in last_B],
        }

    def confusions(
        self, split: str, rows: Ints, answers: NDArray[np.int64]
    ) -> dict[str, list[tuple[str, str]]]:
        """A wrong symbol is no other question's answer: nothing to confuse."""
        return {}

    def oracle(self, split: str, rows: Ints) -> Oracle:
        """P(next | what was read) at every valid position, weighted or not, and its entropy."""
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
        """`a b b EOS: accept`; a string that was cut shows what came next in brackets."""
        kept = self._take(split, np.array([row]))
        last = kept.lengths_N[0] - 1
        words = [self.tokenizer.names[token] for token in kept.tokens_NT[0, 1 : last + 1]]
        following = self.tokenizer.names[kept.next_NT[0, last]]
        words.append(following if following == "EOS" else f"[{following} …]")
        state = kept.states_NT[0, last]
        return f"{' '.join(words)}: {self.machine.class_names[self.machine.classes[state]]}"

    def facts(self) -> dict[str, Any]:
        """The machine, the walk and its exact entropy, sizes, how many positions count, a hash."""
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
