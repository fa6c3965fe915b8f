"""Attention: softmax(q k^T / sqrt(H) + bias) v and its gradients, for grouped heads, with a mask.

Query heads of one group share their keys, so their rows are stacked: K products of (G x T) rows
each, and the sum over the group that backward needs happens inside the product.

Multi-head attention: projections, q/k-norm, rotation, heads, output projection; and back.

q, k and v of self-attention come from one product: their weights are contiguous in the
model's storage, so the joined matrix `qkv_proj.weight` is a view, and so is its gradient (and the
joined bias, where all three have one).
"""

import math
from typing import NamedTuple, Protocol

import numpy as np

from glassformer.byhand.embedding import rotate_backward, rotate_forward
from glassformer.byhand.linear import (
    LinearCache,
    dot_rows,
    linear_forward,
    linear_grads,
    linear_products,
    sum_rows,
)
from glassformer.byhand.norm import NormCache, norm_backward, norm_forward
from glassformer.byhand.pass_context import Array, PassContext, Workspace, slot
from glassformer.spec import model as spec

# B batch, T query length, S key length, N query heads

#: Scores within these bounds need no shift: exp stays far from overflow and underflow, in float32
#: too (exp(60) = 1e26), whatever the other scores of the row are.
CALM = 60.0


def softmax_forward(x: Array, *, out: Array | None = None) -> tuple[Array, Array]:
    """exp(x - max) / sum, row by row; the result is the cache."""
    out = np.subtract(x, x.max(axis=-1, keepdims=True), out=out)
    np.exp(out, out=out)
    out /= out.sum(axis=-1, keepdims=True)
    return out, out


def softmax_backward(dout: Array, cache: Array, *, dx: Array | None = None) -> Array:
    """Multiply dout by the Jacobian diag(p) - p p^T, without forming the matrix."""
    # forward: p = exp(x) / sum exp(x)   =>   dp_i/dx_j = p_i (1[i=j] - p_j)
    #                                    =>   dx_j = p_j (dout_j - sum_i dout_i p_i)
    dot = np.vecdot(dout, cache)[..., None]
    dx = np.subtract(dout, dot, out=dx)
    dx *= cache
    return dx


def masked_softmax(
    scores_BNTS: Array, *, allow_BNTS: Array | None = None, sinks_N: Array | None = None
) -> Array:
    """Softmax in place over what `allow` (1 = may attend, 0 = not) lets through.

    `sinks_N` are scores of one more column, which takes its share and is not returned.

    A row that may attend to nothing becomes zeros, and `softmax_backward` of it gives zeros.
    Moderate scores are not shifted: softmax ignores a constant, and finding each row's maximum is
    the most expensive part. Shifted and unshifted results differ by rounding only.
    """
    x = scores_BNTS
    sink_BNT1 = None if sinks_N is None else sinks_N[:, None, None]
    if not (x.min() > -CALM and x.max() < CALM) or (
        sink_BNT1 is not None and np.abs(sink_BNT1).max() >= CALM
    ):
        if allow_BNTS is not None:
            x -= (1.0 - allow_BNTS) * (np.finfo(x.dtype).max / 8)
        most_BNT1 = x.max(axis=-1, keepdims=True)
        if sink_BNT1 is not None:
            most_BNT1 = np.maximum(most_BNT1, sink_BNT1)
            sink_BNT1 = sink_BNT1 - most_BNT1
        x -= most_BNT1
    np.exp(x, out=x)
    if allow_BNTS is not None:
        x *= allow_BNTS
    total_BNT = dot_rows(x, np.ones(x.shape[-1], x.dtype))
    if sink_BNT1 is not None:
        total_BNT += np.exp(sink_BNT1)[..., 0]
    if allow_BNTS is not None:
        total_BNT += total_BNT == 0  # an empty row: 0 / 1
    np.reciprocal(total_BNT, out=total_BNT)
    x *= total_BNT[..., None]
    return x


# B batch, T query length, S key length, N query heads, K key-value heads, H d_head, M = N/K x T

#: Queries of a group below which keys are read transposed, and not copied.
FEW_ROWS = 8


class AttendCache(NamedTuple):
    """Folded queries, keys, values, weights before dropout, dropout mask, tap prefix.

    Then the factor of the scores, the slope of their cap, and whether there is a sink.
    """

    q_BKMH: Array
    k_BKSH: Array
    v_BKSH: Array
    weights_BNTS: Array
    keep_BNTS: Array | None
    at: str
    scale: float
    slope_BNTS: Array | None
    sunk: bool


def attend_forward(
    q_BNTH: Array,
    *,
    k_BKSH: Array,
    v_BKSH: Array,
    pass_context: PassContext,
    allow: Array | None = None,
    bias: Array | None = None,
    dropout: float = 0.0,
    at: str = "",
    scale: float | None = None,
    softcap: float | None = None,
    sinks_N: Array | None = None,
) -> tuple[Array, AttendCache]:
    """Return heads_BTNH, in the order in which the output projection reads them.

    allow: 1 = may attend, 0 = not, broadcasting to (B, N, T, S), in the model's dtype. bias: added
    to the scores, broadcasting likewise. scale: in place of 1 / sqrt(H). softcap c: a score s
    becomes c tanh(s / c). sinks_N: scores that take part in the softmax and have no value.
    """
    B, N, T, H = q_BNTH.shape
    K, S = k_BKSH.shape[1:3]
    ws, M = pass_context.ws, N // K * T
    q_BKMH = _fold(q_BNTH, K, ws)
    scores = ws.take((B, N, T, S))
    scale = 1.0 / math.sqrt(H) if scale is None else scale
    _product_with_transposed(q_BKMH, k_BKSH, scores.reshape(B, K, M, S), ws, scale=scale)
    slope = None
    if softcap is not None:
        # out = c tanh(s / c)   =>   slope = 1 - tanh^2(s / c)
        scores /= softcap
        np.tanh(scores, out=scores)
        slope = np.multiply(scores, scores, out=ws.take(scores.shape))
        np.subtract(1.0, slope, out=slope)
        scores *= softcap
    if bias is not None:
        scores += bias
    pass_context.tap(f"{at}scores", scores)
    weights = masked_softmax(scores, allow_BNTS=allow, sinks_N=sinks_N)
    pass_context.tap(f"{at}weights", weights)
    keep = pass_context.keep(weights.shape, dropout)
    used = weights if keep is None else np.multiply(weights, keep, out=ws.take(weights.shape))
    heads_BTNH = ws.take((B, T, N, v_BKSH.shape[-1]))
    _unfold_product(used.reshape(B, K, M, S), v_BKSH, heads_BTNH.transpose(0, 2, 1, 3), ws)
    pass_context.tap(f"{at}heads", heads_BTNH.transpose(0, 2, 1, 3))
    sunk = sinks_N is not None
    return heads_BTNH, AttendCache(q_BKMH, k_BKSH, v_BKSH, weights, keep, at, scale, slope, sunk)


def attend_backward(
    dheads_BNTH: Array,
    cache: AttendCache,
    *,
    pass_context: PassContext,
    dq_BNTH: Array | None = None,
    dk_BKSH: Array | None = None,
    dv_BKSH: Array | None = None,
    dsinks_N: Array | None = None,
    dbias: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return dq, dk, dv, written into the given arrays; fill dsinks, if there are sinks.

    The gradient of a bias that is learned is added to `dbias`, which has the bias's shape.
    """
    q_BKMH, k_BKSH, v_BKSH, weights, keep, at, scale, slope, sunk = cache
    B, N, T, S = weights.shape
    K, M, H = q_BKMH.shape[1:]
    ws = pass_context.ws
    mark = ws.mark()
    pass_context.tap_grad(f"{at}heads", dheads_BNTH)
    dq_BNTH = np.empty((B, N, T, H), weights.dtype) if dq_BNTH is None else dq_BNTH
    dheads_BKMH = _fold(dheads_BNTH, K, ws)
    # forward: heads = (weights * keep) @ v
    #   =>   dweights = (dheads @ v.T) * keep,  dv = (weights * keep).T @ dheads
    dweights = ws.take(weights.shape)
    _product_with_transposed(dheads_BKMH, v_BKSH, dweights.reshape(B, K, M, S), ws)
    used = weights
    if keep is not None:
        dweights *= keep
        used = np.multiply(weights, keep, out=ws.take(weights.shape))
    dv_BKSH = np.matmul(used.reshape(B, K, M, S).swapaxes(-1, -2), dheads_BKMH, out=dv_BKSH)
    if pass_context.tap_grads is not None:  # a row that may attend to nothing hands nothing back
        pass_context.tap_grad(f"{at}weights", dweights * weights.any(axis=-1, keepdims=True))
    pass_context.tap_grad(f"{at}v", dv_BKSH)
    if sunk:
        # forward: the sink's weight w' is what the others leave of 1, and it has no value
        #   =>   dsink = -w' sum_j dw_j w_j, as in a softmax whose last column gets no gradient
        assert dsinks_N is not None
        left_BNT = 1.0 - weights.sum(axis=-1)
        np.sum(-left_BNT * np.vecdot(dweights, weights), axis=(0, 2), out=dsinks_N)
    # forward: weights = softmax(scores) where allowed, 0 elsewhere; a weight of 0 passes nothing on
    dscores = softmax_backward(dweights, weights, dx=dweights)
    pass_context.tap_grad(f"{at}scores", dscores)
    if dbias is not None:
        # forward: scores = cap(q @ k.T / sqrt(H)) + bias   =>   dbias = dscores
        dbias += dscores.sum(axis=0, keepdims=True) if len(dbias) == 1 else dscores
    if slope is not None:
        dscores *= slope
    # forward: scores = q @ k.T / sqrt(H) + bias
    #   =>   dq = dscores @ k / sqrt(H),  dk = dscores.T @ q / sqrt(H)
    dscores *= scale
    dscores_BKMS = dscores.reshape(B, K, M, S)
    _unfold_product(dscores_BKMS, k_BKSH, dq_BNTH, ws)
    dk_BKSH = np.matmul(dscores_BKMS.swapaxes(-1, -2), q_BKMH, out=dk_BKSH)
    pass_context.tap_grad(f"{at}q", dq_BNTH)
    pass_context.tap_grad(f"{at}k", dk_BKSH)
    ws.release(mark)
    return dq_BNTH, dk_BKSH, dv_BKSH


def _fold(x_BNTH: Array, kv_heads: int, ws: Workspace) -> Array:
    """Stack the rows of a group: (B, K, M, H); a view where each group is one head."""
    B, N, T, H = x_BNTH.shape
    if kv_heads == N:
        return x_BNTH
    folded = ws.take((B, kv_heads, N // kv_heads * T, H))
    np.copyto(folded.reshape(B, N, T, H), x_BNTH)
    return folded


def _product_with_transposed(
    a_BKMH: Array, b_BKSH: Array, out_BKMS: Array, ws: Workspace, *, scale: float = 1.0
) -> None:
    """scale * a @ b.T.

    OpenBLAS is slower at small products with a transposed right side than at copying it first; the
    copy applies the scale on the way. For a few rows (decoding) the copy would cost more.
    """
    if a_BKMH.shape[2] < FEW_ROWS:
        np.matmul(a_BKMH, b_BKSH.swapaxes(-1, -2), out=out_BKMS)
        out_BKMS *= scale
        return
    mark = ws.mark()
    B, K, S, H = b_BKSH.shape
    b_BKHS = np.multiply(b_BKSH.swapaxes(-1, -2), scale, out=ws.take((B, K, H, S)))
    np.matmul(a_BKMH, b_BKHS, out=out_BKMS)
    ws.release(mark)


def _unfold_product(a_BKMS: Array, b_BKSH: Array, out_BNTH: Array, ws: Workspace) -> None:
    """Write a @ b to each head's own rows."""
    B, K, M, _ = a_BKMS.shape
    if out_BNTH.shape[1] == K:
        np.matmul(a_BKMS, b_BKSH, out=out_BNTH)
        return
    mark = ws.mark()
    folded = np.matmul(a_BKMS, b_BKSH, out=ws.take((B, K, M, b_BKSH.shape[-1])))
    np.copyto(out_BNTH, folded.reshape(out_BNTH.shape))
    ws.release(mark)


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
        scale=attention.scale,
        softcap=attention.softcap,
        sinks_N=params.get("sinks"),
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
    dout_BTD: Array,
    cache: HeadsCache,
    *,
    grads: dict[str, Array],
    pass_context: PassContext,
    dbias: Array | None = None,
) -> tuple[Array, Array | None]:
    """Return dx and, for cross-attention, dcontext; parameter gradients go to `grads`.

    `dbias` is added to, where the bias of the scores is learned.
    """
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
    flat: dict[str, Array] = {}
    for d_BTE, projection in zip(dflat, cache.projections, strict=True):
        for letter, columns in projection.columns.items():
            flat[letter] = part = d_BTE[..., columns]
            split[letter] = part.reshape(*part.shape[:2], -1, d_head)
    dq, dk, dv = (split[letter].transpose(0, 2, 1, 3) for letter in "qkv")
    dheads_BNTH = dheads.reshape(cache.shape).transpose(0, 2, 1, 3)
    dsinks_N = None
    if cache.attention.sinks:
        dsinks_N = slot(grads, "sinks", (cache.attention.n_heads,), dheads.dtype)
    attend_backward(
        dheads_BNTH,
        cache.attend,
        pass_context=pass_context,
        dq_BNTH=dq,
        dk_BKSH=dk,
        dv_BKSH=dv,
        dsinks_N=dsinks_N,
        dbias=dbias,
    )
    # forward: norm, then rotation (or the other way round)   =>   backward in the other order
    if cache.attention.qk_norm_last:
        _norms_backward(split, flat, cache, grads, ws)
    if cache.rotation is not None:
        for letter in "qk":
            rotate_backward(split[letter].transpose(0, 2, 1, 3), cache.rotation, ws=ws)
    if not cache.attention.qk_norm_last:
        _norms_backward(split, flat, cache, grads, ws)
    dinto = [
        _project_backward(d_BTE, projection, cache.attention, grads, pass_context)
        for d_BTE, projection in zip(dflat, cache.projections, strict=True)
    ]
    return dinto[0], dinto[1] if len(dinto) == 2 else None


def _norms_backward(
    split: dict[str, Array],
    flat: dict[str, Array],
    cache: HeadsCache,
    grads: dict[str, Array],
    ws: Workspace,
) -> None:
    """Turn the gradients of normalised q and k into those of q and k, in place."""
    over = flat if cache.attention.qk_norm_over == "all" else split
    for letter, norm in cache.norms.items():
        assert cache.attention.qk_norm is not None
        norm_backward(
            over[letter],
            norm,
            norm=cache.attention.qk_norm,
            grads=grads,
            name=f"{letter}_norm",
            dx=over[letter],
            ws=ws,
        )


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

    def normalise(x: Array, letter: str) -> None:
        if attention.qk_norm is not None and letter != "v":
            norm, name = attention.qk_norm, f"{letter}_norm"
            _, norms[letter] = norm_forward(
                x, norm=norm, params=params, name=name, out=x, ws=pass_context.ws
            )

    for letter, flat in made.items():
        split_BTNH = flat.reshape(*flat.shape[:2], -1, width)
        if not attention.qk_norm_last:
            normalise(flat if attention.qk_norm_over == "all" else split_BTNH, letter)
        heads[letter] = split_BTNH.transpose(0, 2, 1, 3)
        if rotation is not None and letter != "v":
            rotate_forward(heads[letter], cos=rotation[0], sin=rotation[1], ws=pass_context.ws)
        if attention.qk_norm_last:
            normalise(split_BTNH, letter)
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
