"""The training loop: a generator that yields a record per step; callers log, save and stop."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from glassformer.data.rng import Sampler
from glassformer.data.task import Task
from glassformer.spec.train import TrainSpec
from glassformer.training.engine import Engine


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The result of one step. `step` counts from 1; `nll` is each head's plain loss.

    `loss` is what was differentiated, without the load-balancing term of a model with experts:
    `balance` is that loss, `objective` all of it.
    """

    step: int
    loss: float
    nll: Mapping[str, float]
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    applied: bool
    balance: float | None = None
    balance_term: float = 0.0

    @property
    def objective(self) -> float:
        """The number that was differentiated: the loss and the load-balancing term."""
        return self.loss + self.balance_term

    @property
    def first_loss(self) -> float:
        """The loss that an evaluation calls `loss`: with several heads, the first one's."""
        return self.loss if len(self.nll) == 1 else next(iter(self.nll.values()))


def fit(engine: Engine, task: Task, train: TrainSpec, *, start: int = 0) -> Iterator[StepRecord]:
    """Train from step `start` to the last, yielding one record each.

    The batches, the rate and the dropout of a step are functions of its number and the seed alone:
    resuming from a saved step is the same as never having stopped.
    """
    sampler = Sampler(
        task.sizes()["train"],
        batch_size=train.batch_size,
        seed=train.seed,
        lengths=task.lengths("train"),
    )
    for step in range(start, train.steps):
        began = time.perf_counter()
        first = step * train.accumulate
        batches = [task.batch("train", sampler.rows(first + i)) for i in range(train.accumulate)]
        lr = train.learning_rate(step)
        result = engine.step(batches, lr=lr, seed=step_seed(train.seed, step))
        yield StepRecord(
            step + 1,
            result.loss,
            result.nll,
            lr,
            result.grad_norm,
            result.tokens,
            time.perf_counter() - began,
            result.applied,
            result.balance,
            result.balance_term,
        )


def step_seed(seed: int, step: int) -> int:
    """Return a seed for each step, the same on every machine."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])
