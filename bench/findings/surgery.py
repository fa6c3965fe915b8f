"""Taking something out of a built model that its spec cannot leave out.

residual: in a pre-norm block the stream after a part is x + part(norm(x)); an edit at that tap
gives back the difference to the stream before it, so that the part stands alone.
ffn: its result is replaced by zeros at its tap. scale: queries are multiplied by sqrt(d_head) at
their tap, which undoes the division. norm: every norm of a block is an identity.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.nn.block import TransformerBlock
from glassformer.nn.taps import Edit, Taps
from glassformer.spec.model import ModelSpec, tap_shapes

STREAM = ("resid_pre", "resid_mid", "resid_cross", "resid_post")


def operate(model: Model, without: Iterable[str]) -> None:
    """Change a fresh model in place."""
    edits: dict[str, Edit] = {}
    for what in without:
        match what:
            case "norm":
                for block in model.modules():
                    if isinstance(block, TransformerBlock):
                        block.attn_norm = block.ffn_norm = nn.Identity()
                        if block.cross_norm is not None:
                            block.cross_norm = nn.Identity()
            case "residual":
                edits |= no_residual(model.spec)
            case "ffn":
                edits |= everywhere(model.spec, "ffn.out", torch.zeros_like)
            case "scale":
                edits |= everywhere(model.spec, ".q", unscaled)
            case _:
                raise AssertionError(what)
    if edits:
        always_edited(model, edits)


def everywhere(
    spec: ModelSpec, leaf: str, edit: Callable[[Tensor], Tensor]
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The same edit at every tap whose name ends so."""
    return {name: edit for name in tap_shapes(spec) if name.endswith(leaf)}


def unscaled(q_BNTH: Tensor) -> Tensor:
    """Queries so much longer that dividing the scores by sqrt(d_head) changes nothing."""
    return q_BNTH * math.sqrt(q_BNTH.shape[-1])


def no_residual(spec: ModelSpec) -> dict[str, Callable[[Tensor], Tensor]]:
    """Edits that keep each part's own result and drop what it was added to."""
    edits: dict[str, Callable[[Tensor], Tensor]] = {}
    before: dict[str, Tensor] = {}

    def keep(at: str) -> Callable[[Tensor], Tensor]:
        def remember(x: Tensor) -> Tensor:
            before[at] = x
            return x

        return remember

    def drop(at: str) -> Callable[[Tensor], Tensor]:
        def alone(x: Tensor) -> Tensor:
            before[at] = part = x - before[at]
            return part

        return alone

    for name in tap_shapes(spec):
        at, _, leaf = name.rpartition(".")
        if leaf in STREAM:
            edits[name] = keep(at) if leaf == STREAM[0] else drop(at)
    return edits


def always_edited(model: Model, edits: Mapping[str, Edit]) -> None:
    """Make the model compute with these edits from now on, in training and after it."""
    taps = Taps(edit=edits)
    taps.check(model.spec)
    plain = model.hidden

    def hidden(inputs: Inputs, *, taps: Taps | None = None, **options: Any) -> Tensor:
        return plain(inputs, taps=edited if taps is None else taps, **options)

    edited = taps
    model.hidden = hidden  # type: ignore[method-assign]
