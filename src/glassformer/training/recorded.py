"""Training steps that a GPU can record: forward, loss, backward, clipping and update of one shape.

The objective (hidden states and loss) is compiled as one function; a complete step over a batch of
one shape is launched by a `Launcher`, on a GPU as one CUDA graph. A step whose loss or gradient is
not finite is skipped on the device: weights, moments and step counts stay as they were.

The weights and the optimizer are the engine's own, so a step may also be taken without a record:
the first of a shape is (it warms up), and so are shapes that do not repeat.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.models.inputs import Inputs, as_inputs, packed_runs
from glassformer.models.model import Model
from glassformer.spec.errors import MachineError
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import OwnPosition
from glassformer.spec.train import SGD, AdamW, TrainSpec
from glassformer.training.engine import Array, StepResult, loss_weights
from glassformer.training.losses import fixed_loss

# B batch, T length, M rows that count

#: Steps that may be on their way to the device before the first of their results is read.
AHEAD = 4
#: Shapes that are recorded; those that come later are computed without a record.
SHAPES = 16
#: A shape that is not the run's first is compiled when it comes more often than this.
RARE = 2
#: Time that compiling takes, and what it saves in a step: for a layer, and for an operation.
COMPILE_SECONDS = 30.0
LAYER_SECONDS = 0.14e-3
SAVED_PER_FLOP = 1 / 400e12
#: Rows that count are filled up to this share of all rows, so that few shapes occur.
SHARE = 8


def pays_to_compile(spec: ModelSpec, train: TrainSpec, *, parameters: int) -> bool:
    """Return True if compiling is likely to save more time in this run than it takes.

    Against a record of plain kernels it saves some launches a layer and half of the time of the
    products, both as measured on an H200; it takes about half a minute. A rule of the spec alone,
    so that a resumed run computes as before.
    """
    layers = sum(1 for stack in spec.stacks().values() for _ in stack.blocks())
    tokens = train.batch_size * train.accumulate * spec.max_seq_len
    saved = LAYER_SECONDS * layers + SAVED_PER_FLOP * 6 * parameters * tokens
    return train.steps * saved > COMPILE_SECONDS


def can_record(spec: ModelSpec, train: TrainSpec) -> bool:
    """Return True if every operation of a step has shapes that only the batch's shape decides.

    Experts are chosen by the data; a user's own parts may do anything; Muon's rate is a constant
    of its kernels.
    """
    return (
        not spec.mixtures()
        and not isinstance(spec.position, OwnPosition)
        and isinstance(train.optimizer, SGD | AdamW)
    )


def pack(
    batch: Batch, spec: ModelSpec, counts: Mapping[str, float], *, rows: int
) -> dict[str, Array]:
    """Return the arrays that a step reads, checked, in one of a few shapes.

    Lengths are filled up to a multiple of an eighth of the next power of two; a batch that needs no
    filling and whose tokens are all real has no mask. An epoch's short batch is filled up to `rows`
    sequences by copies that do not count. Where few positions count, the loss is taken of those
    alone: their indices, filled up to a multiple of an eighth of all.
    """
    inputs = as_inputs(batch, spec, device=torch.device("cpu"))
    B = len(batch.tokens)
    again = np.arange(max(B, rows)) % B

    def filling(length: int) -> int:
        piece = -(-(1 << (length - 1).bit_length()) // SHARE)
        return min(spec.max_seq_len, -(-length // piece) * piece) - length

    def grown(array: Array) -> Array:
        if array.ndim == 2:
            more = filling(array.shape[1])
            array = np.pad(array, ((0, 0), (0, more))) if more else array
        return array[again] if len(again) > B else array

    arrays = {"tokens": grown(inputs.tokens_BT.numpy())}
    if inputs.valid_BT is not None or filling(batch.tokens.shape[1]):
        arrays["valid"] = grown(batch.valid)
    if batch.segments is not None:
        arrays["segments"] = grown(batch.segments)
        runs = packed_runs(arrays["segments"], arrays.get("valid", grown(batch.valid)))
        if runs is not None:
            arrays["runs"] = runs
    if batch.source is not None:
        arrays["source"] = grown(batch.source.tokens.astype(np.int64, copy=False))
        arrays["source_valid"] = grown(batch.source.valid)
    for head, count in counts.items():
        given = loss_weights(batch, head)
        share = -(-SHARE * int(np.count_nonzero(given)) // given.size)
        weights = grown(given).copy()
        weights[B:] = 0.0
        weights = weights.reshape(-1)
        targets = np.where(weights > 0, grown(batch.targets[head]).reshape(-1), 0)
        if share < SHARE:
            counted = np.flatnonzero(weights)
            size = max(len(counted), -(-len(weights) * max(1, share) // SHARE))
            index = np.zeros(size, dtype=np.int64)
            index[: len(counted)] = counted
            targets, weights = targets[index], weights[index]
            targets[len(counted) :], weights[len(counted) :] = 0, 0.0
            arrays[f"rows.{head}"] = index
        arrays[f"targets.{head}"] = targets.astype(np.int64, copy=False)
        arrays[f"weights.{head}"] = weights
        arrays[f"scale.{head}"] = np.array(1.0 / (count or 1.0))
    return arrays


Kind = tuple[tuple[str, tuple[int, ...], str], ...]


def kind_of(arrays: Mapping[str, Array]) -> Kind:
    """Return names, shapes and dtypes: batches of one kind are steps of one record."""
    return tuple((name, array.shape, array.dtype.str) for name, array in arrays.items())


Compute = Callable[[Mapping[str, Tensor]], Tensor]


class Launcher(Protocol):
    """What runs computations whose arrays have one of a few kinds; it may record each kind."""

    def forget(self) -> None:
        """Drop every record: the weights or the optimizer's tensors were replaced."""

    def run(self, arrays: Mapping[str, Array], compute: Compute) -> Tensor:
        """Compute on arrays; the result is overwritten by the next run of the same kind."""

    def dropout_from(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """Seed dropout for this step; torch's own generator is restored afterwards."""

    def fetched(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Return a function that waits for numbers and returns them on the host."""


#: Makes a launcher of the steps that change some parameters.
Graphs = Callable[[Sequence[Tensor]], Launcher]


class Plain:
    """A launcher that records nothing, to compare the others with."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.device = parameters[0].device

    def forget(self) -> None:
        """Do nothing: there is no record."""

    def run(self, arrays: Mapping[str, Array], compute: Compute) -> Tensor:
        """Compute on copies of the arrays on the device."""
        return compute(
            {name: torch.tensor(array, device=self.device) for name, array in arrays.items()}
        )

    @contextlib.contextmanager
    def dropout_from(self, seed: int) -> Iterator[None]:
        """Seed dropout for this step; torch's own generator is restored afterwards."""
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            yield

    def fetched(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the numbers on the host."""
        return numbers.cpu


class RecordedSteps:
    """Steps of one engine. `submit` returns at once; what it returns reads the result."""

    def __init__(
        self,
        model: Model,
        train: TrainSpec,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        random: bool,
        compiled: bool = True,
        graphs: Graphs = Plain,
        parameters: Sequence[Tensor] | None = None,
    ) -> None:
        self.model, self.train, self.optimizer, self.random = model, train, optimizer, random
        trained = [p for p in model.parameters() if p.requires_grad]
        self.parameters = trained if parameters is None else parameters
        self.device = self.parameters[0].device
        self.launcher = graphs(self.parameters)
        self.heads: tuple[str, ...] = ()
        self.objective: Callable[..., tuple[Tensor, Tensor]] = self._objective
        self.compiled = compiled
        if compiled:
            self.objective = torch.compile(self._objective, fullgraph=True, dynamic=False)
        # With several batches a step their gradients add up in place; with one they are replaced.
        self.adds = train.accumulate > 1
        self.forget()

    def forget(self) -> None:
        """Drop every record: the weights or the optimizer's tensors were replaced."""
        self.seen: dict[Kind, int] = {}
        self.taken: set[Kind] = set()
        self.launcher.forget()
        self.sums: Tensor | None = None

    def pack(self, batches: Sequence[Batch], counts: Mapping[str, float]) -> list[dict[str, Array]]:
        """Return the arrays of a step's batches, filled up to shapes that repeat."""
        spec, rows = self.model.spec, self.train.batch_size
        return [pack(batch, spec, counts, rows=rows) for batch in batches]

    def takes(self, packed: Sequence[Mapping[str, Array]]) -> bool:
        """Return True unless a shape is too rare to be worth compiling: not the run's first, and
        seen fewer than three times.
        """
        for arrays in packed:
            kind = kind_of(arrays)
            self.seen[kind] = self.seen.get(kind, 0) + 1
            often = self.seen[kind] > RARE and len(self.taken) < SHAPES
            if often or not self.taken:
                self.taken.add(kind)
        return all(kind_of(arrays) in self.taken for arrays in packed)

    def submit(
        self,
        packed: Sequence[Mapping[str, Array]],
        *,
        lr: float,
        seed: int,
        tokens: int,
        heads: Sequence[str],
    ) -> Callable[[], StepResult]:
        """Begin a step; the returned function waits for it and returns its result."""
        self.heads = tuple(heads)
        rate = {"lr": np.array(lr, dtype=np.float32)}
        with self.launcher.dropout_from(seed) if self.random else contextlib.nullcontext():
            if self.adds:
                for arrays in packed:
                    self._run(arrays, self._add)
                numbers = self._run(rate, self._update_sums)
            else:
                numbers = self._run({**packed[0], **rate}, self._whole)
        return _result(self.launcher.fetched(numbers), tokens, self.heads)

    def _run(self, arrays: Mapping[str, Array], compute: Compute) -> Tensor:
        """Compute on a batch, by its record where there is one."""

        def training(views: Mapping[str, Tensor]) -> Tensor:
            self.model.train()
            with self._shapes_allowed():
                result = compute(views)
            self.model.eval()
            return result

        return self.launcher.run(arrays, training)

    def _shapes_allowed(self) -> contextlib.AbstractContextManager[object]:
        """Let torch compile for as many shapes as are recorded; its compiler takes seconds to
        import, so only where it is used.
        """
        if not self.compiled:
            return contextlib.nullcontext()
        allowed: contextlib.AbstractContextManager[object] = torch._dynamo.config.patch(
            recompile_limit=2 * SHAPES
        )
        return allowed

    # --- what is computed -------------------------------------------------------------------------

    def _whole(self, views: Mapping[str, Tensor]) -> Tensor:
        """A step of one batch."""
        for parameter in self.parameters:
            parameter.grad = None
        return self._update(self._backward(views), views)

    def _add(self, views: Mapping[str, Tensor]) -> Tensor:
        """One of several batches: its gradients and sums are added to what is there."""
        if self.sums is None:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            self.sums = self._backward(views).clone()
            return self.sums
        return self.sums.add_(self._backward(views))

    def _update_sums(self, views: Mapping[str, Tensor]) -> Tensor:
        """The update after several batches; the sums begin again at 0."""
        assert self.sums is not None
        result = self._update(self.sums, views)
        torch._foreach_zero_([self.sums, *(cast(Tensor, p.grad) for p in self.parameters)])
        return result

    def _objective(self, views: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return a batch's share of the step's loss, and each head's plain loss."""
        inputs = inputs_of(views)
        with precision(self.train, self.device):
            hidden_BTD = self.model.hidden(inputs, recompute=self.train.gradient_checkpointing)
            total, sums = self.model.penalty() / self.train.accumulate, []
            for head in self.heads:
                loss = fixed_loss(
                    self.model,
                    hidden_BTD,
                    head,
                    views[f"targets.{head}"],
                    views[f"weights.{head}"],
                    rows_M=views.get(f"rows.{head}"),
                    valid_BT=inputs.valid_BT,
                    label_smoothing=self.train.label_smoothing,
                )
                scale = views[f"scale.{head}"].to(loss.nll.dtype)
                total = total + self.train.head_weight(head) * loss.smoothed * scale
                sums.append(loss.nll * scale)
        return total, torch.stack(sums)

    def _backward(self, views: Mapping[str, Tensor]) -> Tensor:
        """Compute a batch's gradients; return its loss and each head's plain loss."""
        total, sums = self._guarded(views)
        torch.autograd.backward(total)
        return torch.cat((total.detach()[None].double(), sums.detach().double()))

    def _guarded(self, views: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Call the objective, compiled or not; say so if it cannot be compiled."""
        if not self.compiled:
            return self.objective(views)
        try:
            return self.objective(views)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise MachineError(
                f"torch.compile could not compile the training step: {reason[:200]}",
                hint="train.compile=off trains without it; compiling needs Triton and a C compiler",
            ) from error

    def _update(self, numbers: Tensor, views: Mapping[str, Tensor]) -> Tensor:
        """Clip and apply, unless something is not finite; return loss, norm and the heads' losses.

        The optimizer's kernel divides by `grad_scale` and does nothing where `found_inf` is 1.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        finite = torch.isfinite(numbers[0]) & torch.isfinite(norm)
        assert self.optimizer is not None
        kernel = cast(Any, self.optimizer)
        kernel.found_inf = (~finite).float()
        kernel.grad_scale = None
        if self.train.clip:
            kernel.grad_scale = ((norm + 1e-6) / self.train.clip).clamp(min=1.0).float()
        for group in self.optimizer.param_groups:
            group["lr"] = views["lr"]
        self.optimizer.step()
        kernel.found_inf = kernel.grad_scale = None
        return torch.cat((numbers[:1], norm.double()[None], numbers[1:]))


def inputs_of(views: Mapping[str, Tensor]) -> Inputs:
    """Return what the model reads, of a batch whose arrays have names."""
    return Inputs(
        views["tokens"],
        views.get("valid"),
        views.get("segments"),
        views.get("source"),
        views.get("source_valid"),
        runs_R=views.get("runs"),
    )


def precision(train: TrainSpec, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a model computes in the training's precision."""
    if train.precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _result(
    fetched: Callable[[], Tensor], tokens: int, heads: Sequence[str]
) -> Callable[[], StepResult]:
    def read() -> StepResult:
        loss, norm, *plain = fetched().tolist()
        applied = math.isfinite(loss) and math.isfinite(norm)
        return StepResult(loss, dict(zip(heads, plain, strict=True)), norm, tokens, applied)

    return read
