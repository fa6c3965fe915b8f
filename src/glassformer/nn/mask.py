"""Attention masks. One convention: True = may attend, True = real token.

A row that may attend to nothing gives zeros, forward and backward, in every kernel. The kernels do
not agree on such rows (some give NaN), so they never see one: the row is opened for the kernel
and its result is erased afterwards.
"""

import math
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from glassformer.nn.position import ALiBiPosition, RelativePosition, heads_key, positions_of
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError

# B batch, T query length, S key length, N query heads, R runs of a packed batch


@dataclass(frozen=True, slots=True)
class Packed:
    """The same mask for a kernel of packed sequences: where each begins in the flattened batch, and
    how far a query sees to its left and right; -1 = to the end.
    """

    runs_R: Tensor
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Mask:
    """An attention mask: -inf for scores where attention is not allowed, and a bias by distance.

    allow: (T, S), (B, 1, T, S) or (B, N, T, S), True = may attend; None = everything, or the
    triangle if causal. empty: (B, 1 or N, T, 1), True where a row may attend to nothing, and its
    result is erased. bias: (1 or B, N, T, S), ALiBi's or T5's; None = no bias. packed: see there.
    """

    allow: Tensor | None = None
    causal: bool = False
    empty: Tensor | None = None
    bias: Tensor | None = None
    packed: Packed | None = None
    made: dict[tuple[object, ...], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def explicit(self, length: int, device: torch.device) -> Tensor | None:
        """Return the mask as a bool tensor, the plain triangle included."""
        return causal_allow(length, length, device=device) if self.causal else self.allow

    def added(self, q_BNTH: Tensor) -> Tensor:
        """Return what is added to scores: the bias or 0, -inf where attention is not allowed."""
        T, kind = q_BNTH.shape[2], (q_BNTH.shape[2], q_BNTH.dtype, q_BNTH.device)
        if kind not in self.made:
            if self.causal:
                none_TT = torch.full((T, T), -math.inf, dtype=q_BNTH.dtype, device=q_BNTH.device)
                added = none_TT.triu_(1)
            elif self.allow is None:
                added = q_BNTH.new_zeros(1, 1)
            else:
                added = torch.where(self.allow, q_BNTH.new_zeros(()), -math.inf)
            self.made[kind] = added if self.bias is None else added + self.bias.to(q_BNTH.dtype)
        return self.made[kind]


def causal_allow(
    queries: int, keys: int, *, window: int | None = None, device: torch.device | None = None
) -> Tensor:
    """Return (T, S): a query attends to itself and before; the last query is the last key."""
    q_T1 = torch.arange(keys - queries, keys, device=device)[:, None]
    k_1S = torch.arange(keys, device=device)
    allow = k_1S <= q_T1
    return allow if window is None else allow & (q_T1 - k_1S < window)


def window_allow(
    queries: int, keys: int, *, window: int, device: torch.device | None = None
) -> Tensor:
    """Return (T, S): within `window` on both sides, for attention that is not causal."""
    q_T1 = torch.arange(keys - queries, keys, device=device)[:, None]
    k_1S = torch.arange(keys, device=device)
    return (q_T1 - k_1S).abs() < window


def padding_allow(valid_q_BT: Tensor, valid_k_BS: Tensor) -> Tensor:
    """Return (B, 1, T, S): a padded position neither attends nor is attended to."""
    return valid_q_BT[:, None, :, None] & valid_k_BS[:, None, None, :]


def build_mask(
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None = None,
    valid_q_BT: Tensor | None = None,
    valid_k_BS: Tensor | None = None,
    segments_q_BT: Tensor | None = None,
    segments_k_BS: Tensor | None = None,
    runs_R: Tensor | None = None,
    device: torch.device | None = None,
) -> Mask:
    """Combine order, window, padding and segments; the kernel's own triangle where it is enough."""
    plain = valid_q_BT is None and valid_k_BS is None and segments_q_BT is None
    if plain and (window is None or window >= keys):
        if not causal or queries == 1:
            return Mask()
        if queries == keys:
            return Mask(causal=True)
    counted = window is not None and valid_k_BS is not None
    allow = _order_allow(
        queries, keys, causal=causal, window=None if counted else window, device=device
    )
    if plain:
        return Mask(allow=allow)
    if window is not None and valid_k_BS is not None:
        # Counted in real tokens: padding between cached tokens does not use up the window.
        place_BS = valid_k_BS.cumsum(1)
        apart_BTS = place_BS[:, -queries:, None] - place_BS[:, None, :]
        allow = _both(allow, (apart_BTS.abs() < window)[:, None])
    if valid_q_BT is not None and valid_k_BS is not None:
        allow = _both(allow, padding_allow(valid_q_BT, valid_k_BS))
    elif valid_k_BS is not None:
        allow = _both(allow, valid_k_BS[:, None, None, :])
    if segments_q_BT is not None and segments_k_BS is not None:
        same = segments_q_BT[:, None, :, None] == segments_k_BS[:, None, None, :]
        allow = _both(allow, same)
    assert allow is not None
    mask = close_empty_rows(allow)
    if runs_R is None:
        return mask
    reach = -1 if window is None else window - 1
    return replace(mask, packed=Packed(runs_R, left=reach, right=0 if causal else reach))


def close_empty_rows(allow: Tensor) -> Mask:
    """Open the rows that may attend to nothing for the kernel, and mark them to be erased."""
    empty = ~allow.any(dim=-1, keepdim=True)
    return Mask(allow=allow | empty, empty=empty)


def mask_from_allow(allow: Tensor) -> Mask:
    """Make a `Mask` from a bool tensor (T, S), (B, T, S) or (B, N, T, S)."""
    if allow.dtype != torch.bool:
        raise InputError(f"a mask of dtype {allow.dtype}", hint="bool, True = may attend")
    return close_empty_rows(allow[:, None] if allow.ndim == 3 else allow)


def _order_allow(
    queries: int, keys: int, *, causal: bool, window: int | None, device: torch.device | None
) -> Tensor | None:
    if causal:
        return causal_allow(queries, keys, window=window, device=device)
    if window is not None:
        return window_allow(queries, keys, window=window, device=device)
    return None


def _both(allow: Tensor | None, more: Tensor) -> Tensor:
    return more if allow is None else allow & more


# --- the masks of one forward --------------------------------------------------------------------


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

    def of(self, mixer: spec.Mixer, d_model: int) -> Mask:
        """Return the mask of this kind of mixer."""
        heads = ""
        if self.alibi and isinstance(mixer, spec.Attention):
            heads = heads_key(mixer.n_heads, mixer.head_width(d_model))
        kind = (mixer.causal, mixer.window, heads)
        if kind not in self.made:
            valid_BS = self.valid_BS
            mask = build_mask(
                self.queries,
                self.keys,
                causal=mixer.causal,
                window=mixer.window,
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
