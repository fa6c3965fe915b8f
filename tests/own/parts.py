"""Parts as a user would write them in a file of their own; tests name them by this file's path."""

import json

import numpy as np
import torch

from glassformer.data.batch import Batch
from glassformer.data.task import Task
from glassformer.data.tokenizers.own import TrainedTokenizer
from glassformer.data.tokenizers.vocab import Vocab
from glassformer.nn.position import AddedPosition


class Palindromes(Task):
    """Letters in, `yes` or `no` out; one example in two is a palindrome."""

    def __init__(self, *, length: int = 6, examples: int = 2_000, seed: int = 0) -> None:
        self.tokenizer = Vocab(("no", "yes", "a", "b", "c", "d"))
        self.heads = {"answer": self.tokenizer.vocab_size}
        rng = np.random.default_rng(seed)
        rows = rng.integers(2, 6, size=(examples, length))
        same = rng.random(examples) < 0.5
        rows[same, length - length // 2 :] = rows[same, : length // 2][:, ::-1]
        self.rows = {"train": rows[: -examples // 5], "val": rows[-examples // 5 :]}

    def sizes(self):
        return {split: len(rows) for split, rows in self.rows.items()}

    def batch(self, split, rows):
        tokens = self.rows[split][rows]
        answers = (tokens == tokens[:, ::-1]).all(axis=1).astype(np.int64)
        return Batch(tokens=tokens, valid=np.ones(tokens.shape, bool), targets={"answer": answers})


class Trapezoid:
    """A schedule that rises, stays, and falls to 0."""

    def __init__(self, *, warmup=2, fall=0.5):
        self.warmup, self.fall = warmup, fall

    def share(self, step, steps):
        return min((step + 1) / self.warmup, 1.0, (steps - step) / (self.fall * steps))


class Words(TrainedTokenizer):
    """Whole words and the spaces between them; words that are rare or new are spelled `?`."""

    def __init__(self, words):
        self.words = words
        self.ids = {word: i for i, word in enumerate(words)}

    @classmethod
    def train(cls, texts, *, least=1):
        counts = {}
        for text in texts:
            for word in text.split():
                counts[word] = counts.get(word, 0) + 1
        return cls(["?", *sorted(word for word, count in counts.items() if count >= least)])

    @property
    def vocab_size(self):
        return len(self.words)

    def encode(self, text):
        return [self.ids.get(word, 0) for word in text.split()]

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids)

    def to_json(self):
        return json.dumps(self.words)

    @classmethod
    def from_json(cls, text):
        return cls(json.loads(text))


class Lion(torch.optim.Optimizer):
    """Chen and others, 2023: the sign of an interpolated momentum, with decoupled decay."""

    def __init__(self, params, lr, *, beta1=0.9, beta2=0.99, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": (beta1, beta2), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(beta1 * momentum + (1 - beta1) * p.grad))
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Stripes(AddedPosition):
    """A learned vector for even and one for odd positions, and the distance from the beginning."""

    def __init__(self, *, max_seq_len, d_model, reach=10.0):
        super().__init__()
        self.stripe = torch.nn.Parameter(torch.empty(2, d_model))
        self.slope = torch.nn.Parameter(torch.empty(1, d_model))
        self.reach = reach

    @classmethod
    def parameters_of(cls, *, max_seq_len, d_model, reach=10.0):
        return {"stripe": (2, d_model), "slope": (1, d_model)}

    def rows(self, positions):
        return self.stripe[positions % 2] + positions[..., None] / self.reach * self.slope
