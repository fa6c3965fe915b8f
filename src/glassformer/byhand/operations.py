"""The table in NumPy: each kind of the program, by the pair that computes it.

A function here takes a `Step` apart for its pair, `x_forward` and `x_backward`, where the
computation and its derivation are. A new kind is one more entry of `NUMPY`.
"""

from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np

from glassformer.byhand.activation import (
    activate_backward,
    activate_forward,
    clamped_gate_forward,
    dropout_backward,
    dropout_forward,
    gate_backward,
    gate_forward,
)
from glassformer.byhand.attention import attend_backward, attend_forward
from glassformer.byhand.embedding import (
    alibi_bias,
    embedding_backward,
    embedding_forward,
    relative_backward,
    relative_buckets_of,
    relative_forward,
    rotate_backward,
    rotate_forward,
    rotations,
    sinusoids,
)
from glassformer.byhand.experts import (
    route_backward,
    route_forward,
    rows_of_experts,
    scatter_backward,
    scatter_forward,
)
from glassformer.byhand.heads import (
    adjust_backward,
    adjust_forward,
    readout_backward,
    readout_forward,
)
from glassformer.byhand.linear import LinearCache, linear_forward, linear_products, sum_rows
from glassformer.byhand.loss import cross_entropy_backward, cross_entropy_forward
from glassformer.byhand.norm import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from glassformer.byhand.pass_context import Array
from glassformer.byhand.table import Operation, Run, Setting, Step, Table
from glassformer.byhand.updates import adam_update, clip_global_norm, global_norm, sgd_update
from glassformer.spec import program as kinds
from glassformer.spec.own import OwnPosition
from glassformer.spec.position import (
    ALiBi,
    RelativeBias,
    Sinusoidal,
    alibi_slopes,
    relative_buckets,
)
from glassformer.spec.program import Op, everything_but

# B batch, T query length, S key length, M rows (B x T), W width, N heads, H d_head, R runs

Made = tuple[Array, Any]
Grads = Sequence[Array | None]


def _own(step: Step, inputs: Sequence[Array], run: Run) -> Array:
    """Return the first input where it may be overwritten, else a copy of it."""
    if step.over == 0:
        return inputs[0]
    out = run.ws.take(inputs[0].shape)
    np.copyto(out, inputs[0])
    return out


def _out(step: Step, inputs: Sequence[Array], run: Run) -> Array:
    """Return the first input where it may be overwritten, else room for the output."""
    return inputs[0] if step.over == 0 else run.ws.take(inputs[0].shape)


def _dx(step: Step, dout: Array, run: Run) -> Array:
    """Return dout where it may be overwritten, else room for the gradient of the first input."""
    return dout if step.own else run.gradient(step, 0)


def _zeroed(step: Step, k: int) -> Array:
    """Return the gradient of a weight to add to, zeros at first."""
    if not step.adds[k]:
        step.grads[k].fill(0.0)
    found: Array = step.grads[k]
    return found


# --- rows by token, position, type ----------------------------------------------------------------


def _embed(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    tokens_M = run.rows(step).side.tokens_BT.reshape(-1)
    return embedding_forward(tokens_M, table_VD=step.weights[0], scale=step.kind.scale, ws=run.ws)


def _embed_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    embedding_backward(dout, cache, dtable_VD=_zeroed(step, 0))
    return ()


def _prepare_rows(op: Op, setting: Setting) -> Any:
    table = op.kind.table if isinstance(op.kind, kinds.AddRows) else None
    if not isinstance(table, Sinusoidal):
        return None

    def make() -> Array:
        made = sinusoids(setting.max_seq_len, d_model=setting.width, kind=table)
        return made.astype(setting.dtype)

    return setting.once(("sinusoids", table, setting.width), make)


def _add_rows(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    rows, out = run.rows(step), _own(step, inputs, run)
    places = _places(step, run)
    if step.kind.by == "type":
        table = step.weights[0]
    else:
        table = step.weights[0][step.kind.offset :] if step.weights else step.constant
    if isinstance(places, slice):
        out_BTW = out.reshape(rows.B, rows.T, -1)
        out_BTW += table[places]
    else:
        out += table[places]
    return out, None


def _places(step: Step, run: Run) -> "Array | slice":
    """Return which row of the table each row gets: a slice where they are the same everywhere."""
    rows = run.rows(step)
    if step.kind.by == "type":
        given = rows.side.types_BT
        return np.zeros(rows.B * rows.T, np.int64) if given is None else given.reshape(-1)
    return rows.positions if isinstance(rows.positions, slice) else rows.positions.reshape(-1)


def _add_rows_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    # forward: x' = x + table[place]   =>   dx = dx', and the table accumulates dx'
    if step.weights:
        rows, places = run.rows(step), _places(step, run)
        dtable = _zeroed(step, 0)
        if step.kind.by == "position":
            dtable = dtable[step.kind.offset :]
        if isinstance(places, slice):
            dtable[places] += dout.reshape(rows.B, rows.T, -1).sum(axis=0)
        else:
            few = dtable if step.kind.by == "type" else dtable[: rows.T]
            embedding_backward(dout, (places, 1.0), dtable_VD=few)
    return (dout,)


# --- norms and projections ------------------------------------------------------------------------


def _runs(x: Array, over: int) -> Array:
    """Return rows as runs of `over` numbers, (M, runs, over), where they are more than one."""
    return x if x.shape[1] == over else x.reshape(len(x), x.shape[1] // over, over)


def _norm(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    kind, out = step.kind, _out(step, inputs, run)
    x_R, out_R = _runs(inputs[0], kind.over), _runs(out, kind.over)
    weight_D = step.weights[0]
    if kind.form == "rms":
        # out = unit * (1 + w)   =>   dw = d(1 + w), so backward needs nothing else
        weight_D = 1.0 + weight_D if kind.offset else weight_D
        _, cache = rms_norm_forward(x_R, weight_D=weight_D, eps=kind.eps, out=out_R, ws=run.ws)
    else:
        bias_D = step.weights[1] if len(step.weights) > 1 else None
        _, cache = layer_norm_forward(
            x_R, weight_D=weight_D, bias_D=bias_D, eps=kind.eps, out=out_R, ws=run.ws
        )
    return out, cache


def _norm_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    kind, dx = step.kind, _dx(step, dout, run)
    dout_R, dx_R = _runs(dout, kind.over), _runs(dx, kind.over)
    if kind.form == "rms":
        rms_norm_backward(dout_R, cache, dx=dx_R, dweight_D=step.grads[0], ws=run.ws)
    else:
        dbias_D = step.grads[1] if len(step.grads) > 1 else None
        layer_norm_backward(
            dout_R, cache, dx=dx_R, dweight_D=step.grads[0], dbias_D=dbias_D, ws=run.ws
        )
    return (dx,)


def _linear(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    weight = step.weights[0]
    out, cache = linear_forward(
        inputs[0],
        weight_OI=weight.T if step.kind.transposed else weight,
        bias_O=step.weights[1] if len(step.weights) > 1 else None,
        ws=run.ws,
    )
    for columns, bias, _ in step.column_biases:
        out[:, columns] += bias
    return out, cache


def _linear_backward(step: Step, dout: Array, cache: LinearCache, run: Run) -> Grads:
    dx, dweight = run.gradient(step, 0), step.grads[0]
    if dweight is None:
        np.matmul(dout, cache.weight_OI, out=dx)
    elif step.adds[0] or step.kind.transposed:
        mark = run.ws.mark()
        room = run.ws.take(cache.weight_OI.shape)
        linear_products(dout, cache, dx=dx, dweight_OI=room)
        made = room.T if step.kind.transposed else room
        if step.adds[0]:
            dweight += made
        else:
            np.copyto(dweight, made)
        run.ws.release(mark)
    else:
        linear_products(dout, cache, dx=dx, dweight_OI=dweight)
    if len(step.grads) > 1 and step.grads[1] is not None:
        sum_rows(dout, out=step.grads[1])
    for columns, _, dbias in step.column_biases:
        if dbias is not None:
            sum_rows(dout[:, columns], out=dbias)
    return (dx,)


# --- attention ------------------------------------------------------------------------------------


def _heads(x: Array, heads: int, step: Step, run: Run) -> Array:
    """Return rows (M, N H) as (B, N, T, H), a view."""
    rows = run.rows(step)
    return x.reshape(rows.B, rows.T, heads, -1).transpose(0, 2, 1, 3)


def _prepare_rotations(op: Op, setting: Setting) -> tuple[Array, Array]:
    assert isinstance(op.kind, kinds.Rotate)
    rotary, width = op.kind.rotary(), setting.width // op.kind.heads
    made: tuple[Array, Array] = setting.once(
        ("rotations", rotary, width),
        lambda: rotations(rotary, length=setting.max_seq_len, d_head=width, dtype=setting.dtype),
    )
    return made


def _rotate(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    def make() -> tuple[Array, Array]:
        places, (cos, sin) = run.rows(step).positions, step.constant
        if isinstance(places, slice):
            return cos[places], sin[places]
        return cos[places][:, None], sin[places][:, None]

    cos, sin = run.once(("rotation", step.side, id(step.constant)), make)
    out = _own(step, inputs, run)
    _, cache = rotate_forward(_heads(out, step.kind.heads, step, run), cos=cos, sin=sin, ws=run.ws)
    return out, cache


def _rotate_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    dx = _dx(step, dout, run)
    if dx is not dout:
        np.copyto(dx, dout)
    rotate_backward(_heads(dx, step.kind.heads, step, run), cache, ws=run.ws)
    return (dx,)


def _prepare_bias(op: Op, setting: Setting) -> Array:
    assert isinstance(op.kind, kinds.Bias)
    match op.kind.form:
        case ALiBi() as alibi:
            return np.array(alibi_slopes(alibi, op.kind.heads, op.kind.d_head), setting.dtype)
        case RelativeBias() as relative:
            return np.array(relative_buckets(relative, causal=op.kind.causal))
        case _ as unreachable:
            assert_never(unreachable)


def _bias(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    rows = run.rows(step)
    places_BS = rows.places()
    if isinstance(step.kind.form, ALiBi):
        return alibi_bias(step.constant, positions_BS=places_BS, queries=rows.T), None
    buckets_BTS = relative_buckets_of(step.constant, positions_BS=places_BS, queries=rows.T)
    return relative_forward(buckets_BTS, table_RN=step.weights[0]), buckets_BTS


def _bias_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    if step.weights:
        relative_backward(dout, cache, dtable_RN=_zeroed(step, 0))
    return ()


def _remember(step: Step, inputs: Sequence[Array], run: Run) -> tuple[Any, Any]:
    memory = step.op.memory
    assert memory is not None
    k_BKSH, v_BKSH = (_heads(x, step.kind.heads, step, run) for x in inputs)
    if run.state is not None:
        k_BKSH, v_BKSH = run.state.of(memory).extend((k_BKSH, v_BKSH), state=run.state)
    run.memories[memory] = k_BKSH, v_BKSH
    for name, x in zip(step.op.taps, (k_BKSH, v_BKSH), strict=True):
        run.context.tap(name, x)
    return None, None


def _remember_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    # every `Attend` of this memory has been run backward: what it gave to k and v is complete
    if run.context.tap_grads is not None:
        for name, i in zip(step.op.taps, step.reads, strict=True):
            run.context.tap_grad(name, _heads(run.grads[i], step.kind.heads, step, run))
    return ()


def _attend(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    kind, memory = step.kind, step.op.memory
    assert memory is not None
    k_BKSH, v_BKSH = run.memories[memory]
    heads_BTNH, cache = attend_forward(
        _heads(inputs[0], kind.heads, step, run),
        k_BKSH=k_BKSH,
        v_BKSH=v_BKSH,
        pass_context=run.context,
        allow=run.allow(step),
        bias=inputs[3] if len(inputs) > 3 else None,
        dropout=kind.drop,
        at=f"{memory}.",
        scale=kind.scale,
        softcap=kind.softcap,
        sinks_N=step.weights[0] if step.weights else None,
    )
    return heads_BTNH.reshape(len(inputs[0]), -1), cache


def _attend_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    kind = step.kind
    dq, dk, dv = (run.gradient(step, k) for k in range(3))
    dbias = None
    if len(step.reads) > 3 and step.needs[3]:
        dbias = run.gradient(step, 3)
    keys = run.sides[step.keys]

    def kv(x: Array) -> Array:
        return x.reshape(keys.B, keys.T, kind.kv_heads, -1).transpose(0, 2, 1, 3)

    attend_backward(
        _heads(dout, kind.heads, step, run),
        cache,
        pass_context=run.context,
        dq_BNTH=_heads(dq, kind.heads, step, run),
        dk_BKSH=kv(dk),
        dv_BKSH=kv(dv),
        dsinks_N=step.grads[0] if step.grads else None,
        dbias=dbias,
    )
    return (dq, dk, dv, dbias)[: len(step.reads)]


# --- elementwise ----------------------------------------------------------------------------------


def _activate(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    return activate_forward(inputs[0], step.kind.function, out=_out(step, inputs, run), ws=run.ws)


def _activate_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    dx = _dx(step, dout, run)
    return (activate_backward(dout, cache, step.kind.function, dx=dx),)


def _gate(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    kind, (gate, up) = step.kind, inputs
    if kind.limit is None:
        return gate_forward(gate, up, function=kind.function, ws=run.ws)
    return clamped_gate_forward(gate, up, limit=kind.limit, slope=kind.slope, ws=run.ws)


def _gate_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    dgate, dup = run.gradient(step, 0), run.gradient(step, 1)
    return gate_backward(dout, cache, dgate=dgate, dup=dup)


def _adjust(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    out, kind = _out(step, inputs, run), step.kind
    return adjust_forward(inputs[0], scale=kind.scale, softcap=kind.softcap, out=out, ws=run.ws)


def _adjust_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    return (adjust_backward(dout, cache, dx=_dx(step, dout, run)),)


def _drop(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    keep = run.context.keep(inputs[0].shape, step.kind.rate)
    assert keep is not None, "a program for training, and no generator"
    return dropout_forward(inputs[0], keep=keep, out=_out(step, inputs, run))


def _drop_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    return (dropout_backward(dout, cache, dx=_dx(step, dout, run)),)


def _add(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    x, z = inputs
    out = inputs[step.over] if step.over >= 0 else run.ws.take(x.shape)
    return np.add(x, z, out=out), None


def _add_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    # forward: x' = x + z   =>   dx = dz = dx'
    return (dout, dout)


def _add_scaled(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    (x, z), out = inputs, _out(step, inputs, run)
    mark = run.ws.mark()
    scaled = np.multiply(z, step.kind.scale, out=run.ws.take(z.shape))
    np.add(x, scaled, out=out)
    run.ws.release(mark)
    return out, None


def _add_scaled_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    # forward: x' = x + scale z   =>   dx = dx',  dz = scale dx'
    return (dout, np.multiply(dout, step.kind.scale, out=run.gradient(step, 1)))


# --- a mixture of experts -------------------------------------------------------------------------


def _route(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    valid_BT = run.rows(step).valid_BT
    routing_ME, loss, cache = route_forward(
        inputs[0],
        chosen=step.kind.chosen,
        normalize=step.kind.normalize,
        real_M=None if valid_BT is None else valid_BT.reshape(-1),
    )
    run.balances[_layer(step)] = loss
    return routing_ME, cache


def _route_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    return (route_backward(dout, cache, dloss=run.dbalance.get(_layer(step), 0.0)),)


def _layer(step: Step) -> str:
    """Return the name of the block that a mixture stands in."""
    return step.op.part.rpartition(".")[0]


def _experts(run: Run, routing: int) -> list[Array]:
    """Return the rows that chose each expert, found once."""
    found: list[Array] = run.once(
        ("experts", routing), lambda: rows_of_experts(run.values[routing])
    )
    return found


def _gather(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    rows_J = _experts(run, step.reads[1])[step.kind.expert]
    return inputs[0][rows_J], rows_J


def _gather_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    # forward: out = x[rows]   =>   dx[rows] += dout; the choice itself has no gradient
    dx = run.total(step, 0)
    dx[cache] += dout
    return (dx, None)


def _scatter(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    routing_ME, *outs = inputs
    rows = _experts(run, step.reads[0])
    out_MD = run.ws.take((len(routing_ME), outs[0].shape[1]))
    return scatter_forward(routing_ME, outs, rows, out_MD=out_MD), inputs


def _scatter_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    routing_ME, *outs = cache
    drouting_ME, *douts = (run.gradient(step, k) for k in range(len(step.reads)))
    rows = _experts(run, step.reads[0])
    scatter_backward(dout, routing_ME, outs, rows, drouting_ME=drouting_ME, douts=douts)
    return (drouting_ME, *douts)


# --- one row of a sequence ------------------------------------------------------------------------


def _read_out(step: Step, inputs: Sequence[Array], run: Run) -> Made:
    rows = run.rows(step)
    hidden_BTD = inputs[0].reshape(rows.B, rows.T, -1)
    return readout_forward(hidden_BTD, valid_BT=rows.valid_BT, readout=step.kind.place)


def _read_out_backward(step: Step, dout: Array, cache: Any, run: Run) -> Grads:
    dhidden, rows = run.gradient(step, 0), run.rows(step)
    readout_backward(dout, cache, dhidden_BTD=dhidden.reshape(rows.B, rows.T, -1))
    return (dhidden,)


# --- the table ------------------------------------------------------------------------------------

#: What NumPy's table runs: every part but a user's position, which is a torch module.
RUNS = everything_but(OwnPosition)

#: Raised whenever a step's numbers are rounded differently: a run that is resumed says so.
ROUNDING = 1

EVERY_INPUT = range(1 << 31)

NUMPY = Table(
    name="NumPy's table",
    operations=(
        Operation(kinds.Embed, _embed, _embed_backward, RUNS),
        Operation(
            kinds.AddRows, _add_rows, _add_rows_backward, RUNS, _prepare_rows, over=(0,), same=(0,)
        ),
        Operation(kinds.Norm, _norm, _norm_backward, RUNS, over=(0,), inplace=True),
        Operation(kinds.Linear, _linear, _linear_backward, RUNS, keeps=(0,)),
        Operation(
            kinds.Rotate,
            _rotate,
            _rotate_backward,
            RUNS,
            _prepare_rotations,
            over=(0,),
            inplace=True,
        ),
        Operation(kinds.Bias, _bias, _bias_backward, RUNS, _prepare_bias),
        Operation(kinds.Remember, _remember, _remember_backward, RUNS, keeps=(0, 1)),
        Operation(kinds.Attend, _attend, _attend_backward, RUNS, keeps=(0, 1, 2)),
        Operation(
            kinds.Activate,
            _activate,
            _activate_backward,
            RUNS,
            over=(0,),
            keeps_output=True,
            inplace=True,
        ),
        Operation(kinds.Gate, _gate, _gate_backward, RUNS, keeps=(1,)),
        Operation(kinds.Adjust, _adjust, _adjust_backward, RUNS, over=(0,), inplace=True),
        Operation(kinds.Route, _route, _route_backward, RUNS),
        Operation(kinds.Gather, _gather, _gather_backward, RUNS, into=True),
        Operation(kinds.Scatter, _scatter, _scatter_backward, RUNS, keeps=EVERY_INPUT),
        Operation(kinds.Drop, _drop, _drop_backward, RUNS, over=(0,), inplace=True),
        # the plain sum, then the one with a factor
        Operation(kinds.Add, _add, _add_backward, {kinds.Add: {}}, over=(0, 1), same=(0, 1)),
        Operation(kinds.Add, _add_scaled, _add_scaled_backward, RUNS, over=(0,), same=(0,)),
        Operation(kinds.ReadOut, _read_out, _read_out_backward, RUNS),
    ),
    cross_entropy=cross_entropy_forward,
    cross_entropy_backward=cross_entropy_backward,
    adam=adam_update,
    sgd=sgd_update,
    global_norm=global_norm,
    clip_global_norm=clip_global_norm,
)
