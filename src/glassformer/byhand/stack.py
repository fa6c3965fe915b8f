"""One stack: embedding, position, blocks, final norm; and its backward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import numpy as np

from glassformer.byhand.attention import Past
from glassformer.byhand.block import BlockArrays, BlockCache, Setting, block_backward, block_forward
from glassformer.byhand.embedding import (
    FactorCache,
    alibi_bias,
    embedding_backward,
    embedding_forward,
    embedding_scale,
    factorized_backward,
    factorized_forward,
    relative_backward,
    relative_buckets_of,
    relative_forward,
    rotations,
    sinusoidal_forward,
    sinusoids,
)
from glassformer.byhand.inputs import Side, allow_of, positions_of
from glassformer.byhand.norm import NormCache, norm_backward, norm_forward
from glassformer.byhand.pass_context import Array, PassContext
from glassformer.byhand.storage import Storage
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError
from glassformer.spec.own import OwnPosition
from glassformer.spec.position import alibi_slopes, relative_buckets
from glassformer.spec.program import everything_but

# B batch, T query length, S key length, D d_model

#: What this engine runs: every part but a user's position, which is a torch module.
RUNS = everything_but(OwnPosition)


@dataclass(slots=True)
class StackParts:
    """One stack's arrays: parameters, gradients, and the tables that are not learned."""

    model: spec.ModelSpec
    stack: spec.Stack
    prefix: str
    own: dict[str, Array]
    own_grads: dict[str, Array]
    blocks: list[tuple[spec.Block, BlockArrays, BlockArrays]]
    sinusoids_SD: Array | None
    rotary: dict[tuple[spec.Rotary, int], tuple[Array, Array]]
    slopes: dict[tuple[int, int], Array]
    offset: int = 0
    buckets_R: Array | None = None


class StackCache(NamedTuple):
    """The cache of a stack for its backward."""

    embed: tuple[Array, float] | FactorCache
    positions: "Array | slice"
    keep: Array | None
    blocks: list[BlockCache]
    final: NormCache | None
    types_BT: Array | None
    normed: NormCache | None
    buckets_BTS: Array | None


def stack_parts(
    model: spec.ModelSpec,
    stack: spec.Stack,
    prefix: str,
    *,
    storage: Storage,
    grads: tuple[Array, dict[str, Array]],
) -> StackParts:
    """Look up every view of a stack once."""
    dtype, vector = storage.vector.dtype, storage.vector
    blocks = []
    for layer, block in enumerate(stack.blocks()):
        at = f"{prefix}blocks.{layer}."
        blocks.append(
            (block, storage.block(vector, storage.views, at), storage.block(grads[0], grads[1], at))
        )
    own, own_grads = storage.below(storage.views, prefix), storage.below(grads[1], prefix)
    offset = 0
    table: Array | None = None
    rotary: dict[tuple[spec.Rotary, int], tuple[Array, Array]] = {}
    slopes: dict[tuple[int, int], Array] = {}
    buckets: Array | None = None
    match model.position:
        case spec.NoPosition():
            pass
        case spec.Learned(offset=offset):  # the table is among the parameters
            pass
        case spec.Sinusoidal() as kind:
            table = sinusoids(model.max_seq_len, d_model=model.d_model, kind=kind).astype(dtype)
        case spec.ALiBi() as alibi:
            for block in stack.blocks():
                heads = (block.attention.n_heads, block.attention.head_width(model.d_model))
                slopes[heads] = np.array(alibi_slopes(alibi, *heads), dtype)
        case spec.RelativeBias() as relative:
            causal = next(stack.blocks()).attention.causal
            buckets = np.array(relative_buckets(relative, causal=causal))
        case spec.Rotary():  # below: layers may have one of their own
            pass
        case OwnPosition(source=source):
            raise InputError(
                f"{source} is a torch module: positions of your own have no NumPy twin",
                hint="engine=torch",
            )
        case _ as unreachable:
            assert_never(unreachable)
    for block in stack.blocks():
        turned, width = _rotation(block, model)
        if turned is not None and (turned, width) not in rotary:
            rotary[turned, width] = rotations(
                turned, length=model.max_seq_len, d_head=width, dtype=dtype
            )
    return StackParts(
        model, stack, prefix, own, own_grads, blocks, table, rotary, slopes, offset, buckets
    )


def _rotation(block: spec.Block, model: spec.ModelSpec) -> tuple[spec.Rotary | None, int]:
    """Return how a layer rotates its queries and keys, and the width of their heads."""
    rotary = spec.rotary_of(block.attention, model.position)
    return rotary, block.attention.head_width(model.d_model)


def stack_forward(
    side: Side,
    *,
    parts: StackParts,
    pass_context: PassContext,
    memory_BSD: Array | None = None,
    memory_valid_BS: Array | None = None,
    past: int = 0,
    valid_BS: Array | None = None,
    pasts: Sequence[Past] | None = None,
    ready: Sequence[tuple[Array, Array]] | None = None,
) -> tuple[Array, StackCache]:
    """Return hidden states (B, T, D) after the final norm.

    With `pasts` (one per layer), `valid_BS` covers the past positions and the new ones; `ready` are
    the memory's keys and values of each layer, computed before.
    """
    valid_BS = side.valid_BT if pasts is None else valid_BS
    T = side.tokens_BT.shape[1]
    positions = positions_of(T, past=past, valid_BS=valid_BS, segments_BT=side.segments_BT)
    x_BTD, embed, keep, normed = _embed(side, positions, parts, pass_context)
    allows = _Allows(side, past, valid_BS, x_BTD.dtype)
    memory_allow = allows.of_memory(memory_BSD, memory_valid_BS)
    turned = {kind: _rows(table, positions) for kind, table in parts.rotary.items()}
    biases = {heads: allows.bias(slopes_N) for heads, slopes_N in parts.slopes.items()}
    buckets_BTS = learned = None
    if parts.buckets_R is not None:
        buckets_BTS = allows.buckets(parts.buckets_R)
        learned = relative_forward(buckets_BTS, table_RN=parts.own["relative.weight"])
    caches = []
    for layer, (block, params, _) in enumerate(parts.blocks):
        rotary, d_head = _rotation(block, parts.model)
        setting = Setting(
            allow=allows.of(block.attention),
            bias=biases.get((block.attention.n_heads, d_head)) if learned is None else learned,
            rotation=None if rotary is None else turned[rotary, d_head],
            memory_BSD=memory_BSD,
            memory_allow=memory_allow,
            memory_ready=None if ready is None else ready[layer],
            past=None if pasts is None else pasts[layer],
            valid_BT=side.valid_BT,
        )
        x_BTD, cache = block_forward(
            x_BTD,
            block=block,
            params=params,
            pass_context=pass_context,
            setting=setting,
            dropout=parts.stack.dropout,
            at=f"{parts.prefix}blocks.{layer}.",
        )
        caches.append(cache)
    final = None
    if parts.stack.final_norm is not None:
        x_BTD, final = norm_forward(
            x_BTD,
            norm=parts.stack.final_norm,
            params=parts.own,
            name="final_norm",
            ws=pass_context.ws,
        )
    pass_context.tap(f"{parts.prefix}final", x_BTD)
    types_BT = None
    if "token_type.weight" in parts.own:
        types_BT = _types_of(side)
    return x_BTD, StackCache(embed, positions, keep, caches, final, types_BT, normed, buckets_BTS)


def stack_backward(
    d_BTD: Array,
    cache: StackCache,
    *,
    parts: StackParts,
    pass_context: PassContext,
    dmemory_BSD: Array | None = None,
    dbalance: Mapping[str, float] | None = None,
) -> None:
    """Fill the gradients of every parameter of the stack; d_BTD is overwritten, dmemory added to.

    `dbalance` has the slope of the objective in each layer's load-balancing loss.
    """
    pass_context.tap_grad(f"{parts.prefix}final", d_BTD)
    if cache.final is not None:
        assert parts.stack.final_norm is not None
        norm_backward(
            d_BTD,
            cache.final,
            norm=parts.stack.final_norm,
            grads=parts.own_grads,
            name="final_norm",
            dx=d_BTD,
            ws=pass_context.ws,
        )
    dbias = None
    if cache.buckets_BTS is not None:
        B, T, S = cache.buckets_BTS.shape
        heads = next(parts.stack.blocks()).attention.n_heads
        dbias = np.zeros((B, heads, T, S), d_BTD.dtype)
    for (_, _, grads), block in zip(reversed(parts.blocks), reversed(cache.blocks), strict=True):
        block_backward(
            d_BTD,
            block,
            grads=grads,
            pass_context=pass_context,
            dmemory_BSD=dmemory_BSD,
            dbalance=(dbalance or {}).get(block.at.removesuffix("."), 0.0),
            dbias=dbias,
        )
    if dbias is not None and cache.buckets_BTS is not None:
        relative_backward(dbias, cache.buckets_BTS, dtable_RN=parts.own_grads["relative.weight"])
    pass_context.tap_grad(f"{parts.prefix}embed", d_BTD)
    if cache.keep is not None:
        d_BTD *= cache.keep
    tables = parts.own_grads
    if cache.normed is not None:
        assert parts.stack.embed_norm is not None
        norm_backward(
            d_BTD,
            cache.normed,
            norm=parts.stack.embed_norm,
            grads=tables,
            name="embed_norm",
            dx=d_BTD,
            ws=pass_context.ws,
        )
    # forward: x = embed[token] + position.weight[place] + token_type.weight[type]
    #   =>   every table accumulates d
    if "position.weight" in tables:
        T = d_BTD.shape[1]
        dpositions = tables["position.weight"][parts.offset :]
        if isinstance(cache.positions, slice):
            dpositions[cache.positions] += d_BTD.sum(axis=0)
        else:
            embedding_backward(d_BTD, (cache.positions, 1.0), dtable_VD=dpositions[:T])
    if cache.types_BT is not None:
        embedding_backward(d_BTD, (cache.types_BT, 1.0), dtable_VD=tables["token_type.weight"])
    if isinstance(cache.embed, FactorCache):
        factorized_backward(d_BTD, cache.embed, du_VR=tables["embed.u"], dv_RD=tables["embed.v"])
    else:
        embedding_backward(d_BTD, cache.embed, dtable_VD=tables["embed.weight"])


def _types_of(side: Side) -> Array:
    """Return the type of each token; 0 where none was given."""
    return np.zeros(side.tokens_BT.shape, np.int64) if side.types_BT is None else side.types_BT


def _embed(
    side: Side, positions: "Array | slice", parts: StackParts, pass_context: PassContext
) -> tuple[Array, tuple[Array, float] | FactorCache, Array | None, NormCache | None]:
    own, ws = parts.own, pass_context.ws
    cache: tuple[Array, float] | FactorCache
    if "embed.u" in own:
        x_BTD, cache = factorized_forward(
            side.tokens_BT, u_VR=own["embed.u"], v_RD=own["embed.v"], ws=ws
        )
    else:
        scale = embedding_scale(parts.model.embedding, parts.model.d_model)
        x_BTD, cache = embedding_forward(
            side.tokens_BT, table_VD=own["embed.weight"], scale=scale, ws=ws
        )
    if parts.sinusoids_SD is not None:
        x_BTD = sinusoidal_forward(x_BTD, table_SD=parts.sinusoids_SD, positions=positions)
    elif "position.weight" in own:
        x_BTD += own["position.weight"][parts.offset :][positions]
    if "token_type.weight" in own:
        x_BTD += own["token_type.weight"][_types_of(side)]
    normed = None
    if parts.stack.embed_norm is not None:
        x_BTD, normed = norm_forward(
            x_BTD, norm=parts.stack.embed_norm, params=own, name="embed_norm", ws=ws
        )
    keep = pass_context.keep(x_BTD.shape, parts.stack.dropout.embedding)
    if keep is not None:
        x_BTD *= keep
    pass_context.tap(f"{parts.prefix}embed", x_BTD)
    return x_BTD, cache, keep, normed


def _rows(table: tuple[Array, Array], positions: "Array | slice") -> tuple[Array, Array]:
    """Return cos and sin at these positions: (T, H/2), or (B, 1, T, H/2) if they differ by row."""
    cos, sin = table[0][positions], table[1][positions]
    return (cos, sin) if isinstance(positions, slice) else (cos[:, None], sin[:, None])


class _Allows:
    """The masks of one pass, made once for each kind of attention among the layers."""

    def __init__(
        self, side: Side, past: int, valid_BS: Array | None, dtype: "np.dtype[Any]"
    ) -> None:
        self.queries, self.past, self.dtype = side.tokens_BT.shape[1], past, dtype
        self.valid_BS, self.segments_BT = valid_BS, side.segments_BT
        self.made: dict[tuple[bool, int | None], Array | None] = {}

    def of(self, attention: spec.Attention) -> Array | None:
        kind = (attention.causal, attention.window)
        if kind not in self.made:
            before = None if attention.window is None else attention.window - 1
            self.made[kind] = allow_of(
                before=before,
                after=0 if attention.causal else before,
                queries=self.queries,
                keys=self.past + self.queries,
                dtype=self.dtype,
                valid_q_BT=self._valid_q(),
                valid_k_BS=self.valid_BS,
                segments_BT=self.segments_BT,
            )
        return self.made[kind]

    def bias(self, slopes_N: Array) -> Array:
        """Return ALiBi's bias, (1 or B, N, T, S): the queries are the last positions."""
        return alibi_bias(slopes_N, positions_BS=self._places(), queries=self.queries)

    def buckets(self, buckets_R: Array) -> Array:
        """Return the bucket of every query and key, (1 or B, T, S)."""
        return relative_buckets_of(buckets_R, positions_BS=self._places(), queries=self.queries)

    def _places(self) -> Array:
        """Return the positions of all keys, (1 or B, S)."""
        keys = self.past + self.queries
        places = positions_of(keys, valid_BS=self.valid_BS, segments_BT=self.segments_BT)
        return np.arange(keys)[None] if isinstance(places, slice) else places

    def of_memory(self, memory_BSD: Array | None, memory_valid_BS: Array | None) -> Array | None:
        if memory_BSD is None:
            return None
        return allow_of(
            before=None,
            after=None,
            queries=self.queries,
            keys=memory_BSD.shape[1],
            dtype=self.dtype,
            valid_q_BT=self._valid_q(),
            valid_k_BS=memory_valid_BS,
        )

    def _valid_q(self) -> Array | None:
        return None if self.valid_BS is None else self.valid_BS[:, self.past :]
