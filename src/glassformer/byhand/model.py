"""Heads: projections of hidden states, the tied table, the answer's readout; and their backward.

`Model`: any `ModelSpec` in NumPy. A body and heads, a loss, and the gradient of every parameter.

Results of `forward` and `hidden` belong to the caller. What `record` and `loss_and_grads` return
is in the model's workspace and valid until the next call of either.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, assert_never

import numpy as np

from glassformer.byhand.activation import activate_backward, activate_forward
from glassformer.byhand.embedding import tied_forward
from glassformer.byhand.inputs import Inputs, check_inputs
from glassformer.byhand.linear import (
    LinearCache,
    linear_forward,
    linear_grads,
    linear_products,
    sum_rows,
)
from glassformer.byhand.loss import (
    Losses,
    balance_slopes,
    cross_entropy_backward,
    head_losses,
    penalty,
    total_loss,
)
from glassformer.byhand.norm import NormCache, norm_backward, norm_forward
from glassformer.byhand.pass_context import Array, PassContext, Workspace, room
from glassformer.byhand.stack import (
    StackCache,
    StackParts,
    stack_backward,
    stack_forward,
    stack_parts,
)
from glassformer.byhand.storage import Storage
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import check_fits

# B batch, T length, D d_model, V logits, R rank


def readout_forward(
    hidden_BTD: Array, *, valid_BT: Array | None, readout: str
) -> tuple[Array, Array]:
    """Return one vector per sequence, a weighted sum over positions: share_BT is the cache.

    last and first have one share of 1; mean has 1 / count at every real token.
    """
    B, T, _ = hidden_BTD.shape
    share_BT = np.zeros((B, T), hidden_BTD.dtype)
    valid = np.ones((B, T), np.bool_) if valid_BT is None else valid_BT
    match readout:
        case "last":
            share_BT[np.arange(B), T - 1 - np.argmax(valid[:, ::-1], axis=1)] = 1.0
        case "first":
            share_BT[np.arange(B), np.argmax(valid, axis=1)] = 1.0
        case _:
            share_BT[...] = valid / np.maximum(valid.sum(axis=1, keepdims=True), 1)
    return np.matmul(share_BT[:, None, :], hidden_BTD)[:, 0], share_BT


def readout_backward(dout_BD: Array, cache: Array, *, dhidden_BTD: Array) -> Array:
    """Add to dhidden."""
    # forward: out_b = sum_t share_bt hidden_bt   =>   dhidden_bt += share_bt dout_b
    dhidden_BTD += cache[:, :, None] * dout_BD[:, None, :]
    return dhidden_BTD


class TransformCache(NamedTuple):
    """The caches of norm(act(dense(x))), and which of its parts have a bias."""

    dense: LinearCache
    act: Array
    norm: NormCache
    transform: spec.HeadTransform


def transform_forward(
    x: Array, *, transform: spec.HeadTransform, params: dict[str, Array], ws: Workspace | None
) -> tuple[Array, TransformCache]:
    """norm(act(dense(x))); `params`: dense.weight, dense.bias, norm.weight, norm.bias."""
    made, dense = linear_forward(
        x, weight_OI=params["dense.weight"], bias_O=params.get("dense.bias"), ws=ws
    )
    hidden, act = activate_forward(made, transform.activation, ws=ws)
    out, norm = norm_forward(hidden, norm=transform.norm, params=params, name="norm", ws=ws)
    return out, TransformCache(dense, act, norm, transform)


def transform_backward(
    dout: Array, cache: TransformCache, *, grads: dict[str, Array], ws: Workspace | None
) -> Array:
    """Return dx: backward through the norm, the activation and the projection."""
    transform = cache.transform
    dhidden = norm_backward(dout, cache.norm, norm=transform.norm, grads=grads, name="norm", ws=ws)
    activate_backward(dhidden, cache.act, transform.activation)
    return linear_grads(
        dhidden, cache.dense, grads=grads, name="dense", biased=transform.bias, ws=ws
    )


class HeadCache(NamedTuple):
    """A head's input, an answer's shares of each position, and x V^T of a tied factorized head.

    `transform` is what stands before a masked-token head; `pooled` the result of BERT's pooler.
    Then the factor of its logits and the slope of their cap.
    """

    x: Array
    share_BT: Array | None
    middle: Array | None
    transform: TransformCache | None = None
    pooled: Array | None = None
    scale: float = 1.0
    slope: Array | None = None


def head_forward(
    hidden_BTD: Array,
    *,
    head: spec.Head,
    params: dict[str, Array],
    valid_BT: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, HeadCache]:
    """Return logits. `params`: weight (own or tied table), or the tied factors u and v; bias."""
    x, share, middle, transformed = hidden_BTD, None, None, None
    if head.readout is not None:
        x, share = readout_forward(hidden_BTD, valid_BT=valid_BT, readout=head.readout)
    if isinstance(head, spec.VectorHead):
        if not head.pooler:
            return np.array(x), HeadCache(x, share, None)
        made, _ = linear_forward(x, weight_OI=params["weight"], bias_O=params["bias"])
        return np.tanh(made, out=made), HeadCache(x, share, None, None, made)
    if isinstance(head, spec.MaskedHead) and head.transform is not None:
        x, transformed = transform_forward(x, transform=head.transform, params=params, ws=ws)
    if "u" in params:
        # tied to a factorized table: logits = (x @ V.T) @ U.T
        middle, _ = tied_forward(x, table_VD=params["v"], ws=ws)
        logits, _ = tied_forward(middle, table_VD=params["u"], ws=ws)
    else:
        logits, _ = linear_forward(x, weight_OI=params["weight"], ws=ws)
    if "bias" in params:
        logits += params["bias"]
    scale, slope = _finish(logits, head, ws)
    return logits, HeadCache(x, share, middle, transformed, scale=scale, slope=slope)


def _finish(logits: Array, head: spec.Head, ws: Workspace | None) -> tuple[float, Array | None]:
    """Scale and cap logits in place; return the factor, and the slope of the cap."""
    match head:
        case spec.NextHead(scale=scale, softcap=softcap):
            if scale != 1.0:
                logits *= scale
            if softcap is None:
                return scale, None
            # out = c tanh(s / c)   =>   slope = 1 - tanh^2(s / c)
            logits /= softcap
            np.tanh(logits, out=logits)
            slope = np.multiply(logits, logits, out=room(ws, logits.shape, logits.dtype))
            np.subtract(1.0, slope, out=slope)
            logits *= softcap
            return scale, slope
        case (
            spec.ClassHead()
            | spec.StateHead()
            | spec.AnswerHead()
            | spec.MaskedHead()
            | spec.VectorHead()
        ):
            return 1.0, None
        case _ as unreachable:
            assert_never(unreachable)


def head_backward(
    dlogits: Array,
    cache: HeadCache,
    *,
    params: dict[str, Array],
    grads: dict[str, Array],
    dhidden_BTD: Array,
    ws: Workspace | None = None,
) -> None:
    """Add to dhidden, and to every gradient in `grads`: a tied table is also the embedding's."""
    x_RD = cache.x.reshape(-1, cache.x.shape[-1])
    # forward: logits = cap(scale * raw)   =>   draw = dlogits * slope * scale
    if cache.slope is not None:
        dlogits = dlogits * cache.slope
    if cache.scale != 1.0:
        dlogits = dlogits * cache.scale
    dlogits_RV = dlogits.reshape(-1, dlogits.shape[-1])
    if "weight" not in params and "u" not in params:  # a vector as it is
        assert cache.share_BT is not None
        readout_backward(dlogits_RV, cache.share_BT, dhidden_BTD=dhidden_BTD)
        return
    if cache.pooled is not None:
        # forward: out = tanh(x @ W.T + b)   =>   d(x @ W.T + b) = dout (1 - out^2)
        dlogits_RV = dlogits_RV * (1.0 - cache.pooled**2)
    if "bias" in params:
        grads["bias"] += sum_rows(dlogits_RV)
    dx_RD = room(ws, x_RD.shape, x_RD.dtype)
    if cache.middle is not None:
        middle_RR = cache.middle.reshape(-1, cache.middle.shape[-1])
        # forward: logits = middle @ U.T, middle = x @ V.T
        #   =>   dmiddle = dlogits @ U,  dU += dlogits.T @ middle
        #        dx = dmiddle @ V,  dV += dmiddle.T @ x
        dmiddle, du = linear_products(dlogits_RV, LinearCache(middle_RR, params["u"]), ws=ws)
        _, dv = linear_products(dmiddle, LinearCache(x_RD, params["v"]), dx=dx_RD, ws=ws)
        grads["u"] += du
        grads["v"] += dv
    else:
        weight_VD = params["weight"]
        dweight = room(ws, weight_VD.shape, weight_VD.dtype)
        linear_products(dlogits_RV, LinearCache(x_RD, weight_VD), dx=dx_RD, dweight_OI=dweight)
        grads["weight"] += dweight
    if cache.transform is not None:
        dx_RD = transform_backward(
            dx_RD.reshape(cache.x.shape), cache.transform, grads=grads, ws=ws
        )
    if cache.share_BT is not None:
        readout_backward(dx_RD, cache.share_BT, dhidden_BTD=dhidden_BTD)
    else:
        dhidden_BTD += dx_RD.reshape(dhidden_BTD.shape)


# B batch, T target length, S source length, D d_model, V logits


class Tape(NamedTuple):
    """The caches of a recorded pass for `backward`."""

    pass_context: PassContext
    inputs: Inputs
    stacks: dict[str, StackCache]
    heads: dict[str, HeadCache]
    hidden_BTD: Array
    memory_BSD: Array | None

    def balances(self) -> dict[str, float]:
        """The load-balancing loss of every mixture of experts, by layer."""
        return {
            block.at.removesuffix("."): block.balance
            for stack in self.stacks.values()
            for block in stack.blocks
            if isinstance(block.block.ffn, spec.MoE)
        }


class Model:
    """embed -> blocks -> final norm -> heads, with an encoder before it if the spec has one.

    `params` and `grads` are dicts by manifest name; tied parameters appear under their owner.
    """

    def __init__(
        self,
        model: spec.ModelSpec,
        *,
        params: Mapping[str, Array] | None = None,
        rng: np.random.Generator | None = None,
        dtype: "np.dtype[Any] | type[Any]" = np.float64,
    ) -> None:
        self.spec = model
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise InputError(
                f"the by-hand engine computes in float32 or float64, not {self.dtype}",
                hint="half precision and quantized layers are torch-only",
            )
        check_fits(model, bytes_each=2 * self.dtype.itemsize)  # with its gradients
        self.storage = Storage(model, self.dtype)
        if params is not None:
            self.storage.load(params)
        else:
            self.storage.draw(np.random.default_rng() if rng is None else rng)
        self.params = self.storage.views
        self.grad_vector, self.grads = self.storage.twin()
        self._stacks = {
            prefix: stack_parts(
                model, stack, prefix, storage=self.storage, grads=(self.grad_vector, self.grads)
            )
            for prefix, stack in model.stacks().items()
        }
        below = self.storage.below
        self._heads = {
            name: (
                model.head(name),
                below(self.params, f"heads.{name}.") | below(self.params, f"transforms.{name}."),
                below(self.grads, f"heads.{name}.") | below(self.grads, f"transforms.{name}."),
            )
            for name in model.head_names()
        }
        self.workspace = Workspace(self.dtype)
        self._before: Array | None = None
        self._recorded: Tape | None = None
        #: Bytes of the arrays that the last recorded pass kept for its backward.
        self.cached_bytes = 0

    # --- forward ------------------------------------------------------------------------------

    def inputs(
        self,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        segments_BT: Array | None = None,
        source_tokens_BS: Array | None = None,
        source_valid_BS: Array | None = None,
        types_BT: Array | None = None,
    ) -> Inputs:
        """Return checked arrays."""
        return check_inputs(
            tokens_BT,
            model=self.spec,
            valid_BT=valid_BT,
            segments_BT=segments_BT,
            source_tokens_BS=source_tokens_BS,
            source_valid_BS=source_valid_BS,
            types_BT=types_BT,
        )

    def forward(
        self,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        segments_BT: Array | None = None,
        source_tokens_BS: Array | None = None,
        source_valid_BS: Array | None = None,
        types_BT: Array | None = None,
        taps: dict[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Return logits by head; `taps` is filled by tap name."""
        inputs = self.inputs(
            tokens_BT,
            valid_BT=valid_BT,
            segments_BT=segments_BT,
            source_tokens_BS=source_tokens_BS,
            source_valid_BS=source_valid_BS,
            types_BT=types_BT,
        )
        return self._run(inputs, PassContext(Workspace(self.dtype), taps=taps))[0]

    def hidden(self, inputs: Inputs) -> Array:
        """Return the hidden states (B, T, D) after the final norm."""
        return self._body(inputs, PassContext(Workspace(self.dtype)))[0]

    def logits(
        self, hidden_BTD: Array, *, head: str = "next", valid_BT: Array | None = None
    ) -> Array:
        """Return one head's logits, (..., V) as the hidden states, or (B, V) for an answer."""
        kind, params = self.spec.head(head), self._heads[head][1]
        return head_forward(hidden_BTD, head=kind, params=params, valid_BT=valid_BT)[0]

    def stack(self, prefix: str) -> StackParts:
        """Return one stack's arrays, by the prefix of its names."""
        return self._stacks[prefix]

    def record(
        self,
        inputs: Inputs,
        *,
        rng: np.random.Generator | None = None,
        taps: dict[str, Array] | None = None,
    ) -> tuple[dict[str, Array], Tape]:
        """Return logits by head, and the tape for `backward`; with `rng`, dropout is on."""
        self.workspace.reset()
        logits, tape = self._run(inputs, PassContext(self.workspace, taps=taps, rng=rng))
        self.cached_bytes = self.workspace.taken_bytes
        self._recorded = tape
        return logits, tape

    def _run(self, inputs: Inputs, pass_context: PassContext) -> tuple[dict[str, Array], Tape]:
        hidden_BTD, memory_BSD, stacks = self._body(inputs, pass_context)
        logits, heads, valid_BT = {}, {}, inputs.target.valid_BT
        for name, (head, params, _) in self._heads.items():
            logits[name], heads[name] = head_forward(
                hidden_BTD, head=head, params=params, valid_BT=valid_BT, ws=pass_context.ws
            )
            pass_context.tap(f"logits.{name}", logits[name])
        return logits, Tape(pass_context, inputs, stacks, heads, hidden_BTD, memory_BSD)

    def _body(
        self, inputs: Inputs, pass_context: PassContext
    ) -> tuple[Array, Array | None, dict[str, StackCache]]:
        stacks: dict[str, StackCache] = {}
        memory_BSD = memory_valid_BS = None
        if inputs.source is not None:
            memory_BSD, stacks["encoder."] = stack_forward(
                inputs.source, parts=self._stacks["encoder."], pass_context=pass_context
            )
            memory_valid_BS = inputs.source.valid_BT
        last = "" if inputs.source is None else "decoder."
        hidden_BTD, stacks[last] = stack_forward(
            inputs.target,
            parts=self._stacks[last],
            pass_context=pass_context,
            memory_BSD=memory_BSD,
            memory_valid_BS=memory_valid_BS,
        )
        return hidden_BTD, memory_BSD, stacks

    # --- backward -----------------------------------------------------------------------------

    def backward(
        self,
        dlogits: Mapping[str, Array],
        tape: Tape,
        *,
        dbalance: Mapping[str, float] | None = None,
        tap_grads: dict[str, Array] | None = None,
        accumulate: bool = False,
    ) -> None:
        """Fill `grads` from the gradients of the logits; `accumulate` adds to existing gradients.

        `dbalance` has the slope of the objective in each layer's load-balancing loss.
        """
        if tape is not self._recorded:
            raise InputError(
                "a later pass has overwritten what this tape recorded",
                hint="call backward before the next record or loss_and_grads",
            )
        pass_context, ws = tape.pass_context, tape.pass_context.ws
        pass_context.tap_grads = tap_grads
        if accumulate:
            if self._before is None:
                self._before = np.empty_like(self.grad_vector)
            np.copyto(self._before, self.grad_vector)
        self._zero_shared()
        d_BTD = ws.take(tape.hidden_BTD.shape)
        d_BTD.fill(0.0)
        for name, dlogit in dlogits.items():
            mark = ws.mark()
            pass_context.tap_grad(f"logits.{name}", dlogit)
            _, params, grads = self._heads[name]
            head_backward(
                dlogit, tape.heads[name], params=params, grads=grads, dhidden_BTD=d_BTD, ws=ws
            )
            ws.release(mark)
        dmemory = None
        if tape.memory_BSD is not None:
            dmemory = ws.take(tape.memory_BSD.shape)
            dmemory.fill(0.0)
        for prefix, cache in reversed(tape.stacks.items()):
            d = dmemory if prefix == "encoder." else d_BTD
            assert d is not None
            stack_backward(
                d,
                cache,
                parts=self._stacks[prefix],
                pass_context=pass_context,
                dmemory_BSD=dmemory,
                dbalance=dbalance,
            )
        if accumulate and self._before is not None:
            self.grad_vector += self._before

    def _zero_shared(self) -> None:
        """Zero the gradients of tables and heads, which several parts add to."""
        for parts in self._stacks.values():
            for name, grad in parts.own_grads.items():
                if name.startswith(("embed.", "position.", "token_type.")):
                    grad.fill(0.0)
        for _, _, grads in self._heads.values():
            for grad in grads.values():
                grad.fill(0.0)

    # --- loss ---------------------------------------------------------------------------------

    def loss_and_grads(
        self,
        inputs: Inputs,
        *,
        targets: Mapping[str, Array],
        weights: Array | Mapping[str, Array] | None = None,
        head_weights: Mapping[str, float] | None = None,
        label_smoothing: float = 0.0,
        rng: np.random.Generator | None = None,
        taps: dict[str, Array] | None = None,
        tap_grads: dict[str, Array] | None = None,
        accumulate: bool = False,
        scale: float = 1.0,
        balance_shares: Mapping[str, float] | None = None,
    ) -> Losses:
        """Return the losses and fill `grads`. `scale` multiplies the gradients, not the losses.

        `balance_shares` are the weights of this batch's load-balancing losses by layer (1 each).
        """
        logits, tape = self.record(inputs, rng=rng, taps=taps)
        losses = head_losses(
            logits,
            targets=targets,
            model=self.spec,
            weights=weights,
            valid_BT=inputs.target.valid_BT,
            label_smoothing=label_smoothing,
            ws=self.workspace,
        )
        factors, dlogits = head_weights or {}, {}
        for name, (_, cache) in losses.items():
            d_MC = cross_entropy_backward(scale * factors.get(name, 1.0), cache)
            dlogits[name] = d_MC.reshape(logits[name].shape)
        slopes = balance_slopes(self.spec, shares=balance_shares)
        self.backward(
            dlogits,
            tape,
            dbalance={layer: scale * slope for layer, slope in slopes.items()},
            tap_grads=tap_grads,
            accumulate=accumulate,
        )
        return total_loss(
            losses,
            head_weights=factors,
            penalty=penalty(self.spec, self.params, grads=self.grads, scale=scale),
            logits=logits,
            balances=tape.balances(),
            balance_slopes=slopes,
        )

    def loss(
        self,
        inputs: Inputs,
        *,
        targets: Mapping[str, Array],
        weights: Array | Mapping[str, Array] | None = None,
        head_weights: Mapping[str, float] | None = None,
        label_smoothing: float = 0.0,
    ) -> Losses:
        """Return the same losses without gradients or dropout."""
        logits, tape = self._run(inputs, PassContext(Workspace(self.dtype)))
        losses = head_losses(
            logits,
            targets=targets,
            model=self.spec,
            weights=weights,
            valid_BT=inputs.target.valid_BT,
            label_smoothing=label_smoothing,
        )
        return total_loss(
            losses,
            head_weights=head_weights or {},
            penalty=penalty(self.spec, self.params),
            logits=logits,
            balances=tape.balances(),
            balance_slopes=balance_slopes(self.spec),
        )
