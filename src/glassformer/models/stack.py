"""One stack: embedding, position, blocks, final norm."""

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glassformer.nn.block import TransformerBlock
from glassformer.nn.cache import Cache, joined_valid
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding, build_embedding
from glassformer.nn.experts import BalanceAt, BalanceLosses
from glassformer.nn.mask import Masks, memory_mask
from glassformer.nn.norm import LayerNorm, RMSNorm, build_norm
from glassformer.nn.position import (
    AddedPosition,
    LearnedPosition,
    RelativePosition,
    RotaryPosition,
    SinusoidalPosition,
    build_biases,
    build_position,
    positions_of,
)
from glassformer.nn.taps import Taps, TapsAt, tap, under
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError

# B batch, T new length, S length with the past, D d_model


class StackParts(nn.Module):
    """The parts that `run_stack` needs: one side of an encoder-decoder, or a decoder with heads."""

    embed: TokenEmbedding | FactorizedTokenEmbedding
    position: SinusoidalPosition | LearnedPosition | AddedPosition | None
    token_type: TokenEmbedding | None
    embed_norm: LayerNorm | RMSNorm | None
    dropout: nn.Dropout
    rotary: nn.ModuleDict
    turns: tuple[str | None, ...]
    alibi: nn.ModuleDict
    relative: RelativePosition | None
    blocks: nn.ModuleList
    final_norm: LayerNorm | RMSNorm | None
    stack: spec.Stack


def add_stack_parts(
    holder: StackParts, model: spec.ModelSpec, stack: spec.Stack, *, vocab_size: int
) -> None:
    """Register the parts of one stack on a module, under the manifest's names."""
    holder.stack = stack
    holder.embed = build_embedding(model.embedding, vocab_size, model.d_model)
    holder.dropout = nn.Dropout(stack.dropout.embedding)
    holder.position = build_position(model)
    holder.rotary, holder.alibi = nn.ModuleDict(), nn.ModuleDict()
    slopes, holder.relative = build_biases(model, stack)
    holder.alibi.update(slopes)
    holder.token_type = holder.embed_norm = None
    if model.token_types:
        holder.token_type = TokenEmbedding(model.token_types, model.d_model)
    if stack.embed_norm is not None:
        holder.embed_norm = build_norm(stack.embed_norm, model.d_model)
    _add_rotations(holder, model, stack)
    holder.blocks = nn.ModuleList(
        TransformerBlock(block, model.d_model, layer=layer, dropout=stack.dropout)
        for layer, block in enumerate(stack.blocks())
    )
    final = stack.final_norm
    holder.final_norm = None if final is None else build_norm(final, model.d_model)


def _add_rotations(holder: StackParts, model: spec.ModelSpec, stack: spec.Stack) -> None:
    """Register a table for each kind of rotation, and note which one each layer uses.

    The model's own has the width of a head for its name; others, which some layers have in its
    place, are numbered.
    """
    names: dict[tuple[spec.Rotary, int], str] = {}
    turns: list[str | None] = []
    for block in stack.blocks():
        rotary = spec.rotary_of(block.mixer, model.position)
        if rotary is None:
            turns.append(None)
            continue
        width = block.attention.head_width(model.d_model)
        number = "" if rotary == model.position else f" {len(names)}"
        name = names.setdefault((rotary, width), f"{width}{number}")
        if name not in holder.rotary:
            holder.rotary[name] = RotaryPosition(rotary, model.max_seq_len, width)
        turns.append(name)
    holder.turns = tuple(turns)


class Stack(StackParts):
    """One side of an encoder-decoder."""

    def __init__(self, model: spec.ModelSpec, stack: spec.Stack, *, vocab_size: int) -> None:
        super().__init__()
        add_stack_parts(self, model, stack, vocab_size=vocab_size)


def run_stack(
    parts: StackParts,
    tokens_BT: Tensor,
    *,
    valid_BT: Tensor | None = None,
    segments_BT: Tensor | None = None,
    runs_R: Tensor | None = None,
    types_BT: Tensor | None = None,
    memory_BSD: Tensor | None = None,
    memory_valid_BS: Tensor | None = None,
    cache: Cache | None = None,
    taps: Taps | None = None,
    prefix: str = "",
    recompute: bool = False,
    balance: BalanceLosses | None = None,
) -> Tensor:
    """Return hidden states (B, T, D) of the new tokens; a cache is read and extended.

    With `recompute`, the backward runs each block again instead of keeping its activations.
    `balance` collects the load-balancing losses of mixtures of experts.
    """
    assert not recompute or (cache is None and taps is None), "a block run twice writes twice"
    at = None if taps is None else TapsAt(taps, prefix)
    T, past = tokens_BT.shape[1], 0 if cache is None else cache.length
    valid_BS = valid_BT
    if cache is not None:
        if segments_BT is not None:
            raise InputError("packed segments cannot be continued from a cache")
        if past and not all(block.mixer.causal for block in parts.stack.blocks()):
            raise InputError(
                "a cache cannot continue attention that is not causal: the past would have to "
                "attend to the new tokens",
                hint="give the complete sequence at once, without a cache",
            )
        valid_BS = joined_valid(cache.valid_BS, past, valid_BT, T)
    places = positions_of(past, T, valid_BS, segments_BT)
    where = (T, past + T, valid_BS, segments_BT, tokens_BT.device)
    masks = Masks(*where, alibi=parts.alibi, relative=parts.relative, runs_R=runs_R)
    mask_of_memory = memory_mask(T, memory_BSD, valid_BS, memory_valid_BS)
    rotations = {
        width: cast(RotaryPosition, rotary).at(places) for width, rotary in parts.rotary.items()
    }

    x_BTD = parts.embed(tokens_BT)
    if parts.position is not None:
        x_BTD = parts.position(x_BTD, places)
    if parts.token_type is not None:
        first = torch.zeros_like(tokens_BT) if types_BT is None else types_BT
        x_BTD = x_BTD + parts.token_type(first)
    if parts.embed_norm is not None:
        x_BTD = parts.embed_norm(x_BTD)
    x_BTD = parts.dropout(x_BTD)
    x_BTD = tap(at, "embed", x_BTD)
    for layer, block in enumerate(parts.stack.blocks()):
        module = cast(TransformerBlock, parts.blocks[layer])
        run = partial(checkpoint, module, use_reentrant=False) if recompute else module
        x_BTD = run(
            x_BTD,
            mask=masks.of(block.mixer, x_BTD.shape[-1]),
            memory_BSD=memory_BSD,
            memory_mask=mask_of_memory,
            rotation=None if (turn := parts.turns[layer]) is None else rotations[turn],
            cache=cache,
            taps=under(at, f"blocks.{layer}."),
            balance=None
            if balance is None
            else BalanceAt(balance, f"{prefix}blocks.{layer}", valid_BT),
        )
    if parts.final_norm is not None:
        x_BTD = parts.final_norm(x_BTD)
    if cache is not None:
        cache.advance(T, valid_BT)
    return tap(at, "final", x_BTD)
