"""Run one implementation along another: what each step computes of exactly the other's tensors.

After each module with weights the second side goes on with the first side's output, so rounding
does not add up from layer to layer, and every gap is made where it is seen. How large rounding is
at a place is measured there: the first model is run along itself, each output moved by one unit in
its last place. A gap is a difference where it is many times what that changes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glasscheck.causes import Computed, gap_of, has_weights, layouts
from glasscheck.measure import seeded
from glasscheck.subject import Subject

# B batch, T length, N heads, H d_head

#: Calls around the last paired one among which a counterpart is looked for.
NEAR = 4
#: Outputs closer than this, as a part of their spread, are the same step of both sides, equal or
#: not; in half precision, this many units in the last place.
PAIRED, PAIRED_UNITS = 1e-2, 32
#: A gap of this many times the rounding at its place is a difference. Correct ports of real models
#: (SmolLM2, Gemma 3, MiniLM) stay below 3 in all of their modules.
CLEAR = 12.0
#: Fewer numbers than this give no root mean square to rely on.
FEW = 8
#: Runs along itself from which rounding is measured.
RUNS = 2

Change = Callable[[Computed], Tensor | None]


class _Enough(Exception):
    """Ends a run whose remaining modules are of no interest."""


def trace(
    module: nn.Module,
    subject: Subject,
    tokens: Tensor,
    *,
    change: Change | None = None,
    last: int | None = None,
    keep: bool = True,
) -> list[Computed]:
    """Run the model once and record every module's call, in the order in which they end.

    `change` may return another output to go on with. With `last`, only modules with weights are
    looked at, and the run ends after so many of them. Without `keep`, `change` alone sees them.
    """
    computed: list[Computed] = []
    handles, ended = [], 0

    def record(name: str) -> Callable[..., Any]:
        def hook(part: nn.Module, args: Any, kwargs: Mapping[str, Any], result: Any) -> Any:
            nonlocal ended
            given = tuple(_tensors([*args, *kwargs.values()]))
            made = next(_tensors([result]), None)
            if made is None:
                return None
            one = Computed(name, part, given, made)
            if keep:
                computed.append(one)
            other, ended = None if change is None else change(one), ended + 1
            if last is not None and ended >= last:
                raise _Enough
            return None if other is None else _replaced(result, other)

        return hook

    for name, part in module.named_modules():
        if name and (last is None or has_weights(part)):
            handles.append(part.register_forward_hook(record(name), with_kwargs=True))
    try:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        with torch.no_grad():
            logits = subject.logits(tokens.to(device), None)
    except _Enough:
        return computed
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


def _replaced(result: Any, other: Tensor) -> Any:
    """Return a module's result with another first tensor; None where it has none at the top."""
    if isinstance(result, Tensor):
        return other.reshape(result.shape).to(result, copy=True)  # later code may write into it
    if type(result) is tuple and result and isinstance(result[0], Tensor):
        return (other.reshape(result[0].shape).to(result[0], copy=True), *result[1:])
    return None


def is_weighted(one: Computed) -> bool:
    """True for the call of a module with weights of its own, and for the logits."""
    return one.name == "logits" or has_weights(one.module)


def weighted(computed: Sequence[Computed]) -> list[Computed]:
    """Return the calls of modules with weights of their own, and the logits."""
    return [one for one in computed if is_weighted(one)]


# --- tensors of other layouts -------------------------------------------------------------------


def _slices(narrow: Tensor, wide: Tensor) -> Iterator[slice]:
    """Yield the columns of a wider tensor in which a narrower one may be."""
    width, total = narrow.shape[-1], wide.shape[-1]
    if width < total and narrow.numel() // width == wide.numel() // total:
        for start in range(0, total - width + 1, math.gcd(width, total)):
            yield slice(start, start + width)


def _columns(x: Tensor, columns: slice) -> Tensor:
    return x.reshape(-1, x.shape[-1])[:, columns]


def _spread_out(x: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor that is the same in every row of a batch, as often as `shape` has rows."""
    if shape and x.numel() and x.numel() * shape[0] == math.prod(shape):
        return x.reshape(1, *shape[1:]).expand(shape)
    return x


def as_large(a: Tensor, b: Tensor) -> bool:
    """True for tensors of one size, but for a batch whose rows are all the same."""
    return _spread_out(a, b.shape).numel() == _spread_out(b, a.shape).numel()


def aligned(a: Tensor, b: Tensor) -> tuple[float, Tensor, slice | None, slice | None]:
    """Return the gap, b in the layout of a, and the columns of a, or of b, that were compared.

    One may be joined with others along the last axis, or be the same in all rows of the batch.
    """
    a, b = _spread_out(a, b.shape), _spread_out(b, a.shape)
    best: tuple[float, Tensor, slice | None, slice | None] = (math.inf, b, None, None)
    if a.numel() == b.numel():
        for form in layouts(b, a.shape):
            gap = gap_of_same(a, form)
            if gap < best[0]:
                best = (gap, form, None, None)
    elif a.numel() < b.numel():
        flat = a.reshape(-1, a.shape[-1])
        for columns in _slices(a, b):
            gap = gap_of_same(flat, _columns(b, columns))
            if gap < best[0]:
                best = (gap, _columns(b, columns).reshape(a.shape), None, columns)
    else:
        flat = b.reshape(-1, b.shape[-1])
        for columns in _slices(b, a):
            gap = gap_of_same(_columns(a, columns), flat)
            if gap < best[0]:
                best = (gap, flat, columns, None)
    return best


def gap_of_same(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors of one shape as a part of their spread."""
    spread = max(float(a.std()), float(b.std()), 1e-12) if a.numel() > 1 else 1.0
    gap = float((a - b).abs().max()) / spread
    return math.inf if math.isnan(gap) else gap


# --- rounding -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding changes in each tensor that the first side computes, squared, per number."""

    outputs: dict[int, Tensor]
    inputs: dict[int, Tensor]
    eps: float

    def excess(self, at: int, a: Tensor, b: Tensor, *, entering: bool = False) -> float:
        """Return how many times rounding two tensors differ, one of which is call `at`'s."""
        gap, form, columns, _ = aligned(a, b)
        if not math.isfinite(gap):
            return math.inf
        noise = (self.inputs if entering else self.outputs).get(at)
        noise = torch.zeros_like(a) if noise is None else noise
        a, noise = _spread_out(a, form.shape), _spread_out(noise, form.shape)
        if columns is not None:
            a, noise = _columns(a, columns), _columns(noise, columns)
        pairs = zip(_sums(noise), last_place(a, self.eps), strict=True)
        columns_rows = tuple(x + y for x, y in pairs)
        return times_rounding(a, form, (columns_rows[0], columns_rows[1]))


def times_rounding(a: Tensor, b: Tensor, explained: tuple[Tensor, Tensor]) -> float:
    """Return the difference over what rounding explains: of a row, of a column, the largest.

    Both are root mean squares, which do not swing as the largest of many numbers does; a row or
    column of a few numbers is not looked at by itself.
    """
    columns_rows = squares(a, b)
    worst = float(columns_rows[0].sum() / explained[0].sum())
    for i, apart in enumerate(columns_rows):
        if len(columns_rows[1 - i]) >= FEW:
            worst = max(worst, float((apart / explained[i]).max()))
    return math.inf if math.isnan(worst) else math.sqrt(worst)


def squares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared difference of two tensors, summed over each column and over each row."""
    return _sums((a - b).square())


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    return rows.sum(0, dtype=torch.float64), rows.sum(1, dtype=torch.float64)


def last_place(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the squared last places of a tensor's numbers, as `squares` sums them.

    A thousandth of the tensor's own is the least: a row of zeros may hold one of another order.
    """
    least = (1e-3 * eps) ** 2 * float(x.square().mean()) + 1e-60
    columns, rows = _sums((eps * x).square())
    return columns + least * len(rows), rows + least * len(columns)


def moved(x: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """Return numbers, each one unit in its last place larger or smaller."""
    sign = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8) * 2 - 1
    return x * (1 + eps * sign.to(x.device))


def measured(
    module: nn.Module,
    subject: Subject,
    tokens: Tensor,
    computed: Sequence[Computed],
    *,
    eps: float,
) -> Rounding:
    """Run a model along itself, each output moved by its last place; return what that changes."""
    ours = weighted(computed)
    found = Rounding({}, {}, eps)
    for seed in range(RUNS):
        generator, at = seeded(seed), -1

        def go_on(one: Computed, generator: torch.Generator = generator) -> Tensor | None:
            nonlocal at
            if not is_weighted(one):
                return None
            at += 1
            if at >= len(ours) or ours[at].output.shape != one.output.shape:
                return None  # experts that are chosen otherwise
            _add(found.outputs, at, ours[at].output, one.output)
            if one.inputs and ours[at].inputs and one.inputs[0].shape == ours[at].inputs[0].shape:
                _add(found.inputs, at, ours[at].inputs[0], one.inputs[0])
            return moved(ours[at].output, eps, generator)

        again = trace(module, subject, tokens, change=go_on)
        if again[-1].name == "logits" and again[-1].output.shape == ours[-1].output.shape:
            _add(found.outputs, len(ours) - 1, ours[-1].output, again[-1].output)
    return found


def _add(table: dict[int, Tensor], at: int, a: Tensor, b: Tensor) -> None:
    square = (a - b).square() / RUNS
    table[at] = table[at] + square if at in table else square


def precision_of(*modules: nn.Module) -> float:
    """Return the unit in the last place of the finest of some models; float32's at the least."""
    found = [
        max(torch.finfo(p.dtype).eps, torch.finfo(torch.float32).eps)
        for module in modules
        for p in list(module.parameters())[:1]
        if p.is_floating_point()
    ]
    return min(found, default=torch.finfo(torch.float32).eps)


# --- following ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Followed:
    """The second side's calls, run along the first's, and the counterparts of each of those."""

    calls: list[Computed]
    partners: dict[int, list[Computed]]


def follow(
    module: nn.Module,
    subject: Subject,
    tokens: Tensor,
    ours: Sequence[Computed],
    *,
    eps: float,
) -> Followed:
    """Run the second side along the first side's calls; pair them by what they compute."""
    bound = max(PAIRED, PAIRED_UNITS * eps) if eps > 1e-6 else PAIRED
    partner: dict[int, list[Computed]] = {}
    newest = 0

    def go_on(other: Computed) -> Tensor | None:
        nonlocal newest
        if not is_weighted(other):
            return None
        # Parallel parts may be computed in another order, and one product here may be several
        # there: look a little ahead, and back at what is wider than this.
        best: list[tuple[float, int]] = []
        for at in range(max(0, newest - NEAR), min(newest + 2 * NEAR, len(ours))):
            if at in partner and ours[at].output.numel() <= other.output.numel():
                continue
            gap = aligned(ours[at].output, other.output)[0]
            if gap <= bound:
                best.append((gap, at))
        if not best:
            return None
        closest = min(best)[1]
        narrow = [at for _, at in best if ours[at].output.numel() < other.output.numel()]
        chosen, output = narrow if closest in narrow else [closest], other.output
        for at in chosen:
            partner.setdefault(at, []).append(other)
            output = _written(ours[at].output, output)
        newest = max(newest, *chosen)
        return output

    calls = trace(module, subject, tokens, change=go_on)
    if calls and calls[-1].name == "logits":
        # The results are compared with each other, not with a head before a cap or a factor.
        end = len(ours) - 1
        if as_large(ours[end].output, calls[-1].output):
            partner[end] = [*partner.get(end, ()), calls[-1]]
    _pair_containers(ours, partner, calls, bound)
    return Followed(calls, partner)


def _written(source: Tensor, target: Tensor) -> Tensor:
    """Return the target with a source's numbers, in the target's layout."""
    if source.numel() < target.numel() and source.numel() * target.shape[0] != target.numel():
        columns = aligned(source, target)[3]
        result = target.clone()
        rows = result.view(-1, target.shape[-1])
        rows[:, columns] = source.reshape(-1, source.shape[-1])
        return result
    if source.numel() > target.numel() and target.numel() * source.shape[0] == source.numel():
        return source.reshape(source.shape[0], -1)[0].reshape(target.shape)
    _, form, _, columns = aligned(target, source)
    return form.reshape(target.shape)


def _pair_containers(
    ours: Sequence[Computed],
    partner: dict[int, list[Computed]],
    calls: Sequence[Computed],
    bound: float,
) -> None:
    """Pair what is one module here and several in a container there, by the container's output."""
    order = {id(one): at for at, one in enumerate(calls)}
    missing = [at for at in range(len(ours)) if at not in partner][:FEW]
    for at in missing:  # what comes long after a difference is another one's
        begin = max((order[id(partner[i][-1])] for i in range(at) if i in partner), default=0)
        alike = [
            other
            for other in calls[begin:]
            if not is_weighted(other) and gap_of(ours[at].output, other.output) <= bound
        ]
        if alike:  # its last part has the container's output too, but not its input
            read = ours[at].inputs[:1]
            whole = [x for x in alike if any(gap_of(a, b) <= bound for a in read for b in x.inputs)]
            partner[at] = [min(whole or alike, key=lambda x: len(x.name))]


def readers(
    module: nn.Module,
    subject: Subject,
    tokens: Tensor,
    ours: Sequence[Computed],
    call: int,
) -> list[int]:
    """Return the calls whose input depends on one call's output directly, in their order."""
    found: list[int] = []
    at = -1

    def go_on(one: Computed) -> Tensor | None:
        nonlocal at
        if not is_weighted(one):
            return None
        at += 1
        if at > call and any(
            x.shape != y.shape or not torch.equal(x, y)
            for x, y in zip(one.inputs, ours[at].inputs, strict=False)
        ):
            found.append(at)
        return ours[at].output * 1.5 + 0.1 if at == call else ours[at].output

    end = trace(module, subject, tokens, change=go_on)[-1]
    if end.name == "logits" and not torch.equal(end.output, ours[-1].output):
        found.append(len(ours) - 1)
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """What both sides compute of the same tokens, and how large rounding is at each place."""

    left: list[Computed]
    followed: Followed
    rounding: Rounding
    readers: Callable[[int], list[int]]

    @classmethod
    def of(
        cls,
        modules: Sequence[nn.Module],
        sides: Sequence[Subject],
        tokens: Tensor,
    ) -> "Run":
        """Run the first side, the first along itself, and the second along the first."""
        eps = precision_of(*modules)
        left = trace(modules[0], sides[0], tokens)
        rounding = measured(modules[0], sides[0], tokens, left, eps=eps)
        ours = weighted(left)
        followed = follow(modules[1], sides[1], tokens, ours, eps=eps)
        return cls(
            left,
            followed,
            rounding,
            lambda at: readers(modules[0], sides[0], tokens, ours, at),
        )

    def entering(self, at: int, one: Computed, other: Computed) -> float:
        """Return how many times rounding the inputs of two modules differ; inf where none fits."""
        excess = [
            self.rounding.excess(at, x, y, entering=i == 0)
            for i, x in enumerate(one.inputs)
            for y in other.inputs
        ]
        return min(excess, default=math.inf)


def entering_far(
    run: Run,
    modules: Sequence[nn.Module],
    sides: Sequence[Subject],
    tokens: Tensor,
    *,
    ends: tuple[int, int],
) -> Iterator[tuple[int, Computed, Computed, float]]:
    """Yield calls whose inputs differ in other, longer rows: (call, ours, theirs, times rounding).

    Pairs are those of the run; what modules make of their inputs is known, and is not compared.
    Only what enters the first side's modules is kept, as rows that are long are large.
    """
    eps = run.rounding.eps
    short = weighted(run.left)
    ours = trace(modules[0], sides[0], tokens, last=ends[0])
    assert [one.name for one in ours] == [one.name for one in short[: len(ours)]]
    explained: dict[int, tuple[Tensor, Tensor]] = {}
    generator, at = seeded(0), -1

    def along_itself(one: Computed) -> Tensor:
        nonlocal at
        at += 1
        if one.inputs:
            x = ours[at].inputs[0]
            pairs = zip(squares(x, one.inputs[0]), last_place(x, eps), strict=True)
            columns, rows = (a + b for a, b in pairs)
            explained[at] = columns, rows
        return moved(ours[at].output, eps, generator)

    trace(modules[0], sides[0], tokens, change=along_itself, last=ends[0], keep=False)
    calls = {id(one): i for i, one in enumerate(weighted(run.followed.calls))}
    of_theirs: dict[int, list[int]] = {}
    for mine, others in run.followed.partners.items():
        for other in others:
            if mine < len(ours) and id(other) in calls:
                of_theirs.setdefault(calls[id(other)], []).append(mine)
    found: list[tuple[int, Computed, Computed, float]] = []
    step = -1

    def along_ours(other: Computed) -> Tensor:
        nonlocal step
        step += 1
        output = other.output
        for mine in of_theirs.get(step, ()):
            output = _written(ours[mine].output, output)
            if mine in explained and other.inputs:
                x = ours[mine].inputs[0]
                gap, form, columns, _ = aligned(x, other.inputs[0])
                if math.isfinite(gap) and columns is None:
                    times = times_rounding(x, form, explained[mine])
                    if times > CLEAR and not found:
                        found.append((mine, ours[mine], other, times))
        return output

    trace(modules[1], sides[1], tokens, change=along_ours, last=ends[1], keep=False)
    yield from found
