"""Time each layer shape, float and quantized, to find the layers that get faster on this machine.

Quantization always saves memory, but not always time. Layers that would be slower stay float.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.models.model import Model
from glassformer.nn.embedding import TokenEmbedding
from glassformer.quant.convert import Select, plan
from glassformer.quant.layers import QuantizedEmbedding, QuantizedLinear, QuantizedWeight
from glassformer.quant.schemes import quantize_tensor
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Scheme

# M rows, O outputs, I inputs

ROUNDS = 9
#: The length of a round, long enough that the clock's resolution does not matter.
ROUND_SECONDS = 2e-3


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one product of a layer's shape, float and quantized."""

    path: str
    shape: tuple[int, int]
    scheme: Scheme
    float_ms: float
    quantized_ms: float

    @property
    def wins(self) -> bool:
        """True if the quantized layer is faster."""
        return self.quantized_ms < self.float_ms


def time_layers(
    model: Model,
    spec: QuantSpec,
    *,
    rows: int = 1,
    select: Select | None = None,
    backend: str = "auto",
) -> list[Timing]:
    """Time every layer that would be quantized, float and quantized, for `rows` input rows.

    Layers of one shape and scheme are timed once.
    """
    known: dict[tuple[tuple[int, int], Scheme, bool], tuple[float, float]] = {}
    found = []
    for path, (module, scheme) in plan(model, spec, select=select).items():
        weight_OI = module.weight.detach()
        table = isinstance(module, TokenEmbedding)
        outputs, inputs = weight_OI.shape
        key = ((outputs, inputs), scheme, table)
        if key not in known:
            known[key] = _both_ways(weight_OI, scheme, rows=rows, table=table, backend=backend)
        found.append(Timing(path, key[0], scheme, *known[key]))
    return found


def keeping_float(timings: list[Timing], select: Select | None = None) -> Select:
    """Return a predicate that leaves out every layer that is slower when quantized."""
    losers = {timing.path for timing in timings if not timing.wins}

    def choose(path: str, module: nn.Module) -> bool:
        return path not in losers and (select is None or select(path, module))

    return choose


@torch.no_grad()
def _both_ways(
    weight_OI: Tensor, scheme: Scheme, *, rows: int, table: bool, backend: str
) -> tuple[float, float]:
    x_MI = torch.randn(rows, weight_OI.shape[1], device=weight_OI.device, dtype=weight_OI.dtype)
    tensor = quantize_tensor(weight_OI, scheme)
    if table:
        layer: QuantizedWeight = QuantizedEmbedding(tensor, backend=backend)
    else:
        layer = QuantizedLinear(tensor, None, backend=backend)
    sides = (lambda: F.linear(x_MI, weight_OI), lambda: layer.times(x_MI, None))
    inner = [_calls_a_round(side) for side in sides]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for side, calls, taken in zip(sides, inner, times, strict=True):
            taken.append(_timed(side, calls))
    float_ms, quantized_ms = (statistics.median(taken) * 1e3 for taken in times)
    return float_ms, quantized_ms


def _calls_a_round(side: Callable[[], Tensor]) -> int:
    side()
    return max(1, min(200, int(ROUND_SECONDS / max(1e-7, _timed(side, 1)))))


def _timed(side: Callable[[], Tensor], calls: int) -> float:
    """Return seconds per call."""
    begin = time.perf_counter()
    for _ in range(calls):
        out = side()
    float(out[0, 0])  # waits for a GPU to finish
    return (time.perf_counter() - begin) / calls
