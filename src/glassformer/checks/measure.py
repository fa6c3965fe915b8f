"""Compare two ways of computing the same thing, and decide how far apart they may be.

Forward results are compared absolutely, on inputs of unit scale; gradients relative to the largest
entry of the tensor; gradients that theory says are zero, absolutely.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: The tolerance for two computations of one thing; `glass verify` prints the worst gap beside it.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
EXACT = 0.0


@dataclass(frozen=True, slots=True)
class Measure:
    """The worst disagreement of one check, what was allowed, and the size it was taken at."""

    worst: float
    tolerance: float
    size: str = ""
    note: str = ""
    dtype: str = ""  # where it is not the subject's own

    @property
    def holds(self) -> bool:
        """True if the worst value is within the tolerance; NaN is not."""
        return self.worst <= self.tolerance


class NotOffered(Exception):
    """The subject does not offer what a check needs; the text says what."""


def gap(ours: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference; infinite for unequal shapes or one-sided NaN."""
    if ours.shape != reference.shape:
        return math.inf
    if ours.numel() == 0:
        return 0.0
    worst = float((ours.detach() - reference.detach()).abs().max())
    return math.inf if math.isnan(worst) else worst


def relative_gap(ours: Tensor, reference: Tensor) -> float:
    """Return `gap` divided by the largest entry of the reference."""
    largest = float(reference.detach().abs().max())
    return gap(ours, reference) / largest if largest > 0 else gap(ours, reference)


def seeded(seed: int) -> torch.Generator:
    """Return a seeded generator, so that a check never touches torch's global one."""
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return standard normal numbers that require gradients."""
    # Drawn in float64, so that both precisions are measured on the same numbers.
    x = torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


@dataclass(frozen=True, slots=True)
class Pair:
    """One of our tensors and the (part of a) reference tensor that plays the same role."""

    name: str
    ours: Tensor
    reference: Tensor
    rows: slice | None = None
    zero_by_theory: bool = False

    def copy(self) -> None:
        """Copy our values into the reference."""
        with torch.no_grad():
            self._part(self.reference).copy_(self.ours)

    def gradient_gap(self) -> float:
        """Return the relative gap of the gradients; absolute where theory says zero."""
        if self.ours.grad is None or self.reference.grad is None:
            return math.inf
        if self.zero_by_theory:
            return gap(self.ours.grad, torch.zeros_like(self.ours.grad))
        return relative_gap(self.ours.grad, self._part(self.reference.grad))

    def _part(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor[self.rows]


def parity(
    ours: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    *,
    inputs: Sequence[Tensor],
    pairs: Sequence[Pair] = (),
    where: Tensor | None = None,
    size: str = "",
) -> Measure:
    """Compare results and every gradient; `where` (bool) limits both to real positions."""
    for pair in pairs:
        pair.copy()
    twins = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    out, expected = ours(*inputs), reference(*twins)
    if out.shape != expected.shape:
        return Measure(math.inf, TOLERANCE[out.dtype], size, "another shape")
    if where is not None:
        out, expected = out[where], expected[where]
    push = torch.randn(out.shape, generator=seeded(99), dtype=torch.float64).to(out)
    (out * push).sum().backward()
    (expected * push).sum().backward()
    gaps = {"result": gap(out, expected)}
    for i, (x, twin) in enumerate(zip(inputs, twins, strict=True)):
        if x.requires_grad:
            if x.grad is None or twin.grad is None:
                gaps[f"input {i}"] = math.inf
            else:
                gaps[f"input {i}"] = relative_gap(x.grad, twin.grad)
    for pair in pairs:
        gaps[pair.name] = pair.gradient_gap()
    name = max(gaps, key=lambda key: gaps[key])
    return Measure(gaps[name], TOLERANCE[out.dtype], size, f"worst at {name}")
