"""The cached forward: `start` reads prompts, `extend` adds tokens to each row, `step` one token.

It runs the same list of operations; what `Remember` extends is in a state that the caller holds,
never on the model. Rows of a batch may have prompts of different lengths, padded on either side.
"""

import numpy as np

from glassformer.byhand.inputs import Side, check_side
from glassformer.byhand.model import Model
from glassformer.byhand.pass_context import Array, PassContext, Workspace
from glassformer.byhand.table import Rows
from glassformer.spec.errors import InputError
from glassformer.spec.state import Library, Memories, joined_valid

# B batch, T new length, S length so far, D d_model, K key-value heads, H d_head, V vocab


NUMPY_ARRAYS = Library(
    empty=lambda like, shape: np.empty(shape, like.dtype),
    true=lambda _, shape: np.ones(shape, np.bool_),
    index=lambda _, rows: np.asarray(rows, dtype=np.int64),
)


class DecodeState(Memories):
    """The memories of a program by name, in room that doubles when it is full.

    Of an encoder, `cross` has the keys and values of its rows, and as `source` its tokens and which
    of them are real.
    """

    def __init__(self, dtype: "np.dtype[np.floating]") -> None:
        super().__init__(NUMPY_ARRAYS)
        self.ws = Workspace(dtype)

    def room(self, end: int) -> int:
        """Return how many columns to have where `end` are needed."""
        return 2 * end


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
    state = DecodeState(model.dtype)
    if inputs.source is not None:
        source = Rows(inputs.source)
        run = model.new_run({"source": source}, PassContext(Workspace(model.dtype)))
        model.plan.forward(run, (one for one in model.plan.body if one.side == "source"))
        state.cross |= run.memories
        held = (inputs.source.tokens_BT, inputs.source.valid_BT)
        state.cross["source"] = tuple(one for one in held if one is not None)
    hidden_BTD = _advance(model, inputs.target, state)
    B, T, _ = hidden_BTD.shape
    last_B = np.full(B, T - 1)
    if inputs.target.valid_BT is not None:
        last_B = T - 1 - np.argmax(inputs.target.valid_BT[:, ::-1], axis=1)
    return model.logits(hidden_BTD[np.arange(B), last_B]), state


def extend(model: Model, tokens_BT: Array, *, state: DecodeState) -> Array:
    """Add the same number of tokens to each row; return next-token logits (B, T, V) after each."""
    side = check_side(np.asarray(tokens_BT), model=model.spec, past=state.length)
    return model.logits(_advance(model, side, state))


def step(model: Model, tokens_B: Array, *, state: DecodeState) -> Array:
    """Add one token to each row; return next-token logits (B, V)."""
    return extend(model, np.asarray(tokens_B)[:, None], state=state)[:, 0]


def _advance(model: Model, side: Side, state: DecodeState) -> Array:
    """Return hidden states of the new tokens; append their keys and values to the past."""
    B, T = side.tokens_BT.shape
    past = state.length
    valid_BS = joined_valid(state.valid_BS, past, side.valid_BT, T, true=NUMPY_ARRAYS.true)
    state.ws.reset()
    sides = {"target": Rows(side, past=past, valid_BS=valid_BS)}
    if "source" in state.cross:
        sides["source"] = Rows(Side(*state.cross["source"]))
    run = model.new_run(sides, PassContext(state.ws), state=state)
    run.memories |= {name: held for name, held in state.cross.items() if name != "source"}
    model.plan.forward(run, (one for one in model.plan.body if one.side == "target"))
    state.advance(T, side.valid_BT)
    hidden_MD: Array = run.values[model.plan.numbers[model.plan.program.hidden]]
    return hidden_MD.reshape(B, T, -1)
