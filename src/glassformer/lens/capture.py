"""One forward pass with the taps that the lens reads, and edits of taps.

Checks the input (exactly one sequence, maps that fit into memory), runs the model in eval mode
without gradients, and keeps attention, residual stream and sublayer outputs.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.lens.heads import HeadName, attentions, kinds_of, prefix_of
from glassformer.models.inputs import Inputs
from glassformer.models.model import Holder, Model
from glassformer.nn.linear import PackedWeight
from glassformer.nn.taps import Edit, Taps
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# B batch (1), T length, S source length, D d_model, N heads, H d_head

#: Attention maps of more bytes than this are refused before they are computed.
MOST_MAPS = 4 << 30

#: One sequence, in any of the forms that `inspect` accepts.
OneSequence = Batch | Inputs | Tensor | NDArray[Any] | Sequence[int]


def tapped_model(model: Model | Holder) -> Model:
    """Return the model with taps: `model` itself, or the one inside a loaded model."""
    inner = model if isinstance(model, Model) else model.model
    if not isinstance(inner, Model):
        raise InputError(
            f"{type(inner).__name__} is another library's module and has no taps, so its "
            "attention, lens, norms and heads are not offered",
            hint='load it with backend="native"',
        )
    return inner


@contextmanager
def eval_mode(model: Model) -> Iterator[None]:
    """Within the block: no dropout, no gradients. Every part's mode is restored afterwards."""
    training = [part for part in model.modules() if part.training]
    for part in training:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


def one_row(model: Model, inputs: OneSequence) -> Inputs:
    """Return checked tensors of exactly one sequence; bare ids may be (T,) or (1, T)."""
    given = inputs
    if not isinstance(given, (Batch, Inputs)):
        try:
            ids = given if isinstance(given, Tensor) else np.asarray(given)
        except ValueError as error:
            raise InputError("ids of different lengths", hint="inspect one sequence") from error
        given = ids[None] if ids.ndim == 1 else ids
    checked = model.inputs(given)
    if len(checked.tokens_BT) != 1:
        raise InputError(
            f"{len(checked.tokens_BT)} sequences to inspect",
            hint="inspect one: take one row of the batch",
        )
    return checked


@dataclass(frozen=True, eq=False)
class Capture:
    """The result of one pass: activations by tap name, and the hidden states the heads read."""

    inputs: Inputs
    taps: dict[str, Tensor]
    hidden_TD: Tensor


def capture(model: Model, inputs: Inputs, *, ablate: Sequence[HeadName] = ()) -> Capture:
    """Run the model once, with these heads ablated, and keep attention, residual and outputs."""
    spec = model.spec
    _check_size(spec, inputs)
    read = ["*.attn.weights", "*.attn.out", "*.ffn.out", "*embed", "*.resid_mid", "*.resid_post"]
    if spec.encoder is not None:
        read += ["*.cross.weights", "*.cross.out", "*.resid_cross"]
    if spec.mixtures():
        read.append("*.ffn.routing")
    taps = Taps(read=read, edit=edits_by_tap(ablations(spec, ablate)))
    taps.check(spec)
    with eval_mode(model):
        hidden_BTD = model.hidden(inputs, taps=taps.within(model.scoped_taps))
    return Capture(inputs, {name: x[0] for name, x in taps.seen.items()}, hidden_BTD[0])


# --- edits of taps --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Write `value` at `index` (a head, or a position) of a tap, in these rows of the batch."""

    tap: str
    rows: int | slice
    index: int
    value: Tensor | float


def ablations(
    spec: ModelSpec, heads: Iterable[HeadName], *, rows: int | slice = slice(None)
) -> list[Assignment]:
    """Set the outputs of heads to 0 before they are concatenated and projected."""
    return [Assignment(head.tap(spec), rows, head.head, 0.0) for head in heads]


def edits_by_tap(assignments: Iterable[Assignment]) -> dict[str, Edit]:
    """Return one edit per tap that makes all assignments to it and changes nothing else."""
    by_tap: dict[str, list[Assignment]] = {}
    for each in assignments:
        by_tap.setdefault(each.tap, []).append(each)

    def assign(each_of_tap: list[Assignment]) -> Edit:
        def edit(x: Tensor) -> Tensor:
            x = x.clone()
            for each in each_of_tap:
                x[each.rows, each.index] = each.value
            return x

        return edit

    return {tap: assign(each_of_tap) for tap, each_of_tap in by_tap.items()}


def repeated(inputs: Inputs, count: int) -> Inputs:
    """Return one sequence as a batch of `count` copies, without copying memory."""

    def copies(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.expand(count, -1)

    return replace(
        inputs,
        tokens_BT=inputs.tokens_BT.expand(count, -1),
        valid_BT=copies(inputs.valid_BT),
        segments_BT=copies(inputs.segments_BT),
        source_BS=copies(inputs.source_BS),
        source_valid_BS=copies(inputs.source_valid_BS),
    )


# --- facts about the model ------------------------------------------------------------------------


def residual_rows(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return the points of the decoder's residual stream: a display name and the tap of each."""
    at = prefix_of(spec, "self")
    rows = [("embed", f"{at}embed")]
    for layer, block in enumerate(spec.decoder.blocks()):
        here = f"{at}blocks.{layer}"
        rows.append((f"L{layer} attn", f"{here}.resid_mid"))
        if block.cross is not None:
            rows.append((f"L{layer} cross", f"{here}.resid_cross"))
        rows.append((f"L{layer} mlp", f"{here}.resid_post"))
    return rows


def weight_versions(model: Model) -> tuple[int, ...]:
    """Return numbers that change when any weight is written to or replaced.

    A quantized layer has no parameters, and its buffers come and go with the form that it runs in,
    so it counts itself how often other weights were loaded into it.
    """
    versions: list[int] = []
    for tensor in model.parameters():
        written = 0 if tensor.is_inference() else tensor._version
        versions += [tensor.data_ptr(), tensor.element_size(), written]
    versions += [part.loads for part in model.modules() if isinstance(part, PackedWeight)]
    return tuple(versions)


def _check_size(spec: ModelSpec, inputs: Inputs) -> None:
    T = inputs.tokens_BT.shape[1]
    S = T if inputs.source_BS is None else inputs.source_BS.shape[1]
    sides = {"self": T * T, "encoder": S * S, "cross": T * S}
    cells = sum(
        attention.n_heads * sides[kind]
        for kind in kinds_of(spec)
        for attention in attentions(spec, kind)
    )
    if 4 * cells > MOST_MAPS:
        fewer = int(max(T, S) * (MOST_MAPS / (4 * cells)) ** 0.5)
        raise InputError(
            f"attention maps of {max(T, S)} tokens would take {4 * cells / 2**30:.0f} GiB",
            hint=f"inspect {fewer} tokens or fewer",
        )
