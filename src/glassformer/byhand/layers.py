"""Layers as objects that keep their cache, thin wrappers of the forward and backward functions.

Each has `params` and `grads` under manifest leaf names, `forward` and `backward`. The model
itself (`model.py`) uses the functions; these are for reading, and for trying one part alone. First
values come from `rng`, or from a new generator.

The larger ones: attention, feed-forward, block, complete model.
"""

from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

import numpy as np

from glassformer.byhand.activation import relu_backward, relu_forward
from glassformer.byhand.attention import (
    AttendCache,
    HeadsCache,
    attend_forward,
    multi_head_backward,
    multi_head_forward,
    softmax_backward,
    softmax_forward,
)
from glassformer.byhand.block import BlockArrays, BlockCache, Setting, block_backward, block_forward
from glassformer.byhand.embedding import (
    embedding_backward,
    embedding_forward,
    sinusoidal_backward,
    sinusoids,
)
from glassformer.byhand.ffn import FeedCache, feed_backward, feed_forward
from glassformer.byhand.linear import LinearCache, linear_backward, linear_forward
from glassformer.byhand.loss import LossCache, cross_entropy_backward, cross_entropy_forward
from glassformer.byhand.model import Model, Tape
from glassformer.byhand.norm import NormCache, layer_norm_backward, layer_norm_forward
from glassformer.byhand.optim import Slot, slots_of
from glassformer.byhand.pass_context import Array, PassContext, Workspace
from glassformer.byhand.storage import fill, under
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError
from glassformer.spec.init import HeInit
from glassformer.spec.manifest import (
    Parameter,
    attention_parameters,
    block_parameters,
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


class Layer:
    """Parameters and gradients by name; `slots` are for an optimizer."""

    def __init__(self) -> None:
        self.params: dict[str, Array] = {}
        self.grads: dict[str, Array] = {}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in self.params.items())
        return f"<{type(self).__name__}: {shapes or 'no parameters'}>"

    def slots(self) -> list[Slot]:
        """Return slots for `Adam(layer.slots())`, after the first backward; only matrices decay."""
        return [Slot(p, self.grads[name], p.ndim == 2) for name, p in self.params.items()]


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
        super().__init__()
        rules = linear_parameters(
            "", (d_out, d_in), role="ffn", init=HeInit(), bias=bias, feeds_relu=he
        )
        self.params = draw(tuple(rules), rng=rng)
        self.grads = {name: np.zeros_like(array) for name, array in self.params.items()}
        self._cache: LinearCache | None = None

    def forward(self, x: Array) -> Array:
        out, self._cache = linear_forward(
            x, weight_OI=self.params["weight"], bias_O=self.params.get("bias")
        )
        return out

    def backward(self, dout: Array) -> Array:
        dx, dweight, dbias = linear_backward(dout, remembered(self._cache))
        self.grads["weight"][...] = dweight
        if "bias" in self.grads:
            self.grads["bias"][...] = dbias
        return dx


class Embedding(Layer):
    """table[token]; the gradients of a repeated token add up."""

    def __init__(
        self, vocab_size: int, d_model: int, *, rng: np.random.Generator | None = None
    ) -> None:
        super().__init__()
        rng = np.random.default_rng() if rng is None else rng
        self.params = {"weight": rng.normal(0.0, d_model**-0.5, (vocab_size, d_model))}
        self.grads = {"weight": np.zeros((vocab_size, d_model))}
        self._cache: tuple[Array, float] | None = None

    def forward(self, tokens_BT: Array) -> Array:
        out, self._cache = embedding_forward(tokens_BT, table_VD=self.params["weight"])
        return out

    def backward(self, dout_BTD: Array) -> None:
        self.grads["weight"].fill(0.0)
        embedding_backward(dout_BTD, remembered(self._cache), dtable_VD=self.grads["weight"])


class PositionalEncoding(Layer):
    """x + PE(position), from a table computed once."""

    def __init__(self, d_model: int, *, max_seq_len: int = 512) -> None:
        super().__init__()
        self.table_SD = sinusoids(max_seq_len, d_model=d_model)

    def forward(self, x_BTD: Array) -> Array:
        if x_BTD.shape[1] > len(self.table_SD):
            raise InputError(
                f"length {x_BTD.shape[1]} exceeds max_seq_len {len(self.table_SD)}",
                hint="PositionalEncoding(d_model, max_seq_len=...)",
            )
        return x_BTD + self.table_SD[: x_BTD.shape[1]]

    def backward(self, dout_BTD: Array) -> Array:
        return sinusoidal_backward(dout_BTD)


class LayerNorm(Layer):
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.params = {"weight": np.ones(width), "bias": np.zeros(width)}
        self.grads = {"weight": np.zeros(width), "bias": np.zeros(width)}
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
            x, weight_D=self.params["weight"], bias_D=self.params["bias"], eps=self.eps
        )
        return out

    def backward(self, dout: Array) -> Array:
        dweight, dbias = self.grads["weight"], self.grads["bias"]
        return layer_norm_backward(dout, remembered(self._cache), dweight_D=dweight, dbias_D=dbias)[
            0
        ]


class ReLU(Layer):
    """max(x, 0)."""

    def forward(self, x: Array) -> Array:
        out, self._cache = relu_forward(x)
        return out

    def backward(self, dout: Array) -> Array:
        return relu_backward(dout, self._cache)


class Softmax(Layer):
    """exp(x) / sum exp(x) over the last axis; backward is the product with its Jacobian."""

    def forward(self, x: Array) -> Array:
        out, self._cache = softmax_forward(x)
        return out

    def backward(self, dout: Array) -> Array:
        return softmax_backward(dout, self._cache)


def scaled_dot_product_attention(
    q: Array, k: Array, v: Array, *, mask: Array | None = None
) -> tuple[Array, Array, AttendCache]:
    """Output, weights, and the cache for `attend_backward`.

    q, k, v: (batch, seq, d_k), or with heads (batch, N, seq, d_k); the output has the same form,
    the weights (batch, seq, seq) or (batch, N, seq, seq). mask: True = may attend, (T, S),
    (B, T, S) or (B, N, T, S); a row without any gives zeros.
    """
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
        raise InputError(
            f"q, k, v have shapes {q.shape}, {k.shape}, {v.shape}",
            hint="(batch, seq, d_k), or (batch, heads, seq, d_k), for all three",
        )
    one_head = q.ndim == 3
    if one_head:
        q, k, v = q[:, None], k[:, None], v[:, None]
    allow = permission(mask)
    heads_BTNH, cache = attend_forward(
        q,
        k_BKSH=k,
        v_BKSH=v,
        pass_context=PassContext(Workspace(q.dtype)),
        allow=None if allow is None else allow.astype(q.dtype),
    )
    out_BNTH, weights_BNTS = heads_BTNH.transpose(0, 2, 1, 3), cache.weights_BNTS
    if one_head:
        return out_BNTH[:, 0], weights_BNTS[:, 0], cache
    return out_BNTH, weights_BNTS, cache


class CrossEntropyLoss:
    """Mean of -log p[target], computed from logits so that log(0) never happens."""

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing
        self._cache: LossCache | None = None
        self._shape: tuple[int, ...] = ()

    def forward(self, logits: Array, targets: Array, *, weights: Array | None = None) -> float:
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


def permission(mask: Array | None) -> Array | None:
    """A mask (T, S), (B, T, S) or (B, N, T, S), True = may attend, in the form of the functions."""
    if mask is None:
        return None
    allow = np.asarray(mask, np.float64)
    return allow[:, None] if allow.ndim == 3 else allow


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
        super().__init__()
        self.attention = spec.Attention(
            n_heads=n_heads, n_kv_heads=n_kv_heads, bias="all", causal=False
        )
        rules = attention_parameters(self.attention, "", d_model, init=HeInit())
        self.params = draw(tuple(rules), rng=rng)
        self.weights_BNTS: Array | None = None
        self._cache: HeadsCache | None = None
        self._trip = PassContext(Workspace(np.float64))

    def forward(
        self, x_BTD: Array, *, mask: Array | None = None, context_BSD: Array | None = None
    ) -> Array:
        self._trip = PassContext(Workspace(x_BTD.dtype))
        out_BTD, self._cache = multi_head_forward(
            x_BTD,
            attention=self.attention,
            params=self.params,
            pass_context=self._trip,
            context_BSD=context_BSD,
            allow=permission(mask),
        )
        self.weights_BNTS = self._cache.attend.weights_BNTS
        return out_BTD

    def backward(self, dout_BTD: Array) -> tuple[Array, Array | None]:
        """dx, and dcontext if there was one."""
        cache = remembered(self._cache)
        return multi_head_backward(dout_BTD, cache, grads=self.grads, pass_context=self._trip)


class FeedForward(Layer):
    """Linear, ReLU, Linear."""

    def __init__(self, d_model: int, d_ff: int, *, rng: np.random.Generator | None = None) -> None:
        super().__init__()
        self.ffn = spec.MLP(d_ff=d_ff, activation="relu")
        self.params = draw(tuple(ffn_parameters(self.ffn, "", d_model, init=HeInit())), rng=rng)
        self._cache: FeedCache | None = None
        self._trip = PassContext(Workspace(np.float64))

    def forward(self, x_BTD: Array) -> Array:
        self._trip = PassContext(Workspace(x_BTD.dtype))
        out, self._cache = feed_forward(
            x_BTD, ffn=self.ffn, params=self.params, pass_context=self._trip
        )
        return out

    def backward(self, dout_BTD: Array) -> Array:
        return feed_backward(
            dout_BTD, remembered(self._cache), grads=self.grads, pass_context=self._trip
        )


class TransformerBlock(Layer):
    """Attention, add & norm, feed-forward, add & norm: post-norm, as in 2017."""

    def __init__(
        self, d_model: int, n_heads: int, d_ff: int, *, rng: np.random.Generator | None = None
    ) -> None:
        super().__init__()
        self.block = spec.Block(
            attention=spec.Attention(n_heads=n_heads, bias="all", causal=False),
            ffn=spec.MLP(d_ff=d_ff, activation="relu"),
            norm=spec.LayerNorm(),
            placement="post",
        )
        self.params = draw(tuple(block_parameters(self.block, "", d_model, init=HeInit())), rng=rng)
        self._cache: BlockCache | None = None
        self._trip = PassContext(Workspace(np.float64))

    def forward(self, x_BTD: Array, *, mask: Array | None = None) -> Array:
        self._trip = PassContext(Workspace(x_BTD.dtype))
        out, self._cache = block_forward(
            x_BTD,
            block=self.block,
            params=BlockArrays(
                attn=under(self.params, "attn."),
                ffn=under(self.params, "ffn."),
                norms={name: array for name, array in self.params.items() if "_norm." in name},
            ),
            pass_context=self._trip,
            setting=Setting(allow=permission(mask)),
            dropout=spec.Dropout(),
        )
        return out

    def backward(self, dout_BTD: Array) -> Array:
        arrays = BlockArrays()
        d_BTD = np.array(dout_BTD)
        block_backward(d_BTD, remembered(self._cache), grads=arrays, pass_context=self._trip)
        for prefix, part in (("attn.", arrays.attn), ("ffn.", arrays.ffn), ("", arrays.norms)):
            self.grads |= {f"{prefix}{name}": grad for name, grad in part.items()}
        return d_BTD


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

    @property
    def spec(self) -> spec.ModelSpec:
        """The model's spec."""
        return self.model.spec

    def __repr__(self) -> str:
        size, heads = self.model.storage.vector.size, next(self.spec.decoder.blocks()).attention
        return (
            f"<{type(self).__name__}: {size:,} parameters, {self.spec.n_layers} layers, d_model "
            f"{self.spec.d_model}, {heads.n_heads} heads, vocabulary {self.spec.vocab_size}, "
            f"{self.model.dtype} in NumPy>"
        )

    def slots(self) -> list[Slot]:
        """Return slots for an optimizer; norms and biases do not decay."""
        return slots_of(self.model)

    def forward(self, tokens_BT: Array, valid_BT: Array | None = None) -> Array:
        logits, self._tape = self.model.record(self.model.inputs(tokens_BT, valid_BT=valid_BT))
        return np.array(logits[self._head])

    def backward(self, dlogits: Array) -> None:
        """Fill `grads`."""
        self.model.backward({self._head: dlogits}, remembered(self._tape))
