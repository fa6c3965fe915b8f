"""How weights become whole numbers, and which tensors of a checkpoint hold them.

weight = (level - zero) * scale, with one scale for each output channel (8 bits) or for each group
of inputs of a channel (4 bits). Targets and stored names come from the manifest: nobody else
decides what is quantized, or what it is called on disk.
"""

import math
from dataclasses import replace
from typing import Literal, get_args

from glassformer.spec.checks import one_of, spec
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.manifest import Parameter, is_factorized, manifest, stored
from glassformer.spec.model import ModelSpec, NextHead

GROUPS = (32, 64, 128)

#: What a tied table becomes: one quantized table for both uses; a quantized head beside a float
#: table; or a table that stays as it is.
Tied = Literal["share", "untie", "skip"]
#: How scales are found, or the training that found the weights.
Method = Literal["absmax", "mse", "gptq", "qat"]
#: What becomes of a layer whose inputs the group does not divide.
Indivisible = Literal["refuse", "int8", "keep"]


@spec
class Scheme:
    """The numbers of one tensor. `group` is None for 8 bits, 32, 64 or 128 inputs for 4 bits."""

    bits: int = 8
    group: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise InputError(f"bits {self.bits} is neither 8 nor 4", hint="use 8 or 4")
        if self.bits == 8 and self.group is not None:
            raise InputError(
                f"8 bits have one scale an output channel, and no group of {self.group}",
                hint="leave the group out, or use 4 bits",
            )
        if self.bits == 4 and self.group not in GROUPS:
            raise InputError(
                f"group {self.group} is not one of {', '.join(map(str, GROUPS))}", hint="use 32"
            )

    @property
    def lowest(self) -> int:
        """The smallest level; 4 bits are kept as 0 to 15."""
        if self.bits == 4:
            return 0
        return -127 if self.symmetric else -128

    @property
    def highest(self) -> int:
        """The largest level."""
        return 127 if self.bits == 8 else 15

    @property
    def middle(self) -> int:
        """The level that means 0 where no zero is stored."""
        return 8 if self.bits == 4 else 0

    def groups(self, inputs: int) -> int:
        """Scales for each output channel."""
        return 1 if self.group is None else inputs // self.group

    def divides(self, inputs: int) -> bool:
        """Whether groups fill a row of so many inputs."""
        return self.group is None or inputs % self.group == 0

    def describe(self) -> str:
        """`int4 g32`, `int8 asymmetric`."""
        group = "" if self.group is None else f" g{self.group}"
        return f"int{self.bits}{group}{'' if self.symmetric else ' asymmetric'}"


@spec
class QuantSpec:
    """What to do with a whole model. None stands for what serves most models best:

    group: 64 inputs for 4 bits, or 32 where 64 do not divide a layer's. symmetric: yes for 8 bits,
    no for 4, which have too few levels to leave some unused. method: absmax for 8 bits, mse for 4.
    head_bits: 8, since a head of 4 bits costs more than all other layers together.
    """

    bits: int = 8
    group: int | None = None
    symmetric: bool | None = None
    method: Method | None = None
    head_bits: int | None = None
    tied: Tied = "share"
    indivisible: Indivisible = "refuse"

    def __post_init__(self) -> None:
        if self.method is not None:
            one_of("method", self.method, get_args(Method))
        one_of("tied", self.tied, get_args(Tied))
        one_of("indivisible", self.indivisible, get_args(Indivisible))
        if self.group is not None and 4 not in (self.bits, self.head_bits):
            Scheme(bits=self.bits, group=self.group)  # says why not
        self.scheme(self.bits)
        self.scheme(self.of_head)

    @property
    def way(self) -> Method:
        """The method, resolved."""
        return self.method or ("mse" if self.bits == 4 else "absmax")

    @property
    def of_head(self) -> int:
        """Bits of heads and of the table that a tied one shares."""
        return self.head_bits or 8

    def scheme(self, bits: int, inputs: int = GROUPS[-1]) -> Scheme:
        """Of a layer with so many bits and inputs."""
        group = self.group
        if bits == 4 and group is None:
            group = 32 if inputs % 64 else 64
        if bits != 4:
            group = None
        symmetric = bits != 4 if self.symmetric is None else self.symmetric
        return Scheme(bits=bits, group=group, symmetric=symmetric)

    def scheme_of(self, target: Parameter) -> Scheme | None:
        """Of one tensor of the manifest; None leaves it as it is."""
        head = target.role in ("head", "embedding")
        inputs = target.shape[-1]
        scheme = self.scheme(self.of_head if head else self.bits, inputs)
        if scheme.divides(inputs):
            return scheme
        if self.indivisible == "int8":
            return self.scheme(8)
        if self.indivisible == "keep":
            return None
        fitting = [str(group) for group in GROUPS if inputs % group == 0]
        raise InputError(
            f"group {scheme.group} does not divide the {inputs} inputs of this layer",
            where=layer_of(target.name),
            hint=f"a group that does: {' or '.join(fitting)}"
            if fitting
            else "indivisible='int8' or 'keep' says what becomes of such layers; or use 8 bits",
        )


@spec
class QuantizedLayer:
    """One layer of a model that is quantized."""

    name: str
    scheme: Scheme
    method: Method = "absmax"


@spec
class Quantization:
    """What a checkpoint says of its quantized layers; the rest of it is plain."""

    layers: tuple[QuantizedLayer, ...]

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if not names or len(set(names)) < len(names):
            raise InputError("a quantization names each of its layers once, and at least one")


def layer_of(parameter: str) -> str:
    """The module that owns a parameter."""
    return parameter.rpartition(".")[0]


def targets(model: ModelSpec, tied: Tied = "share") -> tuple[Parameter, ...]:
    """What can be quantized: every matrix, and a table that is also a head.

    A factorized table is two small factors, and stays as it is. With "untie" the head's own copy of
    the table is named, as the manifest of the untied model has it.
    """
    every = manifest(untied(model) if tied == "untie" else model)
    shared = {p.tied_to for p in every if p.role == "head" and p.tied_to is not None}
    keep_tables = is_factorized(model.embedding) or tied != "share"
    return tuple(
        p
        for p in every
        if p.tied_to is None
        and (p.kind == "matrix" or (p.name in shared and p.kind == "table" and not keep_tables))
    )


def untied(model: ModelSpec) -> ModelSpec:
    """The same model whose heads have weights of their own."""
    if is_factorized(model.embedding):
        return model
    heads = tuple(
        replace(head, tied=False) if isinstance(head, NextHead) else head for head in model.heads
    )
    return replace(model, heads=heads)


@spec
class Stored:
    """One tensor of a checkpoint: its shape, and the types it may have ("" means any float)."""

    shape: tuple[int, ...]
    dtype: str = ""


def stored_tensors(model: ModelSpec, quantization: Quantization | None) -> dict[str, Stored]:
    """Every tensor that a checkpoint of this model holds, by name."""
    plain = {name: Stored(shape=p.shape) for name, p in stored(model).items()}
    if quantization is None:
        return plain
    known = {layer_of(p.name): p for p in targets(model)}
    for layer in quantization.layers:
        if layer.name not in known:
            raise InputError(
                f"'{layer.name}' is no layer that can be quantized",
                hint=nearest(layer.name, known),
            )
        target, scheme = known[layer.name], layer.scheme
        outputs, inputs = target.shape
        if not scheme.divides(inputs):
            raise InputError(
                f"group {scheme.group} does not divide the {inputs} inputs", where=layer.name
            )
        del plain[target.name]
        scales = (outputs,) if scheme.group is None else (outputs, scheme.groups(inputs))
        width = inputs // 2 if scheme.bits == 4 else inputs
        kind = "U8" if scheme.bits == 4 else "I8"
        plain[f"{layer.name}.qweight"] = Stored(shape=(outputs, width), dtype=kind)
        plain[f"{layer.name}.scale"] = Stored(
            shape=scales, dtype="F32" if scheme.group is None else "F16"
        )
        if not scheme.symmetric:
            plain[f"{layer.name}.zero"] = Stored(shape=scales, dtype=kind)
    return plain


def quantized_bytes(shape: tuple[int, ...], scheme: Scheme) -> int:
    """Of a quantized matrix: levels, scales, zeros."""
    outputs, inputs = shape
    each = (4 if scheme.group is None else 2) + (not scheme.symmetric)
    return math.prod(shape) * scheme.bits // 8 + outputs * scheme.groups(inputs) * each
