"""One pass of either engine's model with its taps, as NumPy arrays, and its way to an answer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from glassformer.byhand.model import Model as HandModel
from glassformer.byhand.norm import norm_forward
from glassformer.data.batch import Batch
from glassformer.lens.capture import at_rest, residual_rows
from glassformer.lens.headname import prefix_of
from glassformer.lens.reading import final_norm
from glassformer.models.model import Model
from glassformer.nn.taps import Taps

# B examples, T length, D d_model, V answers, M rows of any kind


class Pass(NamedTuple):
    """What one pass left, in NumPy, whichever engine made it."""

    taps: Mapping[str, NDArray[Any]]
    hidden_BTD: NDArray[Any]
    logits: NDArray[Any]  # of the head looked at: (B, T, V), or (B, V)
    normed: Callable[[NDArray[Any]], NDArray[Any]]
    project: Callable[[NDArray[Any]], NDArray[Any]]  # (M, D) to (M, V)


def one_pass(model: Model | HandModel, batch: Batch, head: str) -> Pass:
    """Attention and residual of these examples, and the logits of one head."""
    if isinstance(model, HandModel):
        return _by_hand(model, batch, head)
    return _torch(model, batch, head)


def _torch(model: Model, batch: Batch, head: str) -> Pass:
    spec = model.spec
    read = ["*.attn.weights", *(tap for _, tap in residual_rows(spec))]
    taps = Taps(read=read if spec.encoder is None else [*read, "*.cross.weights"])
    norm = final_norm(model)

    def array(x: torch.Tensor) -> NDArray[Any]:
        return (x if x.dtype == torch.float64 else x.float()).cpu().numpy()

    def through(part: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., NDArray[Any]]:
        def call(x: NDArray[Any]) -> NDArray[Any]:
            with at_rest(model):
                return array(part(torch.from_numpy(x).to(hidden_BTD)))

        return call

    with at_rest(model):
        inputs = model.inputs(batch)
        hidden_BTD = model.hidden(inputs, taps=taps)
        logits = model.logits(hidden_BTD, head, valid_BT=inputs.valid_BT)
    return Pass(
        {name: array(x) for name, x in taps.seen.items()},
        array(hidden_BTD),
        array(logits),
        (lambda x: x) if norm is None else through(norm),
        through(lambda rows: model.project(rows, head)),
    )


def _by_hand(model: HandModel, batch: Batch, head: str) -> Pass:
    taps: dict[str, NDArray[Any]] = {}
    source = batch.source
    logits = model.forward(
        batch.tokens,
        valid_BT=None if batch.valid.all() else batch.valid,
        segments_BT=batch.segments,
        source_tokens_BS=None if source is None else source.tokens,
        source_valid_BS=None if source is None or source.valid.all() else source.valid,
        taps=taps,
    )
    at = prefix_of(model.spec, "self")
    parts = model.stack(at)
    final = parts.stack.final_norm

    def normed(x: NDArray[Any]) -> NDArray[Any]:
        if final is None:
            return x
        return norm_forward(x, norm=final, params=parts.own, name="final_norm")[0]

    # A row is a sequence of one token: there even a head that answers once reads every one of them.
    return Pass(
        taps,
        taps[f"{at}final"],
        logits[head],
        normed,
        lambda rows: model.logits(rows[:, None], head=head).reshape(len(rows), -1),
    )
