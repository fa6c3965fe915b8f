"""Initialisation as data: a policy in the spec, and from it one rule for each tensor.

`manifest` turns the policy (Xavier, normal, He) into `Uniform`, `Gaussian` or `Constant` for each
parameter, so that every engine samples from the same rule.
"""

import math

from glassformer.spec.checks import positive, spec


@spec
class Constant:
    """Every entry equal to `value`."""

    value: float


@spec
class Uniform:
    """Uniform in [-bound, bound]."""

    bound: float


@spec
class Gaussian:
    """Normal with mean 0."""

    std: float


Rule = Constant | Uniform | Gaussian


@spec
class XavierInit:
    """Uniform in +-sqrt(6 / (fan_in + fan_out)) for every matrix and table (Glorot, 2010)."""

    def matrix(self, shape: tuple[int, ...], *, feeds_relu: bool, residual_depth: int) -> Rule:
        """Rule of a weight matrix (out, in)."""
        return Uniform(bound=math.sqrt(6.0 / (shape[0] + shape[1])))

    def table(self, shape: tuple[int, ...]) -> Rule:
        """Rule of an embedding or position table (rows, width)."""
        return Uniform(bound=math.sqrt(6.0 / (shape[0] + shape[1])))


@spec
class NormalInit:
    """Normal with one std everywhere.

    `scale_residual` divides the std of the projections that write into the residual stream by
    sqrt(number of such projections), as GPT-2 does.
    """

    std: float = 0.02
    scale_residual: bool = False

    def __post_init__(self) -> None:
        positive("std", self.std)

    def matrix(self, shape: tuple[int, ...], *, feeds_relu: bool, residual_depth: int) -> Rule:
        """Rule of a weight matrix; `residual_depth` is 0 off the residual stream."""
        scaled = self.scale_residual and residual_depth > 0
        return Gaussian(std=self.std / math.sqrt(residual_depth) if scaled else self.std)

    def table(self, shape: tuple[int, ...]) -> Rule:
        """Rule of an embedding or position table."""
        return Gaussian(std=self.std)


@spec
class HeInit:
    """He normal before a ReLU, Xavier uniform elsewhere, tables normal with std 1/sqrt(width)."""

    def matrix(self, shape: tuple[int, ...], *, feeds_relu: bool, residual_depth: int) -> Rule:
        """Rule of a weight matrix (out, in)."""
        if feeds_relu:
            return Gaussian(std=math.sqrt(2.0 / shape[1]))
        return Uniform(bound=math.sqrt(6.0 / (shape[0] + shape[1])))

    def table(self, shape: tuple[int, ...]) -> Rule:
        """Rule of an embedding or position table."""
        return Gaussian(std=1.0 / math.sqrt(shape[1]))


Init = XavierInit | NormalInit | HeInit
