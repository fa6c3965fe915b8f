"""The larger layers of source 003 by their names: attention, feed-forward, block, whole model."""

from collections.abc import Mapping

import numpy as np

from glassformer.byhand.attention import HeadsCache, multi_head_backward, multi_head_forward
from glassformer.byhand.block import BlockArrays, BlockCache, Setting, block_backward, block_forward
from glassformer.byhand.ffn import FeedCache, feed_backward, feed_forward
from glassformer.byhand.layers import Layer, draw, remembered
from glassformer.byhand.model import Model, Tape
from glassformer.byhand.storage import under
from glassformer.byhand.trip import Trip
from glassformer.byhand.workspace import Array, Workspace
from glassformer.spec import model as spec
from glassformer.spec.inits import HeInit
from glassformer.spec.parameters import attention_parameters, block_parameters, ffn_parameters

# B batch, T query length, S key length, D d_model, V vocab


def permission(mask: Array | None) -> Array | None:
    """A mask (T, S), (B, T, S) or (B, N, T, S), True = may attend, as the pairs want it."""
    if mask is None:
        return None
    allow = np.asarray(mask, np.float64)
    return allow[:, None] if allow.ndim == 3 else allow


class MultiHeadAttention(Layer):
    """q, k, v and o projections around scaled dot-product attention in n_heads parts."""

    def __init__(
        self, d_model: int, n_heads: int, *, rng: np.random.Generator, n_kv_heads: int | None = None
    ) -> None:
        super().__init__()
        self.attention = spec.Attention(
            n_heads=n_heads, n_kv_heads=n_kv_heads, bias="all", causal=False
        )
        rules = attention_parameters(self.attention, "", d_model, init=HeInit())
        self.params = draw(tuple(rules), rng=rng)
        self.weights_BNTS: Array | None = None
        self._cache: HeadsCache | None = None
        self._trip = Trip(Workspace(np.float64))

    def forward(
        self, x_BTD: Array, *, mask: Array | None = None, context_BSD: Array | None = None
    ) -> Array:
        self._trip = Trip(Workspace(x_BTD.dtype))
        out_BTD, self._cache = multi_head_forward(
            x_BTD,
            attention=self.attention,
            params=self.params,
            trip=self._trip,
            context_BSD=context_BSD,
            allow=permission(mask),
        )
        self.weights_BNTS = self._cache.attend.weights_BNTS
        return out_BTD

    def backward(self, dout_BTD: Array) -> tuple[Array, Array | None]:
        """dx, and dcontext if there was one."""
        cache = remembered(self._cache)
        return multi_head_backward(dout_BTD, cache, grads=self.grads, trip=self._trip)


class FeedForward(Layer):
    """Linear, ReLU, Linear."""

    def __init__(self, d_model: int, d_ff: int, *, rng: np.random.Generator) -> None:
        super().__init__()
        self.ffn = spec.MLP(d_ff=d_ff, activation="relu")
        self.params = draw(tuple(ffn_parameters(self.ffn, "", d_model, init=HeInit())), rng=rng)
        self._cache: FeedCache | None = None
        self._trip = Trip(Workspace(np.float64))

    def forward(self, x_BTD: Array) -> Array:
        self._trip = Trip(Workspace(x_BTD.dtype))
        out, self._cache = feed_forward(x_BTD, ffn=self.ffn, params=self.params, trip=self._trip)
        return out

    def backward(self, dout_BTD: Array) -> Array:
        return feed_backward(dout_BTD, remembered(self._cache), grads=self.grads, trip=self._trip)


class TransformerBlock(Layer):
    """Attention, add & norm, feed-forward, add & norm: post-norm, as the source has it."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int, *, rng: np.random.Generator) -> None:
        super().__init__()
        self.block = spec.Block(
            attention=spec.Attention(n_heads=n_heads, bias="all", causal=False),
            ffn=spec.MLP(d_ff=d_ff, activation="relu"),
            norm=spec.LayerNorm(),
            placement="post",
        )
        self.params = draw(tuple(block_parameters(self.block, "", d_model, init=HeInit())), rng=rng)
        self._cache: BlockCache | None = None
        self._trip = Trip(Workspace(np.float64))

    def forward(self, x_BTD: Array, *, mask: Array | None = None) -> Array:
        self._trip = Trip(Workspace(x_BTD.dtype))
        out, self._cache = block_forward(
            x_BTD,
            block=self.block,
            params=BlockArrays(
                attn=under(self.params, "attn."),
                ffn=under(self.params, "ffn."),
                norms={name: array for name, array in self.params.items() if "_norm." in name},
            ),
            trip=self._trip,
            setting=Setting(allow=permission(mask)),
            dropout=spec.Dropout(),
        )
        return out

    def backward(self, dout_BTD: Array) -> Array:
        arrays = BlockArrays()
        d_BTD = np.array(dout_BTD)
        block_backward(d_BTD, remembered(self._cache), grads=arrays, trip=self._trip)
        for prefix, part in (("attn.", arrays.attn), ("ffn.", arrays.ffn), ("", arrays.norms)):
            self.grads |= {f"{prefix}{name}": grad for name, grad in part.items()}
        return d_BTD


class Transformer:
    """A `Model` of the source's spec: embedding, sinusoids, blocks, one answer (B, V)."""

    def __init__(self, model: spec.ModelSpec, *, rng: np.random.Generator) -> None:
        self.model = Model(model, rng=rng)
        self.params: Mapping[str, Array] = self.model.params
        self.grads: Mapping[str, Array] = self.model.grads
        self._head = model.head_names()[0]
        self._tape: Tape | None = None

    def forward(self, tokens_BT: Array, *, valid_BT: Array | None = None) -> Array:
        logits, self._tape = self.model.record(self.model.inputs(tokens_BT, valid_BT=valid_BT))
        return np.array(logits[self._head])

    def backward(self, dlogits: Array) -> None:
        """Fill `grads`."""
        self.model.backward({self._head: dlogits}, remembered(self._tape))
