"""Several processes train one model, as torchrun starts them.

Every rank makes the batches of a step, which are a function of its number, and computes the rows
that are its share of each. Losses are divided by the weights of the complete step, which every rank
knows, so the sum over the ranks is the loss of one process, never a mean of means. The gradients
are summed once a step, after all of its batches, as one flat tensor, and every rank makes the same
update of the same weights. With `sharded` (FSDP2) each rank holds a slice of every parameter and of
the optimizer's state; torch gathers a block's parameters when it is computed and leaves each rank
its slice of the summed gradients.

Dropout is drawn from the seed of the step and the rank. So a run is the same bits whenever it has
as many ranks; with another number of them it is the same up to rounding without dropout, and with
dropout the same in distribution only.
"""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from glassformer.data.batch import Batch, Source
from glassformer.models.model import Model
from glassformer.models.weights import array_of, tensor_of
from glassformer.nn.block import TransformerBlock
from glassformer.nn.operations import TORCH, Operations
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.model import ModelSpec
from glassformer.spec.train import LoRA, TrainSpec
from glassformer.store.tensors import Deferred, explain_difference
from glassformer.training.engine import (
    Array,
    Arrays,
    Judged,
    StepResult,
    balance_shares,
    judge_logits,
    totals,
)
from glassformer.training.torch_engine import Part, TorchEngine

T = TypeVar("T")

#: A collective that takes longer than this has lost a rank.
PATIENCE = datetime.timedelta(minutes=10)
#: Texts in the errors of gloo and NCCL that mean: another rank is gone.
GONE = ("gloo", "Connection", "NCCL", "ncclRemote", "Timed out", "recvBytes", "sendBytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The processes of a run, seen from one of them; `local` counts those of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def join(
        cls,
        *,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        device: str = "cpu",
        meeting: str = "env://",
    ) -> "Ranks":
        """Join the others. On a GPU, gradients go through NCCL and small numbers through gloo.

        `meeting` is torch's address for it; torchrun sets the environment that `env://` means.
        """
        ranks = cls(rank=rank, size=size, local_rank=local_rank, local_size=local_size)
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        with ranks.contact():
            dist.init_process_group(
                backend, init_method=meeting, rank=rank, world_size=size, timeout=PATIENCE
            )
        return ranks

    @property
    def writes(self) -> bool:
        """True on rank 0, which writes the run's files and reports to people."""
        return self.rank == 0

    def leave(self) -> None:
        """Leave the group, once all of it has come this far."""
        with self.contact():
            dist.barrier()
            dist.destroy_process_group()

    @contextlib.contextmanager
    def contact(self) -> Iterator[None]:
        """Report a collective that failed as the loss of another rank."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if not isinstance(error, dist.DistError) and not any(word in text for word in GONE):
                raise
            raise MachineError(
                f"rank {self.rank} of {self.size} lost the others: {text.splitlines()[0][:120]}",
                hint="--resume goes on from the last checkpoint; torchrun --max-restarts does so "
                "by itself",
            ) from error

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place; every rank gets the same bits."""
        with self.contact():
            dist.all_reduce(tensor)
        return tensor

    def gather(self, number: int) -> list[int]:
        """Return one number of each rank."""
        return [int(row[0]) for row in self.gather_rows(np.array([[number]], dtype=np.int64))]

    def gather_rows(self, rows: Array) -> Array:
        """Return the rows of all ranks in their order; each has as many."""
        mine = torch.from_numpy(np.ascontiguousarray(rows))
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.contact():
            dist.all_gather(found, mine)
        return torch.cat(found).numpy()

    def any(self, flag: bool) -> bool:
        """Return True on all ranks if the flag is set on one of them."""
        return any(self.gather(flag))

    def in_turn(self, compute: Callable[[], T]) -> T:
        """Compute on one rank of each machine first, so that the others find what it has cached."""
        made = [compute()] if self.local_rank == 0 else []
        with self.contact():
            dist.barrier()
        return made[0] if made else compute()

    def is_first_to_fail(self) -> bool:
        """Return True on the one rank that is to report an error: rank 0, or the first of the rest.

        The ranks meet in torch's store, since others may be waiting in a collective.
        """
        try:
            time.sleep(0.0 if self.rank == 0 else 0.5)
            store = dist.distributed_c10d._get_default_store()
            return int(store.add("failed", 1)) == 1
        except (RuntimeError, ValueError):  # whoever kept the store has ended
            return self.rank == 0

    def check_equal(self, facts: Mapping[str, bytes]) -> None:
        """Refuse ranks that differ from rank 0 in a fact: what it is, and 32 bytes of its hash."""
        mine = np.stack([np.frombuffer(digest, dtype=np.uint8) for digest in facts.values()])
        every = self.gather_rows(mine[None])
        for rank, digests in enumerate(every):
            differs = (digests != every[0]).any(axis=1)
            for what, other in zip(facts, differs, strict=True):
                if other:
                    raise InputError(
                        f"rank {rank} has {what} different from rank 0's",
                        hint="every process needs the same installation, the same files and the "
                        "same command",
                    )

    def check_batch(self, batch_size: int) -> None:
        """Refuse a batch that the ranks cannot share evenly."""
        if batch_size % self.size:
            most = max(n for n in range(1, self.size + 1) if batch_size % n == 0)
            raise InputError(
                f"rank {self.rank}: {self.size} processes cannot share a batch of {batch_size} "
                "evenly",
                hint=f"{most} processes, or train.batch_size="
                f"{max(1, batch_size // self.size) * self.size}",
            )

    def share(self, batch: Batch) -> Batch:
        """Return every `size`-th row from this rank's own; a row that counts nowhere if none."""
        return _rows(batch, slice(self.rank, None, self.size))

    def block(self, batch: Batch) -> Batch:
        """Return consecutive rows, as many on every rank: the last row fills up."""
        each = -(-len(batch.tokens) // self.size)
        rows = np.arange(self.rank * each, (self.rank + 1) * each)
        return _rows(batch, np.minimum(rows, len(batch.tokens) - 1))


def _rows(batch: Batch, at: slice | NDArray[np.int64]) -> Batch:
    """Return some rows of a batch; of none, one row of padding, so that the rank takes part."""
    if len(batch.tokens[at]) == 0:
        idle = _rows(batch, slice(0, 1))
        flat = any(target.ndim == 1 for target in idle.targets.values())
        source = idle.source
        return replace(
            idle,
            valid=np.zeros_like(idle.valid),
            weights=np.zeros(1 if flat else idle.tokens.shape, dtype=np.float32),
            source=None
            if source is None
            else Source(tokens=source.tokens, valid=np.zeros_like(source.valid)),
        )
    source = batch.source
    return Batch(
        tokens=batch.tokens[at],
        valid=batch.valid[at],
        targets={head: target[at] for head, target in batch.targets.items()},
        weights=None if batch.weights is None else batch.weights[at],
        segments=None if batch.segments is None else batch.segments[at],
        source=None if source is None else Source(tokens=source.tokens[at], valid=source.valid[at]),
    )


class DistributedEngine:
    """An engine of which every rank holds one: they step, evaluate and load together.

    `inner` computes this rank's part.
    """

    ahead = 0

    def __init__(
        self,
        model: Model,
        train: TrainSpec,
        ranks: Ranks,
        *,
        device: str = "cpu",
        lora: LoRA | None = None,
        sharded: bool = False,
        operations: Operations = TORCH,
    ) -> None:
        ranks.check_batch(train.batch_size)
        self.spec: ModelSpec = model.spec
        self.ranks, self.sharded = ranks, sharded
        whole = _shard(model, ranks, device) if sharded else None
        part = Part(ranks.size, ranks.sum, *([] if whole is None else [whole]))
        self.inner = TorchEngine(model, train, lora=lora, part=part, operations=operations)

    @property
    def logits_at_once(self) -> int:
        """The largest number of logits of one evaluation step: as many as all ranks can make."""
        return self.inner.logits_at_once * self.ranks.size

    # --- steps ------------------------------------------------------------------------------------

    def submit(self, batches: Sequence[Batch], *, lr: float, seed: int) -> Callable[[], StepResult]:
        """Make one update; the returned function has its result."""
        result = self.step(batches, lr=lr, seed=seed)
        return lambda: result

    def step(self, batches: Sequence[Batch], *, lr: float, seed: int) -> StepResult:
        """Make one update from all ranks' shares; the result is the same on every rank."""
        inner, counts = self.inner, totals(batches, self.spec)
        shares = balance_shares(batches, self.spec) if inner.routed else []
        mine = [self.ranks.share(batch) for batch in batches]
        tokens = sum(int(batch.valid.sum()) for batch in batches)
        with self.ranks.contact():
            sums = inner.gradients(mine, counts, shares=shares, seed=self._seed(seed))
            if not self.sharded:
                self._sum_gradients()
            norm = torch.nn.utils.get_total_norm(inner.filled())
            if self.sharded:
                norm = cast(Any, norm).full_tensor()
            return inner.apply(self.ranks.sum(sums), norm, counts, tokens=tokens, lr=lr)

    def _sum_gradients(self) -> None:
        """Sum the gradients of all ranks as one flat tensor, of which they become views."""
        found = [p for p in self.inner.parameters if p.grad is not None]
        gradients = [cast(Tensor, p.grad) for p in found]
        flat = self.ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for parameter, piece in zip(found, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)

    def _seed(self, seed: int) -> int:
        """Return this rank's seed of a step; the step's own where there is one rank."""
        if self.ranks.size == 1:
            return seed
        return int(np.random.SeedSequence([seed, self.ranks.rank]).generate_state(1)[0])

    # --- evaluation -------------------------------------------------------------------------------

    def run(self, compute: Callable[[], T]) -> T:
        """Compute with the model, on every rank if it is sharded, while its parameters are there.

        For samples and probes: blocks are gathered as they are called, by all ranks in step.
        """
        made: list[T] = []
        with torch.no_grad(), self.ranks.contact():
            self.inner.part.run(lambda: made.append(compute()))
        if self.sharded:  # without a backward nothing else would give the gathered ones back
            cast(Any, self.inner.part.run).reshard()
        return made[0]

    def logits(self, batch: Batch) -> Arrays:
        """Return logits by head of all rows; each rank computes as many of them."""
        mine = self.run(lambda: self.inner.logits(self.ranks.block(batch)))
        return {
            head: self.ranks.gather_rows(rows)[: len(batch.tokens)] for head, rows in mine.items()
        }

    def judge(self, batch: Batch) -> dict[str, Judged]:
        """Return losses and likeliest classes by head of all rows, shared out in the same way."""
        block, size = self.ranks.block(batch), len(batch.tokens)
        mine = self.run(lambda: self._judged(block))
        return {
            head: Judged(*(self.ranks.gather_rows(rows)[:size] for rows in judged))
            for head, judged in mine.items()
        }

    def _judged(self, batch: Batch) -> dict[str, Judged]:
        if self.inner.device.type == "cpu":
            return judge_logits(self.inner.logits(batch), batch)
        return self.inner.judge(batch)

    # --- weights and state ------------------------------------------------------------------------

    def weights(self) -> Arrays:
        """Return copies of the parameters; of a sharded model on every rank, by all together."""
        if not self.sharded:
            return self.inner.weights()
        return {name: each.read() for name, each in self.saved_weights().items()}

    def state(self) -> Arrays:
        """Return the optimizer's arrays and its step count, likewise."""
        if not self.sharded:
            return self.inner.state()
        return {name: each.read() for name, each in self.saved_state().items()}

    def saved_weights(self) -> dict[str, Deferred]:
        """Return the parameters of a sharded model, each gathered when it is read.

        All ranks must read all of them, in the same order: no more than one is complete at a time.
        """
        own = dict(self.inner.model.named_parameters())
        return {name: _deferred(own[name]) for name in self.inner.rules}

    def saved_state(self) -> dict[str, Deferred]:
        """Return the optimizer's tensors in the same way."""
        steps = Deferred((), np.dtype(np.int64), lambda: np.array(self.inner.steps))
        tensors = {name: _deferred(value) for name, value in self.inner.state_tensors().items()}
        return {"steps": steps, **tensors}

    def load_weights(self, arrays: Mapping[str, Array]) -> None:
        """Load parameters by manifest name; a sharded model takes its slice of each."""
        if not self.sharded:
            self.inner.load_weights(arrays)
            return
        problems = explain_difference(self.inner.rules, {n: a.shape for n, a in arrays.items()})
        if problems:
            raise InputError(f"the weights do not fit the model: {problems}")
        own = dict(self.inner.model.named_parameters())
        with torch.no_grad():
            for name, array in arrays.items():
                _local(own[name]).copy_(tensor_of(self._slice(array)))

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """Load what `state` returned."""
        if not self.sharded:
            self.inner.load_state(arrays)
            return
        from torch.distributed.tensor import DTensor

        self.inner.load_state({"steps": arrays["steps"]})
        for optimizer, _ in self.inner.optimizers:
            held = {p for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in self.inner.model.named_parameters():
                for key in (key for key in arrays if key.partition(".")[2] == name):
                    if parameter not in held:
                        continue
                    kind, like = key.partition(".")[0], cast(DTensor, parameter)
                    value = torch.from_numpy(np.array(arrays[key]))
                    if value.ndim:
                        mine = torch.from_numpy(np.array(self._slice(arrays[key])))
                        value = DTensor.from_local(
                            mine.to(parameter.device),
                            like.device_mesh,
                            like.placements,
                            shape=like.shape,
                            stride=like.stride(),
                        )
                    elif optimizer.defaults.get("fused"):
                        value = value.to(parameter.device)
                    optimizer.state.setdefault(parameter, {})[kind] = value

    def _slice(self, array: Array) -> Array:
        """Return this rank's rows: as many on each but the last ones, as torch shards them."""
        each = -(-len(array) // self.ranks.size)
        return array[self.ranks.rank * each : (self.ranks.rank + 1) * each]


# --- FSDP2 ----------------------------------------------------------------------------------------


class _Whole(nn.Module):
    """A root for a sharded model, whose forward runs any function of it.

    What belongs to no block (embedding, final norm, heads) is gathered while it runs.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., T], *arguments: Any) -> T:
        return compute(*arguments)


def _shard(model: Model, ranks: Ranks, device: str) -> _Whole:
    """Shard every block on its own, and the rest together; gradients are summed, not averaged."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    whole, mesh = _Whole(model), init_device_mesh(torch.device(device).type, (ranks.size,))
    for block in [part for part in model.modules() if isinstance(part, TransformerBlock)]:
        fully_shard(block, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    for part in whole.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return whole


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _deferred(tensor: Tensor) -> Deferred:
    from torch.distributed.tensor import DTensor

    def read() -> Array:
        complete = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return array_of(complete.detach())

    kind = array_of(_local(tensor).detach().flatten()[:0]).dtype
    return Deferred(tuple(tensor.shape), kind, read)
