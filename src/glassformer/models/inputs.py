"""Model inputs: arrays in, checked tensors out.

Checked inputs are inside the vocabulary, no longer than the model's context, and have masks of the
right shape and dtype; the model itself checks nothing again.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# B batch, T length, S source length, R runs of a packed batch


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors that a model reads. `None` for a mask means that every token is real."""

    tokens_BT: Tensor
    valid_BT: Tensor | None = None
    segments_BT: Tensor | None = None
    source_BS: Tensor | None = None
    source_valid_BS: Tensor | None = None
    types_BT: Tensor | None = None
    runs_R: Tensor | None = None  # of `packed_runs`: lets a GPU's kernel leave out what is masked


def packed_runs(segments_BT: np.ndarray, valid_BT: np.ndarray) -> np.ndarray | None:
    """Return where runs of tokens that attend only to each other begin, in the flattened batch.

    The size of the batch follows, again and again up to a power of two: batches of one shape have
    few numbers of runs. None where a segment is not one run, which no list of starts can express.
    """
    begins_BT = np.ones(valid_BT.shape, dtype=np.bool_)
    changed = segments_BT[:, 1:] != segments_BT[:, :-1]
    begins_BT[:, 1:] = changed | (valid_BT[:, 1:] != valid_BT[:, :-1])
    rows, columns = np.nonzero(begins_BT & valid_BT)
    if len({*zip(rows.tolist(), segments_BT[rows, columns].tolist(), strict=True)}) < len(rows):
        return None
    starts = np.flatnonzero(begins_BT)
    runs_R = np.full((1 << len(starts).bit_length()) + 1, valid_BT.size, dtype=np.int32)
    runs_R[: len(starts)] = starts
    return runs_R


def as_inputs(
    batch: "Batch | Inputs | Tensor | np.ndarray",
    spec: ModelSpec,
    *,
    device: torch.device,
    past: int = 0,
) -> Inputs:
    """Check, convert and move. Accepts a Batch, token ids alone, or tensors as `Inputs`.

    `past` counts the positions that a cache already holds.
    """
    match batch:
        case Batch():
            source, runs = batch.source, None
            if batch.segments is not None and device.type == "cuda":
                runs = packed_runs(batch.segments, batch.valid)
            given = Inputs(
                _tensor(batch.tokens),
                _tensor(batch.valid),
                None if batch.segments is None else _tensor(batch.segments),
                None if source is None else _tensor(source.tokens),
                None if source is None else _tensor(source.valid),
                runs_R=None if runs is None else _tensor(runs),
            )
        case Inputs():
            given = batch
        case _:
            given = Inputs(_tensor(batch))
    valid_BT = _check_side("tokens", given.tokens_BT, given.valid_BT, spec.vocab_size, spec, past)
    source_valid_BS = _check_source(given, spec)
    if given.segments_BT is not None:
        _check_mask_shape("segments", given.segments_BT, given.tokens_BT)
        if spec.encoder is not None:
            raise InputError(
                "packed segments for a model with an encoder",
                hint="give each example a row of its own",
            )

    if given.types_BT is not None:
        if not spec.token_types:
            raise InputError("token types for a model that has none", hint="leave them out")
        _check_mask_shape("token types", given.types_BT, given.tokens_BT)
        _check_ids("token types", given.types_BT.long(), spec.token_types)

    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return Inputs(
        given.tokens_BT.to(device, torch.int64),
        move(valid_BT),
        move(given.segments_BT),
        None if given.source_BS is None else given.source_BS.to(device, torch.int64),
        move(source_valid_BS),
        None if given.types_BT is None else given.types_BT.to(device, torch.int64),
        move(given.runs_R),
    )


def _tensor(array: "Tensor | np.ndarray") -> Tensor:
    if isinstance(array, Tensor):
        return array
    try:
        return torch.as_tensor(np.asarray(array))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"tokens cannot be read as an array: {error}",
            hint="whole numbers of shape (batch, length)",
        ) from error


def _check_side(
    name: str, tokens: Tensor, valid: Tensor | None, vocab: int, spec: ModelSpec, past: int = 0
) -> Tensor | None:
    """Check ids and mask; a mask that is True everywhere becomes None."""
    fractional = tokens.is_floating_point() or tokens.is_complex()
    if tokens.ndim != 2 or fractional or tokens.dtype == torch.bool:
        raise InputError(
            f"{name} has shape {tuple(tokens.shape)} and dtype {tokens.dtype}",
            hint="whole numbers of shape (batch, length)",
        )
    if tokens.numel() == 0:
        raise InputError(
            f"{name} is empty: shape {tuple(tokens.shape)}",
            hint="give at least one sequence of at least one token",
        )
    length = past + tokens.shape[1]
    if length > spec.max_seq_len:
        raise InputError(
            f"{name}: length {length} exceeds max_seq_len {spec.max_seq_len}",
            hint="shorten the sequence, or build the model with a larger max_seq_len",
        )
    if valid is not None:
        _check_mask_shape(f"the mask of {name}", valid, tokens)
        if valid.dtype != torch.bool:
            raise InputError(
                f"the mask of {name} has dtype {valid.dtype}", hint="bool, True = real token"
            )
        if bool(valid.all()):
            valid = None
    _check_ids(name, tokens.long(), vocab)
    return valid


def _check_ids(name: str, tokens: Tensor, vocab: int) -> None:
    """Require every id to be in the table, padded ones too: lookup comes before masking."""
    low, high = (int(bound) for bound in tokens.aminmax())
    if low >= 0 and high < vocab:
        return
    row, column = (int(i) for i in ((tokens < 0) | (tokens >= vocab)).nonzero()[0])
    raise InputError(
        f"token id {int(tokens[row, column])} is outside the vocabulary of {vocab}",
        where=f"{name}[{row}, {column}]",
        hint=f"ids run from 0 to {vocab - 1}",
    )


def _check_mask_shape(name: str, mask: Tensor, tokens: Tensor) -> None:
    if mask.shape != tokens.shape:
        raise InputError(
            f"{name} has shape {tuple(mask.shape)}, the tokens {tuple(tokens.shape)}",
            hint="one entry for each token",
        )


def _check_source(given: Inputs, spec: ModelSpec) -> Tensor | None:
    if spec.encoder is None:
        if given.source_BS is not None:
            raise InputError("a source sequence for a model without an encoder")
        return None
    if given.source_BS is None:
        raise InputError(
            "an encoder-decoder needs a source sequence",
            hint="give a Batch with `source`, or Inputs with `source_BS`",
        )
    valid_BS = _check_side(
        "source", given.source_BS, given.source_valid_BS, spec.source_vocab, spec
    )
    if len(given.source_BS) != len(given.tokens_BT):
        raise InputError(
            f"{len(given.source_BS)} source sequences for {len(given.tokens_BT)} target ones"
        )
    return valid_BS
