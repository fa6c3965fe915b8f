"""The table in C: the passes of a training step over memory, in float32; products by NumPy's BLAS.

Each operation declares what it takes, and what it does not take falls back to NumPy's, kind by
kind. Numbers are float32's: rounding apart, they are NumPy's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from glassformer.byhand.inputs import allow_of
from glassformer.byhand.loss import rows_that_count
from glassformer.byhand.operations import NUMPY
from glassformer.byhand.pass_context import Array, Workspace
from glassformer.byhand.table import AdamRule, Operation, Run, Step, Table
from glassformer.byhand.updates import adam_update
from glassformer.kernels import training as c
from glassformer.spec import program as kinds
from glassformer.spec.lacking import ANY, Runs

# B batch, T query length, S key length, M rows (B x T), W width, N heads, H d_head, P parameters

#: Numbers of a gradient that one thread scales at least.
ROW = 4096
Made = tuple[Array, Any]
Grads = Sequence[Array | None]


def _numpys(kind: type) -> Operation:
    """Return NumPy's operation of a kind, for the passes that only it can run."""
    return next(one for one in NUMPY.operations if one.kind is kind)


def _onto(step: Step, run: Run) -> tuple[Array, Array | None]:
    """Return where the gradient of the first input goes, and what is added to it, if anything."""
    if step.sums[0] == "first":
        return run.gradient(step, 0), None
    there: Array = run.grads[step.reads[0]]
    return (there if step.sums[0] == "into" else run.gradient(step, 0)), there


# --- embeddings, projections, norms ---------------------------------------------------------------


def _embed(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    table_VW = step.weights[0]
    tokens_M = np.ascontiguousarray(run.rows(step).side.tokens_BT, np.int64).reshape(-1)
    out = run.ws.take((len(tokens_M), table_VW.shape[1]))
    np.take(table_VW, tokens_M, axis=0, out=out, mode="clip")  # the ids were checked
    if step.kind.scale != 1.0:
        c.add(None, out, out=out, scale=step.kind.scale)
    return out, tokens_M


def _embed_backward(step: Step, dout: Array, tokens_M: Array, run: Run) -> Grads:
    # forward: out[m] = scale table[token[m]]   =>   dtable[token[m]] += scale dout[m]
    if not step.adds[0]:
        step.grads[0].fill(0.0)
    c.add_rows(step.grads[0], np.ascontiguousarray(dout), tokens_M, scale=step.kind.scale)
    return ()


def _linear(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    (x_MI,), weight = inputs, step.weights[0]
    weight_IO = weight if step.kind.transposed else weight.T
    out_MO = run.ws.take((len(x_MI), weight_IO.shape[1]))
    c.product(x_MI, weight_IO, out=out_MO)
    if len(step.weights) > 1:
        c.add(out_MO, step.weights[1], out=out_MO)
    for columns, bias, _ in step.column_biases:
        out_MO[:, columns] += bias
    return out_MO, x_MI


def _linear_backward(step: Step, dout: Array, x_MI: Array, run: Run) -> Grads:
    # forward: out = x @ W.T + b   =>   dx = dout @ W,  dW = dout.T @ x,  db = sum of dout's rows
    transposed, weight, dweight = step.kind.transposed, step.weights[0], step.grads[0]
    left, right = (x_MI.T, dout) if transposed else (dout.T, x_MI)
    if dweight is not None:
        c.product(left, right, out=dweight, add=step.adds[0])
    if len(step.grads) > 1 and step.grads[1] is not None:
        c.columns_sum(dout, out_D=step.grads[1])
    for columns, _, dbias in step.column_biases:
        if dbias is not None:
            c.columns_sum(dout[:, columns], out_D=dbias)
    if not step.needs[0]:
        return (None,)
    return (c.product(dout, weight.T if transposed else weight, out=run.gradient(step, 0)),)


class _NormCache(NamedTuple):
    """A norm's cache: its normalised input, and each run's rate and, in LayerNorm, its mean."""

    x: Array
    rate_R: Array
    mean_R: Array | None


def _together(x: Array, run: Run) -> Array:
    """Return rows without gaps: as they are, or a copy of some columns."""
    if x.flags.c_contiguous:
        return x
    copied = run.ws.take(x.shape)
    np.copyto(copied, x)
    return copied


def _norm(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    kind, x = step.kind, _together(inputs[0], run)
    runs, layer = x.size // kind.over, kind.form == "layer"
    out, rate_R = run.ws.take(x.shape), run.ws.take((runs,))
    mean_R = run.ws.take((runs,)) if layer else None
    c.norm_forward(
        x,
        step.weights[0],
        out=out,
        rate_M=rate_R,
        mean_M=mean_R,
        eps=kind.eps,
        bias_D=step.weights[1] if len(step.weights) > 1 else None,
        plus=1.0 if kind.offset else 0.0,
    )
    return out, _NormCache(x, rate_R, mean_R)


def _norm_backward(step: Step, dout: Array, cache: _NormCache, run: Run) -> Grads:
    dx, more = _onto(step, run)
    mark = run.ws.mark()
    together = all(one is None or one.flags.c_contiguous for one in (dx, more))
    made = dx if together else run.ws.take(cache.x.shape)
    c.norm_backward(
        dout if dout.flags.c_contiguous else np.ascontiguousarray(dout),
        cache.x,
        step.weights[0],
        rate_M=cache.rate_R,
        mean_M=cache.mean_R,
        dx=made,
        more=more if together else None,
        d_gain_D=step.grads[0],
        d_bias_D=step.grads[1] if len(step.grads) > 1 else None,
        plus=1.0 if step.kind.offset else 0.0,
    )
    if not together:
        np.copyto(dx, made if more is None else np.add(made, more, out=made))
    run.ws.release(mark)
    return (dx,)


# --- attention ------------------------------------------------------------------------------------


def _rotate(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    def make() -> tuple[Array, Array]:
        places, (cos, sin) = run.rows(step).positions, step.constant
        if not isinstance(places, slice):
            places = places.reshape(-1)
        return np.ascontiguousarray(cos[places]), np.ascontiguousarray(sin[places])

    cos, sin = run.once(("rotation in C", step.side, id(step.constant)), make)
    out = inputs[0] if step.over == 0 else run.ws.take(inputs[0].shape)
    c.rotate(inputs[0], cos, sin, out_MQ=out, heads=step.kind.heads)
    return out, (cos, sin)


def _rotate_backward(step: Step, dout: Array, cache: tuple[Array, Array], run: Run) -> Grads:
    dx = dout if step.own else run.gradient(step, 0)
    c.rotate(dout, *cache, out_MQ=dx, heads=step.kind.heads, back=True)
    return (dx,)


def _allow(step: Step, run: Run) -> tuple[bool, Array | None]:
    """Return whether order alone excludes keys, and else a mask (1 or B, 1, T, S)."""
    kind, queries, keys = step.kind, run.sides[step.side], run.sides[step.keys]
    apart = queries is not keys
    segments = None if apart else queries.side.segments_BT
    free = kind.before is None and queries.valid_BS is None and keys.valid_BS is None
    if free and segments is None and (kind.after == 0 or kind.after is None):
        return kind.after == 0, None

    def make() -> Array | None:
        return allow_of(
            before=kind.before,
            after=kind.after,
            queries=queries.T,
            keys=keys.T,
            dtype=np.dtype(np.bool_),
            valid_q_BT=queries.valid_BT,
            valid_k_BS=keys.valid_BS,
            segments_BT=segments,
        )

    key = ("allow in C", apart, step.side, kind.before, kind.after)
    return kind.after == 0 and not apart, run.once(key, make)


def _attend(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    kind = step.kind
    # Scores and weights are nowhere as a whole, and earlier keys lie elsewhere.
    if run.state is not None or run.context.taps is not None:
        return _numpys(kinds.Attend).forward(step, inputs, run)
    q, k, v = inputs[:3]
    rows = run.rows(step)
    causal, allow = _allow(step, run)
    drop = c.KEEP
    if kind.drop:
        assert run.context.rng is not None, "a program for training, and no generator"
        drop = c.drop_of(kind.drop, run.context.rng)
    out = run.ws.take((len(q), q.shape[1] // kind.heads * kind.heads))
    made = c.attention_forward(
        q,
        k,
        v,
        out_MQ=out,
        kept=run.ws.take((len(q), kind.heads, 2)),
        sequences=rows.B,
        heads=kind.heads,
        kv_heads=kind.kv_heads,
        scale=kind.scale,
        causal=causal,
        allow=allow,
        bias=inputs[3] if len(inputs) > 3 else None,
        sinks_N=step.weights[0] if step.weights else None,
        softcap=kind.softcap,
        drop=drop,
    )
    return out, made


def _attend_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    if not isinstance(cache, c.Attending):
        return _numpys(kinds.Attend).backward(step, dout, cache, run)
    dq, dk, dv = (run.gradient(step, k) for k in range(3))
    B, N, T, S = cache.job.batch, cache.job.heads, cache.job.queries, cache.job.keys
    learned = len(step.reads) > 3 and step.needs[3]
    d_bias = np.zeros((B, N, T, S), np.float32) if learned else None
    d_sinks_BN = np.zeros((B, N), np.float32) if step.grads else None
    c.attention_backward(
        dout, cache, d_q_MQ=dq, d_k_RK=dk, d_v_RK=dv, d_bias=d_bias, d_sinks_BN=d_sinks_BN
    )
    if d_sinks_BN is not None:
        np.sum(d_sinks_BN, axis=0, out=step.grads[0])
    if d_bias is not None:
        whole = run.gradient(step, 3)
        np.copyto(whole, d_bias if len(whole) == B else d_bias.sum(axis=0, keepdims=True))
        d_bias = whole
    return (dq, dk, dv, d_bias)[: len(step.reads)]


# --- elementwise ----------------------------------------------------------------------------------


def _activate(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    x = _together(inputs[0], run)
    out = run.ws.take(x.shape)
    c.activation_forward(x, step.kind.function, out=out)
    return out, x


def _activate_backward(step: Step, dout: Array, x: Array, run: Run) -> Grads:
    dx = dout if step.own else run.gradient(step, 0)
    c.activation_backward(dout, x, step.kind.function, dx=dx)
    return (dx,)


def _gate(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    gate, up = inputs
    out = run.ws.take(up.shape)
    c.gate_forward(gate, up, step.kind.function, out=out)
    return out, (gate, up)


def _gate_backward(step: Step, dout: Array, cache: tuple[Array, Array], run: Run) -> Grads:
    dgate, dup = run.gradient(step, 0), run.gradient(step, 1)
    c.gate_backward(dout, *cache, step.kind.function, d_gate=dgate, d_up=dup)
    return (dgate, dup)


def _drop(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    assert run.context.rng is not None, "a program for training, and no generator"
    drop = c.drop_of(step.kind.rate, run.context.rng)
    x = _together(inputs[0], run)
    out = x if step.over == 0 else run.ws.take(x.shape)
    c.add(None, x, out=out, drop=drop)
    return out, drop


def _drop_backward(step: Step, dout: Array, drop: c.Drop, run: Run) -> Grads:
    dx = dout if step.own else run.gradient(step, 0)
    c.add(None, dout, out=dx, drop=drop)
    return (dx,)


def _add(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    x, z = inputs
    out = x if step.over == 0 else run.ws.take(x.shape)
    c.add(x, z, out=out, scale=step.kind.scale)
    return out, None


def _add_backward(step: Step, dout: Array, cache: None, run: Run) -> Grads:
    # forward: x' = x + z   =>   dx = dz = dx'
    return (dout, dout)


def _add_scaled_backward(step: Step, dout: Array, cache: None, run: Run) -> Grads:
    # forward: x' = x + scale z   =>   dx = dx',  dz = scale dx'
    dz = run.gradient(step, 1)
    c.add(None, dout, out=dz, scale=step.kind.scale)
    return (dout, dz)


# --- the loss and the update ----------------------------------------------------------------------


class _Loss(NamedTuple):
    """The gradient of the loss in the logits, and the loss without smoothing."""

    dlogits_MC: Array
    nll: float


def _cross_entropy(
    logits: Array,
    *,
    targets: Array,
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    ws: Workspace | None = None,
) -> tuple[float, _Loss]:
    """Mean of -log p[target], as NumPy's; with a workspace the logits become their gradient."""
    logits_MC = logits.reshape(-1, logits.shape[-1])
    targets_M, share_M = rows_that_count(targets, weights, logits_MC)
    made = np.ascontiguousarray(logits_MC) if ws is not None else np.array(logits_MC)
    loss, plain = c.cross_entropy(
        made,
        np.ascontiguousarray(targets_M, np.int64),
        np.ascontiguousarray(share_M, np.float32),
        smoothing=label_smoothing,
    )
    return loss, _Loss(made, plain)


def _cross_entropy_backward(dloss: float, cache: _Loss) -> Array:
    dlogits_MC = cache.dlogits_MC
    if dloss != 1.0:
        c.add(None, dlogits_MC, out=dlogits_MC, scale=dloss)
    return dlogits_MC


def _adam(
    param_P: Array,
    grad_P: Array,
    m_P: Array,
    v_P: Array,
    rule: AdamRule,
    scratch: tuple[Array, Array],
) -> None:
    if rule.decay and not rule.decoupled:
        adam_update(param_P, grad_P, m_P, v_P, rule, scratch)
        return
    betas = (rule.beta1, rule.beta2)
    c.adamw(
        *(param_P, grad_P, m_P, v_P),
        step=rule.steps,
        lr=rule.lr,
        betas=betas,
        eps=rule.eps,
        decay=rule.decay,
    )


def _clip(grads: Array, *, max_norm: float) -> float:
    norm = c.norm_of(grads)
    if norm > 0 and (factor := max_norm / (norm + 1e-6)) < 1.0:
        cut = len(grads) // ROW * ROW
        for part in (grads[:cut].reshape(-1, ROW), grads[cut:]):
            if part.size:
                c.add(None, part, out=part, scale=factor)
    return norm


# --- the table ------------------------------------------------------------------------------------


def _all_of(kind: type, **limits: Any) -> Runs:
    """Return every field of a kind with any value, but for those that are limited."""
    every: Mapping[str, Any] = {one.name: ANY for one in fields(kind)}
    return {kind: {**every, **limits}}


C = Table(
    name="the table in C",
    operations=(
        Operation(kinds.Embed, _embed, _embed_backward, _all_of(kinds.Embed)),
        Operation(kinds.Norm, _norm, _norm_backward, _all_of(kinds.Norm), keeps=(0,), into=True),
        Operation(kinds.Linear, _linear, _linear_backward, _all_of(kinds.Linear), keeps=(0,)),
        Operation(
            kinds.Rotate,
            _rotate,
            _rotate_backward,
            _numpys(kinds.Rotate).runs,
            _numpys(kinds.Rotate).prepare,
            over=(0,),
            inplace=True,
        ),
        Operation(
            kinds.Attend,
            _attend,
            _attend_backward,
            _all_of(kinds.Attend),
            keeps=(0, 1, 2),
        ),
        Operation(
            kinds.Activate,
            _activate,
            _activate_backward,
            _all_of(kinds.Activate, function=tuple(c.ACTIVATIONS)),
            keeps=(0,),
            inplace=True,
        ),
        Operation(
            kinds.Gate,
            _gate,
            _gate_backward,
            {kinds.Gate: {"function": tuple(c.ACTIVATIONS)}},
            keeps=(0, 1),
        ),
        Operation(kinds.Drop, _drop, _drop_backward, _all_of(kinds.Drop), over=(0,), inplace=True),
        # the plain sum, then the one with a factor
        Operation(kinds.Add, _add, _add_backward, {kinds.Add: {}}, over=(0,), same=(0, 1)),
        Operation(kinds.Add, _add, _add_scaled_backward, _all_of(kinds.Add), over=(0,), same=(0,)),
        *NUMPY.operations,
    ),
    cross_entropy=_cross_entropy,
    cross_entropy_backward=_cross_entropy_backward,
    adam=_adam,
    sgd=NUMPY.sgd,
    global_norm=c.norm_of,
    clip_global_norm=_clip,
)
