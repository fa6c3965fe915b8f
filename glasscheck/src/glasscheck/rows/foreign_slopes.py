"""The row that compares backward with measured slopes, for modules of other libraries.

Authors stop gradients on purpose: a norm is taken for a constant, a rounded weight passes gradients
as if it were not rounded. Backward is then not the derivative, and should not be. What tells that
from a mistake is a second backward, through the same forward with every stop undone: where it gives
the measured slopes, the stops are the whole difference, and the row names them.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from glasscheck.measure import MASKED, Measure, NotOffered, seeded, short
from glasscheck.rows.invariants import LENGTH, long_of, tokens_of
from glasscheck.subject import Subject

#: More kinds of weights than this are moved together, two or more at a time.
KINDS = 12
#: A slope may differ by this much: rounding and curvature of a step of a thousandth.
SLOPE = 2e-2
#: Steps, relative to the weights. A token may go to another expert at one of them, a part that
#: computes in float32 is coarse at the small ones, and rounded weights jump at the large ones; a
#: wrong slope is wrong at all of them.
STEPS = (1e-3, 1e-4, 3e-3, 1e-2, 1e-6)
#: The largest share of a slope that coarse heights may leave in doubt.
VISIBLE = 0.05
#: A slope counts at this share of the largest at least.
FLAT = 0.05
#: A float64 copy of more weights than this takes too long.
LARGE = 50_000_000


# --- stops --------------------------------------------------------------------------------------


class Unstopped(TorchFunctionMode):
    """Run a forward with its gradient stops undone, and note the lines that have them.

    Undone are `detach`, `.data` and `no_grad`, and straight-through estimates: functions of the
    model's own whose result is their input (backward scales or turns gradients) or moves in steps
    (backward passes what rounding would not).
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, None] = {}
        self._region = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or what it stands for where it stops gradients."""
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            if not args[0]:
                self._region = f"no_grad at {_place()}"
                return None
            if self._region:
                self._region = ""
                return None
        live = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if live and func in STOPS:
            self.places[f"{STOPS[func]} at {_place()}"] = None
            return args[0].view_as(args[0])
        result = func(*args, **kwargs)
        if live and self._region and isinstance(result, Tensor) and result.requires_grad:
            self.places[self._region] = None
        if live and getattr(func, "__name__", "").startswith("fake_quantize"):
            self.places[f"straight-through rounding at {_place()}"] = None
            return result.detach()
        return result

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Undo stops, those in functions with a backward of their own too."""
        owner: Any = torch.autograd.Function
        plain = owner.__dict__["apply"]

        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain.__func__(kind, *args, **kwargs)
            with torch._C.DisableTorchFunction():
                return self._straight(kind, plain.__func__, args, kwargs, result)

        owner.apply = classmethod(apply)
        try:
            with self:
                yield
        finally:
            owner.apply = plain

    def _straight(
        self, kind: Any, plain: Callable[..., Any], args: Any, kwargs: Any, result: Any
    ) -> Any:
        """Return the input of an identity, a constant for steps, or the result as it is."""
        live = [
            a for a in args if isinstance(a, Tensor) and a.requires_grad and a.is_floating_point()
        ]
        if not isinstance(result, Tensor) or not live:
            return result
        for x in live:
            if x.shape == result.shape and torch.equal(x, result):
                self.places[f"backward of {kind.__name__}, an identity, at {_place()}"] = None
                return x.view_as(x)
        near = [
            a.detach() * (1 + 1e-6 * torch.randn(a.shape, generator=seeded(152)).to(a))
            if isinstance(a, Tensor) and a.is_floating_point()
            else a
            for a in args
        ]
        same = (plain(kind, *near, **kwargs) == result).double().mean()
        if float(same) < 0.9:
            return result
        self.places[f"straight-through {kind.__name__} at {_place()}"] = None
        return result.detach()


#: What stops a gradient, and how it is called.
STOPS: dict[Any, str] = {
    torch.Tensor.detach: "detach",
    torch.detach: "detach",
    torch.Tensor.detach_: "detach_",
    torch.Tensor.data.__get__: ".data",  # type: ignore[attr-defined]
}


def _place() -> str:
    """Return `module:line` of the innermost caller that is neither torch nor this package."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] not in ("torch", "contextlib", "glasscheck"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


# --- slopes -------------------------------------------------------------------------------------


class Hill:
    """The logits of a float64 copy, summed with random weights, as a height above its weights."""

    def __init__(self, subject: Subject, *, length: int = LENGTH) -> None:
        self.twin = subject.stranger().doubled()
        self.tokens = tokens_of(subject, 2, length, seed=149)
        self.weights = {
            name: p
            for name, p in self.twin.module.named_parameters()
            if p.requires_grad and p.is_floating_point() and p.numel()
        }
        if not self.weights:
            raise NotOffered("every parameter is frozen")

    def height(self) -> Tensor:
        """Return one number that depends on all logits."""
        logits = self.twin.logits(self.tokens)
        push = torch.randn(logits.shape, generator=seeded(151), dtype=torch.float64)
        return (torch.where(logits.abs() < MASKED, logits, 0.0) * push).sum()

    def backward(self) -> dict[str, Tensor]:
        """Return the gradient of each weight that has one."""
        for p in self.weights.values():
            p.grad = None
        try:
            self.height().backward()
        except (RuntimeError, AssertionError) as error:
            raise NotOffered(f"no float64 copy: the model raised {short(error)}") from error
        gradients = {n: p.grad for n, p in self.weights.items() if p.grad is not None}
        for p in self.weights.values():
            p.grad = None
        return gradients

    def moves(self, names: list[str]) -> dict[str, Tensor]:
        """Return a direction in which these weights are moved: the same for the same names.

        Half of it is the weights themselves: a backward that leaves out a norm's own slope is wrong
        along them alone.
        """
        generator, moves = seeded(150 + list(self.weights).index(names[0])), {}
        for name in names:
            weight = self.weights[name].detach()
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            size = float(weight.square().mean().sqrt()) or 1.0
            moves[name] = (noise * size + weight).to(weight) / len(names) ** 0.5
        return moves

    @torch.no_grad()
    def at(self, names: list[str], step: float) -> float:
        """Return the height a step away."""
        moves = self.moves(names)
        kept = {name: self.weights[name].detach().clone() for name in names}
        try:
            for name, move in moves.items():
                self.weights[name].add_(move, alpha=step)
            return float(self.height())
        finally:
            for name, before in kept.items():
                self.weights[name].copy_(before)

    def measured(self, names: list[str], step: float) -> float:
        """Return the slope between a step ahead and one back."""
        return (self.at(names, step) - self.at(names, -step)) / (2 * step)

    def coarseness(self, names: list[str]) -> float:
        """Return how far heights a hair apart are from a line: parts may compute in float32."""
        hair = 1e-6
        heights = torch.tensor(
            [self.at(names, hair * t) for t in range(-2, 3)], dtype=torch.float64
        )
        t = torch.arange(-2, 3).double()
        line = heights.mean() + t * (t * (heights - heights.mean())).sum() / t.square().sum()
        return float((heights - line).abs().max())

    @torch.no_grad()
    def rewritten(self, names: list[str]) -> list[str]:
        """Return those of the weights that a forward overwrites by itself."""
        kept = {name: self.weights[name].detach().clone() for name in names}
        try:
            for name, move in self.moves(names).items():
                self.weights[name].add_(move, alpha=STEPS[0])
            before = {name: self.weights[name].detach().clone() for name in names}
            self.height()
            return [n for n in names if not torch.equal(self.weights[n], before[n])]
        finally:
            for name, weight in kept.items():
                self.weights[name].copy_(weight)

    def given(self, gradients: Mapping[str, Tensor], names: list[str]) -> float:
        """Return the slope that backward gives."""
        moves = self.moves(names)
        return sum(float((gradients[n] * moves[n]).sum()) for n in names if n in gradients)


def gradients_by_differences(subject: Subject) -> Measure:
    """Backward gives the slope of the logits along each kind of weight, in float64."""
    if (subject.parameter_count() or 0) > LARGE:
        raise NotOffered(f"more than {LARGE:,} weights")
    hill = Hill(subject)
    gradients = hill.backward()
    kinds: dict[str, list[str]] = {}
    for name, gradient in gradients.items():
        if bool(gradient.any()):  # the others have a row of their own
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            kinds.setdefault(kind, []).append(name)
    if not kinds:
        raise NotOffered("no weight has a gradient in float64")
    listed = list(kinds.values())
    groups = [listed[i::KINDS] for i in range(min(KINDS, len(listed)))]
    slopes = [hill.measured(list(chain(*group)), STEPS[0]) for group in groups]
    floor = FLAT * max(abs(slope) for slope in slopes)

    def apart(given: float, measured: float) -> float:
        return abs(given - measured) / (max(abs(given), abs(measured), floor) or 1.0)

    worst, wrong = 0.0, []
    for group, slope in zip(groups, slopes, strict=True):
        together = apart(hill.given(gradients, list(chain(*group))), slope)
        if together <= SLOPE:
            worst = max(worst, together)
            continue
        for names in group:
            if (gap := _gap(hill, gradients, names, apart)) > SLOPE:
                wrong.append((gap, names))
            else:
                worst = max(worst, gap)
    if not wrong:
        return Measure(worst, SLOPE, subject.size, dtype="float64")
    gap, names = max(wrong)
    slope = hill.measured(names, STEPS[0])
    note = f"backward of {names[0]}: {hill.given(gradients, names):.4g}, measured {slope:.4g}"
    written = hill.rewritten(list(chain(*(names for _, names in wrong))))
    limit = (
        f"the forward itself writes {', '.join(written[:3])}, which backward leaves out"
        if written
        else _stopped(hill, [names for _, names in wrong], apart)
    )
    return Measure(gap, SLOPE, subject.size, note, dtype="float64", limit=limit)


def long_gradients_by_differences(subject: Subject) -> Measure:
    """Backward through a long row gives the slope of its logits along all weights, in float64."""
    length = long_of(subject)
    if length < 2 * LENGTH:
        raise NotOffered(f"a context of {subject.max_length} tokens is a short row")
    if (subject.parameter_count() or 0) > LARGE // 10:
        raise NotOffered(f"more than {LARGE // 10:,} weights")
    hill = Hill(subject, length=length)
    gradients = hill.backward()
    names = list(gradients)
    if not names:
        raise NotOffered("no weight has a gradient in float64")
    size = f"{subject.size}, T{length}"
    scale = max(
        (abs(hill.given(gradients, [name])) for name in names), default=0.0
    ) / len(names) ** 0.5  # fmt: skip

    def apart(given: float, measured: float) -> float:
        return abs(given - measured) / (max(abs(given), abs(measured), scale) or 1.0)

    gap = _gap(hill, gradients, names, apart)
    if gap <= SLOPE:
        return Measure(gap, SLOPE, size, dtype="float64")
    slope = hill.measured(names, STEPS[0])
    note = f"along all weights backward gives {hill.given(gradients, names):.4g}, "
    limit = _stopped(hill, [names], apart)
    return Measure(gap, SLOPE, size, f"{note}measured {slope:.4g}", dtype="float64", limit=limit)


Apart = Callable[[float, float], float]


def _gap(hill: Hill, gradients: Mapping[str, Tensor], names: list[str], apart: Apart) -> float:
    """Return the smallest gap of several steps, less what coarse heights explain.

    A step that leaves more than a twentieth in doubt says nothing; where all do, there is no slope
    that could be seen.
    """
    given, coarse, best = hill.given(gradients, names), None, math.inf
    for step in STEPS:
        measured = hill.measured(names, step)
        gap = apart(given, measured)
        if gap > SLOPE:
            coarse = hill.coarseness(names) if coarse is None else coarse
            doubt = apart(measured + 2 * coarse / step, measured)
            gap = math.inf if doubt > VISIBLE else max(0.0, gap - doubt)
        best = min(best, gap)
        if best <= SLOPE:
            return best
    return best if math.isfinite(best) else 0.0


def _stopped(hill: Hill, wrong: list[list[str]], apart: Apart) -> str:
    """Return where the forward stops gradients, if backward without those stops is right."""
    mode = Unstopped()
    for name, weight in hill.weights.items():
        if weight._backward_hooks:
            mode.places[f"a hook on the gradient of {name}"] = None
            weight._backward_hooks = None
    try:
        with mode.everywhere():
            through = hill.backward()
    except Exception:  # not every forward runs with its stops undone: they are no excuse then
        return ""
    if not mode.places or any(_gap(hill, through, names, apart) > SLOPE for names in wrong):
        return ""
    names = list(chain(*wrong))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    places = list(mode.places)
    where = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    return (
        f"the forward stops gradients ({where}), and without these stops backward is the slope; "
        f"concerned: {', '.join(names[:2])}{more}"
    )
