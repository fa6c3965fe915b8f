"""The first place where two implementations of one model differ, and the likely cause.

Both run on the same tokens; every module's inputs and output are recorded in the order in which
they are computed. Modules with weights are paired by the values that they compute, not by name: up
to the first difference both sides compute the same tensors, whatever their modules are called and
however a layout splits or joins them. The first module whose output has no counterpart differs. If
its input is the same on both sides the module itself is at fault; otherwise it is what is computed
between the last equal tensors and it, which has no module of its own: attention, a residual sum, a
position. `causes` then tries what commonly goes wrong there, and names what reproduces both sides.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.adapters.base import BaseAdapter
from glassformer.checks.causes import (
    SAME,
    Computed,
    Scene,
    close,
    gap_of,
    layouts,
    module_causes,
    own_weights,
    ratio_of,
    region_causes,
)
from glassformer.checks.measure import seeded
from glassformer.checks.subject import Subject, subject_of
from glassformer.spec.errors import InputError

# B batch, T length, N heads, K key-value heads, H d_head

#: Tokens that are compared: distinct primes, so that no axis is mistaken for another.
ROWS, LENGTH = 2, 11
#: Calls around the last equal one among which a counterpart is looked for.
NEAR = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of a comparison. `same` means that no tensor differs by more than rounding.

    `first` and `second` are the modules on either side, `inside` says whether their inputs are
    equal, so that the fault is in the module itself; otherwise it is between `after`, the last
    module whose output is the same on both sides, and them. `gap` is the largest difference as a
    part of the larger tensor's spread.
    """

    same: bool
    compared: int
    gap: float
    stage: str = "forward"
    first: str = ""
    second: str = ""
    inside: bool = False
    after: tuple[str, str] = ("", "")
    causes: tuple[str, ...] = ()
    values: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    names: tuple[str, str] = ("A", "B")
    worst: tuple[int, ...] = field(default=())

    @property
    def module(self) -> str:
        """The smallest module that contains the difference, by the first side's names."""
        return self.first if self.inside else _common(self.after[0], self.first)

    def __str__(self) -> str:
        if self.same:
            return f"no difference: {self.compared} modules compared, largest gap {self.gap:.1e}"
        where = (
            f"in {self.first} (beside {self.second}): the same input, another output"
            if self.inside
            else f"between {self.after[0] or 'the tokens'} (equal on both sides) and "
            f"{self.first} (beside {self.second})"
        )
        lines = [f"first difference, {self.stage}: {where}", f"  gap {self.gap:.2g} of the spread"]
        lines += [f"  likely cause: {cause}" for cause in self.causes]
        if not self.causes:
            lines.append("  likely cause: none of the known ones reproduces both sides")
        if self.values[0]:
            at = ", ".join(map(str, self.worst))
            lines.append(f"  values from [{at}] on:")
            for name, values in zip(self.names, self.values, strict=True):
                lines.append(f"    {name:<12}" + "  ".join(f"{value:>11.5g}" for value in values))
        lines.append(f"  {self.compared} modules before it are equal")
        return "\n".join(lines)


def diff(
    first: object,
    second: object,
    *,
    tokens: Tensor | None = None,
    names: tuple[str, str] = ("A", "B"),
    backward: bool = True,
) -> Difference:
    """Compare two models on the same tokens; name the first module that differs, and why.

    Models of ours and modules of any library; with `backward`, if the forwards agree, also the
    gradients of the weights that the two share. A quantized model stands for the float model of
    exactly its weights.
    """
    modules = (_module_of(first), _module_of(second))
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        return _compared((first, second), modules, tokens, names, backward=backward)
    finally:
        for part, mode in modes:
            part.training = mode


def _compared(
    things: tuple[object, object],
    modules: tuple[nn.Module, nn.Module],
    tokens: Tensor | None,
    names: tuple[str, str],
    *,
    backward: bool,
) -> Difference:
    sides = [subject_of(thing, name=name) for thing, name in zip(things, names, strict=True)]
    modules = (_computing(modules[0], sides[0]), _computing(modules[1], sides[1]))
    for module in modules:
        module.eval()
    if tokens is None:
        vocabulary = min(side.vocab_size for side in sides)
        length = min(LENGTH, *(side.max_length for side in sides))
        tokens = torch.randint(vocabulary, (ROWS, length), generator=seeded(3))
    traces = [trace(module, side, tokens) for module, side in zip(modules, sides, strict=True)]
    found = _first_difference(*traces, names=names)
    if found.same and backward:
        return _backward_difference(modules, sides, tokens, traces, found, names)
    return found


def _module_of(thing: object) -> nn.Module:
    module = thing.model if isinstance(thing, BaseAdapter) else thing
    if not isinstance(module, nn.Module):
        raise InputError(
            f"{type(thing).__name__} is no torch module",
            hint="give modules, or what gf.load returns",
        )
    return module


def _computing(module: nn.Module, side: Subject) -> nn.Module:
    """Return the module that computes a subject's logits: of a quantized model, its float twin."""
    if side.quantized is None:
        return module
    assert side.model is not None
    return side.model


# --- what each side computes --------------------------------------------------------------------


def trace(module: nn.Module, subject: Subject, tokens: Tensor) -> list[Computed]:
    """Run the model once and record every module's call, in the order in which they end."""
    computed: list[Computed] = []
    handles = []

    def record(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
            given = tuple(_tensors([*args, *kwargs.values()]))
            made = next(_tensors([result]), None)
            if made is not None:
                computed.append(Computed(name, part, given, made))

        return hook

    for name, part in module.named_modules():
        if name:
            handles.append(part.register_forward_hook(record(name), with_kwargs=True))
    try:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        with torch.no_grad():
            logits = subject.logits(tokens.to(device), None)
    finally:
        for handle in handles:
            handle.remove()
    computed.append(Computed("logits", nn.Identity(), (), logits.detach().float().cpu()))
    return computed


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the floating tensors among some values, and in the tuples and tables among them."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield value.detach().float().cpu().clone()  # later code may write into it
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, Mapping):
            yield from _tensors([*value.values()])


def weighted(computed: Sequence[Computed]) -> list[Computed]:
    """Return the calls of modules with weights of their own, and the logits."""
    return [
        one
        for one in computed
        if one.name == "logits" or any(True for _ in one.module.parameters(recurse=False))
    ]


# --- pairing ------------------------------------------------------------------------------------


def _slice_gap(part: Tensor, whole: Tensor) -> float:
    """Return the gap between a tensor and the closest slice of a wider one's last axis."""
    width, total = part.shape[-1], whole.shape[-1]
    if width >= total or part.numel() // width != whole.numel() // total:
        return math.inf
    rows, columns = part.reshape(-1, width), whole.reshape(-1, total)
    starts = range(0, total - width + 1, math.gcd(width, total))
    return min((gap_of(rows, columns[:, s : s + width]) for s in starts), default=math.inf)


def _same(a: Tensor, b: Tensor) -> float:
    """Return the gap of two outputs, one of which may be joined with others."""
    if a.numel() == b.numel():
        return gap_of(a, b)
    return _slice_gap(a, b) if a.numel() < b.numel() else _slice_gap(b, a)


def _first_difference(
    left: Sequence[Computed], right: Sequence[Computed], *, names: tuple[str, str]
) -> Difference:
    ours, theirs = weighted(left), weighted(right)
    matched: list[tuple[Computed, Computed]] = []
    used: set[int] = set()
    worst, newest = 0.0, 0
    for one in ours:
        partner, gap = None, math.inf
        # Parallel parts may be computed in another order, and one product there may be several
        # here: look a little ahead, and back at what is wider than this.
        for at in range(max(0, newest - NEAR), min(newest + 2 * NEAR, len(theirs))):
            if at in used and theirs[at].output.numel() <= one.output.numel():
                continue
            found = _same(one.output, theirs[at].output)
            if found < gap and found <= SAME:
                partner, gap = at, found
        if partner is None:
            return _described(one, matched, theirs, left, right, names)
        worst, newest = max(worst, gap), max(newest, partner)
        used.add(partner)
        matched.append((one, theirs[partner]))
    return Difference(same=True, compared=len(matched), gap=worst, names=names)


def _described(
    one: Computed,
    matched: Sequence[tuple[Computed, Computed]],
    theirs: Sequence[Computed],
    left: Sequence[Computed],
    right: Sequence[Computed],
    names: tuple[str, str],
) -> Difference:
    """Describe the first module without a counterpart, beside the first such on the other side."""
    partners = {id(pair[1]) for pair in matched}
    free = [other for other in theirs if id(other) not in partners]
    alike = [other for other in free if other.output.numel() == one.output.numel()]
    other = (alike or free or [theirs[-1]])[0]
    # The other side may have a module that this one lacks: a norm of queries, say.
    early = free[0] if free else other
    inputs = min((_same(a, b) for a in one.inputs for b in other.inputs), default=math.inf)
    read_tokens = not one.inputs and not other.inputs
    inside = inputs <= SAME or read_tokens
    after = (matched[-1][0].name, matched[-1][1].name) if matched else ("", "")
    gap = gap_of(one.output, other.output)
    values, worst = _worst(one.output, other.output)
    scene = Scene(one, other, matched, left, right)
    found = tuple(module_causes(scene) if inside else region_causes(scene))[:2]
    if not found and early is not other and early.kind != one.kind:
        found = (
            f"{names[1]} also computes {early.name} ({early.kind}), which {names[0]} does not",
        )
    return Difference(
        same=False,
        compared=len(matched),
        gap=gap,
        first=one.name,
        second=other.name,
        inside=inside,
        after=after,
        causes=found,
        values=values,
        names=names,
        worst=worst,
    )


def _worst(
    a: Tensor, b: Tensor
) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], tuple[int, ...]]:
    """Return a few values of both around the largest difference, and its index."""
    best, chosen = math.inf, None
    for other in layouts(b, a.shape):
        gap = float((a - other).abs().mean())
        if gap < best:
            best, chosen = gap, other
    if chosen is None:
        return ((), ()), ()
    flat = int((a - chosen).abs().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
    begin = max(0, min(index[-1] - 1, a.shape[-1] - 4))
    rows = [tensor[index[:-1]][begin : begin + 4].tolist() for tensor in (a, chosen)]
    return (tuple(rows[0]), tuple(rows[1])), (*index[:-1], begin)


def _common(a: str, b: str) -> str:
    """Return the longest common prefix of two module names, or the whole model."""
    shared = []
    for one, other in zip(a.split("."), b.split("."), strict=False):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared) or "the model"


# --- backwards ----------------------------------------------------------------------------------


def _backward_difference(
    modules: Sequence[nn.Module],
    sides: Sequence[Subject],
    tokens: Tensor,
    traces: Sequence[Sequence[Computed]],
    forward: Difference,
    names: tuple[str, str],
) -> Difference:
    """Compare the gradients of weights that both sides have, from the last module to the first."""
    gradients = [_gradients(m, s, tokens) for m, s in zip(modules, sides, strict=True)]
    ours, theirs = weighted(traces[0]), weighted(traces[1])
    worst, compared = forward.gap, 0
    for one in reversed(ours):
        for other in reversed(theirs):
            if one.name == "logits" or _same(one.output, other.output) > SAME:
                continue
            for name, weight in own_weights(one.module).items():
                a = gradients[0].get(f"{one.name}.{name}")
                twin = next(
                    (n for n, w in own_weights(other.module).items() if close(w, weight)), None
                )
                b = None if twin is None else gradients[1].get(f"{other.name}.{twin}")
                if a is None or b is None or a.shape != b.shape:
                    continue
                compared += 1
                gap = gap_of(a, b)
                worst = max(worst, gap)
                if gap > 10 * SAME:
                    values, at = _worst(a, b)
                    ratio = ratio_of(a, b)
                    cause = () if ratio is None else (f"scale: a factor of {ratio:.6g}",)
                    return Difference(
                        same=False,
                        compared=compared,
                        gap=gap,
                        stage="backward",
                        first=f"{one.name}.{name}",
                        second=f"{other.name}.{twin}",
                        inside=True,
                        causes=cause,
                        values=values,
                        names=names,
                        worst=at,
                    )
            break
    return Difference(same=True, compared=forward.compared, gap=worst, names=names)


def _gradients(module: nn.Module, subject: Subject, tokens: Tensor) -> dict[str, Tensor]:
    """Return the gradient of each weight for one fixed combination of the logits."""
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    device = next(iter(named.values())).device if named else torch.device("cpu")
    logits = subject.logits(tokens.to(device), None).float()
    weights = torch.randn(logits.shape, generator=seeded(5)).to(device)
    found = torch.autograd.grad((logits * weights).sum(), [*named.values()], allow_unused=True)
    return {
        name: gradient.detach().float().cpu()
        for name, gradient in zip(named, found, strict=True)
        if gradient is not None
    }
