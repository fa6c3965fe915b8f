"""Tasks, an optimizer and a position of a user, each with a mistake, for `python -m bench doctor`.

`Rhymes` is the healthy task: a row of letters, each one of two that may follow the one before, and
an end. `fault` damages it.
"""

import numpy as np
import torch
from torch import nn

from glassformer.data.batch import Batch, pad
from glassformer.data.task import Task
from glassformer.data.tokenizers.vocab import Vocab
from glassformer.nn.position import AddedPosition

LETTERS = 16


def walk(rng: np.random.Generator, length: int) -> list[int]:
    """A row in which each letter has four that may follow it."""
    row = [int(rng.integers(LETTERS))]
    while len(row) < length:
        row.append((row[-1] * 3 + int(rng.integers(4)) * 4 + 1) % LETTERS)
    return [3 + letter for letter in row]


class Rhymes(Task):
    """PAD, BOS, EOS and letters; the next one is predicted."""

    def __init__(self, *, fault: str = "", examples: int = 1_000, seed: int = 0) -> None:
        letters = (f"l{i}" for i in range(LETTERS))
        self.tokenizer = Vocab(("PAD", "BOS", "EOS", *letters))
        self.heads = {"next": self.tokenizer.vocab_size}
        self.fault = fault
        rng = np.random.default_rng(seed)
        rows = [[1, *walk(rng, int(rng.integers(8, 25))), 2] for _ in range(examples)]
        if fault == "truncated":
            rows = [row[:16] for row in rows]
        if fault == "repeated":
            rows = rows[: examples // 4] * 4
        cut = examples * 4 // 5
        self.examples = {"train": rows[:cut], "val": rows[cut:]}
        if fault == "leak":
            self.examples["val"] = rows[: examples // 5]

    def sizes(self) -> dict[str, int]:
        """The number of examples by split."""
        return {split: len(rows) for split, rows in self.examples.items()}

    def batch(self, split: str, rows: np.ndarray) -> Batch:
        """Rows and the next token of each position."""
        chosen = [self.examples[split][int(i)] for i in rows]
        ahead = {"unshifted": 0, "two ahead": 2}.get(self.fault, 1)
        tokens, valid = pad([row[:-1] for row in chosen])
        full, _ = pad([[*row, 0, 0] for row in chosen])
        targets = full[:, ahead : ahead + tokens.shape[1]]
        weights = np.ones(valid.shape) if self.fault == "padding counts" else valid
        return Batch(
            tokens=tokens,
            valid=valid,
            targets={"next": targets},
            weights=weights.astype(np.float32),
        )


class Classes(Task):
    """A row of letters; is there more of the first half of the alphabet, or of the second?"""

    def __init__(self, *, fault: str = "", examples: int = 1_200, seed: int = 0) -> None:
        letters = (f"l{i}" for i in range(LETTERS))
        self.tokenizer = Vocab(("few", "many", "rare", *letters))
        self.heads = {"answer": self.tokenizer.vocab_size}
        rng = np.random.default_rng(seed)
        self.rows = np.array([walk(rng, 12) for _ in range(examples)])
        self.answers = ((self.rows > 10).sum(1) > 5).astype(np.int64)
        if fault == "rare":
            self.answers[rng.random(examples) < 0.004] = 2
        if fault == "answer first":
            self.rows[:, 0] = 3 + self.answers

    def sizes(self) -> dict[str, int]:
        """The number of examples by split."""
        return {"train": len(self.rows) - 200, "val": 200}

    def batch(self, split: str, rows: np.ndarray) -> Batch:
        """Rows with one answer each."""
        at = np.asarray(rows) + (len(self.rows) - 200 if split == "val" else 0)
        tokens = self.rows[at]
        return Batch(
            tokens=tokens, valid=np.ones(tokens.shape, bool), targets={"answer": self.answers[at]}
        )


class Forgetful(torch.optim.AdamW):
    """Keeps the parameters that decay, and leaves the others out."""

    def __init__(self, params, lr: float, *, weight_decay: float = 0.0) -> None:
        super().__init__(list(params)[:1], lr=lr, weight_decay=weight_decay)


class DecaysAll(torch.optim.AdamW):
    """Takes its own decay for every group."""

    def __init__(self, params, lr: float, *, weight_decay: float = 0.1) -> None:
        merged = [q for group in params for q in group["params"]]
        super().__init__(merged, lr=lr, weight_decay=weight_decay)


class Climbs(torch.optim.SGD):
    """Goes the wrong way."""

    def __init__(self, params, lr: float, *, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, maximize=True)


class Noisy(AddedPosition):
    """A learned position with noise that never ends."""

    def __init__(self, *, max_seq_len: int, d_model: int) -> None:
        super().__init__()
        self.grid = nn.Parameter(torch.empty(max_seq_len, d_model))

    @classmethod
    def parameters_of(cls, *, max_seq_len: int, d_model: int) -> dict[str, tuple[int, ...]]:
        """What is learned."""
        return {"grid": (max_seq_len, d_model)}

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """A row of the table, and noise."""
        found = self.grid[positions]
        return found + 0.05 * torch.randn_like(found)
