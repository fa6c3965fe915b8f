"""Layers as objects that keep their cache, thin wrappers of the forward and backward functions.

Each has `params` and `grads` under manifest leaf names, `forward` and `backward`. The model
itself (`model.py`) uses the functions; these are for reading, and for trying one part alone. First
values come from `rng`, or from a new generator.

The larger ones: attention, feed-forward, block, complete model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from glassformer.byhand.activation import relu_backward, relu_forward
from glassformer.byhand.attention import (
    AttendCache,
    attend_forward,
    softmax_backward,
    softmax_forward,
)
from glassformer.byhand.attention import attend_backward as heads_backward
from glassformer.byhand.embedding import (
    embedding_backward,
    embedding_forward,
    sinusoids,
)
from glassformer.byhand.inputs import check_ids
from glassformer.byhand.linear import LinearCache, linear_backward, linear_forward
from glassformer.byhand.loss import LossCache, cross_entropy_backward, cross_entropy_forward
from glassformer.byhand.model import Model, Tape
from glassformer.byhand.norm import NormCache, layer_norm_backward, layer_norm_forward
from glassformer.byhand.optim import Slot, slots_of
from glassformer.byhand.pass_context import Array, PassContext, Workspace
from glassformer.byhand.storage import fill
from glassformer.spec import model as spec
from glassformer.spec.attention_shapes import check_heads, check_mask_shape
from glassformer.spec.checks import divides, size
from glassformer.spec.errors import InputError
from glassformer.spec.init import HeInit
from glassformer.spec.manifest import (
    Parameter,
    attention_parameters,
    ffn_parameters,
    linear_parameters,
)
from glassformer.spec.presets import digits

# B batch, T query length, S key length, D d_model, N heads, H d_head, V vocab, C classes

T = TypeVar("T")


def draw(parameters: Sequence[Parameter], *, rng: np.random.Generator | None) -> dict[str, Array]:
    """Sample arrays in float64 by the manifest's rules."""
    rng = np.random.default_rng() if rng is None else rng
    arrays = {parameter.name: np.empty(parameter.shape) for parameter in parameters}
    for parameter in parameters:
        fill(arrays[parameter.name], rule=parameter.init, rng=rng)
    return arrays


def numbers(name: str, x: Array, *, width: int | None = None, axes: int | None = None) -> Array:
    """Return x as an array of floats, `width` wide and of so many axes; refuse any other."""
    try:
        x = np.asarray(x)
    except ValueError as error:
        raise InputError(f"{name} is no array: {error}", hint="rows of one length") from error
    fits = x.ndim > 0 and (axes is None or x.ndim == axes) and width in (None, x.shape[-1])
    if not fits or not (np.issubdtype(x.dtype, np.floating) or np.issubdtype(x.dtype, np.integer)):
        form = "(batch, length, {})" if axes == 3 else "(..., {})"
        raise InputError(
            f"{name} has shape {x.shape} and dtype {x.dtype}",
            hint=f"numbers of shape {form.format('width' if width is None else width)}",
        )
    return x if np.issubdtype(x.dtype, np.floating) else x.astype(np.float64)


def same_shape(dout: Array, shape: tuple[int, ...]) -> Array:
    """Return the gradient of an output of this shape, checked."""
    dout = numbers("the gradient", dout)
    if dout.shape != shape:
        raise InputError(f"the gradient has shape {dout.shape}", hint=f"the output's: {shape}")
    return dout


class Layer:
    """Parameters and gradients by name; `slots` are for an optimizer."""

    def __init__(self, params: Mapping[str, Array] | None = None) -> None:
        self.params = {} if params is None else dict(params)
        self.grads = {name: np.zeros_like(array) for name, array in self.params.items()}
        self._out_shape: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in self.params.items())
        return f"<{type(self).__name__}: {shapes or 'no parameters'}>"

    def slots(self) -> list[Slot]:
        """Return slots for an optimizer, `Adam(layer)`; only matrices decay."""
        return [Slot(p, self.grads[name], p.ndim == 2) for name, p in self.params.items()]

    def _out(self, out: Array) -> Array:
        self._out_shape = out.shape
        return out

    def _dout(self, dout: Array) -> Array:
        """Return the gradient of the last output, checked."""
        return same_shape(dout, remembered(self._out_shape))

    def _fill(self, made: Mapping[str, Array]) -> None:
        """Copy gradients into the arrays that an optimizer may hold."""
        for name, grad in made.items():
            self.grads[name][...] = grad


class Linear(Layer):
    """y = x W^T + b. Xavier, or He where a ReLU follows."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        bias: bool = True,
        he: bool = False,
        rng: np.random.Generator | None = None,
    ) -> None:
        size("d_in", d_in)
        size("d_out", d_out)
        rules = linear_parameters(
            "", (d_out, d_in), role="ffn", init=HeInit(), bias=bias, feeds_relu=he
        )
        super().__init__(draw(tuple(rules), rng=rng))
        self._cache: LinearCache | None = None

    def forward(self, x: Array) -> Array:
        weight_OI = self.params["weight"]
        out, self._cache = linear_forward(
            numbers("x", x, width=weight_OI.shape[1]),
            weight_OI=weight_OI,
            bias_O=self.params.get("bias"),
        )
        return self._out(out)

    def backward(self, dout: Array) -> Array:
        dx, dweight, dbias = linear_backward(self._dout(dout), remembered(self._cache))
        self._fill({"weight": dweight, **({"bias": dbias} if "bias" in self.grads else {})})
        return dx


class Embedding(Layer):
    """table[token]; the gradients of a repeated token add up."""

    def __init__(
        self, vocab_size: int, d_model: int, *, rng: np.random.Generator | None = None
    ) -> None:
        size("vocab_size", vocab_size)
        size("d_model", d_model)
        rng = np.random.default_rng() if rng is None else rng
        super().__init__({"weight": rng.normal(0.0, d_model**-0.5, (vocab_size, d_model))})
        self._cache: tuple[Array, float] | None = None

    def forward(self, tokens_BT: Array) -> Array:
        table_VD = self.params["weight"]
        tokens_BT = check_ids(tokens_BT, len(table_VD))
        out, self._cache = embedding_forward(tokens_BT, table_VD=table_VD)
        return self._out(out)

    def backward(self, dout_BTD: Array) -> None:
        dout_BTD = self._dout(dout_BTD)
        self.grads["weight"].fill(0.0)
        embedding_backward(dout_BTD, remembered(self._cache), dtable_VD=self.grads["weight"])


class PositionalEncoding(Layer):
    """x + PE(position), from a table computed once."""

    def __init__(self, d_model: int, *, max_seq_len: int = 512) -> None:
        super().__init__()
        size("d_model", d_model)
        size("max_seq_len", max_seq_len)
        self.table_SD = sinusoids(max_seq_len, d_model=d_model)

    def forward(self, x_BTD: Array) -> Array:
        x_BTD = numbers("x", x_BTD, width=self.table_SD.shape[1], axes=3)
        if x_BTD.shape[1] > len(self.table_SD):
            raise InputError(
                f"length {x_BTD.shape[1]} exceeds max_seq_len {len(self.table_SD)}",
                hint="PositionalEncoding(d_model, max_seq_len=...)",
            )
        return self._out(x_BTD + self.table_SD[: x_BTD.shape[1]])

    def backward(self, dout_BTD: Array) -> Array:
        # forward: out = x + constant   =>   dx = dout
        return self._dout(dout_BTD)


class LayerNorm(Layer):
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        size("width", width)
        super().__init__({"weight": np.ones(width), "bias": np.zeros(width)})
        self.eps = eps
        self._cache: NormCache | None = None

    @property
    def gamma(self) -> Array:
        """The learned scale."""
        return self.params["weight"]

    @property
    def beta(self) -> Array:
        """The learned shift."""
        return self.params["bias"]

    def forward(self, x: Array) -> Array:
        out, self._cache = layer_norm_forward(
            numbers("x", x, width=len(self.gamma)),
            weight_D=self.gamma,
            bias_D=self.beta,
            eps=self.eps,
        )
        return self._out(out)

    def backward(self, dout: Array) -> Array:
        dx, _, _ = layer_norm_backward(
            self._dout(dout),
            remembered(self._cache),
            dweight_D=self.grads["weight"],
            dbias_D=self.grads["bias"],
        )
        return dx


class ReLU(Layer):
    """max(x, 0)."""

    def forward(self, x: Array) -> Array:
        out, self._cache = relu_forward(numbers("x", x))
        return self._out(out)

    def backward(self, dout: Array) -> Array:
        return relu_backward(self._dout(dout), self._cache)


class Softmax(Layer):
    """exp(x) / sum exp(x) over the last axis; backward is the product with its Jacobian."""

    def forward(self, x: Array) -> Array:
        out, self._cache = softmax_forward(numbers("x", x))
        return self._out(out)

    def backward(self, dout: Array) -> Array:
        return softmax_backward(self._dout(dout), self._cache)


def scaled_dot_product_attention(
    q: Array, k: Array, v: Array, *, mask: Array | None = None
) -> tuple[Array, Array, AttendCache]:
    """Output, weights, and the cache for `attend_backward`.

    q, k, v: (batch, seq, d_k), or with heads (batch, N, seq, d_k), and v may be d_v wide; the
    output has the same form, the weights (batch, seq, seq) or (batch, N, seq, seq). mask: True =
    may attend, (T, S), (B, T, S) or (B, N, T, S), where 1 stands for all; a row without any gives
    zeros. Padding (B, S) is `mask[:, None]`.
    """
    q, k, v = numbers("q", q), numbers("k", k), numbers("v", v)
    check_heads(q.shape, k.shape, v.shape)
    one_head, dtype = q.ndim == 3, np.result_type(q, k, v)
    q, k, v = (x.astype(dtype, copy=False) for x in (q, k, v))
    if one_head:
        q, k, v = q[:, None], k[:, None], v[:, None]
    heads_BTNH, cache = attend_forward(
        q,
        k_BKSH=k,
        v_BKSH=v,
        pass_context=PassContext(Workspace(dtype)),
        allow=permission(mask, (*q.shape[:3], k.shape[2]), dtype),
    )
    out_BNTH, weights_BNTS = heads_BTNH.transpose(0, 2, 1, 3), cache.weights_BNTS
    if one_head:
        return out_BNTH[:, 0], weights_BNTS[:, 0], cache
    return out_BNTH, weights_BNTS, cache


def attend_backward(dout: Array, cache: AttendCache) -> tuple[Array, Array, Array]:
    """dq, dk, dv of `scaled_dot_product_attention`, from the gradient of its output."""
    dout, (B, N, T, _) = numbers("the gradient", dout), cache.weights_BNTS.shape
    one_head, width = dout.ndim == 3 and N == 1, cache.v_BKSH.shape[-1]
    if dout.shape not in ((B, N, T, width), *(((B, T, width),) if N == 1 else ())):
        raise InputError(
            f"the gradient has shape {dout.shape}", hint=f"the output's: {(B, N, T, width)}"
        )
    found = heads_backward(
        dout[:, None] if one_head else dout,
        cache,
        pass_context=PassContext(Workspace(cache.weights_BNTS.dtype)),
    )
    dq, dk, dv = (x[:, 0] if one_head else x for x in found)
    return dq, dk, dv


class CrossEntropyLoss:
    """Mean of -log p[target], computed from logits so that log(0) never happens."""

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing
        self._cache: LossCache | None = None
        self._shape: tuple[int, ...] = ()

    def forward(self, logits: Array, targets: Array, *, weights: Array | None = None) -> float:
        logits, targets = numbers("logits", logits), np.asarray(targets)
        if not np.issubdtype(targets.dtype, np.integer):
            raise InputError(f"targets have dtype {targets.dtype}", hint="whole numbers: classes")
        loss, self._cache = cross_entropy_forward(
            logits, targets=targets, weights=weights, label_smoothing=self.label_smoothing
        )
        self._shape = logits.shape
        return loss

    def backward(self) -> Array:
        """dlogits; once for each forward."""
        dlogits = cross_entropy_backward(1.0, remembered(self._cache)).reshape(self._shape)
        self._cache = None
        return dlogits


def remembered(cache: T | None) -> T:
    """Return the cache, or raise an error that names what is missing."""
    if cache is None:
        raise InputError("backward without a forward before it", hint="call forward first")
    return cache


# B batch, T query length, S key length, D d_model, V vocab


def permission(
    mask: Array | None, shape: tuple[int, int, int, int], dtype: "np.dtype[Any]"
) -> Array | None:
    """A mask, True = may attend, in the form of the functions; the scores are (B, N, T, S)."""
    if mask is None:
        return None
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        raise InputError(f"a mask of dtype {mask.dtype}", hint="bool, True = may attend")
    B, N, T, S = shape
    full = check_mask_shape(mask.shape, batch=B, heads=N, queries=T, keys=S)
    allowed = np.broadcast_to(mask.reshape(full), (*full[:2], T, S))
    return np.ascontiguousarray(allowed, dtype)


class MultiHeadAttention(Layer):
    """q, k, v and o projections around scaled dot-product attention in n_heads parts."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        divides("d_model", d_model, "n_heads", n_heads)
        self.attention = spec.Attention(
            n_heads=n_heads, n_kv_heads=n_kv_heads, bias="all", causal=False
        )
        rules = attention_parameters(self.attention, "", d_model, init=HeInit())
        super().__init__(draw(tuple(rules), rng=rng))
        self.d_model = d_model
        self.weights_BNTS: Array | None = None
        self._lines = {letter: Projection(self, f"{letter}_proj") for letter in "qkvo"}
        self._cache: AttendCache | None = None
        self._shared = True  # q, k and v read the same x

    def forward(
        self, x_BTD: Array, *, mask: Array | None = None, context_BSD: Array | None = None
    ) -> Array:
        x_BTD = numbers("x", x_BTD, width=self.d_model, axes=3)
        self._shared = context_BSD is None
        context_BSD = x_BTD if context_BSD is None else context_BSD
        context_BSD = numbers("the context", context_BSD, width=self.d_model, axes=3)
        if len(context_BSD) != len(x_BTD):
            raise InputError(f"the context has a batch of {len(context_BSD)}, x of {len(x_BTD)}")
        lines, (B, T, _), S = self._lines, x_BTD.shape, context_BSD.shape[1]
        heads_BTNH, self._cache = attend_forward(
            self._split(lines["q"].forward(x_BTD)),
            k_BKSH=self._split(lines["k"].forward(context_BSD)),
            v_BKSH=self._split(lines["v"].forward(context_BSD)),
            pass_context=PassContext(Workspace(x_BTD.dtype)),
            allow=permission(mask, (B, self.attention.n_heads, T, S), x_BTD.dtype),
        )
        self.weights_BNTS = self._cache.weights_BNTS
        return self._out(lines["o"].forward(heads_BTNH.reshape(B, T, -1)))

    def backward(self, dout_BTD: Array) -> tuple[Array, Array | None]:
        """dx, and dcontext if there was one."""
        cache, lines = remembered(self._cache), self._lines
        dheads_BNTH = self._split(lines["o"].backward(self._dout(dout_BTD)))
        found = attend_backward(dheads_BNTH, cache)
        dq, dk, dv = (
            lines[letter].backward(d.transpose(0, 2, 1, 3).reshape(len(d), d.shape[2], -1))
            for letter, d in zip("qkv", found, strict=True)
        )
        return (dq + dk + dv, None) if self._shared else (dq, dk + dv)

    def _split(self, x_BTE: Array) -> Array:
        """Return (B, N, T, H), a view."""
        width = self.d_model // self.attention.n_heads
        return x_BTE.reshape(*x_BTE.shape[:2], -1, width).transpose(0, 2, 1, 3)


class Projection:
    """A linear layer whose parameters and gradients belong to a larger one."""

    def __init__(self, owner: Layer, name: str) -> None:
        self.owner, self.name = owner, name
        self._cache: LinearCache | None = None

    def forward(self, x: Array) -> Array:
        params = self.owner.params
        weight_OI, bias_O = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
        out, self._cache = linear_forward(x, weight_OI=weight_OI, bias_O=bias_O)
        return out

    def backward(self, dout: Array) -> Array:
        grads = self.owner.grads
        dx, _, _ = linear_backward(
            dout,
            remembered(self._cache),
            dweight_OI=grads[f"{self.name}.weight"],
            dbias_O=grads[f"{self.name}.bias"],
        )
        return dx


class FeedForward(Layer):
    """Linear, ReLU, Linear."""

    def __init__(self, d_model: int, d_ff: int, *, rng: np.random.Generator | None = None) -> None:
        size("d_model", d_model)
        self.ffn, self.d_model = spec.MLP(d_ff=d_ff, activation="relu"), d_model
        rules = ffn_parameters(self.ffn, "", d_model, init=HeInit())
        super().__init__(draw(tuple(rules), rng=rng))
        self._up, self._down = Projection(self, "up_proj"), Projection(self, "down_proj")
        self._relu = ReLU()

    def forward(self, x_BTD: Array) -> Array:
        x_BTD = numbers("x", x_BTD, width=self.d_model)
        return self._out(self._down.forward(self._relu.forward(self._up.forward(x_BTD))))

    def backward(self, dout_BTD: Array) -> Array:
        dhidden = self._down.backward(self._dout(dout_BTD))
        return self._up.backward(self._relu.backward(dhidden))


class TransformerBlock(Layer):
    """Attention, add & norm, feed-forward, add & norm: post-norm, as in 2017."""

    def __init__(
        self, d_model: int, n_heads: int, d_ff: int, *, rng: np.random.Generator | None = None
    ) -> None:
        rng = np.random.default_rng() if rng is None else rng
        self.d_model = d_model
        self.parts: dict[str, Any] = {
            "attn": MultiHeadAttention(d_model, n_heads, rng=rng),
            "attn_norm": LayerNorm(d_model),
            "ffn": FeedForward(d_model, d_ff, rng=rng),
            "ffn_norm": LayerNorm(d_model),
        }
        super().__init__()
        for name, part in self.parts.items():  # the same arrays, under longer names
            self.params |= {f"{name}.{leaf}": array for leaf, array in part.params.items()}
            self.grads |= {f"{name}.{leaf}": array for leaf, array in part.grads.items()}

    def forward(self, x_BTD: Array, *, mask: Array | None = None) -> Array:
        x_BTD, parts = numbers("x", x_BTD, width=self.d_model, axes=3), self.parts
        x_BTD = parts["attn_norm"].forward(x_BTD + parts["attn"].forward(x_BTD, mask=mask))
        return self._out(parts["ffn_norm"].forward(x_BTD + parts["ffn"].forward(x_BTD)))

    def backward(self, dout_BTD: Array) -> Array:
        # forward: x' = norm(s), s = x + part(x)   =>   ds = norm'(dx'),  dx = ds + part'(ds)
        parts = self.parts
        ds_BTD = parts["ffn_norm"].backward(self._dout(dout_BTD))
        ds_BTD = parts["attn_norm"].backward(ds_BTD + parts["ffn"].backward(ds_BTD))
        dx_BTD: Array = ds_BTD + parts["attn"].backward(ds_BTD)[0]
        return dx_BTD


class Transformer:
    """Embedding, sinusoids, post-norm blocks and an output projection: one answer (B, V).

    The answer is read at the last real token. `model` is the `Model` of the digits preset that
    computes; `Transformer.of(spec)` has any other with one head.
    """

    def __init__(
        self,
        vocab_size: int = 20,
        d_model: int = 64,
        n_heads: int = 4,
        d_ff: int = 256,
        n_layers: int = 2,
        *,
        max_seq_len: int = 64,
        rng: np.random.Generator | None = None,
    ) -> None:
        described = digits(
            vocab_size=vocab_size,
            d_model=d_model,
            n_heads=n_heads,
            d_ff=d_ff,
            n_layers=n_layers,
            max_seq_len=max_seq_len,
        )
        self._take(Model(described, rng=rng))

    @classmethod
    def of(cls, model: spec.ModelSpec, *, rng: np.random.Generator | None = None) -> Self:
        """Return a new transformer of a spec."""
        made = cls.__new__(cls)
        made._take(Model(model, rng=rng))
        return made

    def _take(self, model: Model) -> None:
        self.model = model
        self.params: Mapping[str, Array] = model.params
        self.grads: Mapping[str, Array] = model.grads
        self._head = model.spec.head_names()[0]
        self._tape: Tape | None = None
        self._out_shape: tuple[int, ...] | None = None

    @property
    def spec(self) -> spec.ModelSpec:
        """The model's spec."""
        return self.model.spec

    def __repr__(self) -> str:
        size, heads = self.model.storage.vector.size, self.spec.decoder.heads_in_words()
        return (
            f"<{type(self).__name__}: {size:,} parameters, {self.spec.n_layers} layers, d_model "
            f"{self.spec.d_model}, {heads} heads, vocabulary {self.spec.vocab_size}, "
            f"{self.model.dtype} in NumPy>"
        )

    def slots(self) -> list[Slot]:
        """Return slots for an optimizer; norms and biases do not decay."""
        return slots_of(self.model)

    def forward(self, tokens_BT: Array, valid_BT: Array | None = None) -> Array:
        logits, self._tape = self.model.record(self.model.inputs(tokens_BT, valid_BT=valid_BT))
        self._out_shape = logits[self._head].shape
        return np.array(logits[self._head])

    def backward(self, dlogits: Array) -> None:
        """Fill `grads`."""
        dlogits = same_shape(dlogits, remembered(self._out_shape))
        self.model.backward({self._head: dlogits}, remembered(self._tape))
