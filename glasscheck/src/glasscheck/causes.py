"""Why two computations differ: what commonly goes wrong in a port, tried one by one.

A cause is named only where it reproduces what both sides computed from the same tensors: an
activation, a gate, a sum of residuals, attention with another scale, mask, rotation or grouping; or
where the weights themselves show it.
"""

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B batch, T length, N heads, K key-value heads, H d_head

#: Tensors closer than this, as a part of the larger one's spread, are the same computation. Float32
#: rounding of a deep model stays below it, a wrong constant of a norm at usual weights above.
SAME = 2e-5
#: Calls before and after a difference among which the source of an input is looked for.
FEW = 12


@dataclass(frozen=True, slots=True)
class Computed:
    """One call of a module: its name, its kind, and the tensors that went in and came out."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    output: Tensor

    @property
    def kind(self) -> str:
        """The module's class."""
        return type(self.module).__name__


def gap_of(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors as a part of their spread; inf if not alike.

    Layouts may differ by the order of axes and by splitting the last one: (B, T, N x H) beside
    (B, N, T, H) or (T, B, N x H).
    """
    best = math.inf
    for other in layouts(b, a.shape):
        spread = max(float(a.std()), float(other.std()), 1e-12)
        best = min(best, float((a - other).abs().max()) / spread)
    return best


def layouts(x: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """Yield a tensor in that shape, under every order of its axes that libraries use."""
    if x.numel() != math.prod(shape):
        return
    if x.shape == shape:
        yield x
    forms = [x]
    if x.ndim == 4:
        forms += [x.transpose(1, 2), x.permute(2, 0, 1, 3)]
    if x.ndim == 3:
        forms.append(x.transpose(0, 1))
    if x.ndim == 2 and len(shape) == 3:
        forms.append(x)
    for form in forms:
        if form.shape != x.shape or form.shape != shape:
            yield form.reshape(shape)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known at the first difference: the two modules, the equal pairs before them, and
    everything that both sides computed.
    """

    one: Computed
    other: Computed
    matched: Sequence[tuple[Computed, Computed]]
    left: Sequence[Computed]
    right: Sequence[Computed]


def module_causes(scene: Scene) -> Iterator[str]:
    """Yield what explains another output of the same input, the most telling first."""
    a, b = scene.one, scene.other
    if missing := _missing_stretch(scene):
        yield missing
        return
    ours, theirs = own_weights(a.module), own_weights(b.module)
    eps = _eps(a.module), _eps(b.module)
    if eps[0] is not None and eps[1] is not None and eps[0] != eps[1]:
        yield f"epsilon: {eps[0]:g} beside {eps[1]:g}"
        return
    only = _only_one_bias(ours, theirs)
    if only:
        yield f"bias missing: only {(a, b)[only - 1].name} adds one"
        return
    output = next(layouts(b.output, a.output.shape), None)
    changed = [*_changed_weights(a, b, ours, theirs)]
    if changed and (elsewhere := _elsewhere(scene, ours, theirs)):
        yield elsewhere
        return
    yield from changed
    if output is None or changed:
        return
    ratio = ratio_of(a.output, output)
    shift = (a.output - output).reshape(-1, output.shape[-1])
    forms = [_norm_form(one, own) for one, own in ((a, ours), (b, theirs))]
    if all(forms) and forms[0] != forms[1]:
        yield f"norm: {forms[0]} beside {forms[1]}"
    elif ratio is not None:
        yield f"scale: the outputs differ by a factor of {ratio:.6g}{_root(ratio, a)}"
    elif float(shift.std(0).max()) < 0.01 * float(shift.abs().max()):
        yield "bias: the outputs differ by one vector, the same at every position"
    elif _scaled_by_one_more(a, b, ours, output):
        yield "norm: one side multiplies by 1 + weight, the other by the weight"
    elif all(w.ndim < 2 for w in ours.values()) and _by_row(a.output, output):
        yield "norm: each row differs by a factor of its own, as from another statistic or epsilon"
    elif half := _half(a.output, output) or _computed_in_half(a, b, output):
        yield half


def _elsewhere(scene: Scene, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str:
    """Say where else a module's weights are: a layer is missing, or weights are in another one."""
    a, b = scene.one, scene.other
    there = [one for one in scene.right if one is not b and _holds(one, ours)]
    here = [one for one in scene.left if one is not a and _holds(one, theirs)]
    again = [one for one in scene.left if one is not a and _holds(one, ours)]
    twice = [one for one in scene.right if one is not b and _holds(one, theirs)]
    order = {id(one): at for side in (scene.left, scene.right) for at, one in enumerate(side)}
    if there and not here and not again and order[id(there[0])] > order[id(b)]:
        last = scene.right[order[id(there[0])] - 1].name
        return (
            f"missing layer: {a.name} has the weights of {there[0].name}, before which the other "
            f"side computes {b.name} to {last}"
        )
    if here and not there and not twice and order[id(here[0])] > order[id(a)]:
        last = scene.left[order[id(here[0])] - 1].name
        return (
            f"missing layer: {b.name} has the weights of {here[0].name}, before which the first "
            f"side computes {a.name} to {last}"
        )
    found = []
    if there:
        found.append(f"{a.name} holds what {there[0].name} holds on the second side")
    if here:
        found.append(f"{b.name} holds what {here[0].name} holds on the first side")
    return f"weights: {'; '.join(found)}" if found else ""


def _holds(one: Computed, weights: Mapping[str, Tensor]) -> bool:
    """True if a module has exactly these weights, and they are not the same for every module."""
    own = own_weights(one.module)
    if not own or set(own) != set(weights):
        return False
    telling = any(float(w.max()) > float(w.min()) for w in weights.values())
    return telling and all(close(w, weights[name]) for name, w in own.items())


def _missing_stretch(scene: Scene) -> str:
    """Say what one side does not compute: all its weights are the other's, without one stretch."""
    left, right = ([x for x in side if has_weights(x.module)] for side in (scene.left, scene.right))
    if len(left) == len(right):
        return ""
    long, short = (left, right) if len(left) > len(right) else (right, left)
    begin, count = 0, len(long) - len(short)
    tables = [[own_weights(x.module) for x in side] for side in (long, short)]

    def alike(i: int, j: int) -> bool:
        one, other = tables[0][i], tables[1][j]
        return set(one) == set(other) and all(close(w, other[n]) for n, w in one.items())

    while begin < len(short) and alike(begin, begin):
        begin += 1
    if any(not alike(i + count, i) for i in range(begin, len(short))):
        return ""
    # Norms that are all ones are alike: the stretch begins as early as it can.
    latest, place = begin, scene.one if long is left else scene.other
    while begin and alike(begin - 1 + count, begin - 1):
        begin -= 1
    at = next((i for i, one in enumerate(long) if one is place), len(long))
    if not begin <= at <= latest + count:
        return ""  # one side has something more, and the difference is elsewhere
    side, first, last = "second" if long is left else "first", long[begin], long[begin + count - 1]
    if count == 1:
        return f"missing: the {side} side does not compute {first.name} ({first.kind})"
    return f"missing layer: the {side} side does not compute {first.name} to {last.name}"


def _norm_form(one: Computed, weights: Mapping[str, Tensor]) -> str:
    """Return which norm of its input a module's output is, or nothing."""
    x = one.inputs[0] if one.inputs else None
    gain, bias = weights.get("weight"), weights.get("bias")
    if x is None or gain is None or gain.ndim != 1 or x.shape[-1:] != gain.shape:
        return ""
    eps, square = _eps(one.module) or 0.0, x.square().mean(-1, keepdim=True)
    middle = x - x.mean(-1, keepdim=True)
    spread = middle.square().mean(-1, keepdim=True)
    bare = {
        "RMS norm": x * torch.rsqrt(square + eps),
        "RMS norm with epsilon outside the root": x / (square.sqrt() + eps),
        "RMS norm without epsilon": x * torch.rsqrt(square),
        "layer norm": middle * torch.rsqrt(spread + eps),
        "layer norm with epsilon outside the root": middle / (spread.sqrt() + eps),
        "L2 norm": x / x.norm(dim=-1, keepdim=True),
    }
    fits = {
        name + ending: gap_of(one.output, form * factor + (0.0 if bias is None else bias))
        for name, form in bare.items()
        for ending, factor in (("", gain), (" times 1 + weight", 1 + gain))
    }
    best = min(fits, key=lambda name: fits[name])
    return best if fits[best] < SAME / 4 else ""


def _changed_weights(
    a: Computed, b: Computed, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yield how the weights themselves differ: transposed, in another order, scaled, other ones."""
    stored_apart = (
        "Conv1D" in a.kind or "Conv1D" in b.kind
    )  # holds (in, out): another library's way
    for name, weight in ours.items():
        twin = theirs.get(name)
        if twin is None or close(weight, twin):
            continue
        square = weight.ndim == 2 and weight.T.shape == twin.shape
        if square and not stored_apart and close(weight.T, twin):
            yield f"transposed weight: {a.name}.{name} is the other side's, transposed"
        elif twin.shape != weight.shape:
            continue
        elif _same_numbers(weight, twin):
            yield f"order: {a.name}.{name} holds the same numbers in another order"
        elif (ratio := ratio_of(weight, twin)) is not None:
            yield f"scale: {a.name}.{name} is {ratio:.6g} times the other{_root(ratio, a)}"
        elif close(weight, twin + 1) or close(weight + 1, twin):
            yield "norm: one side multiplies by 1 + weight, the other by the weight"
        else:
            apart = (weight - twin).abs()
            rows = int((apart.flatten(1).amax(1) > 0).sum()) if weight.ndim > 1 else 0
            detail = f" in {rows} of {len(weight)} rows" if rows else ""
            yield f"weights: {a.name}.{name} has other values{detail}; a tied copy, or not loaded"


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    """True for the same numbers in any order; a table is only sorted if its extremes are equal."""
    extremes = [torch.stack((x.min(), x.max())) for x in (a, b)]
    return close(*extremes) and close(a.flatten().sort().values, b.flatten().sort().values)


def _scaled_by_one_more(
    a: Computed, b: Computed, ours: Mapping[str, Tensor], output: Tensor
) -> bool:
    """True if the outputs fit (1 + w) beside w, with the same w."""
    for weight in ours.values():
        if weight.ndim == 1 and len(weight) == a.output.shape[-1]:
            safe = torch.where(weight.abs() < 1e-6, torch.ones_like(weight), weight)
            plain = a.output / safe
            return any(
                gap_of(output, plain * factor) < 1e-3
                for factor in (1 + weight, weight * weight / (1 + weight))
            )
    return False


def _by_row(a: Tensor, b: Tensor) -> bool:
    """True if every row of one is a multiple of the other's."""
    power = (b * b).sum(-1, keepdim=True).clamp(min=1e-12)
    factor = (a * b).sum(-1, keepdim=True) / power
    rest = float((a - factor * b).abs().max())
    return rest < 10 * SAME * float(a.std()) and rest < 0.1 * float((a - b).abs().max())


def has_weights(module: nn.Module) -> bool:
    """True for a module with parameters of its own, not only of the modules inside it."""
    return next(module.parameters(recurse=False), None) is not None


def own_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's own parameters, not those of the modules inside it."""
    return {name: p.detach().float().cpu() for name, p in module.named_parameters(recurse=False)}


def _eps(module: nn.Module) -> float | None:
    for name in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _only_one_bias(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> int:
    """Return 1 or 2 for the only side with a bias that is not zero, 0 for both or neither."""
    has = [
        any(p.ndim == 1 and "bias" in name and bool(p.any()) for name, p in side.items())
        for side in (ours, theirs)
    ]
    return 0 if has[0] == has[1] else (1 if has[0] else 2)


def close(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal up to the last digits."""
    return a.shape == b.shape and float((a - b).abs().max()) <= 1e-6 * max(
        1e-6, float(a.abs().max())
    )


def ratio_of(a: Tensor, b: Tensor) -> float | None:
    """Return r where a = r b everywhere, r not 1; None where there is none."""
    power = float((b * b).sum())
    if power == 0.0:
        return None
    ratio = float((a * b).sum()) / power
    rest = float((a - ratio * b).abs().max()) / max(float(a.std()), 1e-12)
    return ratio if rest < 10 * SAME and abs(ratio - 1) > SAME else None


def _root(ratio: float, one: Computed) -> str:
    """Say which width's root a factor is, if it is one."""
    widths = {one.output.shape[-1], *(x.shape[-1] for x in one.inputs)}
    for width in widths:
        for exponent, word in ((0.5, "√"), (1.0, "")):
            for sign, form in ((1, "{}{}"), (-1, "1 / {}{}")):
                if abs(ratio / width ** (sign * exponent) - 1) < 1e-4:
                    return f" = {form.format(word, width)}"
    return ""


HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
#: What rounding must leave of a gap to be its cause.
REPRODUCED = 0.3


def _half(a: Tensor, b: Tensor) -> str:
    """Say that one side is the other one rounded to half precision, if it is, number by number."""
    for dtype, name in HALVES.items():
        for rounded, exact, side in ((a, b, "first"), (b, a, "second")):
            held = torch.equal(rounded, rounded.to(dtype).to(rounded))
            if held and _explained(exact.to(dtype).to(exact), rounded, exact):
                return f"dtype: the {side} side rounds it to {name}"
    return ""


def _computed_in_half(a: Computed, b: Computed, output: Tensor) -> str:
    """Say that one side computes a module in half precision, if that gives what it gives."""
    for dtype, name in HALVES.items():
        for good, exact, rounded, side in (
            (a, a.output, output, "second"),
            (b, output, a.output, "first"),
        ):
            try:
                with torch.no_grad():
                    twin = copy.deepcopy(good.module).to(dtype)
                    made = twin(*(x.to(dtype) for x in good.inputs)).to(exact)
            except Exception:  # a stranger's module may raise anything
                continue
            fitting = next(layouts(made, exact.shape), None)
            if fitting is not None and _explained(fitting, rounded, exact):
                return f"dtype: the {side} side computes it in {name}"
    return ""


def _explained(made: Tensor, wanted: Tensor, exact: Tensor) -> bool:
    """True if a tensor is much closer to what is wanted than the exact one is."""
    before = float((exact - wanted).abs().mean())
    return before > 0 and float((made - wanted).abs().mean()) < REPRODUCED * before


def region_causes(scene: Scene) -> Iterator[str]:
    """Yield what explains another input of the same module: the code between modules."""
    for explain in (
        _missing_stretch,
        _wiring_cause,
        _attention_cause,
        _activation_cause,
        _residual_cause,
        _position_cause,
        _rotation_cause,
    ):
        found = explain(scene)
        if found:
            yield found
            return
    a, b = main_input(scene.one), main_input(scene.other)
    if a is None or b is None or a.numel() != b.numel():
        return
    other = next(layouts(b, a.shape), None)
    if other is None:
        return
    ratio = ratio_of(a, other)
    if ratio is not None:
        yield f"scale: what goes in differs by a factor of {ratio:.6g}{_root(ratio, scene.one)}"
    elif half := _half(a, other):
        yield half


def main_input(one: Computed) -> Tensor | None:
    """Return the tensor that a module reads; of the logits, the tensor itself."""
    if one.name == "logits":
        return one.output
    return one.inputs[0] if one.inputs else None


def _wiring_cause(scene: Scene) -> str:
    """Say that a module reads another one's output than its counterpart does."""
    read = main_input(scene.one), main_input(scene.other)
    if "logits" in (scene.one.name, scene.other.name):
        return ""
    at = next(i for i, one in enumerate(scene.left) if one is scene.one)
    # Of queries, keys and values some may be computed after it, and be read by the other side.
    around = [x for x in scene.left[max(0, at - FEW) : at + FEW] if has_weights(x.module)]
    names = []
    for x in read:
        made = [one.name for one in around if x is not None and _is_read(one.output, x)]
        names.append(made[-1] if made else "")
    if not all(names) or names[0] == names[1]:
        return ""
    return f"input: {scene.one.name} reads {names[0]}, its counterpart what {names[1]} computes"


def _is_read(output: Tensor, x: Tensor) -> bool:
    if output.numel() != x.numel():
        return False
    return min(gap_of(x, output), gap_of(output, x)) < SAME  # heads split on either side


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": F.relu,
    "GELU": F.gelu,
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "SiLU": F.silu,
    "x sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "nothing": lambda x: x,
}


def _activation_cause(scene: Scene) -> str:
    """Try activations and gates of the last equal outputs against what each side feeds on."""
    one, other = main_input(scene.one), main_input(scene.other)
    if one is None or other is None:
        return ""
    recent = [pair[0].output for pair in scene.matched[-2:]]
    if not recent:
        return ""
    forms: dict[str, Tensor] = {}
    last = recent[-1]
    for name, act in ACTIVATIONS.items():
        forms[name] = act(last)
        if len(recent) == 2 and recent[0].shape == last.shape:
            forms[f"{name}(first) x second"] = act(recent[0]) * last
            forms[f"{name}(second) x first"] = act(last) * recent[0]
        if last.shape[-1] % 2 == 0:
            left, right = last.chunk(2, -1)
            forms[f"{name}(first half) x second"] = act(left) * right
            forms[f"{name}(second half) x first"] = act(right) * left
    found = [_fitting(forms, wanted) for wanted in (one, other)]
    if found[0] and found[1] and found[0] != found[1]:
        return f"activation: {found[0]} beside {found[1]}"
    return ""


def _fitting(forms: Mapping[str, Tensor], wanted: Tensor) -> str:
    """Return the name of the form that equals a tensor, or nothing."""
    best, name = 1e-4, ""
    for form, tensor in forms.items():
        if tensor.numel() == wanted.numel():
            gap = gap_of(wanted, tensor)
            if gap < best:
                best, name = gap, form
    return name


def _residual_cause(scene: Scene) -> str:
    """Express what each side reads as a sum of the last equal tensors: stream, output, norm."""
    a, b = main_input(scene.one), main_input(scene.other)
    if a is None or b is None or len(scene.matched) < 2:
        return ""
    terms: dict[str, Tensor] = {}
    for pair in reversed(scene.matched[-14:]):
        one = pair[0]
        candidates = [(f"the output of {one.name}", one.output)]
        candidates += [(f"the input of {one.name}", x) for x in one.inputs[:1]]
        for name, tensor in candidates:
            if tensor.shape == a.shape and not any(close(tensor, t) for t in terms.values()):
                terms[name] = tensor
    sums = [_sum_of(terms, x) for x in (a, b) if x.shape == a.shape]
    if len(sums) == 2 and all(sums) and sums[0] != sums[1]:
        return f"residual: {sums[0]} beside {sums[1]}"
    return ""


def _sum_of(terms: Mapping[str, Tensor], wanted: Tensor) -> str:
    """Write a tensor as a sum of one, two or three of some tensors; nothing if it is none."""
    names = list(terms)[:10]
    groups = [[i] for i in range(len(names))]
    groups += [[i, j] for i in range(len(names)) for j in range(i)]
    y = wanted.flatten()
    for group in groups:
        x = torch.stack([terms[names[i]].flatten() for i in group], 1)
        factors = torch.linalg.lstsq(x.double(), y.double()[:, None]).solution[:, 0]
        rest = (x.double() @ factors - y.double()).abs().max() / y.std().clamp(min=1e-12)
        if float(rest) < 1e-4 and float(factors.abs().min()) > 1e-3:
            parts = [
                names[i] if abs(float(f) - 1) < 1e-4 else f"{float(f):.4g} x {names[i]}"
                for i, f in zip(group, factors, strict=True)
            ]
            return " + ".join(parts)
    return ""


def _position_cause(scene: Scene) -> str:
    """Compare what each side adds to the embedding: a scale, another table, an offset."""
    a, b = main_input(scene.one), main_input(scene.other)
    if a is None or b is None or a.shape != b.shape or a.ndim != 3:
        return ""
    tables = [x for pair in scene.matched[-2:] for x in (pair[0].output,) if x.shape == a.shape]
    for embedded in tables:
        added = [x - embedded for x in (a, b)]
        if all(float((x - x[:1]).abs().max()) < 1e-4 for x in added):
            one, two = added[0][0], added[1][0]
            for way, (p, q) in {"first": (one, two), "second": (two, one)}.items():
                if float((p[1:] - q[:-1]).abs().max()) < 1e-4 * float(q.std().clamp(min=1e-6)):
                    return f"position: off by one, the {way} side's are one behind"
            if not one.any() or not two.any():
                return "position: only one side adds any"
            return "position: the two sides add other vectors"
    return ""


# --- attention by hand, in every way it goes wrong -----------------------------------------------


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to attend, in words, and what it computes of which queries, keys and values."""

    scale: str
    mask: str
    rotation: str
    grouping: str
    order: str = "queries, keys and values in this order"

    def beside(self, other: "_Way") -> str:
        """Return in what two ways differ."""
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return "; ".join(f"{one} beside {two}" for one, two in pairs if one != two)


def _attention_cause(scene: Scene) -> str:
    """Compute attention from the equal queries, keys and values in many ways; name each side's."""
    one, other = main_input(scene.one), main_input(scene.other)
    if one is None or other is None:
        return ""
    wanted = {"one": one, "other": other}
    for q, k, v, H in _projections(scene):
        ways: dict[str, _Way] = {}
        for way, out in _attentions(q, k, v, H, scene):
            new = [side for side, x in wanted.items() if side not in ways and _equal(out, x)]
            ways |= dict.fromkeys(new, way)
            if len(ways) == 1 and new:  # the other one is probably not far
                (rest,) = wanted.keys() - ways.keys()
                near = _near(way, q, k, v, H, scene, wanted[rest])
                ways |= {} if near is None else {rest: near}
            if len(ways) == 2:
                break
        if len(ways) == 2 and ways["one"] != ways["other"]:
            return f"attention: {ways['one'].beside(ways['other'])}"
    return ""


def _near(
    way: _Way, q: Tensor, k: Tensor, v: Tensor, H: int, scene: Scene, wanted: Tensor
) -> _Way | None:
    """Return the way that differs from a known one in one thing and gives `wanted`, if any."""
    T = q.shape[1]
    heads = _Heads.of(q, k, v, H)
    scale, masks = _scales(scene, q, H).get(way.scale), _masks(T)
    if scale is None or way.mask not in masks or way.grouping not in heads.groupings:
        return None
    allow, spread = masks[way.mask], heads.groupings[way.grouping]

    def attended(
        q: Tensor, k: Tensor, v: Tensor, *, scale: float, allow: Tensor, cap: float = 0.0
    ) -> Tensor:
        raw = q @ spread(k).transpose(-2, -1) * scale
        return _joined(_weights(cap * torch.tanh(raw / cap) if cap else raw, allow) @ spread(v))

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
        return next((pair for name, pair in _rotations(q, k, scene) if name == way.rotation), None)

    pair = turned(heads.q, heads.k)
    if pair is None:
        return None
    for name, another in _scales(scene, q, H).items():
        if _equal(attended(*pair, heads.v, scale=another, allow=allow), wanted):
            return replace(way, scale=name)
    order = torch.arange(T)[:, None] - torch.arange(T)
    for width in range(1, T):
        named = f"{way.mask} and a window of {width}"
        if _equal(attended(*pair, heads.v, scale=scale, allow=allow & (order < width)), wanted):
            return replace(way, mask=named)
    for name, other in masks.items():
        if _equal(attended(*pair, heads.v, scale=scale, allow=other), wanted):
            return replace(way, mask=name)
    exchanges = {"keys and values exchanged": (heads.q, heads.v, heads.k)}
    if heads.q.shape == heads.k.shape:
        exchanges["queries and keys exchanged"] = (heads.k, heads.q, heads.v)
        exchanges["queries and values exchanged"] = (heads.v, heads.k, heads.q)
    for name, (one, two, three) in exchanges.items():
        other_pair = turned(one, two)
        if other_pair is not None and _equal(
            attended(*other_pair, three, scale=scale, allow=allow), wanted
        ):
            return replace(way, order=name)
    for cap in (*_settings(scene, "attn_logit_softcapping", "softcap"), 20.0, 30.0, 50.0):
        if _equal(attended(*pair, heads.v, scale=scale, allow=allow, cap=cap), wanted):
            return replace(way, scale=f"{way.scale}, scores capped at {cap:g}")

    def scaled(factor: float) -> Tensor:
        return attended(*pair, heads.v, scale=scale * factor, allow=allow)

    factor = _fitted(lambda x: _apart(scaled(x), wanted), 0.05, 20.0)
    if _equal(scaled(factor), wanted):
        return replace(way, scale=f"{factor:.4g} times the {way.scale}")

    def rotated(*, slower: float = 1.0, base: float | None = None) -> Tensor:
        named = (
            way.rotation if base is None else re.sub("base [^,]+", f"base {base:g}", way.rotation)
        )
        options = _rotations(heads.q, heads.k, scene, slower=slower, base=base)
        pair = next((pair for name, pair in options if name == named), (heads.q, heads.k))
        return attended(*pair, heads.v, scale=scale, allow=allow)

    def divided(slower: float) -> float:
        return _apart(rotated(slower=slower), wanted)

    for slower in (2.0, 4.0, 8.0, 16.0, 32.0, _fitted(divided, 0.02, 50.0)):
        if _equal(rotated(slower=slower), wanted):
            return replace(way, rotation=f"{way.rotation}, positions divided by {slower:.5g}")
    base = _fitted(lambda x: _apart(rotated(base=x), wanted), 100.0, 1e8)
    if _equal(rotated(base=base), wanted):
        return replace(way, rotation=f"the same with base {base:.5g}")
    return None


def _apart(a: Tensor, b: Tensor) -> float:
    """Return the mean distance of two tensors, in the closest layout."""
    return min((float((a - x).square().mean()) for x in layouts(b, a.shape)), default=math.inf)


def _fitted(apart: Callable[[float], float], low: float, high: float) -> float:
    """Return the positive number with the smallest distance, to six digits."""
    for _ in range(6):
        grid = [low * (high / low) ** (i / 24) for i in range(25)]
        best = min(range(25), key=lambda i: apart(grid[i]))
        low, high = grid[max(0, best - 1)], grid[min(24, best + 1)]
    return math.sqrt(low * high)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.numel() != b.numel():
        return False
    # Norms are the same in every layout, and closer than all differences together.
    one, two = float(a.norm()), float(b.norm())
    return abs(one - two) <= 1e-3 * max(one, two) + 1e-9 and gap_of(a, b) < 1e-4


def _projections(scene: Scene) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Yield q, k, v (B, T, ...) of the last equal outputs before an attention's projection.

    And the width of a head. Where one product makes all three, they lie side by side, or those of
    a head do.
    """
    wanted = main_input(scene.one)
    if wanted is None or not scene.matched:
        return
    width, parent = wanted.shape[-1], _parent(scene.matched[-1][0].name)
    if _parent(scene.one.name) != parent:
        return  # another part has begun: the attention before it is equal
    products: list[Tensor] = []
    norms: list[Tensor] = []
    for one, _ in scene.matched:
        if _parent(one.name) != parent:
            continue
        x = one.output
        if x.ndim == 4:  # (B, T, N, H) or (B, N, T, H): each head by itself
            x = (x if x.shape[1] == wanted.shape[1] else x.transpose(1, 2)).flatten(2)
        if any(p.ndim > 1 for p in one.module.parameters(recurse=False)):
            products.append(x)
        elif products:  # a norm before them is that of the stream
            norms.append(x)
    joined = products[0] if products else wanted
    if len(products) == 1 and joined.shape[-1] > width:
        rest = (joined.shape[-1] - width) // 2
        products = [*joined.split([width, rest, rest], -1)]
    if len(products) < 3:
        return
    q, k, v = products[:3]
    if q.shape[-1] % k.shape[-1] or k.shape[-1] != v.shape[-1]:
        return
    normed = [x for x in norms if x.shape == q.shape]
    q = normed[0] if normed else q
    others = [x for x in norms if x.shape == k.shape and not any(x is y for y in normed[:1])]
    k = others[0] if others else k
    for H in _head_widths(scene, q.shape[-1], k.shape[-1]):
        yield q, k, v, H
        if joined.shape[-1] == 3 * width:
            by_head = joined.unflatten(-1, (-1, 3, H)).unbind(-2)
            yield by_head[0].flatten(2), by_head[1].flatten(2), by_head[2].flatten(2), H


def _head_widths(scene: Scene, queries: int, keys: int) -> list[int]:
    """Return possible widths of a head: what the modules say, or else every divisor."""
    widths = [
        value
        for module in _around(scene)
        for name in ("d_head", "head_dim", "head_size")
        if isinstance(value := getattr(module, name, None), int)
    ]
    for module in _around(scene):
        for name in ("n_heads", "num_heads", "n_head", "num_attention_heads", "heads"):
            value = getattr(module, name, None)
            if isinstance(value, int) and value and queries % value == 0:
                widths.append(queries // value)
    rest = [h for h in range(2, queries + 1) if math.gcd(queries, keys) % h == 0]
    fitting = [w for w in widths if queries % w == 0 and keys % w == 0]
    return list(dict.fromkeys(fitting or rest))


def _around(scene: Scene) -> list[nn.Module]:
    """Return the modules that contain the difference, and their configs."""
    found: list[nn.Module] = []
    for side, trace in ((scene.one, scene.left), (scene.other, scene.right)):
        parent = _parent(side.name)
        found += [one.module for one in trace if one.name == parent]
        if hasattr(side.module, "config"):
            found.append(side.module)
    return found


@dataclass(frozen=True, slots=True)
class _Heads:
    """Queries, keys and values by heads (B, N, T, H), and how query heads find their key head."""

    q: Tensor
    k: Tensor
    v: Tensor
    groupings: Mapping[str, Callable[[Tensor], Tensor]]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, H: int) -> "_Heads":
        """Split rows into heads."""
        B, T = q.shape[:2]
        heads = [x.reshape(B, T, -1, H).transpose(1, 2) for x in (q, k, v)]
        group = heads[0].shape[1] // heads[1].shape[1]
        groupings: dict[str, Callable[[Tensor], Tensor]] = {
            "each key head serves neighbouring query heads": lambda x: x.repeat_interleave(group, 1)
        }
        if group > 1:
            groupings["key heads are repeated in turn"] = lambda x: x.repeat(1, group, 1, 1)
        return cls(heads[0], heads[1], heads[2], groupings)


def _scales(scene: Scene, q: Tensor, H: int) -> dict[str, float]:
    return {
        "scale 1 / √d_head": H**-0.5,
        "no scale": 1.0,
        "scale 1 / √d_model": scene.one.output.shape[-1] ** -0.5,
        "scale 1 / √(n_heads d_head)": q.shape[-1] ** -0.5,
        "scale 1 / d_head": 1.0 / H,
        "scale √d_head": H**0.5,
    }


def _masks(T: int) -> dict[str, Tensor]:
    order = torch.arange(T)[:, None] - torch.arange(T)
    return {
        "a causal mask": order >= 0,
        "no mask": order < T,
        "a mask that hides the position itself": (order > 0) | (order == order.max()),
        "a mask that shows one position ahead": order >= -1,
        "an inverted mask": order <= 0,
    }


def _weights(scores: Tensor, allow: Tensor) -> Tensor:
    return torch.nan_to_num(torch.softmax(scores.masked_fill(~allow, -math.inf), -1))


def _joined(out_BNTH: Tensor) -> Tensor:
    return out_BNTH.transpose(1, 2).flatten(2)


def _attentions(
    q: Tensor, k: Tensor, v: Tensor, H: int, scene: Scene
) -> Iterator[tuple[_Way, Tensor]]:
    """Yield attention in every combination of scale, mask, rotation and grouping, by name."""
    B, T = q.shape[:2]
    heads, masks = _Heads.of(q, k, v, H), _masks(T)
    values = {name: x for name, (x, _) in _rotations(heads.v, heads.v, scene)}
    for turned, (one, two) in _rotations(heads.q, heads.k, scene):
        for grouped, spread in heads.groupings.items():
            raw = one @ spread(two).transpose(-2, -1)
            for scaled, scale in _scales(scene, q, H).items():
                for masked, allow in masks.items():
                    out_BNTH = _weights(raw * scale, allow) @ spread(heads.v)
                    yield _Way(scaled, masked, turned, grouped), _joined(out_BNTH)
            allow = masks["a causal mask"]
            scores = (raw * H**-0.5).masked_fill(~allow, -math.inf)
            weights, usual = torch.softmax(scores, -1), ("scale 1 / √d_head", "a causal mask")
            out_BNTH = weights @ spread(heads.v)
            plain = grouped + ", heads "
            yield _Way(*usual, turned, plain + "not joined by position"), out_BNTH.reshape(B, T, -1)
            innermost = out_BNTH.permute(0, 2, 3, 1).flatten(2)
            yield _Way(*usual, turned, plain + "innermost"), innermost
            summed = torch.softmax(scores, -2) @ spread(heads.v)
            over = f"{usual[1]} and a softmax over the queries"
            yield _Way(usual[0], over, turned, grouped), _joined(summed)
            if turned in values:
                out_BNTH = weights @ spread(values[turned])
                yield _Way(*usual, f"{turned}, of values too", grouped), _joined(out_BNTH)


def _rotations(
    q: Tensor, k: Tensor, scene: Scene, *, slower: float = 1.0, base: float | None = None
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield queries and keys turned in every usual way, and not at all; positions over `slower`."""
    yield "no rotation", (q, k)
    T = q.shape[2]
    bases = _bases(scene) if base is None else [base]
    for base, share in itertools.product(bases, _shares(scene)):
        H = int(q.shape[-1] * share)  # columns that are turned; the others stay
        if H % 2 or not H:
            continue
        for offset in (0, 1):
            places = (torch.arange(T) + offset)[:, None] / slower
            angle = places * base ** (-torch.arange(0, H, 2) / H)
            later = f", positions from {offset}" if offset else ""
            later += f", of a share of {share:g}" if share < 1 else ""
            for way, turn in (("halves", _by_halves), ("neighbours", _by_neighbours)):
                for sign, word in ((1.0, ""), (-1.0, ", backwards")):
                    cos, sin = angle.cos(), sign * angle.sin()
                    name = f"rotation of {way}, base {base:g}{later}{word}"
                    one, two = (
                        torch.cat((turn(x[..., :H], cos, sin), x[..., H:]), -1) for x in (q, k)
                    )
                    yield name, (one, two)
                    if not offset and sign > 0:
                        yield f"{name}, of queries only", (one, k)
                        yield f"{name}, of keys only", (q, two)


def _rotation_cause(scene: Scene) -> str:
    """Say that one side turns what a module reads before it, and the other side does not yet."""
    a, b = main_input(scene.one), main_input(scene.other)
    if a is None or b is None or a.ndim != 4 or a.numel() != b.numel():
        return ""
    for turns, (x, y) in {"first": (b, a), "second": (a, b)}.items():
        for form in layouts(x, y.shape):
            for swap in (False, True):  # (B, N, T, H), or (B, T, N, H)
                ready, wanted = (t.transpose(1, 2) if swap else t for t in (form, y))
                for name, (turned, _) in _rotations(ready, ready, scene):
                    if name != "no rotation" and gap_of(wanted, turned) < 1e-4:
                        return f"the {turns} side turns it before {scene.one.name}: {name}"
    return ""


def _by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def _by_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x[..., ::2], x[..., 1::2]
    return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)


def _settings(scene: Scene, *names: str) -> list[float]:
    """Return positive numbers of these names in the models' modules and their configs."""
    owners = [m for one in (*scene.left, *scene.right)
              for m in (one.module, getattr(one.module, "config", None))]  # fmt: skip
    found = [getattr(owner, name, None) for owner in owners for name in names]
    return list(dict.fromkeys(float(x) for x in found if isinstance(x, (int, float)) and x > 0))


def _shares(scene: Scene) -> list[float]:
    """Return which shares of a head's columns are turned: those in the settings, and all."""
    found = _settings(scene, "partial_rotary_factor", "rotary_pct")
    for one in (*scene.left, *scene.right):
        given = getattr(getattr(one.module, "config", None), "rope_parameters", None)
        if isinstance(given, Mapping):
            found.append(given.get("partial_rotary_factor") or 1.0)
    return list(dict.fromkeys([*(x for x in found if 0 < x < 1), 1.0]))


def _bases(scene: Scene) -> list[float]:
    """Return bases of rotation: those that the models' settings hold, and the usual ones."""
    found: list[float] = []
    for trace in (scene.left, scene.right):
        for one in trace:
            config = getattr(one.module, "config", None)
            given = getattr(config, "rope_parameters", None)
            if isinstance(given, Mapping):
                found.append(given.get("rope_theta", 0.0))
            found.append(getattr(config, "rope_theta", 0.0))
            found += [getattr(one.module, name, 0.0) for name in ("base", "theta", "rope_theta")]
    usable = [float(b) for b in found if isinstance(b, (int, float)) and b > 1]
    return list(dict.fromkeys([*usable, 10_000.0, 1_000_000.0, 500_000.0]))
