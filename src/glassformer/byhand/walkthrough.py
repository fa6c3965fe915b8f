"""One block of a transformer, forward and backward, with nothing in between: the page to read.

    x1 = x + attention(norm(x))         x2 = x1 + feed_forward(norm(x1))

Plain NumPy and no machinery: every array is new, and backward is forward read from below, line by
line. The interpreter computes the same from the program's list of operations, faster; a test holds
the two equal, values and every gradient. Parameters have their names in the manifest.
"""

from typing import Any

import numpy as np

from glassformer.byhand.pass_context import Array

# B batch, T length, D d_model, N heads, H d_head (D = N H), F d_ff

Arrays = dict[str, Array]
EPS = 1e-5


def block_forward(x_BTD: Array, p: Arrays, *, heads: int) -> tuple[Array, dict[str, Any]]:
    """Return the residual stream after the block, and what backward needs of the way there."""
    B, T, D = x_BTD.shape

    def split(y_BTD: Array) -> Array:  # (B, T, N H) to (B, N, T, H)
        return y_BTD.reshape(B, T, heads, D // heads).transpose(0, 2, 1, 3)

    # every row normalised, then scaled and shifted
    unit1, rstd1 = normalised(x_BTD)
    n1_BTD = unit1 * p["attn_norm.weight"] + p["attn_norm.bias"]

    # what each position looks for, offers, and hands over
    q = split(n1_BTD @ p["attn.q_proj.weight"].T + p["attn.q_proj.bias"])
    k = split(n1_BTD @ p["attn.k_proj.weight"].T + p["attn.k_proj.bias"])
    v = split(n1_BTD @ p["attn.v_proj.weight"].T + p["attn.v_proj.bias"])

    # a softmax over the past and the position itself
    scores_BNTT = q @ k.swapaxes(-1, -2) / np.sqrt(D // heads)
    scores_BNTT = np.where(np.tri(T, dtype=bool), scores_BNTT, -np.inf)
    weights_BNTT = np.exp(scores_BNTT - scores_BNTT.max(axis=-1, keepdims=True))
    weights_BNTT /= weights_BNTT.sum(axis=-1, keepdims=True)

    # the weighted sum of values, all heads side by side, mixed and added to the stream
    joined_BTD = (weights_BNTT @ v).transpose(0, 2, 1, 3).reshape(B, T, D)
    x1_BTD = x_BTD + joined_BTD @ p["attn.o_proj.weight"].T + p["attn.o_proj.bias"]

    # the second residual line: each position by itself
    unit2, rstd2 = normalised(x1_BTD)
    n2_BTD = unit2 * p["ffn_norm.weight"] + p["ffn_norm.bias"]
    hidden_BTF = np.maximum(n2_BTD @ p["ffn.up_proj.weight"].T + p["ffn.up_proj.bias"], 0)
    x2_BTD = x1_BTD + hidden_BTF @ p["ffn.down_proj.weight"].T + p["ffn.down_proj.bias"]

    cache = {
        "unit1": unit1, "rstd1": rstd1, "n1": n1_BTD, "q": q, "k": k, "v": v,
        "weights": weights_BNTT, "joined": joined_BTD,
        "unit2": unit2, "rstd2": rstd2, "n2": n2_BTD, "hidden": hidden_BTF,
    }  # fmt: skip
    return x2_BTD, cache


def block_backward(
    dx2_BTD: Array, c: dict[str, Any], p: Arrays, *, heads: int
) -> tuple[Array, Arrays]:
    """Return the gradient of the block's input, and that of every parameter by its name."""
    B, T, D = dx2_BTD.shape
    g: Arrays = {}

    def split(y_BTD: Array) -> Array:
        return y_BTD.reshape(B, T, heads, D // heads).transpose(0, 2, 1, 3)

    def merge(y_BNTH: Array) -> Array:
        return y_BNTH.transpose(0, 2, 1, 3).reshape(B, T, D)

    def linear(dy: Array, x: Array, name: str) -> Array:
        # forward: y = x @ W.T + b   =>   dx = dy @ W,  dW = dy.T @ x,  db = sum of dy's rows
        dy_M, x_M = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        g[f"{name}.weight"] = dy_M.T @ x_M
        g[f"{name}.bias"] = dy_M.sum(axis=0)
        dx: Array = dy @ p[f"{name}.weight"]
        return dx

    def norm(dn: Array, unit: Array, rstd: Array, name: str) -> Array:
        # forward: n = unit * weight + bias   =>   dunit = dn * weight,  dweight = sum dn * unit
        dunit = dn * p[f"{name}.weight"]
        g[f"{name}.weight"] = (dn * unit).sum(axis=(0, 1))
        g[f"{name}.bias"] = dn.sum(axis=(0, 1))
        # forward: unit = (x - mean(x)) * rstd, and both depend on every x of the row
        #   =>   dx = rstd (dunit - mean(dunit) - unit mean(dunit * unit))
        pull = (dunit * unit).mean(axis=-1, keepdims=True)
        dx: Array = rstd * (dunit - dunit.mean(axis=-1, keepdims=True) - unit * pull)
        return dx

    # forward: x2 = x1 + down(hidden)   =>   dx1 = dx2 + (through the part),  and the part gets dx2
    dhidden = linear(dx2_BTD, c["hidden"], "ffn.down_proj")
    # forward: hidden = max(up, 0)   =>   dup = dhidden where hidden > 0, else 0
    dup = dhidden * (c["hidden"] > 0)
    dn2 = linear(dup, c["n2"], "ffn.up_proj")
    dx1_BTD = dx2_BTD + norm(dn2, c["unit2"], c["rstd2"], "ffn_norm")

    # forward: x1 = x + o(joined)
    dheads = split(linear(dx1_BTD, c["joined"], "attn.o_proj"))
    # forward: heads = weights @ v   =>   dweights = dheads @ v.T,  dv = weights.T @ dheads
    weights = c["weights"]
    dweights = dheads @ c["v"].swapaxes(-1, -2)
    dv = weights.swapaxes(-1, -2) @ dheads
    # forward: weights = softmax(scores)   =>   dscores = weights (dweights - sum dweights weights)
    # a weight of 0 passes nothing on: what lies in the future gets no gradient
    dscores = weights * (dweights - (dweights * weights).sum(axis=-1, keepdims=True))
    # forward: scores = q @ k.T / sqrt(H)
    #   =>   dq = dscores @ k / sqrt(H),  dk = dscores.T @ q / sqrt(H)
    dscores = dscores / np.sqrt(D // heads)
    dq, dk = dscores @ c["k"], dscores.swapaxes(-1, -2) @ c["q"]
    # forward: q, k and v all read n1   =>   its gradient is the sum of three
    dn1 = linear(merge(dq), c["n1"], "attn.q_proj")
    dn1 = dn1 + linear(merge(dk), c["n1"], "attn.k_proj")
    dn1 = dn1 + linear(merge(dv), c["n1"], "attn.v_proj")
    return dx1_BTD + norm(dn1, c["unit1"], c["rstd1"], "attn_norm"), g


def normalised(x: Array) -> tuple[Array, Array]:
    """Return each row with mean 0 and variance 1, and one over its spread."""
    centred = x - x.mean(axis=-1, keepdims=True)
    rstd = 1.0 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPS)
    return centred * rstd, rstd
