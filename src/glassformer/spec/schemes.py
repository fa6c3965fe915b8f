"""Quantization schemes: the kinds of number that a weight matrix can be stored in.

`Scheme` is a closed union. Each member knows its name, its options, and the tensors that a matrix
of (outputs, inputs) becomes in a checkpoint, from which its bytes follow. The arithmetic of each
(quantize, dequantize, pack, unpack, error) is in `quant.schemes`; all other code calls the scheme.
"""

import math
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from glassformer.spec.checks import check_member, spec
from glassformer.spec.errors import InputError, nearest

#: How the grid of one matrix is found: over the full range, or by least squared error.
Search = Literal["absmax", "mse"]
#: How scales are found, or the training that found the weights.
Method = Literal[Search, "gptq", "qat"]
#: What a checkpoint may say of that: earlier versions had one more.
RecordedMethod = Literal[Method, "hqq"]

#: Inputs that may share a scale.
GROUPS = (32, 64, 128)

_ITEM_BYTES = {"F32": 4, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}


@spec
class StoredTensor:
    """One tensor of a checkpoint: its shape, and its safetensors type ("" means any float)."""

    shape: tuple[int, ...]
    dtype: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes on disk; the type must be given."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def _check_group(group: int) -> None:
    if group not in GROUPS:
        raise InputError(
            f"group {group} is not one of {', '.join(map(str, GROUPS))}", hint="use 32"
        )


def _indivisible(group: int, inputs: int) -> str:
    """Return why a group does not divide the inputs; empty if it does."""
    if inputs % group == 0:
        return ""
    fitting = [str(other) for other in GROUPS if inputs % other == 0]
    better = f"; group {' or '.join(fitting)} does" if fitting else ""
    return f"group {group} does not divide the {inputs} inputs{better}"


@spec
class Int8:
    """weight = (level - zero) * scale: 8-bit levels, one float16 scale per group of inputs.

    `group` is 32, 64 or 128 inputs; 0 means one float32 scale per output channel; None means 32, or
    0 where 32 does not divide the inputs or levels are asymmetric. One scale per channel does for
    small models; the outliers of large ones need groups.
    """

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    summary: ClassVar[str] = "8-bit integers, one scale per group of inputs"
    default_method: ClassVar[Method] = "absmax"
    #: The method where a text is there to look at: 8 bits gain next to nothing by GPTQ.
    calibrated_method: ClassVar[Method] = "mse"

    group: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.group:
            _check_group(self.group)

    def resolve(self, inputs: int) -> "Int8":
        """Return the scheme with every option chosen, for a matrix of this many inputs."""
        if self.group is not None:
            return self
        fits = self.symmetric and inputs % min(GROUPS) == 0
        return replace(self, group=min(GROUPS) if fits else 0)

    def lacks(self, inputs: int) -> str:
        """Return what a matrix of this many inputs lacks for this scheme; empty if nothing."""
        group = self.resolve(inputs).group
        return _indivisible(group, inputs) if group else ""

    def for_head(self) -> "Scheme":
        """Return the scheme of heads and of a tied table, where none is given."""
        return self

    def parts(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        """Return the tensors that a matrix of (outputs, inputs) is stored as, by leaf name."""
        if self.group is None:
            raise InputError(f"a stored {self.name} matrix needs its group", hint="32, or 0: none")
        scales = (outputs, inputs // self.group) if self.group else (outputs,)
        parts = {
            "qweight": StoredTensor(shape=(outputs, inputs), dtype="I8"),
            "scale": StoredTensor(shape=scales, dtype="F16" if self.group else "F32"),
        }
        if not self.symmetric:
            parts["zero"] = StoredTensor(shape=scales, dtype="I8")
        return parts

    def describe(self) -> str:
        """Return the name with its options: `int8 g32`, `int8 per channel asymmetric`."""
        group = {None: "", 0: " per channel"}.get(self.group, f" g{self.group}")
        return f"{self.name}{group}{'' if self.symmetric else ' asymmetric'}"


@spec
class Int4:
    """weight = (level - zero) * scale: 4-bit levels, one scale per group of inputs.

    `group` is 32, 64 or 128 inputs; None means 32. Asymmetric by default: sixteen levels are too
    few to leave some of them unused. `fine`: a scale is a byte times a power of two that the row
    shares, and a zero counts sixteenths of a level. Otherwise scales are float16 and zeros whole
    levels, which is larger and less exact: folders of earlier versions have those.
    """

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    summary: ClassVar[str] = "4-bit integers, one scale per group of inputs"
    #: A width that is a multiple of this can be cut.
    multiple: ClassVar[int] = min(GROUPS)
    default_method: ClassVar[Method] = "mse"
    calibrated_method: ClassVar[Method] = "gptq"

    group: int | None = None
    symmetric: bool = False
    fine: bool = True

    def __post_init__(self) -> None:
        if self.group is not None:
            _check_group(self.group)

    def resolve(self, inputs: int) -> "Int4":
        """Return the scheme with every option chosen, for a matrix of this many inputs."""
        return replace(self, group=min(GROUPS)) if self.group is None else self

    def lacks(self, inputs: int) -> str:
        """Return what a matrix of this many inputs lacks for this scheme; empty if nothing."""
        group = self.resolve(inputs).group
        assert group is not None
        return _indivisible(group, inputs)

    def for_head(self) -> "Scheme":
        """Return `Int8`: a head of 4 bits costs more than all other layers together."""
        return Int8()

    def parts(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        """Return the tensors that a matrix of (outputs, inputs) is stored as, by leaf name.

        Two levels share a byte: the even column in the low nibble.
        """
        if self.group is None:
            raise InputError(f"a stored {self.name} matrix needs its group", hint="32, 64 or 128")
        scales = (outputs, inputs // self.group)
        parts = {
            "qweight": StoredTensor(shape=(outputs, inputs // 2), dtype="U8"),
            "scale": StoredTensor(shape=scales, dtype="U8" if self.fine else "F16"),
        }
        if not self.symmetric:
            parts["zero"] = StoredTensor(shape=scales, dtype="U8")
        if self.fine:
            parts["exponent"] = StoredTensor(shape=(outputs,), dtype="I8")
        return parts

    def describe(self) -> str:
        """Return the name with its options: `int4 g32 asymmetric`."""
        group = "" if self.group is None else f" g{self.group}"
        scales = "" if self.fine else ", 16-bit scales"
        return f"{self.name}{group}{'' if self.symmetric else ' asymmetric'}{scales}"


@spec
class Float8:
    """weight = value * scale: 8-bit floats, one float32 scale per output channel.

    The floats are e4m3: four bits of exponent, three of mantissa, up to 448, no infinity. Small
    weights keep their relative precision, which integers of the same size do not give them.
    """

    name: ClassVar[str] = "fp8"
    bits: ClassVar[int] = 8
    summary: ClassVar[str] = "8-bit floats (e4m3), one scale per output channel"
    default_method: ClassVar[Method] = "absmax"
    calibrated_method: ClassVar[Method] = "absmax"

    def resolve(self, inputs: int) -> "Float8":
        """Return the scheme with every option chosen, for a matrix of this many inputs."""
        return self

    def lacks(self, inputs: int) -> str:
        """Return what a matrix of this many inputs lacks for this scheme; empty if nothing."""
        return ""

    def for_head(self) -> "Scheme":
        """Return the scheme of heads and of a tied table, where none is given."""
        return self

    def parts(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        """Return the tensors that a matrix of (outputs, inputs) is stored as, by leaf name."""
        return {
            "qweight": StoredTensor(shape=(outputs, inputs), dtype="F8_E4M3"),
            "scale": StoredTensor(shape=(outputs,), dtype="F32"),
        }

    def describe(self) -> str:
        """Return the name; there are no options."""
        return self.name


#: Every scheme. Command line, page, costs and checks list these.
Scheme: TypeAlias = Int8 | Int4 | Float8
SCHEMES: tuple[type[Scheme], ...] = get_args(Scheme)
NAMES = tuple(scheme.name for scheme in SCHEMES)
#: What a bare number of bits means.
BY_BITS: dict[int, type[Scheme]] = {8: Int8, 4: Int4}


def check_scheme(scheme: Scheme) -> Scheme:
    """Return the scheme; refuse anything that is not a member of the union."""
    check_member("scheme", scheme, Scheme)
    return scheme


def scheme_class(name: str) -> type[Scheme]:
    """Return the scheme with this name."""
    for scheme in SCHEMES:
        if scheme.name == name:
            return scheme
    raise InputError(f"no quantization scheme '{name}'", hint=nearest(name, NAMES))


def scheme_of_bits(
    bits: float, *, what: str = "bits", rule: str = "neither 8 nor 4"
) -> type[Scheme]:
    """Return the integer scheme with this many bits; an error names `what`, and the `rule`."""
    if bits not in BY_BITS:
        raise InputError(f"{what} {bits:g} is {rule}", hint="use 8 or 4")
    return BY_BITS[int(bits)]


def make_scheme(scheme: type[Scheme], **options: Any) -> Scheme:
    """Make a scheme from options; None means its default, and options it lacks are left out."""
    own = {field.name for field in fields(scheme)}
    return scheme(**{k: v for k, v in options.items() if k in own and v is not None})


def scheme_bytes(scheme: Scheme, shape: tuple[int, ...]) -> int:
    """Return the bytes of a quantized matrix: levels, scales, zeros."""
    outputs, inputs = shape
    parts = check_scheme(scheme).resolve(inputs).parts(outputs, inputs)
    return sum(part.nbytes for part in parts.values())
