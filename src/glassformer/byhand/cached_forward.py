"""The cached forward: `start` reads prompts, `step` adds a token per row, `reorder` is for beams.

Keys and values of the past are in a state that the caller holds, never on the model. Rows of a
batch may have prompts of different lengths, padded on either side.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from glassformer.byhand.attention import keys_values
from glassformer.byhand.inputs import Side, check_side
from glassformer.byhand.model import Model
from glassformer.byhand.pass_context import Array, PassContext, Workspace
from glassformer.byhand.stack import stack_forward
from glassformer.spec.errors import InputError

# B batch, T new length, S length so far, D d_model, K key-value heads, H d_head, V vocab


class LayerPast:
    """Keys and values of one layer, in memory that doubles when it is full."""

    def __init__(self) -> None:
        self.length = 0
        self._k: Array | None = None
        self._v: Array | None = None

    def extend(self, k_BKTH: Array, v_BKTH: Array) -> tuple[Array, Array]:
        """Append the new ones; return views of all so far."""
        end = self.length + k_BKTH.shape[2]
        self._k = self._with_room(self._k, k_BKTH, end)
        self._v = self._with_room(self._v, v_BKTH, end)
        self._k[:, :, self.length : end] = k_BKTH
        self._v[:, :, self.length : end] = v_BKTH
        self.length = end
        return self._k[:, :, :end], self._v[:, :, :end]

    def reorder(self, rows_B: Array) -> None:
        """Make row b what row rows_B[b] was."""
        assert self._k is not None and self._v is not None
        self._k, self._v = self._k[rows_B], self._v[rows_B]

    def _with_room(self, held: Array | None, new_BKTH: Array, end: int) -> Array:
        if held is not None and held.shape[2] >= end:
            return held
        B, K, _, H = new_BKTH.shape
        roomy = np.empty((B, K, 2 * end, H), new_BKTH.dtype)
        if held is not None:
            roomy[:, :, : self.length] = held[:, :, : self.length]
        return roomy


@dataclass(slots=True)
class DecodeState:
    """The past of every layer, which of its positions are real, and the memory of an encoder."""

    pasts: list[LayerPast]
    ws: Workspace
    length: int = 0
    valid_BS: Array | None = None
    memory_BSD: Array | None = None
    memory_valid_BS: Array | None = None
    ready: list[tuple[Array, Array]] = field(default_factory=list)

    def reorder(self, rows_B: Array) -> None:
        """Make row b what row rows_B[b] was; rows may repeat."""
        for past in self.pasts:
            past.reorder(rows_B)
        self.ready = [(k[rows_B], v[rows_B]) for k, v in self.ready]
        self.valid_BS = None if self.valid_BS is None else self.valid_BS[rows_B]
        if self.memory_BSD is not None:
            self.memory_BSD = self.memory_BSD[rows_B]
        if self.memory_valid_BS is not None:
            self.memory_valid_BS = self.memory_valid_BS[rows_B]


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
    state = DecodeState([LayerPast() for _ in range(model.spec.n_layers)], Workspace(model.dtype))
    if inputs.source is not None:
        parts = model.stack("encoder.")
        pass_context = PassContext(Workspace(model.dtype))
        state.memory_BSD, _ = stack_forward(inputs.source, parts=parts, pass_context=pass_context)
        state.memory_valid_BS = inputs.source.valid_BT
        for block, params, _ in model.stack("decoder.").blocks:
            assert block.cross is not None
            ready = keys_values(
                state.memory_BSD,
                attention=block.cross,
                params=params.cross,
                pass_context=pass_context,
            )
            state.ready.append(ready)
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
    hidden_BTD, _ = stack_forward(
        side,
        parts=model.stack("" if state.memory_BSD is None else "decoder."),
        pass_context=PassContext(state.ws),
        memory_BSD=state.memory_BSD,
        memory_valid_BS=state.memory_valid_BS,
        past=state.length,
        valid_BS=state.valid_BS,
        pasts=state.pasts,
        ready=state.ready or None,
    )
    state.length += T
    return hidden_BTD


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
