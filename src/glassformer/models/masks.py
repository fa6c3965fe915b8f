"""The positions of tokens, and the masks of one forward."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from glassformer.nn.mask import Mask, build_mask
from glassformer.nn.position import ALiBiPosition, RelativePosition, heads_key
from glassformer.spec import model as spec

# B batch, T new length, S length with the past, D d_model


def positions_of(
    past: int, length: int, valid_BS: Tensor | None, segments_BT: Tensor | None
) -> Tensor | slice:
    """Return the position of each new token, counting real tokens only, from 0 in every segment."""
    if valid_BS is None and segments_BT is None:
        return slice(past, past + length)
    if valid_BS is None:
        assert segments_BT is not None
        valid_BS = torch.ones_like(segments_BT, dtype=torch.bool)
    count_BS = valid_BS.cumsum(1) - 1
    if segments_BT is not None:
        begins_BS = torch.ones_like(valid_BS)
        begins_BS[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
        before_BS = valid_BS.cumsum(1) - valid_BS.long()
        count_BS = count_BS - (before_BS * begins_BS).cummax(1).values
    return count_BS.clamp(min=0)[:, past:]


class Masks:
    """The masks of one forward, one for each kind of attention among the layers.

    With ALiBi and T5's positions they also carry the bias, which depends on the heads.
    """

    def __init__(
        self,
        queries: int,
        keys: int,
        valid_BS: Tensor | None,
        segments_BT: Tensor | None,
        device: torch.device,
        *,
        alibi: nn.ModuleDict,
        relative: RelativePosition | None,
        runs_R: Tensor | None = None,
    ) -> None:
        self.runs_R = runs_R
        self.queries, self.keys, self.device = queries, keys, device
        self.valid_BS, self.segments_BT = valid_BS, segments_BT
        self.alibi, self.relative = alibi, relative
        self.made: dict[tuple[bool, int | None, str], Mask] = {}

    def of(self, attention: spec.Attention, d_head: int) -> Mask:
        """Return the mask of this kind of attention."""
        heads = heads_key(attention.n_heads, d_head) if self.alibi else ""
        kind = (attention.causal, attention.window, heads)
        if kind not in self.made:
            valid_BS = self.valid_BS
            mask = build_mask(
                self.queries,
                self.keys,
                causal=attention.causal,
                window=attention.window,
                valid_q_BT=None if valid_BS is None else valid_BS[:, -self.queries :],
                valid_k_BS=valid_BS,
                segments_q_BT=self.segments_BT,
                segments_k_BS=self.segments_BT,
                runs_R=self.runs_R,
                device=self.device,
            )
            if heads:
                part = cast(ALiBiPosition, self.alibi[heads])
                mask = replace(mask, bias=self._bias(part))
            elif self.relative is not None:
                mask = replace(mask, bias=self._bias(self.relative))
            self.made[kind] = mask
        return self.made[kind]

    def _bias(self, part: ALiBiPosition | RelativePosition) -> Tensor:
        places = positions_of(0, self.keys, self.valid_BS, self.segments_BT)
        if isinstance(places, slice):
            places = torch.arange(self.keys, device=self.device)
        return part.bias(places, self.queries)


def memory_mask(
    queries: int, memory_BSD: Tensor | None, valid_BS: Tensor | None, memory_valid_BS: Tensor | None
) -> Mask | None:
    """Return the mask between target and source positions; None without an encoder's output."""
    if memory_BSD is None:
        return None
    B, S, _ = memory_BSD.shape
    valid_q_BT = None if valid_BS is None else valid_BS[:, -queries:]
    if valid_q_BT is not None and memory_valid_BS is None:
        memory_valid_BS = valid_q_BT.new_ones(B, S)
    return build_mask(
        queries,
        S,
        causal=False,
        valid_q_BT=valid_q_BT,
        valid_k_BS=memory_valid_BS,
        device=memory_BSD.device,
    )
