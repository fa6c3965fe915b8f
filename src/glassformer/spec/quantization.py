"""Quantization as a value: the request, the layers of a checkpoint, and their stored tensors.

Targets and stored names come from the manifest: no other code decides what is quantized, or what it
is called on disk. The kinds of number are in `spec.schemes`.
"""

from dataclasses import fields, replace
from typing import Any, Literal

from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.manifest import (
    Parameter,
    head_parameters,
    is_factorized,
    manifest,
    stored,
)
from glassformer.spec.model import MaskedHead, ModelSpec, NextHead, VectorHead
from glassformer.spec.schemes import (
    SCHEMES,
    Int4,
    Int8,
    Method,
    RecordedMethod,
    Scheme,
    StoredTensor,
    check_scheme,
    make_scheme,
    scheme_class,
    scheme_of_bits,
)
from glassformer.spec.serialize import from_dict, to_dict

#: What a tied table becomes: one quantized table for both uses; a quantized head beside a float
#: table; or a table that stays as it is.
Tied = Literal["share", "untie", "skip"]
#: What becomes of a layer that the scheme does not fit.
#: `auto`: int8 where the group is ours to choose; a group that was given is refused.
Indivisible = Literal["auto", "refuse", "int8", "keep"]


@spec
class QuantSpec:
    """A quantization of a model. None stands for the scheme's own default:

    head: the scheme of heads and of a tied table (`Scheme.for_head`). method: how scales are found
    (`Scheme.default_method`).

    mean_bits: between 4 and 8, what the layers other than those may have on average: the ones that
    lose most by 4 bits are named in `wider` and get 8 (`quant.mixed` chooses them).
    """

    scheme: Scheme = Int8()
    head: Scheme | None = None
    method: Method | None = None
    tied: Tied = "share"
    indivisible: Indivisible = "auto"
    mean_bits: float | None = None
    wider: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mean_bits is not None and not (
            isinstance(self.scheme, Int4) and Int4.bits < self.mean_bits < Int8.bits
        ):
            raise InputError(
                f"a mean of {self.mean_bits:g} bits with {self.scheme.name}",
                hint="int4, and a mean between 4 and 8",
            )

    @property
    def resolved_method(self) -> Method:
        """The method, or the scheme's default."""
        return self.method or self.scheme.default_method

    @property
    def head_scheme(self) -> Scheme:
        """The scheme of heads and of the table that a tied one shares."""
        return self.scheme.for_head() if self.head is None else self.head

    def scheme_of(self, target: Parameter) -> Scheme | None:
        """Return the scheme of one tensor of the manifest; None leaves it as it is."""
        inputs = target.shape[-1]
        head = target.role in ("head", "embedding")
        own = self.head_scheme if head else self.scheme
        scheme = own.resolve(inputs)
        if layer_of(target.name) in self.wider:
            scheme = Int8().resolve(inputs)
        problem = scheme.lacks(inputs)
        if not problem:
            return scheme
        rule = self.indivisible
        if rule == "auto":
            rule = "refuse" if own == own.resolve(inputs) else "int8"
        match rule:
            case "int8":
                return Int8().resolve(inputs)
            case "keep":
                return None
            case "refuse":
                raise InputError(
                    problem,
                    where=layer_of(target.name),
                    hint="leave the group out, or choose one that fits; {--indivisible int8|"
                    "indivisible='int8'} rounds such layers to 8 bits, {keep|'keep'} leaves them",
                )


def quant_spec(
    *,
    scheme: str | Scheme | None = None,
    bits: float | None = None,
    group: int | None = None,
    symmetric: bool | None = None,
    head_bits: int | None = None,
    method: Method | None = None,
    tied: Tied = "share",
    indivisible: Indivisible = "auto",
) -> QuantSpec:
    """Make the spec of a quantization from the options of `glass quantize` and `gf.quantize`.

    A scheme is given by name, as a value, or by its bits (8 or 4); without any it is int8. Bits
    between the two are a mean: int4, and int8 for the layers that lose most by it.
    """
    if scheme is not None and bits is not None:
        raise InputError("a scheme and bits are both given", hint="give one of them")
    mean_bits = bits if bits is not None and Int4.bits < bits < Int8.bits else None
    bits = bits if mean_bits is None else Int4.bits
    options = {"group": group, "symmetric": symmetric}
    head = None
    if head_bits is not None:
        narrow = scheme_of_bits(head_bits, what="{--head-bits|head_bits}")
        head = make_scheme(narrow, **options)
    if isinstance(scheme, str) or scheme is None:
        if scheme is None:
            given, rule = 8 if bits is None else bits, "not from 4 to 8"
            own = scheme_of_bits(given, what="{--bits|bits}", rule=rule)
        else:
            own = scheme_class(scheme)
        made = make_scheme(own, **options)
        if head is None and symmetric is not None:
            head = make_scheme(type(made.for_head()), symmetric=symmetric)
    else:
        made = check_scheme(scheme)
        if group is not None or symmetric is not None:
            raise InputError(
                "a scheme that is a value has its options already", hint=f"{made.describe()}"
            )
    used = (made,) if head is None else (made, head)
    for name, value in options.items():
        if value is not None and not any(hasattr(each, name) for each in used):
            takes = [cls.name for cls in SCHEMES if name in {f.name for f in fields(cls)}]
            raise InputError(
                f"{made.name} has no {name} (given: {value})",
                hint=f"leave the {name} out, or use {' or '.join(takes)}",
            )
    return QuantSpec(
        scheme=made,
        head=head,
        method=method,
        tied=tied,
        indivisible=indivisible,
        mean_bits=mean_bits,
    )


@spec
class QuantizedLayer:
    """One quantized layer of a model."""

    name: str
    scheme: Scheme
    method: RecordedMethod = "absmax"


@spec
class Quantization:
    """The quantized layers of a checkpoint; all other tensors are plain."""

    layers: tuple[QuantizedLayer, ...]

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if not names or len(set(names)) < len(names):
            raise InputError("a quantization names each of its layers once, and at least one")


def layer_of(parameter: str) -> str:
    """Return the name of the module that owns a parameter."""
    return parameter.rpartition(".")[0]


def targets(model: ModelSpec, tied: Tied = "share") -> tuple[Parameter, ...]:
    """Return what can be quantized: every matrix, and a table that is also a head.

    A router stays as it is: it is small, and rounding it would send tokens to other experts. A
    pooler is read once a sequence, and a factorized table is two small factors: they stay as they
    are. With "untie" the head's own copy of
    the table is named, as the manifest of the untied model has it.
    """
    every = manifest(untied(model) if tied == "untie" else model)
    shared = {p.tied_to for p in every if p.role == "head" and p.tied_to is not None}
    keep_tables = is_factorized(model.embedding) or tied != "share"
    poolers = {
        f"heads.{name}.weight"
        for name in model.head_names()
        if isinstance(model.head(name), VectorHead)
    }
    return tuple(
        p
        for p in every
        if p.tied_to is None
        and p.role != "router"
        and p.name not in poolers
        and (p.kind == "matrix" or (p.name in shared and p.kind == "table" and not keep_tables))
    )


def logit_layers(model: ModelSpec) -> frozenset[str]:
    """Return the layers whose products are logits: heads, and the table that a tied one shares."""
    return frozenset(
        layer_of(p.tied_to or p.name) for p in head_parameters(model) if p.kind != "bias"
    )


@spec
class Coverage:
    """How far a scheme fits a model: the number of layers that it fits, and why not the others.

    Heads and a tied table are not counted: they have a scheme of their own.
    """

    scheme: Scheme
    fitting: int
    unfit: dict[str, str]

    @property
    def name(self) -> str:
        """The scheme's name, with int8 beside it where layers stay int8; empty if none fits."""
        if not self.fitting:
            return ""
        return f"{self.scheme.name} and int8" if self.unfit else self.scheme.name

    def why(self) -> str:
        """Return the first reason why a layer does not fit, and the number of such layers."""
        layer, reason = next(iter(self.unfit.items()))
        more = len(self.unfit) - 1
        others = f", and {more} more layer{'s' if more > 1 else ''}" if more else ""
        return f"{reason} of {layer}{others}"


def coverage(model: ModelSpec, scheme: Scheme) -> Coverage:
    """Return which layers of a model a scheme fits."""
    layers = {
        layer_of(p.name): scheme.lacks(p.shape[-1])
        for p in targets(model)
        if p.role not in ("head", "embedding")
    }
    unfit = {layer: reason for layer, reason in layers.items() if reason}
    return Coverage(scheme=scheme, fitting=len(layers) - len(unfit), unfit=unfit)


def untied(model: ModelSpec) -> ModelSpec:
    """Return the same model with heads that have weights of their own."""
    if is_factorized(model.embedding):
        return model
    heads = tuple(
        replace(head, tied=False) if isinstance(head, NextHead | MaskedHead) else head
        for head in model.heads
    )
    return replace(model, heads=heads)


def stored_tensors(model: ModelSpec, quantization: Quantization | None) -> dict[str, StoredTensor]:
    """Return every tensor that a checkpoint of this model holds, by name."""
    plain = {name: StoredTensor(shape=p.shape) for name, p in stored(model).items()}
    if quantization is None:
        return plain
    known = {layer_of(p.name): p for p in targets(model)}
    for layer in quantization.layers:
        if layer.name not in known:
            raise InputError(
                f"'{layer.name}' is not a layer that can be quantized",
                hint=nearest(layer.name, known),
            )
        target, scheme = known[layer.name], check_scheme(layer.scheme)
        outputs, inputs = target.shape
        problem = scheme.lacks(inputs)
        if problem:
            raise InputError(problem, where=layer.name)
        del plain[target.name]
        for leaf, part in scheme.parts(outputs, inputs).items():
            plain[f"{layer.name}.{leaf}"] = part
    return plain


# --- quantization.json --------------------------------------------------------------------------


def to_record(quantization: Quantization) -> dict[str, Any]:
    """Return plain data for `quantization.json`.

    Int8, and Int4 with 16-bit scales, are written by bits, group and symmetric, as they were before
    schemes were types, so that earlier versions read them; every other scheme carries its kind.
    """
    record = to_dict(quantization)
    for written, layer in zip(record["layers"], quantization.layers, strict=True):
        scheme = layer.scheme
        if isinstance(scheme, Int8) or (isinstance(scheme, Int4) and not scheme.fine):
            written["scheme"] = {
                "bits": scheme.bits,
                "group": scheme.group or None,  # per channel: None, as in every version
                "symmetric": scheme.symmetric,
            }
    return record


def from_record(record: Any) -> Quantization:
    """Read plain data of `quantization.json`, of this version or an earlier one."""
    layers = record.get("layers") if isinstance(record, dict) else None
    if not isinstance(layers, list):
        return from_dict(Quantization, record)  # whose error names what is wrong
    return from_dict(Quantization, {**record, "layers": [_with_kind(layer) for layer in layers]})


def _with_kind(layer: Any) -> Any:
    """Name the kind of a scheme that was written by its bits."""
    scheme = layer.get("scheme") if isinstance(layer, dict) else None
    if not isinstance(scheme, dict) or "kind" in scheme:
        return layer
    rest = {"symmetric": True, **scheme}
    bits = rest.pop("bits", 8)
    kind = scheme_of_bits(bits if isinstance(bits, int) else 0)
    if rest.get("group") is None:
        rest.pop("group", None)
        if kind is Int8:
            rest["group"] = 0
    if kind is Int4:
        rest["fine"] = False
    return {**layer, "scheme": {"kind": kind.__name__, **rest}}
