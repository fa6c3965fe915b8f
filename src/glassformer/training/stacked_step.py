"""The step of a stack: loss, gradient norm, clipping and update of every model at once.

All parameters of a model are one row of an array (M, P), decayed ones first, so that norms and
updates are single operations. `stacked_batches` makes the models' batches one.
On a GPU the step is compiled and recorded as a single model's is; on a CPU it runs as it is.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from glassformer.models.model import Model
from glassformer.nn.embedding import FactorizedTokenEmbedding
from glassformer.nn.experts import BalanceLosses
from glassformer.nn.heads import read_out
from glassformer.nn.norm import as_float
from glassformer.nn.stacked import Fold
from glassformer.spec.execution import PIECE, RECORDED_PIECE
from glassformer.spec.manifest import stored
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import OwnOptimizer
from glassformer.spec.train import SGD, AdamW, Muon, TrainSpec
from glassformer.training.engine import Array, StepResult
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
from glassformer.training.stacked_batches import (
    Joint,
    Work,
    balance_shares_of,
    batches_in_turn,
    counts_of,
    extent_of,
    fold_batches,
    rates_of,
    tokens_of,
)

# M models, B batch of one model, T length, D d_model, R rows that count, V logits, P parameters

#: What compiling saves for a number of the residual stream in a layer, as seen on an H200 with 64
#: models of `lm`'s shape: 12.5 ms a step recorded, 5.8 ms compiled and recorded.
SAVED_PER_NUMBER = 2.7e-10


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
    match train.optimizer:
        case SGD(momentum=momentum):
            return ("momentum_buffer",) if momentum else ()
        case AdamW():
            return "exp_avg", "exp_avg_sq"
        case Muon() | OwnOptimizer():
            raise AssertionError("check_stack refuses them")
        case _ as unreachable:
            assert_never(unreachable)


@dataclass(slots=True)
class StackedModels:
    """The models of a stack: one that computes all of them, and their arrays, a row each."""

    model: Model
    fold: Fold
    layout: Layout
    trains: Sequence[TrainSpec]
    weights_MP: Tensor
    moments: dict[str, Tensor]
    counts_M: Tensor
    random: bool


# --- the step -------------------------------------------------------------------------------------


class StackedSteps(RecordedSteps):
    """Steps of a stack: recorded on a GPU, plain on a CPU."""

    def __init__(
        self, stack: StackedModels, *, sharing: int = 1, graphs: Graphs | None = None
    ) -> None:
        trains, spec, device = stack.trains, stack.model.spec, stack.weights_MP.device
        self.stack, self.fold, train = stack, stack.fold, trains[0]
        fixed = graphs is not None and not spec.mixtures() and train.compile != "off"
        fixed = fixed and (train.compile == "on" or train.precision != "float64")
        compiled = fixed and (
            train.compile == "on" or _pays_to_compile(spec, trains, sharing=sharing)
        )
        self.fixed, self.compiled = fixed, compiled
        self.settings = _settings(trains, spec, device)
        sgd = isinstance(train.optimizer, SGD)
        self.update = self.plain_update = _update_sgd if sgd else _update_adamw
        if compiled:
            self.update = torch.compile(self.update, fullgraph=True, dynamic=False)
        super().__init__(
            stack.model, train, random=False, compiled=compiled, graphs=graphs or Plain
        )

    @property
    def ahead(self) -> int:
        """Steps that may be submitted before the first one's result is read."""
        return AHEAD if self.fixed else 0

    def submit_all(
        self, work: Mapping[int, Work] | Joint, slots: Sequence[int]
    ) -> Callable[[], dict[int, StepResult]]:
        """Begin a step of the members that have work; `slots` says whose each row is."""
        spec, rows, random = self.model.spec, self.train.batch_size, self.stack.random
        rates, seeds, live = rates_of(work, slots)
        by_batch = batches_in_turn(work, slots)
        counts = [counts_of(batches, spec, len(slots)) for batches in by_batch]
        whole = {head: np.sum([count[head] for count in counts], axis=0) for head in counts[0]}
        tokens = [tokens_of(batches, len(slots)) for batches in by_batch]
        self.heads = tuple(whole)
        update = {"lr": np.array(rates), "live": np.array([member in live for member in slots])}
        if not self.fixed and random:
            self.fold.generators = [
                torch.Generator(self.device).manual_seed(seed) for seed in seeds
            ]
        packed = []
        shares = balance_shares_of(by_batch, spec)
        for i, batches in enumerate(by_batch):
            arrays = fold_batches(
                batches, spec, whole, rows=rows, fixed=self.fixed, models=len(slots)
            )
            if self.fixed and random:
                words = [(seed + 0x9E3779B9 * i) & 0xFFFFFFFF for seed in seeds]
                arrays["seeds"] = np.array(words, dtype=np.uint32).view(np.int32)
            packed.append(({**arrays, **shares[i]}, [*map(extent_of, batches)]))
        if self.adds:
            for arrays, extents in packed:
                self.fold.extents = extents
                self._run(arrays, self._add)
            numbers = self._run(update, self._update_sums)
        else:
            ((arrays, self.fold.extents),) = packed
            numbers = self._run({**arrays, **update}, self._whole)
        places = {member: slot for slot, member in enumerate(slots) if member in live}
        return self._reader(numbers, places, np.sum(tokens, axis=0).tolist())

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
        fetched = self.launcher.fetched(numbers)
        routed, heads = bool(self.model.spec.mixtures()), self.heads

        def read() -> dict[int, StepResult]:
            rows = fetched().T.tolist()
            results = {}
            for member, slot in live.items():
                loss, norm, balanced, added, *plain = rows[slot]
                applied = math.isfinite(loss + added) and math.isfinite(norm)
                means = dict(zip(heads, plain, strict=True))
                both = (balanced, added) if routed else (None, 0.0)
                results[member] = StepResult(loss, means, norm, tokens[slot], applied, *both)
            return results

        return read

    def _objective(self, views: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what is differentiated, (M,), and the numbers to report, (3 + heads, M)."""
        inputs = inputs_of(views)
        settings, M = self.settings, self.fold.models
        self.fold.batch, self.fold.seeds_M = len(inputs.tokens_BT) // M, views.get("seeds")
        found = BalanceLosses() if self.model.spec.mixtures() else None
        with precision(self.train, self.device):
            hidden_BTD = self.model.hidden(inputs, balance=found)
            loss_M, means = self._penalty() / self.train.accumulate, []
            for head in self.heads:
                smoothed_M, nll_M = self._head_loss(hidden_BTD, head, inputs.valid_BT, views)
                scale_M = views[f"scale.{head}"].to(nll_M.dtype)
                weight_M = settings[f"weight.{head}"].to(nll_M.dtype)
                loss_M = loss_M + weight_M * smoothed_M * scale_M
                means.append(nll_M.detach() * scale_M)
        total_M, plain_M = loss_M, loss_M.detach()
        balance_M = term_M = torch.zeros_like(plain_M)
        if found is not None:
            plain = [loss * views[f"share.{layer}"] for layer, loss in found.losses.items()]
            factors = [*found.coefficients.values()]
            terms = [c * one for c, one in zip(factors, plain, strict=True)]
            balance_M, term_M = torch.stack(plain).mean(0), torch.stack(terms).mean(0)
            total_M = total_M + term_M
        report = [plain_M, balance_M.detach(), term_M.detach(), *means]
        return total_M, torch.stack([number.double() for number in report])

    def _penalty(self) -> Tensor:
        parts = [p for p in self.model.modules() if isinstance(p, FactorizedTokenEmbedding)]
        zero_M = self.stack.weights_MP.new_zeros(self.fold.models)
        return functools.reduce(torch.add, [part.penalty() for part in parts], zero_M)

    def _head_loss(
        self, hidden_BTD: Tensor, head: str, valid_BT: Tensor | None, views: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return each model's weighted sums: of the smoothed loss, and of the plain one."""
        M, kind = self.fold.models, self.model.spec.head(head)
        if kind.readout is not None:
            rows_MRD = read_out(hidden_BTD, valid_BT, readout=kind.readout).unflatten(0, (M, -1))
        else:
            rows_MRD = hidden_BTD.flatten(0, 1).unflatten(0, (M, -1))
        rows_MR = views.get(f"rows.{head}")
        if rows_MR is not None:
            rows_MRD = torch.take_along_dim(rows_MRD, rows_MR[..., None], 1)
        targets_MR, weights_MR = views[f"targets.{head}"], views[f"weights.{head}"]
        sums = functools.partial(self._sums, head)
        width = self.model.spec.head_size(head)
        limit = RECORDED_PIECE if self.fixed else PIECE
        step = max(1, limit // (M * width))
        if rows_MRD.shape[1] <= step:
            return sums(rows_MRD, targets_MR, weights_MR)
        pieces = [
            checkpoint(
                sums, rows_MRD[:, at], targets_MR[:, at], weights_MR[:, at], use_reentrant=False
            )
            for at in (slice(start, start + step) for start in range(0, rows_MRD.shape[1], step))
        ]
        smoothed, nll = zip(*pieces, strict=True)
        return torch.stack(smoothed).sum(0), torch.stack(nll).sum(0)

    def _sums(
        self, head: str, rows_MRD: Tensor, targets_MR: Tensor, weights_MR: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits_MRV = as_float(self.model.project(rows_MRD, head))
        logp_MRV = F.log_softmax(logits_MRV, dim=-1)
        nll_MR = -logp_MRV.gather(-1, targets_MR[..., None])[..., 0]
        nll_M = (nll_MR * weights_MR).sum(1)
        if not any(train.label_smoothing for train in self.stack.trains):
            return nll_M, nll_M.detach()
        smoothing_M1 = self.settings["smoothing"].to(nll_M.dtype)[:, None]
        smoothed_MR = (1 - smoothing_M1) * nll_MR - smoothing_M1 * logp_MRV.mean(-1)
        return (smoothed_MR * weights_MR).sum(1), nll_M.detach()

    def _backward(self, views: Mapping[str, Tensor]) -> Tensor:
        total_M, report = self._guarded(views)
        torch.autograd.backward(total_M.sum())
        return report

    def _update(self, numbers: Tensor, views: Mapping[str, Tensor]) -> Tensor:
        """Update each model by its own norm, rate and step count, unless it is not finite."""
        stack = self.stack
        gradients = {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        grad_MP = stack.layout.join(gradients)
        norm_M = torch.linalg.vector_norm(grad_MP, dim=1)
        applied_M = torch.isfinite(numbers[0] + numbers[2]) & torch.isfinite(norm_M)
        applied_M = applied_M & views["live"]
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
        match train.optimizer:
            case SGD(momentum=momentum):
                values.setdefault("momentum", []).append(momentum)
            case AdamW() as adam:
                for name in ("beta1", "beta2", "eps", "weight_decay"):
                    values.setdefault(name, []).append(getattr(adam, name))
            case Muon() | OwnOptimizer():
                raise AssertionError("check_stack refuses them")
            case _ as unreachable:
                assert_never(unreachable)
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
