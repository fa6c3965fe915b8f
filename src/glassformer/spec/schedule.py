"""Learning rates as pure functions of the step, the same for every engine."""

import math

from glassformer.spec.base import at_least, spec
from glassformer.spec.errors import InputError


@spec
class ConstantSchedule:
    """A linear warmup, then the full rate."""

    warmup: int = 0

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)

    def share(self, step: int, steps: int) -> float:
        """The rate at this step (from 0) as a share of the full one."""
        return _warm(step, self.warmup)


@spec
class InverseSqrtSchedule:
    """A linear warmup, then falling as 1 / sqrt(step): the 2017 paper's, its peak being 1."""

    warmup: int = 100

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 1)

    def share(self, step: int, steps: int) -> float:
        """min(s / warmup, sqrt(warmup / s)) with s = step + 1."""
        return min((step + 1) / self.warmup, math.sqrt(self.warmup / (step + 1)))


@spec
class CosineSchedule:
    """A linear warmup, then half a cosine down to `floor` at the last step."""

    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)
        if not 0.0 <= self.floor <= 1.0:
            raise InputError(f"floor {self.floor} is outside [0, 1]", hint="a share of the rate")

    def share(self, step: int, steps: int) -> float:
        """The rate at this step (from 0) as a share of the full one."""
        if step < self.warmup:
            return _warm(step, self.warmup)
        way = (step - self.warmup) / max(1, steps - 1 - self.warmup)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(1.0, way))) / 2


Schedule = ConstantSchedule | InverseSqrtSchedule | CosineSchedule


def _warm(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup) if warmup else 1.0
