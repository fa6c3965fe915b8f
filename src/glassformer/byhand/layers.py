"""The layers of source 003 by their names: objects that remember their cache, thin over the pairs.

Each has `params` and `grads` under manifest leaf names, `forward` and `backward`. The model
itself (`model.py`) uses the pairs; these are for reading, and for trying one part alone.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from glassformer.byhand.activation import relu_backward, relu_forward
from glassformer.byhand.attend import AttendCache, attend_forward
from glassformer.byhand.embed import embedding_backward, embedding_forward
from glassformer.byhand.linear import LinearCache, linear_backward, linear_forward
from glassformer.byhand.loss import LossCache, cross_entropy_backward, cross_entropy_forward
from glassformer.byhand.norm import NormCache, layer_norm_backward, layer_norm_forward
from glassformer.byhand.optim import Slot
from glassformer.byhand.position import sinusoidal_backward, sinusoids
from glassformer.byhand.softmax import softmax_backward, softmax_forward
from glassformer.byhand.storage import fill
from glassformer.byhand.trip import Trip
from glassformer.byhand.workspace import Array, Workspace
from glassformer.spec.errors import InputError
from glassformer.spec.inits import HeInit
from glassformer.spec.parameters import Parameter, linear_parameters

# B batch, T query length, S key length, D d_model, N heads, H d_head, V vocab, C classes

T = TypeVar("T")


def draw(parameters: Sequence[Parameter], *, rng: np.random.Generator) -> dict[str, Array]:
    """Arrays in float64 by the manifest's rules."""
    arrays = {parameter.name: np.empty(parameter.shape) for parameter in parameters}
    for parameter in parameters:
        fill(arrays[parameter.name], rule=parameter.init, rng=rng)
    return arrays


class Layer:
    """Parameters and gradients by name; `slots` hands them to an optimizer."""

    def __init__(self) -> None:
        self.params: dict[str, Array] = {}
        self.grads: dict[str, Array] = {}

    def slots(self) -> list[Slot]:
        """For `Adam(layer.slots())`, after the first backward; matrices decay, vectors do not."""
        return [Slot(p, self.grads[name], p.ndim == 2) for name, p in self.params.items()]


class Linear(Layer):
    """y = x W^T + b. Xavier, or He where a ReLU follows."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        rng: np.random.Generator,
        bias: bool = True,
        he: bool = False,
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

    def __init__(self, vocab_size: int, d_model: int, *, rng: np.random.Generator) -> None:
        super().__init__()
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

    def __init__(self, d_model: int, *, max_seq_len: int) -> None:
        super().__init__()
        self.table_SD = sinusoids(max_seq_len, d_model=d_model)

    def forward(self, x_BTD: Array) -> Array:
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
    q_BNTH: Array, k_BNSH: Array, v_BNSH: Array, *, mask: Array | None = None
) -> tuple[Array, Array, AttendCache]:
    """Output (B, N, T, H), weights (B, N, T, S), and the cache for `attend_backward`.

    mask: True = may attend; a row without any gives zeros.
    """
    allow = None if mask is None else np.asarray(mask, q_BNTH.dtype)
    trip = Trip(Workspace(q_BNTH.dtype))
    heads_BTNH, cache = attend_forward(q_BNTH, k_BKSH=k_BNSH, v_BKSH=v_BNSH, trip=trip, allow=allow)
    return heads_BTNH.transpose(0, 2, 1, 3), cache.weights_BNTS, cache


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
    """The cache, or an error that says what is missing."""
    if cache is None:
        raise InputError("backward without a forward before it", hint="call forward first")
    return cache
