"""One text in several precisions: what each says at every position, and what the bits cost.

The float model is looked at once; the same tokens go through each quantized copy. Divergence is in
nats, both ways, at each position that is read: all of a continuation, the one place of an answer.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.quantize import quantize
from glassformer.lab.measure.precision import Speed, layer_errors, speeds
from glassformer.lens.capture import eval_mode
from glassformer.lens.inspection import Inspection
from glassformer.lens.measure.predictions import Readout, divergence
from glassformer.models.model import Model
from glassformer.models.state import weights_of
from glassformer.quant.arrays import quantized_arrays
from glassformer.quant.status import is_model_quantized, resident_bytes
from glassformer.spec.errors import InputError
from glassformer.spec.schemes import NAMES
from glassformer.store.tensors import CODES, Arrays, tensor_chunks

# T positions, D d_model, V answers

#: The likeliest answers of each precision that are told.
TOP = 6


@dataclass(frozen=True, slots=True)
class Precision:
    """A copy of a model; `name` is float32 or a scheme's, `schemes` the layers of each."""

    name: str
    model: Model
    schemes: dict[str, int]
    backends: tuple[str, ...]
    file_bytes: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Spoken:
    """Two precisions on one text: divergences (positions,) and the error of each layer."""

    there: tuple[float, ...]
    back: tuple[float, ...]
    same: tuple[bool, ...]
    layers: dict[str, float]


@dataclass(frozen=True, slots=True)
class Prompted:
    """What every precision says of one text.

    `positions`: those that are read. `answers[i]`: at the i-th of them, the likeliest answers of
    any precision by id, and the probability that each precision gives them.
    """

    look: Inspection
    precisions: tuple[Precision, ...]
    positions: tuple[int, ...]
    answers: tuple[dict[int, tuple[float, ...]], ...]
    against: dict[str, Spoken]

    def __repr__(self) -> str:
        lines = [f"{len(self.positions)} positions in {len(self.precisions)} precisions"]
        for one in self.precisions:
            line = f"  {one.name:<8} {one.file_bytes:>12,} bytes on disk"
            if one.name in self.against:
                far = self.against[one.name].there
                line += f", KL mean {sum(far) / len(far):.5f}, worst {max(far):.4f} nats"
            lines.append(line)
        return "\n".join(lines)


def in_precisions(adapter: BaseAdapter, *, schemes: Sequence[str] = NAMES) -> tuple[Precision, ...]:
    """Return the model in float32, and a copy in each scheme; layers it does not fit get int8."""
    model = adapter.model
    if not isinstance(model, Model):
        raise InputError("only a model of our own parts can be quantized")
    if is_model_quantized(model):
        raise InputError(
            "the model is quantized already", hint="choose the float model that it was made of"
        )
    full = model
    if next(model.parameters()).dtype != torch.float32:
        full = copy.deepcopy(model).float()
    made = [_measured("float32", full)]
    for name in schemes:
        made.append(_measured(name, quantize(full, scheme=name, indivisible="int8")))
    return tuple(made)


def _measured(name: str, model: Model) -> Precision:
    report = is_model_quantized(model)
    schemes: dict[str, int] = {}
    for layer in report.layers.values():
        described = layer.scheme.describe()
        schemes[described] = schemes.get(described, 0) + 1
    arrays = quantized_arrays(model)[1] if report else weights_of(model)
    return Precision(
        name=name,
        model=model,
        schemes=schemes,
        backends=report.backends,
        file_bytes=_file_bytes(arrays),
        resident_bytes=resident_bytes(model),
    )


def _file_bytes(arrays: Arrays) -> int:
    """Of the safetensors file that a checkpoint would hold, made a tensor at a time."""
    described = {name: (CODES[a.dtype], a.shape) for name, a in sorted(arrays.items())}
    return sum(map(len, tensor_chunks(described, arrays.__getitem__)))


@torch.no_grad()
def prompted(
    adapter: BaseAdapter, precisions: Sequence[Precision], text: str, *, top: int = TOP
) -> Prompted:
    """The same tokens through each; the first precision is what the others are held against."""
    look = adapter.inspect(text)
    readings = [replace(look.readout, model=one.model) for one in precisions]
    positions = _read(look.readout)
    rows = [_rows(reading)[list(positions)] for reading in readings]
    answers: list[dict[int, tuple[float, ...]]] = []
    there: list[list[float]] = [[] for _ in readings]
    back: list[list[float]] = [[] for _ in readings]
    same: list[list[bool]] = [[] for _ in readings]
    for at in look.readout.pieces(len(positions)):
        logps = [_logp(reading, row[at]) for reading, row in zip(readings, rows, strict=True)]
        for number, logp_TV in enumerate(logps):
            there[number] += divergence(logps[0], logp_TV).tolist()
            back[number] += divergence(logp_TV, logps[0]).tolist()
            same[number] += (logp_TV.argmax(-1) == logps[0].argmax(-1)).tolist()
        answers += _answers(logps, top)
    full, *others = precisions
    against = {}
    for number, one in enumerate(others, start=1):
        errors = dict(layer_errors(full.model, one.model, look.inputs))
        against[one.name] = Spoken(
            tuple(there[number]), tuple(back[number]), tuple(same[number]), errors
        )
    return Prompted(look, tuple(precisions), positions, tuple(answers), against)


def _read(reading: Readout) -> tuple[int, ...]:
    """The positions whose distributions mean something: an answer has one."""
    if reading.model.spec.head(reading.head).readout is not None:
        return (reading.position,)
    return tuple(reading.real().nonzero().flatten().tolist())


def _rows(reading: Readout) -> Tensor:
    with eval_mode(reading.model):
        return reading.rows_of(reading.model.hidden(reading.inputs)[0])


def _logp(reading: Readout, rows_TD: Tensor) -> Tensor:
    """In double: divergences of 8 bits are near the rounding of 32."""
    return reading.model.project(rows_TD, reading.head).double().log_softmax(-1).cpu()


def _answers(logps: Sequence[Tensor], top: int) -> list[dict[int, tuple[float, ...]]]:
    """At each position the likeliest of any, by what the first gives them."""
    made = []
    most = min(top, logps[0].shape[-1])
    for t in range(len(logps[0])):
        rows = [logp_TV[t].exp() for logp_TV in logps]
        ids = {i for row_V in rows for i in row_V.topk(most).indices.tolist()}
        ranked = sorted(ids, key=lambda i, first=rows[0]: (-float(first[i]), i))
        made.append({i: tuple(float(row_V[i]) for row_V in rows) for i in ranked})
    return made


def precision_speeds(precisions: Sequence[Precision]) -> dict[str, tuple[Speed, Speed | None]]:
    """Each against the first, measured now and in turn."""
    full, *others = precisions
    return {one.name: speeds(full.model, one.model) for one in others}
