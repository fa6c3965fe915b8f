"""Compare two ways of computing the same thing, and decide how far apart they may be.

Results of our parts are compared absolutely, on inputs of unit scale; gradients relative to the
largest entry of the tensor; gradients that theory says are zero, absolutely. Logits of models are
compared relative to the largest of them, and may differ by a multiple of the model's own rounding
noise: what the last bit of every weight changes.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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

#: How many times its rounding noise a model's logits may differ between two ways of computing them.
#: The noise is the effect of one unit in the last place of each weight; a sum of n products in
#: another order is off by up to sqrt(n) such units, and n is 100 to 10,000. Products of half
#: precision are summed in float32, so that the results' own rounding is all that remains.
UNITS = {torch.float64: 64.0, torch.float32: 64.0, torch.float16: 4.0, torch.bfloat16: 4.0}
#: However badly conditioned a model is, this much is never put down to rounding unseen.
LARGEST = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.3, torch.bfloat16: 0.3}
#: A gap of this many tolerances is evidence enough without a float64 copy.
BEYOND_DOUBT = 100.0


@dataclass(frozen=True, slots=True)
class Measure:
    """The worst disagreement of one check, what was allowed, and the size it was taken at.

    `rounding` is the size below which a gap is put down to rounding where bits should be equal;
    `limit` is filled where the claim fails as asked, and holds under the condition that it names;
    `explains` says that rows after this one would fail for the same reason, limit or not; `evident`
    that the tolerance is the model's own rounding, so that more is a bug without another precision.
    """

    worst: float
    tolerance: float
    size: str = ""
    note: str = ""
    dtype: str = ""  # where it is not the subject's own
    rounding: float = 0.0
    limit: str = ""
    explains: bool = False
    evident: bool = False
    #: The two tensors that are furthest apart, to find them again in the calls they come from.
    pair: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False)

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
    worst = float(_apart(ours, reference).max())
    return math.inf if math.isnan(worst) else worst


def _apart(ours: Tensor, reference: Tensor) -> Tensor:
    """Return absolute differences; equal infinities (a masked logit) do not differ."""
    ours, reference = ours.detach(), reference.detach()
    return torch.where(ours == reference, torch.zeros_like(ours), ours - reference).abs()


#: Logits beyond this are a mask's, not a model's.
MASKED = 1e30


def scale_of(x: Tensor) -> float:
    """Return the largest finite entry that is no mask's; 0 where there is none."""
    size = x.detach().abs()
    kept = size[size < MASKED]
    return float(kept.max()) if kept.numel() else 0.0


def relative_gap(ours: Tensor, reference: Tensor) -> float:
    """Return `gap` divided by the largest entry of the reference."""
    if ours.shape != reference.shape:
        return math.inf
    if reference.numel() == 0:
        return 0.0
    largest = scale_of(reference)
    return gap(ours, reference) / largest if largest > 0 else gap(ours, reference)


def place_of(ours: Tensor, reference: Tensor) -> str:
    """Return the row and the position of the largest difference, with the two values."""
    if ours.shape != reference.shape:
        return f"shape {tuple(ours.shape)}, expected {tuple(reference.shape)}"
    apart = _apart(ours, reference)
    at = int(torch.where(apart.isnan(), math.inf, apart).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), ours.shape)]
    value, wanted = float(ours.flatten()[at]), float(reference.flatten()[at])
    where = ", ".join(f"{axis} {i}" for axis, i in zip(AXES[-len(index) :], index, strict=False))
    return f"{where}: {value:.4g}, expected {wanted:.4g}"


#: The axes of logits, for the place of the worst gap.
AXES = ("row", "position", "logit")


@dataclass(slots=True)
class Gaps:
    """The worst of several comparisons, relative to the scale of each, and its place.

    A comparison that a model does not offer is noted, and takes nothing away from the others.
    """

    worst: float = 0.0
    place: str = ""
    compared: int = 0
    missing: list[str] = field(default_factory=list)
    pair: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def compare(self, ours: Tensor, reference: Tensor, where: str = "") -> float:
        """Compare two tensors of one scale; return their relative gap."""
        apart = relative_gap(ours, reference)
        self.compared += 1
        if apart > self.worst:
            self.worst, self.pair = apart, (ours.detach(), reference.detach())
            place = place_of(ours, reference)
            self.place = f"{where}, {place}" if where else place
        return apart

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Run comparisons that a model may refuse."""
        try:
            yield
        except NotOffered as reason:
            self.missing.append(f"{what}: {reason}")
        except Exception as error:  # a stranger's model may raise anything
            self.missing.append(f"{what}: the model raised {short(error)}")

    def measure(
        self, tolerance: float, size: str = "", *, exact: bool = False, limit: str = ""
    ) -> Measure:
        """Return the measure; nothing compared means that the check was not offered."""
        if not self.compared:
            raise NotOffered("; ".join(dict.fromkeys(self.missing)) or "nothing to compare")
        note = self.place if self.worst > (0.0 if exact else tolerance) else ""
        bar = EXACT if exact else tolerance
        return Measure(self.worst, bar, size, note, rounding=tolerance, limit=limit, pair=self.pair)


def short(error: BaseException) -> str:
    """Return `Type: first line` of an exception, and its last where the first is a beginning."""
    first, *rest = str(error).strip().split("\n")
    text = f"{first}...{rest[-1]}" if rest and first.endswith("(") else first
    name = type(error).__name__
    return f"{name}: {text[:160]}" if text else name


@contextlib.contextmanager
def nudged(
    parameters: Iterable[Tensor], *, seed: int, precision: torch.dtype | None = None
) -> Iterator[None]:
    """Move every weight by one unit in its last place, up or down; then restore the bits.

    The last place is that of its dtype, or of the `precision` in which it is computed with.
    """
    moved = [p for p in parameters if p.is_floating_point() and p.numel()]
    kept = [p.detach().clone() for p in moved]
    generator = seeded(seed)
    with torch.no_grad():
        for p in moved:
            sign = torch.randint(0, 2, p.shape, generator=generator, dtype=torch.int8)
            sign.mul_(2).sub_(1)
            p.mul_(sign.to(p).mul_(torch.finfo(precision or p.dtype).eps).add_(1))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(moved, kept, strict=True):
                p.copy_(before)


def rounding_noise(
    compute: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    precision: torch.dtype | None = None,
) -> float:
    """Return the relative change of a result when each weight moves by its last bit.

    The median of three: a mixture of experts may route a token elsewhere once. A model that does
    not repeat itself gets the noise of a few operations, or its fault would excuse itself.
    """
    plain = compute()
    eps = torch.finfo(plain.dtype).eps
    if not torch.equal(compute(), plain):
        return 8 * eps
    changes = []
    for seed in (1, 2, 3):
        with nudged(parameters, seed=seed, precision=precision):
            changes.append(relative_gap(compute(), plain))
    return max(eps, statistics.median(changes))


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
