"""The step of a stack: the modules themselves, mapped over an axis of models.

All parameters of a model are one row of an array (M, P), decayed ones first, so that norms and
updates are single operations; `torch.func.vmap` runs one model's loss over views of all rows. Only
dropout tells the models apart: a site multiplies by a scale that is made before, from each model's
own random numbers. On a GPU the step is compiled and recorded as a single model's is.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from glassformer.data.batch import Batch
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model, build
from glassformer.nn.heads import read_out
from glassformer.nn.mask import Mask
from glassformer.nn.norm import as_float
from glassformer.nn.operations import Operations, per_query_head, use
from glassformer.nn.position import make_tables
from glassformer.spec.execution import PIECE, RECORDED_PIECE
from glassformer.spec.manifest import stored
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import OwnOptimizer
from glassformer.spec.train import SGD, AdamW, Muon, TrainSpec
from glassformer.training.engine import Array, StepResult, totals
from glassformer.training.recorded import (
    AHEAD,
    COMPILE_SECONDS,
    LAYER_SECONDS,
    Graphs,
    Plain,
    RecordedSteps,
    inputs_of,
    precision,
)
from glassformer.training.stacked_batches import Extent, Work, extent_of, stack_batches

# M models, B batch of one model, T length, D d_model, R rows that count, V logits, P parameters

#: What compiling saves for a number of the residual stream in a layer, as seen on an H200 with 64
#: models of `lm`'s shape: 12.5 ms a step recorded, 5.8 ms compiled and recorded.
SAVED_PER_NUMBER = 2.7e-10


# --- one model that is mapped over all ------------------------------------------------------------


def attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, mask: Mask, scale: float, dropout: float
) -> Tensor:
    """softmax(q k^T scale + bias) v in operations that can be mapped."""
    k_BNSH, v_BNSH = per_query_head(k_BKSH, q_BNTH), per_query_head(v_BKSH, q_BNTH)
    scores_BNTS = q_BNTH @ k_BNSH.transpose(-2, -1) * scale
    if mask.bias is not None:
        scores_BNTS = scores_BNTS + mask.bias.to(scores_BNTS.dtype)
    if (allow := mask.explicit(q_BNTH.shape[2], q_BNTH.device)) is not None:
        scores_BNTS = scores_BNTS.masked_fill(~allow, -math.inf)
    return torch.softmax(scores_BNTS, dim=-1) @ v_BNSH


#: The table by which a model computes that is mapped over others.
MAPPED = Operations(name="mapped", attention=attention)


class Scaled(nn.Module):
    """Dropout at one site by given scales, one for each call of a forward pass: 0 or 1 / (1 - rate)
    for each number.
    """

    scales: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.call = p, 0
        self.register_buffer("scales", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        now, self.call = self.call, (self.call + 1) % len(self.scales)
        return x * self.scales[now]


class _Noted(nn.Module):
    """Dropout that notes the shape of what it would drop."""

    def __init__(self, name: str, seen: list[tuple[str, tuple[int, ...]]]) -> None:
        super().__init__()
        self.p, self.name, self.seen = 0.5, name, seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.name, tuple(x.shape)))
        return x


def dropout_rates(model: nn.Module) -> dict[str, float]:
    """Return a model's dropout rates by site."""
    return {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}


def exchange_dropout(model: nn.Module, make: Callable[[str], nn.Module]) -> None:
    """Put another module in the place of each dropout."""
    for name in dropout_rates(model):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, make(name))


def mapped_model(
    spec: ModelSpec, rates: Mapping[str, float], *, dtype: torch.dtype, device: torch.device
) -> Model:
    """Return the model whose parameters are given with every call; `rates` are the largest."""
    model = build(spec, device="meta").to(dtype)
    exchange_dropout(model, lambda name: Scaled(rates[name]))
    make_tables(model, device)
    use(model, MAPPED)
    return model.eval()


@functools.lru_cache(maxsize=256)
def drops_of(spec: ModelSpec, extent: Extent) -> list[tuple[str, tuple[int, ...]]]:
    """Return the site and the shape of each call of dropout, in the order of a forward pass."""
    model, seen = build(spec, device="meta"), list[tuple[str, tuple[int, ...]]]()
    exchange_dropout(model, lambda name: _Noted(name, seen))

    def tokens(length: int) -> Tensor:
        return torch.zeros(extent.rows, length, dtype=torch.long, device="meta")

    source = tokens(extent.source) if extent.source else None
    model.train().hidden(Inputs(tokens(extent.target), source_BS=source))
    return seen


def _by_site(
    drops: Sequence[tuple[str, tuple[int, ...]]], scales: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return (M, calls, ...) by buffer, of (M, ...) for each call."""
    made: dict[str, list[Tensor]] = {}
    for (site, _), scale in zip(drops, scales, strict=True):
        made.setdefault(f"{site}.scales", []).append(scale)
    return {name: torch.stack(own, dim=1) for name, own in made.items()}


def drawn_scales(
    spec: ModelSpec,
    rates: Sequence[Mapping[str, float]],
    generators: Sequence[torch.Generator],
    extents: Sequence[Extent],
    common: Extent,
    *,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return scales by buffer: the numbers that each model's dropout would draw alone."""
    whole, every = drops_of(spec, common), []
    for own, generator, extent in zip(rates, generators, extents, strict=True):
        drawn = []
        for (site, shape), (_, wanted) in zip(drops_of(spec, extent), whole, strict=True):
            scale = torch.ones(shape, dtype=dtype, device=generator.device)
            if own[site]:
                scale.bernoulli_(1 - own[site], generator=generator).div_(1 - own[site])
            gaps = [w - s for w, s in zip(wanted, shape, strict=True)]
            filling = [n for gap in reversed(gaps) for n in (0, gap)]
            drawn.append(F.pad(scale, filling) if any(gaps) else scale)
        every.append(drawn)
    return _by_site(whole, [torch.stack(call) for call in zip(*every, strict=True)])


def hashed_scales(
    spec: ModelSpec,
    rates: Sequence[Mapping[str, float]],
    seeds_M: Tensor,
    common: Extent,
    *,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The same as a function of seed, call and index, which a recorded step computes."""
    drops, scales = drops_of(spec, common), []
    for number, (site, shape) in enumerate(drops, start=1):
        own = [rate[site] for rate in rates]
        rate_M1 = torch.tensor(own, dtype=torch.float32, device=seeds_M.device)[:, None]
        index_R = torch.arange(math.prod(shape), dtype=torch.int32, device=seeds_M.device)
        bits_MR = mixed(mixed(seeds_M[:, None] + 0x3C6EF372 * number) + index_R)
        uniform_MR = (bits_MR & 0xFFFFFF).float() * (1 / (1 << 24))
        scale_MR = torch.where(uniform_MR >= rate_M1, 1 / (1 - rate_M1), 0.0)
        scales.append(scale_MR.to(dtype).view(len(rates), *shape))
    return _by_site(drops, scales)


def mixed(x: Tensor) -> Tensor:
    """Return 32 bits of which each depends on every bit of x (int32): MurmurHash3's finalizer."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -2048144789  # 0x85EBCA6B
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -1028477387  # 0xC2B2AE35
    return x ^ ((x >> 16) & 0xFFFF)


class Objective(nn.Module):
    """One model's share of a step's loss; the numbers to report: it and each head's plain loss."""

    def __init__(self, model: Model, heads: Sequence[str], train: TrainSpec) -> None:
        super().__init__()
        self.model, self.heads, self.train_spec = model, heads, train

    def forward(self, views: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, total, report = inputs_of(views), self.model.penalty() * views["part"], []
        hidden_BTD = self.model.hidden(inputs)
        for head in self.heads:
            kind = self.model.spec.head(head)
            if kind.readout is not None:
                rows_RD = read_out(hidden_BTD, inputs.valid_BT, readout=kind.readout)
            else:
                rows_RD = hidden_BTD.flatten(0, 1)
            if f"rows.{head}" in views:
                rows_RD = rows_RD[views[f"rows.{head}"]]
            logp_RV = F.log_softmax(as_float(self.model.project(rows_RD, head)), dim=-1)
            nll_R = -logp_RV.gather(-1, views[f"targets.{head}"][:, None])[:, 0]
            weights_R, smoothing = views[f"weights.{head}"], views["smoothing"].to(nll_R.dtype)
            smoothed_R = (1 - smoothing) * nll_R - smoothing * logp_RV.mean(-1)
            scale = views[f"scale.{head}"].to(nll_R.dtype)
            share = views[f"weight.{head}"].to(nll_R.dtype) * scale
            total = total + share * (smoothed_R * weights_R).sum()
            report.append((nll_R.detach() * weights_R).sum() * scale)
        return total, torch.stack([number.double() for number in (total.detach(), *report)])


# --- parameters in one array ----------------------------------------------------------------------

#: Numbers between the starts of two parameters are filled up to a multiple of this.
ALIGN = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each parameter lies among the numbers of a model; decayed ones come first."""

    shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, int]
    decayed: int
    size: int

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of (..., P) by name: (..., *shape)."""
        return {
            name: flat[..., start : start + math.prod(self.shapes[name])].view(
                *flat.shape[:-1], *self.shapes[name]
            )
            for name, start in self.starts.items()
        }

    def write(self, flat_P: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors to one model's numbers."""
        views = self.views(flat_P)
        for name, tensor in tensors.items():
            views[name].copy_(tensor.detach())

    def join(self, tensors_M: Mapping[str, Tensor]) -> Tensor:
        """Return (M, P) of tensors (M, *shape); what is missing, and what fills up, is 0."""
        first, parts, end = next(iter(tensors_M.values())), [], 0
        for name, start in [*self.starts.items(), ("", self.size)]:
            if start > end:
                parts.append(first.new_zeros(len(first), start - end))
            if name in tensors_M:
                parts.append(tensors_M[name].flatten(1))
                end = start + parts[-1].shape[1]
            else:
                end = start
        return torch.cat(parts, dim=1)


def layout_of(spec: ModelSpec) -> Layout:
    """Return the layout of a model's parameters."""
    rules = stored(spec)
    names = sorted(rules, key=lambda name: not rules[name].decay)
    starts, end, decayed = {}, 0, 0
    for name in names:
        starts[name] = end
        end += -(-rules[name].size // ALIGN) * ALIGN
        decayed = end if rules[name].decay else decayed
    order = {name: starts[name] for name in names}
    return Layout({name: rules[name].shape for name in rules}, order, decayed, end)


def moments_of(train: TrainSpec) -> tuple[str, ...]:
    """Return the names of what the optimizer keeps for every parameter, as torch spells them."""
    moments, settings = _kept(train)
    return moments if settings.get("momentum") != 0.0 else ()


def _kept(train: TrainSpec) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return the names of the optimizer's moments, and the numbers in which models may differ."""
    match train.optimizer:
        case SGD(momentum=momentum):
            return ("momentum_buffer",), {"momentum": momentum}
        case AdamW() as adam:
            names = ("beta1", "beta2", "eps", "weight_decay")
            return ("exp_avg", "exp_avg_sq"), {name: getattr(adam, name) for name in names}
        case Muon() | OwnOptimizer():
            raise AssertionError("check_stack refuses them")
        case _ as unreachable:
            assert_never(unreachable)


@dataclass(slots=True)
class StackedModels:
    """The models of a stack: one that is mapped over them, and their arrays, a row each."""

    model: Model
    layout: Layout
    trains: Sequence[TrainSpec]
    rates: Sequence[Mapping[str, float]]
    weights_MP: Tensor
    moments: dict[str, Tensor]
    counts_M: Tensor

    @property
    def random(self) -> bool:
        """True if any of them drops anything."""
        return any(any(own.values()) for own in self.rates)


# --- the step -------------------------------------------------------------------------------------


class StackedSteps(RecordedSteps):
    """Steps of a stack: recorded on a GPU, plain on a CPU."""

    def __init__(
        self, stack: StackedModels, *, sharing: int = 1, graphs: Graphs | None = None
    ) -> None:
        trains, spec, device = stack.trains, stack.model.spec, stack.weights_MP.device
        self.stack, train = stack, trains[0]
        fixed = graphs is not None and train.compile != "off"
        fixed = fixed and (train.compile == "on" or train.precision != "float64")
        compiled = fixed and (
            train.compile == "on" or _pays_to_compile(spec, trains, sharing=sharing)
        )
        self.fixed = fixed
        self.settings = _settings(trains, spec, device)
        sgd = isinstance(train.optimizer, SGD)
        self.update = self.plain_update = _update_sgd if sgd else _update_adamw
        if compiled:
            self.update = torch.compile(self.update, fullgraph=True, dynamic=False)
        self.grad_MP: Tensor | None = None
        super().__init__(
            stack.model,
            train,
            random=False,
            compiled=compiled,
            graphs=graphs or Plain,
            parameters=[stack.weights_MP],
        )

    @property
    def ahead(self) -> int:
        """Steps that may be submitted before the first one's result is read."""
        return AHEAD if self.fixed else 0

    def submit_all(
        self, work: Mapping[int, Work], slots: Sequence[int]
    ) -> Callable[[], dict[int, StepResult]]:
        """Begin a step of the members that have work; `slots` says whose each row is.

        An idle slot reads another's batches.
        """
        spec, rows = self.model.spec, self.train.batch_size
        some = next(iter(work.values()))
        every = [work.get(member, some) for member in slots]
        turns: list[tuple[Batch, ...]] = [*zip(*(one.batches for one in every), strict=True)]
        counts = [[totals([batch], spec) for batch in batches] for batches in turns]
        whole = {
            head: np.array([sum(turn[m][head] for turn in counts) for m in range(len(slots))])
            for head in counts[0][0]
        }
        self.heads = tuple(whole)
        live = [member in work and work[member].live for member in slots]
        update = {"lr": np.array([one.lr for one in every]), "live": np.array(live)}
        generators: list[torch.Generator] = []
        if self.stack.random and not self.fixed:
            generators = [torch.Generator(self.device).manual_seed(one.seed) for one in every]
        numbers = None
        for i, batches in enumerate(turns):
            arrays = stack_batches(batches, spec, whole, rows=rows, fixed=self.fixed)
            if self.stack.random and self.fixed:
                words = [(one.seed + 0x9E3779B9 * i) & 0xFFFFFFFF for one in every]
                arrays["seeds"] = np.array(words, dtype=np.uint32).view(np.int32)
            elif self.stack.random:
                self.scales = drawn_scales(
                    spec,
                    self.stack.rates,
                    generators,
                    [*map(extent_of, batches)],
                    _common(arrays),
                    dtype=self.stack.weights_MP.dtype,
                )
            if not self.adds:
                numbers = self._run({**arrays, **update}, self._whole)
            else:
                self._run(arrays, self._add)
        numbers = self._run(update, self._update_sums) if numbers is None else numbers
        places = {member: slot for slot, member in enumerate(slots) if live[slot]}
        tokens = [sum(int(batch.valid.sum()) for batch in one.batches) for one in every]
        return self._reader(numbers, places, tokens)

    def _run(
        self, arrays: Mapping[str, Array], compute: Callable[[Mapping[str, Tensor]], Tensor]
    ) -> Tensor:
        """Compute on arrays: recorded on a GPU, unless their shape is rare."""
        if self.fixed and self.takes([arrays]):
            return super()._run(arrays, compute)
        views = {name: torch.as_tensor(a, device=self.device) for name, a in arrays.items()}
        compiled = self.objective, self.update
        self.objective, self.update = self._objective, self.plain_update
        self.model.train()
        try:
            return compute(views)
        finally:
            self.model.eval()
            self.objective, self.update = compiled

    def _reader(
        self, numbers: Tensor, live: Mapping[int, int], tokens: Sequence[int]
    ) -> Callable[[], dict[int, StepResult]]:
        fetched, heads = self.launcher.fetched(numbers), self.heads

        def read() -> dict[int, StepResult]:
            rows = fetched().T.tolist()
            results = {}
            for member, slot in live.items():
                loss, norm, *plain = rows[slot]
                applied = math.isfinite(loss) and math.isfinite(norm)
                means = dict(zip(heads, plain, strict=True))
                results[member] = StepResult(loss, means, norm, tokens[slot], applied)
            return results

        return read

    # --- what is computed -------------------------------------------------------------------------

    def _objective(self, views: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the numbers to report, (1 + heads, M), and the gradients, (M, P)."""
        stack = self.stack
        own = {name: self.settings[name] for name in self.settings if name in _MAPPED_SETTINGS}
        own |= {f"weight.{head}": self.settings[f"weight.{head}"] for head in self.heads}
        own["part"] = torch.full_like(own["smoothing"], 1 / self.train.accumulate)
        own["part"] = own["part"].to(stack.weights_MP.dtype)
        scales: dict[str, Tensor] = {}
        batch = {name: view for name, view in views.items() if name not in ("seeds", "lr", "live")}
        if "seeds" in views:
            dtype, common = stack.weights_MP.dtype, _common(batch)
            scales = hashed_scales(
                self.model.spec, stack.rates, views["seeds"], common, dtype=dtype
            )
        elif stack.random:
            scales = self.scales
        parameters = {
            name: view.detach().requires_grad_()
            for name, view in stack.layout.views(stack.weights_MP).items()
        }
        objective = Objective(self.model, self.heads, self.train)
        M = len(stack.weights_MP)
        most = max(
            batch[f"targets.{h}"].shape[1] * self.model.spec.head_size(h) for h in self.heads
        )
        size = max(1, (RECORDED_PIECE if self.fixed else PIECE) // most)
        reports, grads = [], []
        for start in range(0, M, size):  # models know nothing of each other: some at a time
            at = slice(start, start + size)
            given = {name: tensor[at] for name, tensor in {**batch, **own}.items()}
            part = {name: tensor[at] for name, tensor in parameters.items()}
            state = {f"model.{name}": tensor for name, tensor in part.items()}
            state |= {f"model.{name}": tensor[at] for name, tensor in scales.items()}

            def one(
                state: Mapping[str, Tensor], given: Mapping[str, Tensor]
            ) -> tuple[Tensor, Tensor]:
                found: tuple[Tensor, Tensor] = functional_call(objective, dict(state), (given,))
                return found

            with precision(self.train, self.device):
                total_M, report_MN = vmap(one)(state, given)
            found = torch.autograd.grad(total_M.sum(), [*part.values()], allow_unused=True)
            pairs = zip(part, found, strict=True)
            grads.append(stack.layout.join({n: g for n, g in pairs if g is not None}))
            reports.append(report_MN)
        return torch.cat(reports).T, torch.cat(grads)

    def _backward(self, views: Mapping[str, Tensor]) -> Tensor:
        report, grad_MP = self._guarded(views)
        if self.adds and self.grad_MP is not None:
            self.grad_MP.add_(grad_MP)
        else:
            self.grad_MP = grad_MP
        return report

    def _add(self, views: Mapping[str, Tensor]) -> Tensor:
        """One of several batches: its gradients and sums are added to what is there."""
        report = self._backward(views)
        self.sums = report.clone() if self.sums is None else self.sums.add_(report)
        return self.sums

    def _whole(self, views: Mapping[str, Tensor]) -> Tensor:
        """A step of one batch."""
        return self._update(self._backward(views), views)

    def _update_sums(self, views: Mapping[str, Tensor]) -> Tensor:
        """The update after several batches; the sums begin again at 0."""
        assert self.sums is not None and self.grad_MP is not None
        result = self._update(self.sums, views)
        torch._foreach_zero_([self.sums, self.grad_MP])
        return result

    def _update(self, numbers: Tensor, views: Mapping[str, Tensor]) -> Tensor:
        """Update each model by its own norm, rate and step count, unless it is not finite."""
        stack, grad_MP = self.stack, self.grad_MP
        assert grad_MP is not None
        norm_M = torch.linalg.vector_norm(grad_MP, dim=1)
        applied_M = torch.isfinite(numbers[0]) & torch.isfinite(norm_M) & views["live"]
        stack.counts_M += applied_M
        clip_M = (self.settings["clip"] / (norm_M.double() + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            self.update(
                stack.weights_MP,
                stack.moments,
                grad_MP,
                applied_M,
                clip_M,
                views["lr"],
                stack.counts_M,
                self.settings,
                stack.layout.decayed,
            )
        return torch.cat((numbers[:1], norm_M.double()[None], numbers[1:]))


#: What of the runs' settings a model's loss reads.
_MAPPED_SETTINGS = ("smoothing",)


def _common(arrays: Mapping[str, Array] | Mapping[str, Tensor]) -> Extent:
    """Return the shape to which the models' batches were filled up."""
    _, rows, target = arrays["tokens"].shape
    return Extent(rows, target, arrays["source"].shape[2] if "source" in arrays else 0)


def _pays_to_compile(spec: ModelSpec, trains: Sequence[TrainSpec], *, sharing: int) -> bool:
    """Return True if compiling is likely to save more time than it takes: launches of each layer,
    and passes over activations.

    A rule of the specs alone, so that a resumed stack computes as before. Where several stacks
    share the device, each on a core of its own, they wait for the device and compile side by side.
    """
    layers = sum(1 for stack in spec.stacks().values() for _ in stack.blocks())
    tokens = trains[0].batch_size * trains[0].accumulate * spec.max_seq_len
    numbers = sum(train.steps for train in trains) * tokens * layers * spec.d_model
    launches = max(train.steps for train in trains) * layers
    saved = numbers * SAVED_PER_NUMBER + launches * LAYER_SECONDS
    return saved > COMPILE_SECONDS / sharing


def _settings(
    trains: Sequence[TrainSpec], spec: ModelSpec, device: torch.device
) -> dict[str, Tensor]:
    """Return the numbers in which the models may differ, each (M,), in float64."""
    values: dict[str, list[float]] = {
        "clip": [train.clip or math.inf for train in trains],
        "smoothing": [train.label_smoothing for train in trains],
    }
    for head in spec.head_names():
        values[f"weight.{head}"] = [train.head_weight(head) for train in trains]
    for train in trains:
        for name, value in _kept(train)[1].items():
            values.setdefault(name, []).append(value)
    return {
        name: torch.tensor(numbers, dtype=torch.float64, device=device)
        for name, numbers in values.items()
    }


def _update_adamw(
    weights_MP: Tensor,
    moments: Mapping[str, Tensor],
    grad_MP: Tensor,
    applied_M: Tensor,
    clip_M: Tensor,
    lr_M: Tensor,
    counts_M: Tensor,
    settings: Mapping[str, Tensor],
    decayed: int,
) -> None:
    """Apply torch's AdamW to each model that is finite; decay acts on the first `decayed`."""
    first_MP, second_MP = moments["exp_avg"], moments["exp_avg_sq"]
    dtype, applied_M1 = weights_MP.dtype, applied_M[:, None]

    def column(numbers_M: Tensor) -> Tensor:
        return numbers_M.to(dtype)[:, None]

    beta1_M, beta2_M = settings["beta1"], settings["beta2"]
    grad_MP = grad_MP * column(clip_M)
    new_first = first_MP + (grad_MP - first_MP) * column(1 - beta1_M)
    new_second = second_MP * column(beta2_M) + grad_MP * grad_MP * column(1 - beta2_M)
    rate_M = lr_M / (1 - beta1_M**counts_M)
    root_M = (1 - beta2_M**counts_M).sqrt()
    step_MP = (
        column(rate_M) * new_first / (new_second.sqrt() / column(root_M) + column(settings["eps"]))
    )
    keep_M1 = column(1 - lr_M * settings["weight_decay"])
    index_P = torch.arange(weights_MP.shape[1], device=weights_MP.device)
    kept_MP = torch.where(index_P < decayed, weights_MP * keep_M1, weights_MP)
    weights_MP.copy_(torch.where(applied_M1, kept_MP - step_MP, weights_MP))
    first_MP.copy_(torch.where(applied_M1, new_first, first_MP))
    second_MP.copy_(torch.where(applied_M1, new_second, second_MP))


def _update_sgd(
    weights_MP: Tensor,
    moments: Mapping[str, Tensor],
    grad_MP: Tensor,
    applied_M: Tensor,
    clip_M: Tensor,
    lr_M: Tensor,
    counts_M: Tensor,
    settings: Mapping[str, Tensor],
    decayed: int,
) -> None:
    """Apply torch's SGD with momentum to each model that is finite."""
    dtype, applied_M1 = weights_MP.dtype, applied_M[:, None]
    step_MP = grad_MP * clip_M.to(dtype)[:, None]
    if "momentum_buffer" in moments:
        buffer_MP = moments["momentum_buffer"]
        step_MP = buffer_MP * settings["momentum"].to(dtype)[:, None] + step_MP
        buffer_MP.copy_(torch.where(applied_M1, step_MP, buffer_MP))
    changed_MP = weights_MP - lr_M.to(dtype)[:, None] * step_MP
    weights_MP.copy_(torch.where(applied_M1, changed_MP, weights_MP))
