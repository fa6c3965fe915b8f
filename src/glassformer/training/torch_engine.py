"""The torch engine: autograd, fused AdamW where there is one, bf16 and compilation on request."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.data.own_code import open_part, running
from glassformer.models.model import Model, build
from glassformer.models.weights import arrays_of, load_weights, weights_of
from glassformer.nn.experts import BalanceLosses
from glassformer.nn.linear import PackedWeight
from glassformer.nn.norm import as_float
from glassformer.nn.operations import TORCH, Operations, use
from glassformer.spec.checks import check_tree
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import Parameter, stored
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import OwnOptimizer
from glassformer.spec.train import SGD, AdamW, LoRA, Muon, TrainSpec, lora_manifest
from glassformer.training.engine import (
    GPU_LOGITS,
    LOGITS,
    Array,
    Arrays,
    Judged,
    StepResult,
    balance_shares,
    judge_logits,
    loss_weights,
    totals,
)
from glassformer.training.losses import head_loss
from glassformer.training.recorded import (
    AHEAD,
    Graphs,
    RecordedSteps,
    can_record,
    pays_to_compile,
    precision,
)

T = TypeVar("T")


def _call(compute: Callable[..., T], *arguments: Any) -> T:
    return compute(*arguments)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of every step that one process computes: one of `ranks`.

    `everywhere` sums a tensor over all of them; `run` calls a function of the model while all of
    its parameters are there.
    """

    ranks: int = 1
    everywhere: Callable[[Tensor], Tensor] | None = None
    run: Callable[..., Any] = _call

    @property
    def sharded(self) -> bool:
        """True if each process keeps a share of the parameters."""
        return self.run is not _call


ALONE = Part()


class TorchEngine:
    """A built model with its optimizers. With `lora`, only the corrections train, and `weights` and
    `load_weights` are about them. `operations` is the table by which the model computes, `graphs`
    record steps, on a GPU that is to be fast.
    """

    def __init__(
        self,
        model: Model,
        train: TrainSpec,
        *,
        lora: LoRA | None = None,
        part: Part = ALONE,
        operations: Operations = TORCH,
        graphs: Graphs | None = None,
    ) -> None:
        use(model, operations)
        self.spec: ModelSpec = model.spec
        self.part = part
        self.model = model
        self.train = train
        self.rules = stored(self.spec) if lora is None else lora_manifest(self.spec, lora)
        self.routed = bool(self.spec.mixtures())
        self.steps = 0
        self.device = next(model.parameters()).device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizers = build_optimizers(model, train, self.rules)
        self.hidden: Callable[..., Tensor] = functools.partial(
            model.hidden, recompute=train.gradient_checkpointing
        )
        self.random = (lora is not None and lora.dropout > 0) or any(
            rate > 0
            for stack in model.spec.stacks().values()
            for rate in (
                stack.dropout.embedding,
                stack.dropout.attention,
                stack.dropout.residual,
                stack.dropout.ffn,
            )
        )
        self.packed = any(isinstance(part, PackedWeight) for part in model.modules())
        if self.packed and train.compile == "on":
            raise InputError("a quantized base is not compiled", hint="train.compile=off")
        self.recorded = None if graphs is None else self._recorded(graphs)
        if train.compile == "on" and self.recorded is None:
            self.hidden = torch.compile(self.hidden)

    def _recorded(self, graphs: Graphs) -> RecordedSteps | None:
        """Return the recorded form of a step, where the model and training have one.

        In float64 nothing is recorded unless asked for: it is chosen to compare, not to be fast.
        """
        wanted = self.train.compile == "on" or self.train.precision != "float64"
        if self.train.compile == "off" or self.part.ranks > 1:
            return None
        if self.packed:
            return None
        if not wanted:
            return None
        if not can_record(self.spec, self.train):
            return None
        ((optimizer, _),) = self.optimizers
        size = sum(parameter.numel() for parameter in self.model.parameters())
        compiled = self.train.compile == "on" or pays_to_compile(
            self.spec, self.train, parameters=size
        )
        return RecordedSteps(
            self.model,
            self.train,
            optimizer,
            random=self.random,
            compiled=compiled,
            graphs=graphs,
        )

    @property
    def logits_at_once(self) -> int:
        """Logits that may be asked for at once: more on a GPU, which has the memory."""
        return LOGITS if self.device.type == "cpu" else GPU_LOGITS

    @property
    def ahead(self) -> int:
        """Steps that may be submitted before the first one's result is read."""
        return AHEAD if self.recorded is not None else 0

    @classmethod
    def fresh(
        cls,
        spec: ModelSpec,
        train: TrainSpec,
        *,
        device: str = "cpu",
        operations: Operations = TORCH,
        graphs: Graphs | None = None,
    ) -> "TorchEngine":
        """Make a new model, initialised from the training's seed."""
        model = build(spec, generator=torch.Generator().manual_seed(train.seed), device=device)
        if train.precision == "float64":
            model.double()
        return cls(model, train, operations=operations, graphs=graphs)

    def step(self, batches: Sequence[Batch], *, lr: float, seed: int) -> StepResult:
        return self.submit(batches, lr=lr, seed=seed)()

    def submit(self, batches: Sequence[Batch], *, lr: float, seed: int) -> Callable[[], StepResult]:
        """Begin a step; the returned function waits for its result, and must be called in turn."""
        counts = totals(batches, self.spec)
        if self.recorded is not None:
            packed = self.recorded.pack(batches, counts)
            if self.recorded.takes(packed):
                tokens = sum(int(batch.valid.sum()) for batch in batches)
                read = self.recorded.submit(
                    packed, lr=lr, seed=seed, tokens=tokens, heads=[*counts]
                )
                return functools.partial(self._counted, read)
        if self.recorded is None:
            result = self._step(batches, counts, lr=lr, seed=seed)
        else:  # records add to the gradients that were there when they were made: those stay
            kept = [parameter.grad for parameter in self.parameters]
            result = self._step(batches, counts, lr=lr, seed=seed)
            for parameter, gradient in zip(self.parameters, kept, strict=True):
                parameter.grad = gradient
        return lambda: result

    def _counted(self, read: Callable[[], StepResult]) -> StepResult:
        result = read()
        self.steps += result.applied
        return result

    def _step(
        self, batches: Sequence[Batch], counts: Mapping[str, float], *, lr: float, seed: int
    ) -> StepResult:
        """Make a step operation by operation."""
        shares = balance_shares(batches, self.spec) if self.routed else []
        sums = self.gradients(batches, counts, shares=shares, seed=seed)
        norm = torch.nn.utils.get_total_norm(self.filled())
        tokens = sum(int(batch.valid.sum()) for batch in batches)
        return self.apply(sums, norm, counts, tokens=tokens, lr=lr)

    def gradients(
        self,
        batches: Sequence[Batch],
        counts: Mapping[str, float],
        *,
        shares: Sequence[Mapping[str, float]],
        seed: int,
    ) -> Tensor:
        """Compute the gradients of some batches, or of this process's part of them.

        Returns sums in float64: the loss, the load-balancing loss and its term, each head's plain
        loss. `counts` and `shares` are those of the complete step.
        """
        self.model.train()
        total: list[Tensor] = []
        for parameter in self.parameters:
            parameter.grad = None
        with self._dropout_from(seed):
            for i, batch in enumerate(batches):
                found = BalanceLosses(self.part.everywhere) if self.routed else None
                share = shares[i] if self.routed else None
                part, sums = self.part.run(
                    self._objective, batch, counts, found, share, len(batches) * self.part.ranks
                )
                total = [a + b for a, b in zip(total, sums, strict=True)] if total else sums
                torch.autograd.backward(part)
        self.model.eval()
        return torch.stack([number.double() for number in total])

    def filled(self) -> list[Tensor]:
        """Return the gradients that the last backward left."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def apply(
        self, sums: Tensor, norm: Tensor, counts: Mapping[str, float], *, tokens: int, lr: float
    ) -> StepResult:
        """Clip and apply the gradients, unless something is not finite: then nothing changes."""
        numbers = torch.cat((sums, norm.double()[None])).tolist()
        total, balanced, added, *means, size = numbers
        applied = math.isfinite(total + added) and math.isfinite(size)
        if applied:
            if self.train.clip:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.train.clip, norm)
            self._update(lr)
        plain = {
            head: mean / (counts[head] or 1.0) for head, mean in zip(counts, means, strict=True)
        }
        routed = (balanced, added) if self.routed else (None, 0.0)
        return StepResult(total, plain, size, tokens, applied, *routed)

    def _objective(
        self,
        batch: Batch,
        counts: Mapping[str, float],
        found: BalanceLosses | None,
        share: Mapping[str, float] | None,
        parts: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return what one of `parts` parts of a step differentiates, and its sums."""
        loss, sums = self._loss(batch, counts, found)
        loss = loss + self.model.penalty() / parts
        balance = term = torch.zeros((), device=self.device)
        objective = loss
        if found is not None:
            balance, term = found.weighted(share)
            objective = loss + term
        return objective, [number.detach() for number in (loss, balance, term, *sums.values())]

    def _loss(
        self, batch: Batch, counts: Mapping[str, float], balance: BalanceLosses | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this batch's share of the step's loss, and each head's summed plain loss.

        `balance` collects the load-balancing losses of a model with experts.
        """
        inputs, total, sums = self.model.inputs(batch), torch.zeros((), device=self.device), {}
        with precision(self.train, self.device):
            hidden_BTD = self.hidden(inputs, balance=balance)
            for head, count in counts.items():
                loss = head_loss(
                    self.model,
                    hidden_BTD,
                    head,
                    torch.as_tensor(batch.targets[head], device=self.device).long(),
                    torch.as_tensor(loss_weights(batch, head), device=self.device),
                    valid_BT=inputs.valid_BT,
                    label_smoothing=self.train.label_smoothing,
                )
                # A head of which nothing counts adds 0, with gradients of 0: never 0 / 0, or None.
                total = total + self.train.head_weight(head) * loss.smoothed / (count or 1.0)
                sums[head] = loss.nll
        return total, sums

    def _update(self, lr: float) -> None:
        self.steps += 1
        for optimizer, share in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * share
            optimizer.step()

    @torch.no_grad()
    def logits(self, batch: Batch) -> Arrays:
        with precision(self.train, self.device):
            answers = self.model(batch)
        return {head: as_float(logits).cpu().numpy() for head, logits in answers.items()}

    @torch.no_grad()
    def judge(self, batch: Batch) -> dict[str, Judged]:
        if self.device.type == "cpu":
            return judge_logits(self.logits(batch), batch)
        with precision(self.train, self.device):
            answers = self.model(batch)
        judged = {}
        for head, target in batch.targets.items():
            if head in answers:
                known = np.where(loss_weights(batch, head) > 0, target, 0).astype(np.int64)
                logits = as_float(answers[head]).flatten(0, -2)
                nll = F.cross_entropy(
                    logits, torch.as_tensor(known, device=self.device).flatten(), reduction="none"
                )
                rows = torch.stack((nll.double(), logits.argmax(-1).double())).cpu().numpy()
                judged[head] = Judged(
                    rows[0].reshape(target.shape), rows[1].astype(np.int64).reshape(target.shape)
                )
        return judged

    def weights(self) -> Arrays:
        return weights_of(self.model, rules=self.rules)

    def load_weights(self, arrays: Mapping[str, Array]) -> None:
        load_weights(self.model, arrays, rules=self.rules)
        self._forget()

    def _forget(self) -> None:
        if self.recorded is not None:
            self.recorded.forget()

    def state(self) -> Arrays:
        return {"steps": np.array(self.steps), **arrays_of(self.state_tensors())}

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's own tensors, named `kind.parameter`."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            for optimizer, _ in self.optimizers:
                for kind, value in optimizer.state.get(parameter, {}).items():
                    if value is not None and not isinstance(value, Tensor):
                        raise InputError(
                            f"the optimizer's state '{kind}' is a {type(value).__name__}, which "
                            "no checkpoint keeps",
                            hint="keep it as a tensor, so that a resumed run goes on alike",
                        )
                    if isinstance(value, Tensor):
                        tensors[f"{kind}.{name}"] = value
        return tensors

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        self.steps = int(arrays["steps"])
        own = dict(self.model.named_parameters())
        for optimizer, _ in self.optimizers:
            held = {p for group in optimizer.param_groups for p in group["params"]}
            for key, array in arrays.items():
                kind, _, name = key.partition(".")
                if name in own and own[name] in held:
                    value, parameter = torch.from_numpy(np.array(array)), own[name]
                    # Without fused kernels torch keeps step counts on the CPU, and moments beside
                    # their parameter.
                    if kind != "step" or _fused(optimizer):
                        value = value.to(parameter.device)
                    optimizer.state.setdefault(parameter, {})[kind] = value
        self._forget()

    @contextlib.contextmanager
    def _dropout_from(self, seed: int) -> Iterator[None]:
        """Seed dropout for this step; torch's own generator is restored afterwards."""
        if not self.random:
            yield
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            # torch.manual_seed would also format a stack trace for each device that is not there.
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
            yield


def build_optimizers(
    model: Model, train: TrainSpec, rules: Mapping[str, Parameter]
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Build optimizers, with their rates relative to the run's; decay follows the manifest."""
    check_tree(train)
    every = model.named_parameters()
    named = {name: p for name, p in every if p.requires_grad and name in rules}
    match train.optimizer:
        case SGD(momentum=momentum):
            fused = next(iter(named.values())).is_cuda
            kind = light(torch.optim.SGD)
            sgd = kind(named.values(), lr=train.lr, momentum=momentum, fused=fused)
            return [(sgd, 1.0)]
        case AdamW() as adam:
            return [(_adamw(named, rules, adam, train.lr), 1.0)]
        case Muon() as muon:
            matrices = {name: p for name, p in named.items() if muon.turns(rules[name])}
            rest = {name: p for name, p in named.items() if name not in matrices}
            first = light(torch.optim.Muon)(
                matrices.values(),
                lr=muon.lr_matrix,
                momentum=muon.momentum,
                weight_decay=muon.weight_decay,
            )
            return [(first, muon.lr_matrix / train.lr), (_adamw(rest, rules, muon, train.lr), 1.0)]
        case OwnOptimizer() as own:
            return [(_own_optimizer(named, rules, own, train.lr), 1.0)]
        case _ as unreachable:
            assert_never(unreachable)


Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def light(kind: type[Optimizer]) -> type[Optimizer]:
    """Return an optimizer of torch without its guards against being compiled, which it is not here.

    They import torch._dynamo, 1.4 s of every start.
    """
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(
        kind.__name__,
        (kind,),
        {"step": step, "add_param_group": inspect.unwrap(kind.add_param_group)},
    )


def _own_optimizer(
    named: Mapping[str, Tensor], rules: Mapping[str, Parameter], own: OwnOptimizer, lr: float
) -> torch.optim.Optimizer:
    """Build a user's optimizer, on two groups: `weight_decay` is 0 where there is no decay."""
    kind: Any = open_part(own)
    if not issubclass(kind, torch.optim.Optimizer):
        raise InputError(f"{own.source} is no optimizer", hint="subclass torch.optim.Optimizer")
    options = dict(own.options)
    decay = options.get("weight_decay", 0.0)
    decayed = [p for name, p in named.items() if rules[name].decay]
    rest = [p for name, p in named.items() if not rules[name].decay]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
    with running(own):
        made: torch.optim.Optimizer = kind(
            [group for group in groups if group["params"]], lr=lr, **options
        )
    return made


def _adamw(
    named: Mapping[str, Tensor], rules: Mapping[str, Parameter], adam: AdamW | Muon, lr: float
) -> torch.optim.AdamW:
    decayed = [p for name, p in named.items() if rules[name].decay]
    rest = [p for name, p in named.items() if not rules[name].decay]
    groups = [
        {"params": decayed, "weight_decay": adam.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return light(torch.optim.AdamW)(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        fused=True,
        capturable=next(iter(named.values())).is_cuda,
    )


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.defaults.get("fused"))
