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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from glasscheck.causes import (
    Computed,
    Scene,
    close,
    gap_of,
    has_weights,
    layouts,
    main_input,
    module_causes,
    own_weights,
    ratio_of,
    region_causes,
)
from glasscheck.errors import InputError
from glasscheck.following import (
    CLEAR,
    NEAR,
    RUNS,
    Run,
    aligned,
    as_large,
    entering_far,
    last_place,
    moved,
    squares,
    times_rounding,
    weighted,
)
from glasscheck.measure import seeded
from glasscheck.subject import Subject, of_its_library, subject_of

# B batch, T length, N heads, K key-value heads, H d_head

#: Tokens that are compared: distinct primes, so that no axis is mistaken for another.
ROWS, LENGTH = 2, 11
#: Bytes of one side's tensors, at most, for a row that is longer than a window.
MOST_HELD = 2**31
#: A gradient's gap of this many times its rounding is a difference. Rounding of the complete model
#: adds up here, forwards and backwards.
CLEAR_BACKWARD = 64.0


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of a comparison. `same` means that no tensor differs by more than rounding.

    `first` and `second` are the modules on either side, `inside` says whether their inputs are
    equal, so that the fault is in the module itself; otherwise it is between `after`, the last
    module whose output is the same on both sides, and them. `gap` is the largest difference as a
    part of the larger tensor's spread, and `times` how many times the model's own rounding there.
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
    times: float = 0.0
    container: str = ""
    notes: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The smallest module that contains the difference, by the first side's names."""
        if self.inside:
            return self.first
        return self.container or _common(self.after[0], self.first)

    def __str__(self) -> str:
        if self.same:
            found = (
                f"no difference: {self.compared} modules compared, largest gap {self.gap:.1e}, at "
                f"most {self.times:.1f} times rounding"
            )
            return "\n".join([found, *(f"  {note}" for note in self.notes)])
        where = (
            f"in {self.first} (beside {self.second}): the same input, another output"
            if self.inside
            else f"between {self.after[0] or 'the tokens'} (equal on both sides) and "
            f"{self.first} (beside {self.second})"
        )
        lines = [f"first difference, {self.stage}: {where}", self._size()]
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

    def _size(self) -> str:
        if not math.isfinite(self.gap):
            return "  the two have other shapes"
        return f"  gap {self.gap:.2g} of the spread, {self.times:.3g} times rounding"


def diff(
    first: object,
    second: object,
    *,
    tokens: Tensor | None = None,
    names: tuple[str, str] = ("A", "B"),
    backward: bool = True,
) -> Difference:
    """Compare two models on the same tokens; name the first module that differs, and why.

    Modules of any library; with `backward`, if the forwards agree, also the gradients of the
    weights that the two share.
    """
    for thing in (first, second):
        if (other := of_its_library("diff", thing)) is not None:
            found: Difference = other(first, second, tokens=tokens, names=names, backward=backward)
            return found
    modules = (_module_of(first), _module_of(second))

    def sides() -> list[Side]:
        things = zip((first, second), modules, names, strict=True)
        return [Side(subject_of(thing, name=name), module) for thing, module, name in things]

    return compared(modules, sides, tokens=tokens, names=names, backward=backward)


@dataclass(frozen=True, slots=True)
class Side:
    """One of two models: how it is called, and the module that computes its logits."""

    subject: Subject
    module: nn.Module


def compared(
    modules: Sequence[nn.Module],
    opened: Callable[[], Sequence[Side]],
    *,
    tokens: Tensor | None,
    names: tuple[str, str],
    backward: bool,
) -> Difference:
    """Compare two sides, whose modules come back in the modes in which they were."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        return _compared(opened(), tokens, names, backward=backward)
    finally:
        for part, mode in modes:
            part.training = mode


def _compared(
    opened: Sequence[Side], tokens: Tensor | None, names: tuple[str, str], *, backward: bool
) -> Difference:
    sides = [side.subject for side in opened]
    modules = (opened[0].module, opened[1].module)
    for module in modules:
        module.eval()
    short = tokens is None
    if tokens is None:
        length = min(LENGTH, *(side.max_length for side in sides))
        tokens = _drawn(sides, ROWS, length)
    run = Run.of(modules, sides, tokens)
    found = _first_difference(run, sides, names=names)
    if found.same and short:
        found = _beyond_windows(modules, sides, run, found, names)
    if not found.same and (loose := _not_repeated(modules, sides, tokens, names)):
        return replace(found, causes=(loose,))
    if not found.same or not backward:
        return found
    if sides[0].per_position != sides[1].per_position:
        note = "gradients are not compared: one side returns a vector, the other one per position"
        return replace(found, notes=(*found.notes, note))
    return _backward_difference(modules, sides, tokens, run, found, names)


def _not_repeated(
    modules: Sequence[nn.Module], sides: Sequence[Subject], tokens: Tensor, names: tuple[str, str]
) -> str:
    """Say which side differs from itself, and the first module that does: dropout is left on."""
    for module, side, name in zip(modules, sides, names, strict=True):
        runs: list[list[tuple[str, Tensor]]] = []
        parts = {id(part): place for place, part in module.named_modules()}

        def note(
            part: nn.Module, _: object, result: Any, parts: Any = parts, runs: Any = runs
        ) -> None:
            result = result[0] if isinstance(result, (tuple, list)) and result else result
            if isinstance(result, Tensor):
                runs[-1].append((parts[id(part)], result.detach()))

        handles = [part.register_forward_hook(note) for part in module.modules()]
        try:
            with torch.random.fork_rng(), torch.no_grad():
                for seed in (1, 2):
                    torch.manual_seed(seed)
                    runs.append([])
                    side.logits(tokens, None)
        finally:
            for handle in handles:
                handle.remove()
        for (place, one), (_, other) in zip(*runs, strict=False):
            if not torch.equal(one, other):
                return f"random: {place} of {name} differs from itself: dropout is left on"
    return ""


def _drawn(sides: Sequence[Subject], rows: int, length: int) -> Tensor:
    vocabulary = min(side.vocab_size for side in sides)
    return torch.randint(vocabulary, (rows, length), generator=seeded(3))


def _beyond_windows(
    modules: Sequence[nn.Module],
    sides: Sequence[Subject],
    run: Run,
    found: Difference,
    names: tuple[str, str],
) -> Difference:
    """Compare a row that is longer than the longest window, without the logits, where it fits."""
    length = min(side.max_length for side in sides)
    windows = {w for side in sides for w in side.windows if LENGTH <= w < length}
    if not windows:
        return found
    longest = min(length, max(windows) + LENGTH)
    held = sum(t.nbytes for one in weighted(run.left) for t in (one.output, *one.inputs))
    if held / (ROWS * LENGTH) * longest > MOST_HELD:
        note = (
            f"a window of {max(windows):,} positions was not reached: pass longer rows as tokens="
        )
        return replace(found, notes=(note,))
    ends = (_before_logits(run.left), _before_logits(run.followed.calls))
    tokens = _drawn(sides, 1, longest)
    for at, one, other, times in entering_far(run, modules, sides, tokens, ends=ends):
        before = weighted(run.left)[at - 1]
        after = (before.name, run.followed.partners.get(at - 1, [other])[0].name)
        values, worst = _worst(one.inputs[0], other.inputs[0])
        return Difference(
            same=False,
            compared=at,
            gap=aligned(one.inputs[0], other.inputs[0])[0],
            times=times,
            first=one.name,
            second=other.name,
            after=after,
            causes=(
                f"window: {LENGTH} positions are equal, {longest} are not; a window of "
                f"{max(windows)} hides them, or one beside it",
            ),
            values=values,
            names=names,
            worst=worst,
        )
    return found


def _before_logits(calls: Sequence[Computed]) -> int:
    """Return how many modules with weights are called before one that is as wide as the logits."""
    own, width = weighted(calls)[:-1], calls[-1].output.shape[-1]
    return max((i + 1 for i, one in enumerate(own) if one.output.shape[-1] != width), default=1)


def _module_of(thing: object) -> nn.Module:
    if not isinstance(thing, nn.Module):
        raise InputError(f"{type(thing).__name__} is no torch module", hint="give modules")
    return thing


# --- where they differ --------------------------------------------------------------------------


def _first_difference(run: Run, sides: Sequence[Subject], *, names: tuple[str, str]) -> Difference:
    ours, partners = weighted(run.left), run.followed.partners
    matched: list[tuple[Computed, Computed]] = []
    largest, times = 0.0, 0.0
    for at, one in enumerate(ours):
        if one.name == "logits" and sides[0].per_position != sides[1].per_position:
            continue  # one of the two ends with a pooler: other numbers, not wrong ones
        if at not in partners:
            if _does_no_harm(run, at):
                continue
            return _described(run, at, None, matched, names)
        for other in partners[at]:
            enters = run.entering(at, one, other) if one.inputs and other.inputs else 0.0
            leaves = run.rounding.excess(at, one.output, other.output)
            if math.isfinite(enters):
                times = max(times, enters)
            if leaves > CLEAR or (CLEAR < enters < math.inf):
                return _described(run, at, other, matched, names)
            largest, times = max(largest, aligned(one.output, other.output)[0]), max(times, leaves)
        matched.append((one, partners[at][0]))
    return Difference(same=True, compared=len(matched), gap=largest, times=times, names=names)


def _does_no_harm(run: Run, at: int) -> bool:
    """True where the first module that reads an output without a counterpart reads the same.

    One side's module may compute what the other side computes between its modules: a sum, say.
    """
    partners, ours = run.followed.partners, weighted(run.left)
    if ours[at].name == "logits":
        return False  # nothing reads them: they are the result
    reading = run.readers(at)
    if not reading:
        return True
    first = reading[0]
    if ours[first].name == "logits":
        theirs = partners.get(first, ())
        excess = [run.rounding.excess(first, ours[first].output, x.output) for x in theirs]
        return max(excess, default=math.inf) <= CLEAR
    return first in partners and run.entering(first, ours[first], partners[first][0]) <= CLEAR


def _described(
    run: Run,
    at: int,
    other: Computed | None,
    matched: Sequence[tuple[Computed, Computed]],
    names: tuple[str, str],
) -> Difference:
    """Describe the first module that differs, beside its counterpart.

    Where it has none, that is the first module of its size on the other side that has none either.
    """
    one, theirs = weighted(run.left)[at], weighted(run.followed.calls)
    paired = {id(call) for calls in run.followed.partners.values() for call in calls}
    reached = {id(pair[1]) for pair in matched}
    begin = max((i for i, call in enumerate(theirs) if id(call) in reached), default=0)
    free = [call for call in theirs[max(0, begin - NEAR) :] if id(call) not in paired]
    alike = [call for call in free if as_large(one.output, call.output)]
    early = None
    if other is None:
        other = (alike or free or [theirs[-1]])[0]
        # The other side may have a module that this one lacks: a norm of queries, say.
        early = free[0] if free else None
    read_tokens = not one.inputs and not other.inputs
    inside = read_tokens or run.entering(at, one, other) <= CLEAR
    after = (matched[-1][0].name, matched[-1][1].name) if matched else ("", "")
    read = main_input(one), main_input(other)
    x, y = one.output, other.output
    if not inside and read[0] is not None and read[1] is not None:
        x, y = read[0], read[1]
    times = run.rounding.excess(at, x, y, entering=x is not one.output)
    values, worst = _worst(x, y)
    scene = Scene(one, other, matched, run.left, run.followed.calls)
    found = tuple(module_causes(scene) if inside else region_causes(scene))[:2]
    if not found and early is not None and early is not other and early.kind != one.kind:
        found = (
            f"{names[1]} also computes {early.name} ({early.kind}), which {names[0]} does not",
        )
    return Difference(
        same=False,
        compared=len(matched),
        gap=aligned(x, y)[0],
        times=times,
        first=one.name,
        second=other.name,
        inside=inside,
        after=after,
        causes=found,
        values=values,
        names=names,
        worst=worst,
        container="" if inside else _returning(run.left, matched, one),
    )


def _returning(
    left: Sequence[Computed], matched: Sequence[tuple[Computed, Computed]], one: Computed
) -> str:
    """Return the module that contains the last equal one, and returns what the next reads."""
    read = main_input(one)
    if not matched or read is None:
        return ""
    last = matched[-1][0]
    order = {id(call): i for i, call in enumerate(left)}
    for call in left[order[id(last)] + 1 : order[id(one)]]:
        around = last.name.startswith(f"{call.name}.")
        if around and call.output.shape == read.shape and torch.equal(call.output, read):
            return call.name
    return ""


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
    run: Run,
    forward: Difference,
    names: tuple[str, str],
) -> Difference:
    """Compare the gradients of weights that both sides have, from the last module to the first."""
    eps, ours = run.rounding.eps, weighted(run.left)
    plain = _gradients(modules[0], sides[0], tokens)
    noise = _gradient_rounding(modules[0], sides[0], tokens, plain, eps=eps)
    theirs = _gradients(modules[1], sides[1], tokens)
    largest, most, compared = forward.gap, 0.0, 0
    for at, one in reversed([*enumerate(ours)]):
        for other in run.followed.partners.get(at, ())[:1]:
            for name, weight in own_weights(one.module).items():
                a = plain.get(f"{one.name}.{name}")
                twin = next(
                    (n for n, w in own_weights(other.module).items() if close(w, weight)), None
                )
                b = None if twin is None else theirs.get(f"{other.name}.{twin}")
                if a is None or b is None or a.shape != b.shape:
                    continue
                compared += 1
                times = times_rounding(a, b, noise[f"{one.name}.{name}"])
                gap = gap_of(a, b)
                largest, most = max(largest, gap), max(most, times)
                if times > CLEAR_BACKWARD:
                    values, place = _worst(a, b)
                    ratio = ratio_of(a, b)
                    cause = () if ratio is None else (f"scale: a factor of {ratio:.6g}",)
                    return Difference(
                        same=False,
                        compared=compared,
                        gap=gap,
                        times=times,
                        stage="backward",
                        first=f"{one.name}.{name}",
                        second=f"{other.name}.{twin}",
                        inside=True,
                        causes=cause,
                        values=values,
                        names=names,
                        worst=place,
                    )
    return Difference(
        same=True,
        compared=forward.compared,
        gap=largest,
        times=max(most, forward.times),
        names=names,
    )


def _gradient_rounding(
    module: nn.Module, subject: Subject, tokens: Tensor, plain: Mapping[str, Tensor], *, eps: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return how much rounding changes each gradient, as sums of squares; no copies are kept."""
    explained = {name: last_place(gradient, eps) for name, gradient in plain.items()}
    for seed in range(RUNS):
        again = _gradients(module, subject, tokens, eps=eps, seed=seed)
        for name, gradient in plain.items():
            columns, rows = squares(gradient, again.pop(name))
            explained[name][0].add_(columns / RUNS)
            explained[name][1].add_(rows / RUNS)
    return explained


def _gradients(
    module: nn.Module, subject: Subject, tokens: Tensor, *, eps: float = 0.0, seed: int = 0
) -> dict[str, Tensor]:
    """Return the gradient of each weight for one fixed combination of the logits.

    With `eps`, each output of a module with weights, and its gradient, is moved by that part of
    itself.
    """
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    device = next(iter(named.values())).device if named else torch.device("cpu")
    generator = seeded(seed)

    def move(part: nn.Module, args: Any, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return None
        if result.requires_grad:
            result.register_hook(lambda gradient: moved(gradient, eps, generator))
        return moved(result, eps, generator)

    parts = [part for part in module.modules() if eps and has_weights(part)]
    handles = [part.register_forward_hook(move) for part in parts]
    try:
        logits = subject.logits(tokens.to(device), None).float()
        weights = torch.randn(logits.shape, generator=seeded(5)).to(device)
        found = torch.autograd.grad((logits * weights).sum(), [*named.values()], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: gradient.detach().float().cpu()
        for name, gradient in zip(named, found, strict=True)
        if gradient is not None
    }
