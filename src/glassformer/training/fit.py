"""The training loop: a generator that yields a record per step; callers log, save and stop.

The learning-rate range test is here too: it trains an engine that the caller makes for this
purpose, and the rate grows each step until the loss diverges.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from glassformer.data.own_code import learning_rate
from glassformer.data.task import Task
from glassformer.spec.errors import InputError
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
        lr = learning_rate(train, step)
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


# --- learning-rate range test ---------------------------------------------------------------------


#: Smoothing of the loss curve, and the first steps that do not count: Adam's own beginning.
SMOOTHING = 0.9
BURN_IN = 10
#: A smoothed loss this much above its lowest means that the rate is too high.
BROKEN = 1.5


@dataclass(frozen=True, slots=True)
class RateRange:
    """The suggested rate, the range in which the loss fell, and the curve (rate, loss)."""

    suggestion: float
    low: float
    high: float
    curve: tuple[tuple[float, float], ...]


def find_rate(
    engine: Engine,
    task: Task,
    train: TrainSpec,
    *,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 150,
) -> RateRange:
    """Train while the rate grows from `lowest` to `highest`, until the loss diverges.

    The suggestion is where the smoothed loss falls fastest by the logarithm of the rate. The range
    ends at a third of the rate at which the loss is lowest.
    """
    if not 0 < lowest < highest or steps <= 2 * BURN_IN:
        raise InputError(
            f"a range test from {lowest} to {highest} in {steps} steps",
            hint=f"0 < lowest < highest, and more than {2 * BURN_IN} steps",
        )
    order = task.order(batch_size=train.batch_size, seed=train.seed)
    smooth, curve, best = 0.0, [], math.inf
    for i in range(steps):
        rate = lowest * (highest / lowest) ** (i / (steps - 1))
        batch = task.batch("train", order.rows(i))
        result = engine.step([batch], lr=rate, seed=step_seed(train.seed, i))
        if not result.applied:
            break
        smooth = SMOOTHING * smooth + (1 - SMOOTHING) * result.loss
        level = smooth / (1 - SMOOTHING ** (i + 1))
        curve.append((rate, level))
        if i >= BURN_IN:
            best = min(best, level)
            if level > BROKEN * best:
                break
    return _read(curve)


def _read(curve: list[tuple[float, float]]) -> RateRange:
    usable = curve[BURN_IN:]
    if len(usable) < 3:
        raise InputError(
            "the loss diverged before the range test could begin", hint="start from a lower rate"
        )
    lowest = min(range(len(usable)), key=lambda i: usable[i][1])
    if lowest == 0:
        raise InputError(
            "the loss never fell: no rate to suggest",
            hint="try a lower range; {glass doctor|gf.doctor} looks for mistakes",
        )
    slopes = [
        (usable[i + 1][1] - usable[i - 1][1]) / math.log(usable[i + 1][0] / usable[i - 1][0])
        for i in range(1, len(usable) - 1)
    ]
    steepest = min(range(len(slopes)), key=lambda i: slopes[i]) + 1
    high = usable[lowest][0] / 3
    steady = [rate for (rate, _), slope in zip(usable[1:-1], slopes, strict=True) if slope < 0]
    suggestion = min(usable[steepest][0], high)
    low = min((rate for rate in steady if rate <= suggestion), default=suggestion)
    return RateRange(suggestion, low, max(high, suggestion), tuple(curve))
