"""Fine-tuning as a value: the model to start from, and which of its parameters train.

`LoRA` names the projections that get a low-rank correction; `lora_manifest` lists the correction's
parameters, with the same names and rules that `manifest` has for the rest of the model.
"""

import math
from dataclasses import replace

from glassformer.spec.checks import positive, probability, size, spec
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.init import Constant, Uniform
from glassformer.spec.manifest import Parameter, stored
from glassformer.spec.model import ModelSpec

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
