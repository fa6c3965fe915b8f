"""Multi-head attention: projections, q/k-norm, rotation, heads, output projection; and back.

q, k and v of self-attention come from one product: their weights are contiguous in the
model's storage, so the joined matrix `qkv_proj.weight` is a view, and so is its gradient (and the
joined bias, where all three have one).
"""

from typing import NamedTuple, Protocol

import numpy as np

from glassformer.byhand.attention_core import AttendCache, attend_backward, attend_forward
from glassformer.byhand.linear import (
    LinearCache,
    linear_forward,
    linear_grads,
    linear_products,
    sum_rows,
)
from glassformer.byhand.norm import NormCache, has_shift, norm_backward, norm_forward
from glassformer.byhand.pass_context import Array, PassContext
from glassformer.byhand.position import rotate_backward, rotate_forward
from glassformer.spec import model as spec

# B batch, T query length, S key length, D d_model, N query heads, K key-value heads, H d_head
# E width of the joined projection: q only, k and v, or all three

JOINED = "qkv_proj"


class Past(Protocol):
    """Cached keys and values of one layer."""

    def extend(self, k_BKTH: Array, v_BKTH: Array) -> tuple[Array, Array]:
        """Append the new ones; return all of them so far."""


class Projection(NamedTuple):
    """One joined projection: its linear cache, the columns of each letter, which have a bias."""

    linear: LinearCache
    columns: dict[str, slice]
    biased: str


class HeadsCache(NamedTuple):
    """The cache of one multi-head attention for its backward."""

    attention: spec.Attention
    projections: tuple[Projection, ...]
    norms: dict[str, NormCache]
    rotation: tuple[Array, Array] | None
    attend: AttendCache
    output: LinearCache
    biased: bool
    shape: tuple[int, int, int, int]
    at: str


def multi_head_forward(
    x_BTD: Array,
    *,
    attention: spec.Attention,
    params: dict[str, Array],
    pass_context: PassContext,
    context_BSD: Array | None = None,
    ready: tuple[Array, Array] | None = None,
    rotation: tuple[Array, Array] | None = None,
    allow: Array | None = None,
    bias: Array | None = None,
    past: Past | None = None,
    dropout: float = 0.0,
    at: str = "",
) -> tuple[Array, HeadsCache]:
    """o(attend(q(x), k(context), v(context))); context is x for self-attention.

    `ready` are keys and values of a context that were computed before; `past` appends the new ones
    to earlier ones. `rotation` is cos and sin for rotate_forward; `bias` is added to the scores.
    """
    norms: dict[str, NormCache] = {}
    if context_BSD is None and ready is None:
        made, projection = _project(x_BTD, "qkv", attention, params, pass_context)
        projections: tuple[Projection, ...] = (projection,)
    else:
        made, projection = _project(x_BTD, "q", attention, params, pass_context)
        projections = (projection,)
        if context_BSD is not None and ready is None:
            kv, of_kv = _project(context_BSD, "kv", attention, params, pass_context)
            made, projections = made | kv, (projection, of_kv)
    heads = _finish_heads(made, attention, params, pass_context, rotation, norms)
    k_BKSH, v_BKSH = ready if ready is not None else (heads["k"], heads["v"])
    if past is not None:
        k_BKSH, v_BKSH = past.extend(k_BKSH, v_BKSH)
    for letter, tapped in (("q", heads["q"]), ("k", k_BKSH), ("v", v_BKSH)):
        pass_context.tap(f"{at}{letter}", tapped)
    heads_BTNH, attend = attend_forward(
        heads["q"],
        k_BKSH=k_BKSH,
        v_BKSH=v_BKSH,
        pass_context=pass_context,
        allow=allow,
        bias=bias,
        dropout=dropout,
        at=at,
    )
    out_BTD, output = linear_forward(
        heads_BTNH.reshape(*x_BTD.shape[:2], -1),
        weight_OI=params["o_proj.weight"],
        bias_O=params.get("o_proj.bias"),
        ws=pass_context.ws,
    )
    pass_context.tap(f"{at}out", out_BTD)
    biased = "o_proj.bias" in params
    return out_BTD, HeadsCache(
        attention, projections, norms, rotation, attend, output, biased, heads_BTNH.shape, at
    )


def multi_head_backward(
    dout_BTD: Array, cache: HeadsCache, *, grads: dict[str, Array], pass_context: PassContext
) -> tuple[Array, Array | None]:
    """Return dx and, for cross-attention, dcontext; parameter gradients go to `grads`."""
    at, ws = cache.at, pass_context.ws
    pass_context.tap_grad(f"{at}out", dout_BTD)
    dheads = linear_grads(
        dout_BTD, cache.output, grads=grads, name="o_proj", biased=cache.biased, ws=ws
    )
    d_head = cache.shape[-1]
    dflat = [
        ws.take((cache.shape[0], len(p.linear.x_RI) // cache.shape[0], p.linear.weight_OI.shape[0]))
        for p in cache.projections
    ]
    split: dict[str, Array] = {}
    for d_BTE, projection in zip(dflat, cache.projections, strict=True):
        for letter, columns in projection.columns.items():
            part = d_BTE[..., columns]
            split[letter] = part.reshape(*part.shape[:2], -1, d_head)
    dq, dk, dv = (split[letter].transpose(0, 2, 1, 3) for letter in "qkv")
    dheads_BNTH = dheads.reshape(cache.shape).transpose(0, 2, 1, 3)
    attend_backward(
        dheads_BNTH, cache.attend, pass_context=pass_context, dq_BNTH=dq, dk_BKSH=dk, dv_BKSH=dv
    )
    if cache.rotation is not None:
        for letter in "qk":
            rotate_backward(split[letter].transpose(0, 2, 1, 3), cache.rotation, ws=ws)
    for letter, norm in cache.norms.items():
        assert cache.attention.qk_norm is not None
        biased = has_shift(cache.attention.qk_norm)
        name = f"{letter}_norm"
        norm_backward(
            split[letter], norm, grads=grads, name=name, biased=biased, dx=split[letter], ws=ws
        )
    dinto = [
        _project_backward(d_BTE, projection, cache.attention, grads, pass_context)
        for d_BTE, projection in zip(dflat, cache.projections, strict=True)
    ]
    return dinto[0], dinto[1] if len(dinto) == 2 else None


def keys_values(
    context_BSD: Array,
    *,
    attention: spec.Attention,
    params: dict[str, Array],
    pass_context: PassContext,
) -> tuple[Array, Array]:
    """Compute k and v of a context once for many queries, as `ready` for multi_head_forward."""
    made, _ = _project(context_BSD, "kv", attention, params, pass_context)
    heads = _finish_heads(made, attention, params, pass_context, None, {})
    return heads["k"], heads["v"]


def _finish_heads(
    made: dict[str, Array],
    attention: spec.Attention,
    params: dict[str, Array],
    pass_context: PassContext,
    rotation: tuple[Array, Array] | None,
    norms: dict[str, NormCache],
) -> dict[str, Array]:
    """Split projections into heads; normalise and rotate q and k in place. Fills `norms`."""
    heads: dict[str, Array] = {}
    width = params["q_proj.weight"].shape[0] // attention.n_heads
    for letter, flat in made.items():
        split_BTNH = flat.reshape(*flat.shape[:2], -1, width)
        if attention.qk_norm is not None and letter != "v":
            norm, name = attention.qk_norm, f"{letter}_norm"
            _, norms[letter] = norm_forward(
                split_BTNH, norm=norm, params=params, name=name, out=split_BTNH, ws=pass_context.ws
            )
        heads[letter] = split_BTNH.transpose(0, 2, 1, 3)
        if rotation is not None and letter != "v":
            rotate_forward(heads[letter], cos=rotation[0], sin=rotation[1], ws=pass_context.ws)
    return heads


def _columns(letters: str, attention: spec.Attention, d_head: int) -> dict[str, slice]:
    """Return the columns of each letter in the joined projection of these letters."""
    columns, start = {}, 0
    for letter in letters:
        heads = attention.n_heads if letter == "q" else attention.kv_heads
        columns[letter] = slice(start, start + heads * d_head)
        start = columns[letter].stop
    return columns


def _joined(
    arrays: dict[str, Array], leaf: str, letters: str, attention: spec.Attention, d_model: int
) -> Array | None:
    """Return the slice of the joined weight or bias for these letters, if there is one."""
    joined = arrays.get(f"{JOINED}.{leaf}")
    if joined is None:
        return None
    every = _columns("qkv", attention, attention.head_width(d_model))
    return joined[every[letters[0]].start : every[letters[-1]].stop]


def _project(
    x_BTD: Array,
    letters: str,
    attention: spec.Attention,
    params: dict[str, Array],
    pass_context: PassContext,
) -> tuple[dict[str, Array], Projection]:
    """Project x by these letters, in one product."""
    columns = _columns(letters, attention, attention.head_width(x_BTD.shape[-1]))
    weight_ED = _joined(params, "weight", letters, attention, x_BTD.shape[-1])
    if weight_ED is None:
        weight_ED = np.concatenate([params[f"{letter}_proj.weight"] for letter in letters])
    bias_E = _joined(params, "bias", letters, attention, x_BTD.shape[-1])
    out_BTE, linear = linear_forward(x_BTD, weight_OI=weight_ED, bias_O=bias_E, ws=pass_context.ws)
    parts = {letter: out_BTE[..., at] for letter, at in columns.items()}
    biased = "".join(letter for letter in letters if f"{letter}_proj.bias" in params)
    if bias_E is None:
        for letter in biased:
            part = parts[letter]
            part += params[f"{letter}_proj.bias"]
    return parts, Projection(linear, columns, biased)


def _project_backward(
    dout_BTE: Array,
    projection: Projection,
    attention: spec.Attention,
    grads: dict[str, Array],
    pass_context: PassContext,
) -> Array:
    """Return dx of one joined projection."""
    columns, weight_ED = projection.columns, projection.linear.weight_OI
    letters, d_model = "".join(columns), weight_ED.shape[1]
    dweight_ED = _joined(grads, "weight", letters, attention, d_model)
    if dweight_ED is None:
        dweight_ED = np.empty_like(weight_ED)
        grads |= {f"{letter}_proj.weight": dweight_ED[at] for letter, at in columns.items()}
    # forward: part = x @ W.T + bias, joined for all letters   =>   one product each for dx and dW
    dx, _ = linear_products(dout_BTE, projection.linear, dweight_OI=dweight_ED, ws=pass_context.ws)
    dout_RE = dout_BTE.reshape(-1, dout_BTE.shape[-1])
    dbias_E = _joined(grads, "bias", letters, attention, d_model)
    if dbias_E is not None:
        sum_rows(dout_RE, out=dbias_E)
        return dx
    for letter in projection.biased:
        name = f"{letter}_proj.bias"
        grads[name] = sum_rows(dout_RE[:, columns[letter]], out=grads.get(name))
    return dx
