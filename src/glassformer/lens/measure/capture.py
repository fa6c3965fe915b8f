"""One forward pass with the taps that the lens reads: the only place where it runs a model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.lens.measure.head_names import HeadName, attentions, kinds_of, prefix_of
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.nn.taps import Edit, Taps
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# B batch (1), T length, S source length, D d_model, N heads, H d_head

#: Attention maps of more bytes than this are refused before they are computed.
MOST_MAPS = 4 << 30


@dataclass(frozen=True, eq=False)
class Capture:
    """What one pass left: taps by name, and the hidden states that the heads read."""

    inputs: Inputs
    seen: dict[str, Tensor]
    hidden_TD: Tensor


@contextmanager
def at_rest(model: Model) -> Iterator[None]:
    """Without dropout and without gradients, for the time of the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def one_row(model: Model, inputs: "Batch | Inputs | Tensor | np.ndarray | Sequence[int]") -> Inputs:
    """Checked tensors of exactly one sequence; bare ids may be (T,) or (1, T)."""
    given = inputs
    if not isinstance(given, (Batch, Inputs)):
        try:
            ids = given if isinstance(given, Tensor) else np.asarray(given)
        except ValueError as error:
            raise InputError("ids of different lengths", hint="a look is of one row") from error
        given = ids[None] if ids.ndim == 1 else ids
    checked = model.inputs(given)
    if len(checked.tokens_BT) != 1:
        raise InputError(
            f"{len(checked.tokens_BT)} sequences to look at",
            hint="a look is of one: take one row of the batch",
        )
    return checked


def capture(model: Model, inputs: Inputs, *, ablate: Sequence[HeadName] = ()) -> Capture:
    """Run the model once and keep attention, residual and sublayer outputs."""
    spec = model.spec
    _check_size(spec, inputs)
    read = ["*.attn.weights", "*.attn.out", "*.ffn.out", "*embed", "*.resid_mid", "*.resid_post"]
    if spec.encoder is not None:
        read += ["*.cross.weights", "*.cross.out", "*.resid_cross"]
    taps = Taps(read=read, edit=zeroed(spec, ablate))
    taps.check(spec)
    with at_rest(model):
        hidden_BTD = model.hidden(inputs, taps=taps)
    return Capture(inputs, {name: x[0] for name, x in taps.seen.items()}, hidden_BTD[0])


def zeroed(spec: ModelSpec, heads: Sequence[HeadName]) -> dict[str, Edit]:
    """Edits that set the outputs of heads to 0 before they are joined and projected."""
    by_tap: dict[str, list[int]] = {}
    for head in heads:
        by_tap.setdefault(head.tap(spec), []).append(head.head)

    def without(places: list[int]) -> Edit:
        def edit(x_BNTH: Tensor) -> Tensor:
            x_BNTH = x_BNTH.clone()
            x_BNTH[:, places] = 0.0
            return x_BNTH

        return edit

    return {tap: without(places) for tap, places in by_tap.items()}


def residual_rows(spec: ModelSpec) -> list[tuple[str, str]]:
    """Names of the rows of the answering stack's residual, each with its tap."""
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
    """Changes when a weight is written to or replaced: a look is of the model as it was.

    A quantized layer has no parameters, and its buffers come and go with the form that it runs in:
    it counts by itself how often other weights were loaded into it.
    """
    found = []
    for tensor in model.parameters():
        written = 0 if tensor.is_inference() else tensor._version
        found += [tensor.data_ptr(), tensor.element_size(), written]
    found += [part.loads for part in model.modules() if hasattr(part, "loads")]
    return tuple(found)


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
            hint=f"look at {fewer} tokens or fewer",
        )


def repeated(inputs: Inputs, count: int) -> Inputs:
    """One sequence as a batch of copies."""

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
