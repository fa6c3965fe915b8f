"""Training as a value: schedules, optimizers, `TrainSpec`, and `RunSpec`, a complete run.

Learning rates are pure functions of the step, the same for every engine.
"""

import math
from typing import Literal

from glassformer.spec.checks import at_least, one_of, positive, probability, spec
from glassformer.spec.errors import InputError
from glassformer.spec.finetune import Tuning
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import OwnOptimizer
from glassformer.spec.tasks import FinetuneTask, Task


@spec
class ConstantSchedule:
    """A linear warmup, then the full rate."""

    warmup: int = 0

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)

    def share(self, step: int, steps: int) -> float:
        """The rate at this step (from 0) as a fraction of the full rate."""
        return _warm(step, self.warmup)


@spec
class InverseSqrtSchedule:
    """A linear warmup, then falling as 1 / sqrt(step): the 2017 paper's, its peak being 1."""

    warmup: int = 100

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 1)

    def share(self, step: int, steps: int) -> float:
        """min(s / warmup, sqrt(warmup / s)) with s = step + 1."""
        return min((step + 1) / self.warmup, math.sqrt(self.warmup / (step + 1)))


@spec
class CosineSchedule:
    """A linear warmup, then half a cosine down to `floor` at the last step."""

    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)
        if not 0.0 <= self.floor <= 1.0:
            raise InputError(f"floor {self.floor} is outside [0, 1]", hint="a share of the rate")

    def share(self, step: int, steps: int) -> float:
        """The rate at this step (from 0) as a fraction of the full rate."""
        if step < self.warmup:
            return _warm(step, self.warmup)
        way = (step - self.warmup) / max(1, steps - 1 - self.warmup)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(1.0, way))) / 2


Schedule = ConstantSchedule | InverseSqrtSchedule | CosineSchedule


def _warm(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def _betas(beta1: float, beta2: float) -> None:
    probability("beta1", beta1)
    probability("beta2", beta2)


def _decay(weight_decay: float) -> None:
    if not 0.0 <= weight_decay < float("inf"):
        raise InputError(
            f"weight_decay {weight_decay} is negative or not finite", hint="0 turns it off"
        )


@spec
class SGD:
    """p -= lr * g, with momentum if it is above 0."""

    momentum: float = 0.0

    def __post_init__(self) -> None:
        probability("momentum", self.momentum)


@spec
class AdamW:
    """Adam with decoupled decay of the parameters that the manifest marks; 0 is plain Adam."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _betas(self.beta1, self.beta2)
        positive("eps", self.eps)
        _decay(self.weight_decay)


@spec
class Muon:
    """Orthogonalised momentum on the matrices of the blocks, AdamW on everything else.

    Jordan and others, 2024. `lr_matrix` is the rate of the matrices, on the same schedule.
    """

    lr_matrix: float = 0.02
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        positive("lr_matrix", self.lr_matrix)
        probability("momentum", self.momentum)
        _betas(self.beta1, self.beta2)
        positive("eps", self.eps)
        _decay(self.weight_decay)


Optimizer = SGD | AdamW | Muon | OwnOptimizer


@spec
class HeadWeight:
    """The weight of one head's loss in the total."""

    head: str
    weight: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight < float("inf"):
            raise InputError(
                f"the weight {self.weight} of head '{self.head}' is negative or not finite",
                hint="0 leaves its loss out",
            )


@spec
class TrainSpec:
    """Steps, batches, optimizer, schedule, precision, and when to evaluate and to save.

    A step takes `accumulate` batches and weights every token equally. `clip` 0 turns clipping off;
    `patience` 0 never stops early, else counts evaluations without a better validation loss.
    `gradient_checkpointing` keeps each block's input only, and computes the rest once more in the
    backward: the same bits, in more time and less memory. `probes` are the validation examples
    whose attention is kept at each evaluation, 0 for none; nothing that is learned depends on them.
    """

    steps: int = 1_000
    batch_size: int = 64
    accumulate: int = 1
    lr: float = 1e-3
    optimizer: Optimizer = AdamW()
    schedule: Schedule = CosineSchedule(warmup=50)
    clip: float = 1.0
    label_smoothing: float = 0.0
    head_weights: tuple[HeadWeight, ...] = ()
    seed: int = 0
    precision: Literal["float32", "float64", "bf16"] = "float32"
    compile: bool = False
    gradient_checkpointing: bool = False
    evaluate_every: int = 100
    evaluate_examples: int = 1_000
    checkpoint_every: int = 100
    keep: int = 2
    patience: int = 0
    probes: int = 8

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "evaluate_every", "checkpoint_every"):
            at_least(name, getattr(self, name))
        at_least("evaluate_examples", self.evaluate_examples)
        at_least("keep", self.keep, 2)
        at_least("patience", self.patience, 0)
        at_least("seed", self.seed, 0)
        if self.seed >= 1 << 64:
            raise InputError(f"seed {self.seed} has more than 64 bits", hint="a smaller one")
        weighed = [weight.head for weight in self.head_weights]
        if len(set(weighed)) < len(weighed):
            raise InputError("head_weights names a head twice", hint="one weight each")
        if not 0 <= self.probes <= 8:
            raise InputError(f"probes {self.probes} is not between 0 and 8", hint="0 keeps none")
        positive("lr", self.lr)
        probability("label_smoothing", self.label_smoothing)
        one_of("precision", self.precision, ("float32", "float64", "bf16"))
        if not 0.0 <= self.clip < float("inf"):
            raise InputError(f"clip {self.clip} is negative", hint="0 turns clipping off")

    def head_weight(self, head: str) -> float:
        """The weight of this head's loss, 1 by default."""
        return next((h.weight for h in self.head_weights if h.head == head), 1.0)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.lr * self.schedule.share(step, self.steps)


@spec
class RunSpec:
    """Everything that decides what a run computes; with `tuning` it starts from a base."""

    model: ModelSpec
    task: Task
    train: TrainSpec = TrainSpec()
    engine: Literal["torch", "numpy"] = "torch"
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        one_of("engine", self.engine, ("torch", "numpy"))
        for weight in self.train.head_weights:
            self.model.head(weight.head)
        if self.engine == "numpy":
            if self.train.precision == "bf16":
                raise InputError(
                    "the NumPy engine has no half precision", hint="train.precision=float32"
                )
            if self.train.compile or isinstance(self.train.optimizer, Muon):
                raise InputError(
                    "the NumPy engine has neither compile nor Muon", hint="engine=torch"
                )
            if isinstance(self.train.optimizer, OwnOptimizer):
                raise InputError(
                    f"{self.train.optimizer.source} is an optimizer of torch", hint="engine=torch"
                )
            if self.train.gradient_checkpointing:
                raise InputError(
                    "the NumPy engine has no gradient checkpointing", hint="engine=torch"
                )
            if self.tuning is not None and self.tuning.lora is not None:
                raise InputError("the NumPy engine has no LoRA", hint="engine=torch, or no lora")
        if isinstance(self.task, FinetuneTask) and self.tuning is None:
            raise InputError("fine-tuning needs a base", hint="base=MODEL")
