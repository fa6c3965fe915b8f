"""The cached forward: `start` reads prompts, `step` adds a token per row, `reorder` is for beams.

It runs the same list of operations; what `Remember` extends is in a state that the caller holds,
never on the model. Rows of a batch may have prompts of different lengths, padded on either side.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from glassformer.byhand.inputs import Side, check_side
from glassformer.byhand.model import Model
from glassformer.byhand.pass_context import Array, PassContext, Workspace
from glassformer.byhand.table import Past, Rows
from glassformer.spec.errors import InputError

# B batch, T new length, S length so far, D d_model, K key-value heads, H d_head, V vocab


@dataclass(slots=True)
class DecodeState:
    """The past of every memory, which of its positions are real, and an encoder's rows."""

    ws: Workspace
    pasts: dict[str, Past] = field(default_factory=dict)
    length: int = 0
    valid_BS: Array | None = None
    source: Rows | None = None
    #: Keys and values of the source, computed once.
    ready: dict[str, tuple[Array, Array]] = field(default_factory=dict)

    def reorder(self, rows_B: Array) -> None:
        """Make row b what row rows_B[b] was; rows may repeat."""
        for past in self.pasts.values():
            past.reorder(rows_B)
        self.ready = {name: (k[rows_B], v[rows_B]) for name, (k, v) in self.ready.items()}
        self.valid_BS = None if self.valid_BS is None else self.valid_BS[rows_B]
        if self.source is not None:
            self.source = Rows(self.source.side.of(rows_B))


def start(
    model: Model,
    tokens_BT: Array,
    *,
    valid_BT: Array | None = None,
    source_tokens_BS: Array | None = None,
    source_valid_BS: Array | None = None,
) -> tuple[Array, DecodeState]:
    """Read the prompts; return logits (B, V) after each row's last real token, and the state."""
    inputs = model.inputs(
        tokens_BT,
        valid_BT=valid_BT,
        source_tokens_BS=source_tokens_BS,
        source_valid_BS=source_valid_BS,
    )
    if "next" not in model.spec.head_names():
        raise InputError(
            "this model has no next-token head to decode with",
            hint=f"it has: {', '.join(model.spec.head_names())}",
        )
    state = DecodeState(Workspace(model.dtype))
    if inputs.source is not None:
        state.source = Rows(inputs.source)
        run = model.new_run({"source": state.source}, PassContext(Workspace(model.dtype)))
        model.plan.forward(run, (one for one in model.plan.body if one.side == "source"))
        state.ready = run.memories
    hidden_BTD = _advance(model, inputs.target, state)
    B, T, _ = hidden_BTD.shape
    last_B = np.full(B, T - 1)
    if inputs.target.valid_BT is not None:
        last_B = T - 1 - np.argmax(inputs.target.valid_BT[:, ::-1], axis=1)
    return model.logits(hidden_BTD[np.arange(B), last_B]), state


def step(model: Model, tokens_B: Array, *, state: DecodeState) -> Array:
    """Add one token to each row; return next-token logits (B, V)."""
    side = check_side(np.asarray(tokens_B)[:, None], model=model.spec, past=state.length)
    return model.logits(_advance(model, side, state)[:, -1])


def _advance(model: Model, side: Side, state: DecodeState) -> Array:
    """Return hidden states of the new tokens; append their keys and values to the past."""
    B, T = side.tokens_BT.shape
    state.valid_BS = _joined(state.valid_BS, state.length, side.valid_BT, (B, T))
    state.ws.reset()
    sides = {"target": Rows(side, past=state.length, valid_BS=state.valid_BS)}
    if state.source is not None:
        sides["source"] = state.source
    run = model.new_run(sides, PassContext(state.ws), pasts=state.pasts)
    run.memories |= state.ready
    model.plan.forward(run, (one for one in model.plan.body if one.side == "target"))
    state.length += T
    hidden_MD: Array = run.values[model.plan.numbers[model.plan.program.hidden]]
    return hidden_MD.reshape(B, T, -1)


def _joined(
    past_BS: Array | None, length: int, new_BT: Array | None, shape: tuple[int, int]
) -> Array | None:
    """Join the validity of past and new positions; None while every position is real."""
    if past_BS is None and new_BT is None:
        return None
    parts: list[Any] = [
        np.ones((shape[0], length), np.bool_) if past_BS is None else past_BS,
        np.ones(shape, np.bool_) if new_BT is None else new_BT,
    ]
    return np.concatenate(parts, axis=1)
