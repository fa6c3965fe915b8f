"""The training loop: a generator that yields a record per step; callers log, save and stop."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from glassformer.data.task import Task
from glassformer.spec.train import TrainSpec
from glassformer.training.engine import Engine, StepResult


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The result of one step. `step` counts from 1; `nll` is each head's plain loss.

    `loss` is what was differentiated, without the load-balancing term of a model with experts:
    `balance` is that loss, `objective` all of it. `settled` is False while the engine is already
    at work on later steps: evaluate, save and stop at a settled record.
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
    settled: bool = True

    @property
    def objective(self) -> float:
        """The number that was differentiated: the loss and the load-balancing term."""
        return self.loss + self.balance_term

    @property
    def first_loss(self) -> float:
        """The loss that an evaluation calls `loss`: with several heads, the first one's."""
        return self.loss if len(self.nll) == 1 else next(iter(self.nll.values()))


def fit(
    engine: Engine,
    task: Task,
    train: TrainSpec,
    *,
    start: int = 0,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[StepRecord]:
    """Train from step `start` to the last, yielding one record each.

    The batches, the rate and the dropout of a step are functions of its number and the seed alone:
    resuming from a saved step is the same as never having stopped. An engine may run some steps
    ahead of the records; it never does so past a step after which the run evaluates or saves, nor
    once `stopping` returns True.
    """
    order = task.order(batch_size=train.batch_size, seed=train.seed)
    waiting: deque[tuple[int, float, Callable[[], StepResult]]] = deque()
    began = time.perf_counter()
    for step in range(start, train.steps):
        first = step * train.accumulate
        batches = [task.batch("train", order.rows(first + i)) for i in range(train.accumulate)]
        lr = train.learning_rate(step)
        read = engine.submit(batches, lr=lr, seed=step_seed(train.seed, step))
        waiting.append((step + 1, lr, read))
        settle = train.looks_after(step + 1) or stopping()
        while len(waiting) > (0 if settle else engine.ahead):
            number, rate, read = waiting.popleft()
            result = read()
            now = time.perf_counter()
            yield StepRecord(
                number,
                result.loss,
                result.nll,
                rate,
                result.grad_norm,
                result.tokens,
                now - began,
                result.applied,
                result.balance,
                result.balance_term,
                settled=not waiting,
            )
            settle = settle or stopping()
            began = time.perf_counter()


def step_seed(seed: int, step: int) -> int:
    """Return a seed for each step, the same on every machine."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])
