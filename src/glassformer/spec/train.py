"""Training as a value: schedules, optimizers, `TrainSpec`, and `RunSpec`, a complete run.

Learning rates are pure functions of the step, the same for every engine.

Fine-tuning names the model to start from, and which of its parameters train. `LoRA` names the
projections that get a low-rank correction; `lora_manifest` lists the correction's parameters, with
the same names and rules that `manifest` has for the rest of the model.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, Literal, get_args

from glassformer.spec.checks import LARGEST, at_least, positive, probability, size, spec
from glassformer.spec.errors import OTHER_WORDS, InputError, nearest
from glassformer.spec.init import Constant, Uniform
from glassformer.spec.lacking import Runs, every_field, lacks
from glassformer.spec.manifest import Parameter, stored
from glassformer.spec.model import ModelSpec
from glassformer.spec.options import check_options, option
from glassformer.spec.own import OwnOptimizer, OwnPart, OwnSchedule
from glassformer.spec.serialize import check_scalar
from glassformer.spec.tasks import FinetuneTask, Task

# R rank


@spec
class LoRA:
    """W x + (alpha / rank) B A dropout(x), W frozen (Hu and others, 2021).

    A target is a projection's own name (`q_proj`), a role of the manifest (`attention`,
    `cross_attention`, `ffn`, `head`), or one projection's full name (`blocks.0.attn.q_proj`).
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("attention", "ffn")

    def __post_init__(self) -> None:
        size("rank", self.rank)
        positive("alpha", self.alpha)
        probability("dropout", self.dropout)
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise InputError(
                "LoRA targets must be named once each, and at least one",
                hint='targets=["q_proj", "v_proj"], or ["attention", "ffn"]',
            )

    @property
    def scale(self) -> float:
        """The factor on the product of the two matrices."""
        return self.alpha / self.rank


@spec
class Tuning:
    """Start from `base`, a run, a checkpoint or a Hugging Face folder; without LoRA, all trains.

    `sha256` is the hash of the base's weights, so that a run is never resumed from another base.
    """

    base: str
    sha256: str
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        if not self.base:
            raise InputError("no base to fine-tune", hint="base=MODEL")


def lora_targets(model: ModelSpec, lora: LoRA) -> dict[str, Parameter]:
    """Return the weights that LoRA corrects, by projection (`blocks.0.attn.q_proj`)."""
    projections = {
        name.removesuffix(".weight"): parameter
        for name, parameter in stored(model).items()
        if parameter.kind == "matrix"
    }
    chosen: set[str] = set()
    for target in lora.targets:
        found = {
            name
            for name, parameter in projections.items()
            if target in (name, name.rpartition(".")[2], parameter.role)
        }
        if not found:
            known = {name.rpartition(".")[2] for name in projections}
            known |= {parameter.role for parameter in projections.values()}
            raise InputError(f"LoRA target '{target}' is in no layer", hint=nearest(target, known))
        chosen |= found
    for name in sorted(chosen):
        narrow = min(projections[name].shape)
        if lora.rank > narrow:
            raise InputError(
                f"rank {lora.rank} is above {narrow}, the width of {name}",
                hint=f"the nearest valid rank is {narrow}",
            )
    return {name: parameter for name, parameter in projections.items() if name in chosen}


def lora_manifest(model: ModelSpec, lora: LoRA) -> dict[str, Parameter]:
    """Return the factors by name: A (R, in) uniform in 1 / sqrt(in), B (out, R) initially zero."""
    factors: dict[str, Parameter] = {}
    for name, weight in lora_targets(model, lora).items():
        d_out, d_in = weight.shape
        for leaf, shape, init in (
            ("lora_A", (lora.rank, d_in), Uniform(bound=1 / math.sqrt(d_in))),
            ("lora_B", (d_out, lora.rank), Constant(value=0.0)),
        ):
            full = f"{name}.{leaf}.weight"
            factors[full] = replace(weight, name=full, shape=shape, init=init)
    return factors


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


Schedule = ConstantSchedule | InverseSqrtSchedule | CosineSchedule | OwnSchedule


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

    def state_size(self, parameter: Parameter) -> int:
        """Count the numbers kept for a parameter."""
        return parameter.size if self.momentum else 0


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

    def state_size(self, parameter: Parameter) -> int:
        """Count the numbers kept for a parameter: two moments, and the steps."""
        return 2 * parameter.size + 1


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

    def turns(self, parameter: Parameter) -> bool:
        """Return True for a matrix of a block; AdamW takes everything else."""
        return parameter.kind == "matrix" and parameter.layer is not None

    def state_size(self, parameter: Parameter) -> int:
        """Count the numbers kept for a parameter: its momentum, or what AdamW keeps."""
        return parameter.size if self.turns(parameter) else 2 * parameter.size + 1


Optimizer = SGD | AdamW | Muon | OwnOptimizer


def part_name(part: Optimizer | Schedule) -> str:
    """Return `AdamW`, or the class of a part of the user's own."""
    return part.class_name if isinstance(part, OwnPart) else type(part).__name__


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


#: The most steps of a run, examples of a batch, and batches of a step, which are all in memory.
MOST = {"steps": LARGEST, "batch_size": 1 << 20, "accumulate": 10_000}


@spec
class TrainSpec:
    """Steps, batches, optimizer, schedule, precision, and when to evaluate and to save."""

    steps: int = option(1_000, help="Number of optimizer steps.", at_least=1)
    batch_size: int = option(64, help="Number of examples in a batch.", at_least=1)
    accumulate: int = option(
        1, help="Batches per step; every token of them has the same weight.", at_least=1
    )
    lr: float = option(1e-3, help="Learning rate at the schedule's peak.", above=0)
    optimizer: Optimizer = option(
        AdamW(), help="SGD, AdamW, Muon, or one of your own: my_lion.py:Lion."
    )
    schedule: Schedule = option(
        CosineSchedule(warmup=50),
        help="ConstantSchedule, InverseSqrtSchedule or CosineSchedule, with a warmup, or one of "
        "your own: my_schedule.py:WSD.",
    )
    clip: float = option(
        1.0, help="Largest norm of the gradient; 0 turns clipping off.", at_least=0, off=0
    )
    label_smoothing: float = option(
        0.0, help="Share of the target's probability spread over all tokens.", at_least=0, below=1
    )
    head_weights: tuple[HeadWeight, ...] = ()
    seed: int = option(0, help="Seed of first weights, order of examples, and dropout.", at_least=0)
    precision: Literal["float32", "float64", "bf16"] = option(
        "float32", help="Number format; bf16 keeps the weights in float32."
    )
    compile: Literal["auto", "off", "on"] = option(
        "auto",
        help="Compile with torch.compile; on a GPU the complete step is recorded and launched as "
        "one. auto: on a GPU, where the model and the optimizer allow it.",
    )
    gradient_checkpointing: bool = option(
        False,
        help="Keep only each block's input and recompute the rest in the backward: the same "
        "bits, more time, less memory.",
    )
    evaluate_every: int = option(100, help="Steps between evaluations.", at_least=1)
    evaluate_examples: int = option(1_000, help="Examples of an evaluation.", at_least=1)
    checkpoint_every: int = option(100, help="Steps between checkpoints.", at_least=1)
    keep: int = option(2, help="Checkpoints that are kept, besides the best.", at_least=2)
    patience: int = option(
        0,
        help="Evaluations without a better validation loss before the run stops; 0 never stops.",
        at_least=0,
        off=0,
    )
    probes: int = option(
        8,
        help="Validation examples whose attention is kept at each evaluation.",
        at_least=0,
        at_most=8,
        hint="0 keeps none, 8 are the most",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name, most in MOST.items():
            at_least(name, getattr(self, name), most=most)
        if self.seed >= 1 << 64:
            raise InputError(f"seed {self.seed} has more than 64 bits", hint="a smaller one")
        weighed = [weight.head for weight in self.head_weights]
        if len(set(weighed)) < len(weighed):
            raise InputError("head_weights names a head twice", hint="one weight each")

    def head_weight(self, head: str) -> float:
        """The weight of this head's loss, 1 by default."""
        return next((h.weight for h in self.head_weights if h.head == head), 1.0)

    def looks_after(self, step: int) -> bool:
        """True if the run evaluates or saves after this step, counted from 1."""
        return (
            step % self.evaluate_every == 0
            or step % self.checkpoint_every == 0
            or step == self.steps
        )

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.lr * self.schedule.share(step, self.steps)


def check_settings(settings: Iterable[str]) -> None:
    """Refuse `train.KEY=VALUE` and `model.KEY=VALUE` whose key or kind of value cannot be.

    It needs neither the task nor torch; what remains is checked where the run is planned.
    """
    for text in settings:
        path, given, value = text.partition("=")
        if not given:
            raise InputError(f"'{text}' has no value", hint="write path=value: train.lr=3e-4")
        first, _, rest = path.partition(".")
        kind: type[TrainSpec | ModelSpec]
        match first:
            case "train":
                kind = TrainSpec
            case "model":
                kind = ModelSpec
            case _:
                continue
        known = [each.name for each in dataclasses.fields(kind)]
        key = rest.partition(".")[0]
        if not key:  # `model=...` or `train=...` is for the plan
            continue
        if key not in known:
            meant = OTHER_WORDS.get(key)
            hint = nearest(key, known) if meant is None else f"did you mean '{meant}'?"
            raise InputError(f"{first}.{rest}: unknown key '{key}'", hint=hint)
        if "." not in rest:
            check_scalar(kind, key, value, path=path)


#: What trains: `auto` is native on a CPU in float32 where nothing is lacking, else torch.
EngineName = Literal["auto", "torch", "native", "numpy"]


@spec
class RunSpec:
    """Everything that decides what a run computes; with `tuning` it starts from a base."""

    model: ModelSpec
    task: Task
    train: TrainSpec = TrainSpec()
    engine: EngineName = "auto"
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        for weight in self.train.head_weights:
            self.model.head(weight.head)
        if self.engine in ("native", "numpy"):
            check_arrays(self.train, native=self.engine == "native")
        if isinstance(self.task, FinetuneTask) and self.tuning is None:
            raise InputError("fine-tuning needs a base", hint="base=MODEL")


def training_by(*optimizers: type, **only: Collection[Any]) -> Runs:
    """Return what an engine runs that trains by these optimizers, with any other setting.

    `only` has the values that it takes of a field; it keeps all activations.
    """
    flags = {"gradient_checkpointing": (False,)}
    return {
        TrainSpec: every_field(TrainSpec, **flags, **only),
        **{one: every_field(one) for one in (*optimizers, *get_args(Schedule))},
    }


def arrays_lack(train: TrainSpec, *, native: bool) -> str:
    """Return what the engine in C or in NumPy lacks for a training; empty if nothing."""
    precision = ("float32",) if native else ("float32", "float64")
    runs = training_by(SGD, AdamW, Muon, precision=precision, compile=("auto", "off"))
    for lack in lacks(train, runs):
        name = lack.replace("TrainSpec ", "train.")
        return f"the {'native' if native else 'NumPy'} engine has no {name}"
    return ""


def check_arrays(train: TrainSpec, *, native: bool) -> None:
    """Refuse what the engine in C or in NumPy lacks for a training."""
    if lack := arrays_lack(train, native=native):
        raise InputError(lack, hint="engine=torch")


def setting_for(word: str) -> str | None:
    """Return the setting that a word means (`lr`: `train.lr`, `layers`: ...), or None."""
    if word in TrainSpec.__dataclass_fields__:
        return f"train.{word}"
    return OTHER_WORDS.get(word)
