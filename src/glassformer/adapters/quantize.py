"""`glassformer.quantize`: one call, for a model with or without an adapter around it."""

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from glassformer.adapters.native import NativeAdapter
from glassformer.models.model import Model
from glassformer.quant.convert import quantize_in_turn, quantize_model
from glassformer.spec.quantization import Indivisible, QuantSpec, Tied, quant_spec
from glassformer.spec.schemes import Method, Scheme

M = TypeVar("M", Model, NativeAdapter)


def quantize(
    model: M,
    *,
    scheme: str | Scheme | None = None,
    bits: int | None = None,
    group: int | None = None,
    symmetric: bool | None = None,
    method: Method | None = None,
    head_bits: int | None = None,
    tied: Tied = "share",
    indivisible: Indivisible = "refuse",
    calibrate: "list[torch.Tensor] | None" = None,
    select: Callable[[str, nn.Module], bool] | None = None,
    backend: str = "auto",
) -> M:
    """Return a quantized copy; the model itself stays as it is.

    `scheme` is a name, such as "int4", or a value, such as `Int4(group=32)`; `bits` is 8 or 4
    instead of it. `calibrate`: batches of tokens, for GPTQ.
    """
    if method is None and calibrate is not None:
        method = "gptq"
    spec = quant_spec(
        scheme=scheme,
        bits=bits,
        group=group,
        symmetric=symmetric,
        method=method,
        head_bits=head_bits,
        tied=tied,
        indivisible=indivisible,
    )
    if isinstance(model, NativeAdapter):
        made = _quantized(copy.deepcopy(model.model), spec, calibrate, select, backend)
        return model.with_model(made)
    return _quantized(copy.deepcopy(model), spec, calibrate, select, backend)


@torch.no_grad()
def _quantized(
    model: Model,
    spec: QuantSpec,
    calibrate: "list[torch.Tensor] | None",
    select: Callable[[str, nn.Module], bool] | None,
    backend: str,
) -> Model:
    if calibrate is None:
        return quantize_model(model, spec, select=select, backend=backend)
    return quantize_in_turn(model, calibrate, spec, select=select, backend=backend)
