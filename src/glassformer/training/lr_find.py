"""A learning-rate range test: the rate grows each step until the loss diverges.

It trains an engine that the caller makes for this purpose.
"""

import math
from dataclasses import dataclass

from glassformer.data.task import Task
from glassformer.spec.errors import InputError
from glassformer.spec.train import TrainSpec
from glassformer.training.engine import Engine
from glassformer.training.fit import step_seed

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
