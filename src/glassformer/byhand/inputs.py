"""Model inputs: arrays in, checked arrays out; the positions and masks that follow from them.

One convention: True = real token, True = may attend. The model itself checks nothing again.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from glassformer.byhand.pass_context import Array
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError

# B batch, T query length, S key length


@dataclass(frozen=True, slots=True)
class Side:
    """One sequence side of a batch; `valid` None means that every token is real."""

    tokens_BT: Array
    valid_BT: Array | None = None
    segments_BT: Array | None = None
    types_BT: Array | None = None

    def of(self, rows_B: Array) -> "Side":
        """Return these rows of it."""
        held = (self.tokens_BT, self.valid_BT, self.segments_BT, self.types_BT)
        tokens_BT, *rest = (None if one is None else one[rows_B] for one in held)
        assert tokens_BT is not None
        return Side(tokens_BT, *rest)


class Inputs(NamedTuple):
    """Checked arrays of a batch."""

    target: Side
    source: Side | None


def check_inputs(
    tokens_BT: Array,
    *,
    model: spec.ModelSpec,
    valid_BT: Array | None = None,
    segments_BT: Array | None = None,
    source_tokens_BS: Array | None = None,
    source_valid_BS: Array | None = None,
    types_BT: Array | None = None,
) -> Inputs:
    """Check both sides; a source is required if the model has an encoder, else refused."""
    target = check_side(tokens_BT, model=model, valid_BT=valid_BT, segments_BT=segments_BT)
    if types_BT is not None:
        target = replace(target, types_BT=_checked_types(types_BT, target.tokens_BT, model))
    if model.encoder is None:
        if source_tokens_BS is not None:
            raise InputError("a source sequence for a model without an encoder")
        return Inputs(target, None)
    if source_tokens_BS is None:
        raise InputError("an encoder-decoder needs a source sequence", hint="source_tokens_BS")
    source = check_side(source_tokens_BS, model=model, valid_BT=source_valid_BS, name="source")
    if len(source.tokens_BT) != len(target.tokens_BT):
        raise InputError(
            f"{len(source.tokens_BT)} source sequences for {len(target.tokens_BT)} target ones"
        )
    return Inputs(target, source)


def check_side(
    tokens_BT: Array,
    *,
    model: spec.ModelSpec,
    valid_BT: Array | None = None,
    segments_BT: Array | None = None,
    past: int = 0,
    name: str = "tokens",
) -> Side:
    """Check ids, length and masks; a mask that is True everywhere becomes None."""
    tokens_BT = np.asarray(tokens_BT)
    if tokens_BT.ndim != 2 or not np.issubdtype(tokens_BT.dtype, np.integer):
        raise InputError(
            f"{name} has shape {tokens_BT.shape} and dtype {tokens_BT.dtype}",
            hint="whole numbers of shape (batch, length)",
        )
    if tokens_BT.size == 0:
        raise InputError(
            f"{name} is empty: shape {tokens_BT.shape}",
            hint="give at least one sequence of at least one token",
        )
    length = past + tokens_BT.shape[1]
    if length > model.max_seq_len:
        raise InputError(
            f"{name}: length {length} exceeds max_seq_len {model.max_seq_len}",
            hint="shorten the sequence, or build the model with a larger max_seq_len",
        )
    vocab = model.source_vocab if name == "source" else model.vocab_size
    check_ids(tokens_BT, vocab, name=name)
    if valid_BT is not None:
        valid_BT = np.asarray(valid_BT)
        _check_shape(f"the mask of {name}", valid_BT, tokens_BT)
        if valid_BT.dtype != np.bool_:
            raise InputError(
                f"the mask of {name} has dtype {valid_BT.dtype}", hint="bool, True = real token"
            )
        valid_BT = None if valid_BT.all() else valid_BT
    if segments_BT is not None:
        segments_BT = np.asarray(segments_BT)
        _check_shape(f"segments of {name}", segments_BT, tokens_BT)
    return Side(tokens_BT, valid_BT, segments_BT)


def check_ids(tokens_BT: Array, vocab: int, *, name: str = "tokens") -> Array:
    """Return ids as an array, each in the table; the lookup itself checks nothing."""
    tokens_BT = np.asarray(tokens_BT)
    if not np.issubdtype(tokens_BT.dtype, np.integer):
        raise InputError(
            f"{name} has shape {tokens_BT.shape} and dtype {tokens_BT.dtype}",
            hint="whole numbers of shape (batch, length)",
        )
    if tokens_BT.size and (tokens_BT.min() < 0 or tokens_BT.max() >= vocab):
        at = tuple(int(i) for i in np.argwhere((tokens_BT < 0) | (tokens_BT >= vocab))[0])
        raise InputError(
            f"token id {tokens_BT[at]} is outside the vocabulary of {vocab}",
            where=f"{name}[{', '.join(map(str, at))}]",
            hint=f"ids run from 0 to {vocab - 1}",
        )
    return tokens_BT


def _checked_types(types_BT: Array, tokens_BT: Array, model: spec.ModelSpec) -> Array:
    types_BT = np.asarray(types_BT)
    _check_shape("token types", types_BT, tokens_BT)
    if types_BT.min() < 0 or types_BT.max() >= model.token_types:
        raise InputError(
            f"token types from {types_BT.min()} to {types_BT.max()}",
            hint=f"the model has {model.token_types} of them",
        )
    return types_BT


def _check_shape(name: str, array: Array, tokens_BT: Array) -> None:
    if array.shape != tokens_BT.shape:
        raise InputError(
            f"{name} has shape {array.shape}, the tokens {tokens_BT.shape}",
            hint="one entry for each token",
        )


def positions_of(
    length: int, *, past: int = 0, valid_BS: Array | None = None, segments_BT: Array | None = None
) -> "Array | slice":
    """Return the position of each new token, counting real tokens only, from 0 in every segment."""
    if valid_BS is None and segments_BT is None:
        return slice(past, past + length)
    if valid_BS is None:
        assert segments_BT is not None
        valid_BS = np.ones(segments_BT.shape, np.bool_)
    seen_BS: Array = np.cumsum(valid_BS, axis=1)
    count_BS: Array = seen_BS - 1
    if segments_BT is not None:
        begins_BS = np.ones(valid_BS.shape, np.bool_)
        begins_BS[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
        before_BS = seen_BS - valid_BS
        count_BS = count_BS - np.maximum.accumulate(before_BS * begins_BS, axis=1)
    count_BS = np.maximum(count_BS, 0)
    return count_BS[:, past:]


def allow_of(
    *,
    before: int | None,
    after: int | None,
    queries: int,
    keys: int,
    dtype: "np.dtype[Any]",
    valid_q_BT: Array | None = None,
    valid_k_BS: Array | None = None,
    segments_BT: Array | None = None,
) -> Array | None:
    """Return the mask (1 or B, 1, T, S), 1 = may attend, 0 = not; None if everything may.

    `before` and `after` are how far a query sees to either side, None: to the end. The last query
    is at the position of the last key.
    """
    allow: Array | None = None
    counted = valid_k_BS is not None and (before is not None or (after or 0) > 0)
    if before is not None or after is not None:
        ahead_TS = np.arange(keys) - np.arange(keys - queries, keys)[:, None]
        order_TS = np.ones(ahead_TS.shape, np.bool_)
        if after is not None and (after == 0 or not counted):
            order_TS &= ahead_TS <= after
        if before is not None and not counted:
            order_TS &= ahead_TS >= -before
        allow = None if order_TS.all() else order_TS[None]
    pairs = [allow] if allow is not None else []
    if counted and valid_k_BS is not None:
        # Counted in real tokens: padding in between does not use up the window.
        place_BS = np.cumsum(valid_k_BS, axis=1)
        apart_BTS = place_BS[:, keys - queries :, None] - place_BS[:, None, :]
        if before is not None:
            pairs.append(apart_BTS <= before)
        if after is not None:
            pairs.append(apart_BTS >= -after)
    if valid_q_BT is not None:
        pairs.append(valid_q_BT[:, :, None])
    if valid_k_BS is not None:
        pairs.append(valid_k_BS[:, None, :])
    if segments_BT is not None:
        pairs.append(segments_BT[:, :, None] == segments_BT[:, None, :])
    if not pairs:
        return None
    joined = pairs[0]
    for more in pairs[1:]:
        joined = joined & more
    full = np.broadcast_to(joined, (len(joined), queries, keys))
    return np.ascontiguousarray(full, dtype)[:, None]
