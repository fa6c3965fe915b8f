"""A training step's passes over memory as C kernels: parts of torch's graph, and the update.

torch writes and reads an intermediate result for each operation of a norm, a gate, a rotation or a
loss, and its attention has a large fixed cost for each short sequence. Here each of them is one
pass, forward and backward, in float32 on a CPU. Plain torch stays the reference, and is used
wherever `in_use` says no: in other formats, in compiled code, and outside of `training_kernels`,
which the engine enters for its steps alone.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from glassformer.kernels import c_library
from glassformer.kernels.threads import product_threads
from glassformer.kernels.training import AddedRows as _AddedRows
from glassformer.kernels.training import Attention as _Attention
from glassformer.kernels.training import Gate as _Gate
from glassformer.kernels.training import Loss as _Loss
from glassformer.kernels.training import Norm as _Norm
from glassformer.kernels.training import Piece as _Piece
from glassformer.kernels.training import Tensor as _Tensor
from glassformer.kernels.training import Turn as _Turn
from glassformer.kernels.training import Update as _Update
from glassformer.spec.errors import MachineError

# B batch, T query length, S key length, N query heads, K key-value heads, H d_head, D d_model,
# F d_ff, M rows, V classes

#: Numbers of a parameter that are updated together.
PIECE = 1 << 14

_scope = threading.local()


@contextlib.contextmanager
def training_kernels(memory: dict[int, Tensor | None] | None = None) -> Iterator[None]:
    """Let this thread's models compute their passes by the kernels, where the library is there.

    `memory` has the parameters, by id, to whose gradients a part may add by itself, each with its
    gradient of an earlier step, which may be written over; None: all gradients go to autograd.
    """
    before = getattr(_scope, "on", False), getattr(_scope, "memory", None)
    _scope.on, _scope.memory = c_library.available(), memory
    try:
        yield
    finally:
        _scope.on, _scope.memory = before


def writes(weight: Tensor) -> bool:
    """Return True if a part may add to `weight.grad` by itself: in a step that runs alone.

    Where an embedding is also the head, autograd would make two gradients of its size and add
    them.
    """
    return id(weight) in (getattr(_scope, "memory", None) or {})


def gradient_memory(weight: Tensor) -> Tensor | None:
    """Return memory for a gradient that nobody reads any more, once a step."""
    memory: dict[int, Tensor | None] = _scope.memory
    spare, memory[id(weight)] = memory[id(weight)], None
    return spare


def add_gradient(weight: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient, or make it that."""
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def in_use(*tensors: Tensor) -> bool:
    """Return True if these tensors are to be computed by the kernels: float32, on a CPU."""
    return (
        getattr(_scope, "on", False)
        and not torch.compiler.is_compiling()
        and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
    )


def _call(name: str, job: ctypes.Structure) -> None:
    if getattr(c_library.library(), name)(ctypes.byref(job)):
        raise MachineError("no memory for attention's weights", hint="smaller batches")


def _heads(x_BNTH: Tensor) -> tuple[int, int, int, int]:
    batch, head, row, one = x_BNTH.stride()
    assert one == 1
    return x_BNTH.data_ptr(), batch, head, row


def _rows_together(x_BNTH: Tensor) -> Tensor:
    """Return a tensor whose last dimension lies together: as it is, or a copy."""
    return x_BNTH if x_BNTH.stride(-1) == 1 else x_BNTH.contiguous()


def _new_heads(x_BNTH: Tensor, width: int) -> Tensor:
    """Return memory for (B, N, T, width) in which the heads of a token lie side by side."""
    B, N, T, _ = x_BNTH.shape
    return x_BNTH.new_empty(B, T, N, width).transpose(1, 2)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


# --- attention ------------------------------------------------------------------------------------


def attention(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    *,
    allow: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return softmax(q k^T scale) v; query head n reads key-value head n // (N / K).

    `allow` broadcasts to (B, N, T, S), True = may attend, at least once in every row.
    """
    B, N, T, _ = q_BNTH.shape
    if allow is not None:
        allow = allow.expand(B, N, T, k_BKSH.shape[2])
    apply: Callable[..., Tensor] = _AttentionPart.apply
    return apply(q_BNTH, k_BKSH, v_BKSH, allow, causal, scale)


def _attention_job(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNTH: Tensor,
    kept_BNT2: Tensor,
    allow: Tensor | None,
    causal: bool,
    scale: float,
    slopes: Sequence[Tensor] = (),
) -> _Attention:
    (B, N, T, H), (K, S) = q_BNTH.shape, k_BKSH.shape[1:3]
    strides = (0, 0, 0, 0) if allow is None else allow.stride()
    fields = [n for x in (q_BNTH, k_BKSH, v_BKSH, out_BNTH, *slopes) for n in _heads(x)]
    fields += [0] * (32 - len(fields))
    return _Attention(
        *fields, kept_BNT2.data_ptr(), _address(allow), *strides,
        B, N, K, T, S, H, scale, causal, product_threads(), 0,
    )  # fmt: skip


class _AttentionPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BNTH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        allow: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        q_BNTH, k_BKSH, v_BKSH = (_rows_together(x) for x in (q_BNTH, k_BKSH, v_BKSH))
        out_BNTH = _new_heads(q_BNTH, v_BKSH.shape[-1])
        kept_BNT2 = q_BNTH.new_empty(*q_BNTH.shape[:3], 2)
        job = _attention_job(q_BNTH, k_BKSH, v_BKSH, out_BNTH, kept_BNT2, allow, causal, scale)
        _call("glass_attention_forward", job)
        ctx.save_for_backward(q_BNTH, k_BKSH, v_BKSH, out_BNTH, kept_BNT2, allow)
        ctx.causal, ctx.scale = causal, scale
        return out_BNTH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BNTH: Tensor) -> Any:
        q_BNTH, k_BKSH, v_BKSH, out_BNTH, kept_BNT2, allow = ctx.saved_tensors
        d_out_BNTH = _rows_together(d_out_BNTH)
        slopes = [_new_heads(x, x.shape[-1]) for x in (q_BNTH, k_BKSH, v_BKSH)]
        job = _attention_job(
            q_BNTH, k_BKSH, v_BKSH, out_BNTH, kept_BNT2, allow, ctx.causal, ctx.scale,
            (d_out_BNTH, *slopes),
        )  # fmt: skip
        _call("glass_attention_backward", job)
        return (*slopes, None, None, None)


# --- RMSNorm --------------------------------------------------------------------------------------


def rms_norm(x: Tensor, gain_D: Tensor, *, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * gain over the last dimension."""
    apply: Callable[..., tuple[Tensor, Tensor]] = _NormPart.apply
    return apply(x, None, gain_D, eps)[1]


def sum_and_norm(x: Tensor, added: Tensor, gain_D: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + added, and its RMSNorm."""
    apply: Callable[..., tuple[Tensor, Tensor]] = _NormPart.apply
    return apply(x, added, gain_D, eps)


class _NormPart(torch.autograd.Function):
    """(x + added, norm(x + added)); without `added`, (None, norm(x))."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, gain_D: Tensor, eps: float
    ) -> tuple[Tensor | None, Tensor]:
        x, y, total = (
            x.contiguous(),
            torch.empty_like(x, memory_format=torch.contiguous_format),
            None,
        )
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        rate_M = x.new_empty(rows)
        if added is not None:
            added, total = added.contiguous(), torch.empty_like(y)
        addresses = (_address(part) for part in (x, added, gain_D, total, y, rate_M))
        job = _Norm(*addresses, None, None, None, rows, width, eps, product_threads(), 0, 0.0, 1.0)
        _call("glass_norm_forward", job)
        ctx.save_for_backward(x if total is None else total, gain_D, rate_M)
        ctx.eps, ctx.summed = eps, added is not None
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, more: Tensor | None, dy: Tensor | None) -> Any:
        x, gain_D, rate_M = ctx.saved_tensors
        if dy is None:
            return more, more if ctx.summed else None, None, None
        dy, dx, (rows, width) = dy.contiguous(), torch.empty_like(x), (len(rate_M), x.shape[-1])
        more = None if more is None else more.contiguous()
        d_gain = x.new_empty(c_library.library().glass_norm_pieces(rows), width)
        parts = (x, None, gain_D, None, dy, rate_M, more, dx, d_gain)
        addresses = (_address(part) for part in parts)
        _call("glass_norm_backward", _Norm(*addresses, rows, width, ctx.eps, product_threads()))
        # A copy: a gradient that is a row of a larger array would keep all of it in memory.
        return dx, dx if ctx.summed else None, d_gain[0].clone(), None


# --- products -------------------------------------------------------------------------------------


def products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Return x W^T + b for each weight."""
    apply: Callable[..., tuple[Tensor, ...]] = _ProductsPart.apply
    return apply(x, *weights, *biases)


class _ProductsPart(torch.autograd.Function):
    """y_i = x W_i^T + b_i, by torch's products, as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        weights, biases = given[: len(given) // 2], given[len(given) // 2 :]
        x_MI = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_MI, *weights)
        ctx.shape = x.shape
        return tuple(
            _product(x_MI, weight_OI, bias_O).view(*x.shape[:-1], len(weight_OI))
            for weight_OI, bias_O in zip(weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        x_MI, *weights = ctx.saved_tensors
        wanted, count = ctx.needs_input_grad, len(weights)
        dx_MI, pairs = _product_slopes(
            x_MI,
            [slope.reshape(-1, slope.shape[-1]) for slope in slopes],
            weights,
            wanted=[*zip(wanted[1 : 1 + count], wanted[1 + count :], strict=True)],
        )
        return dx_MI.view(ctx.shape), *(pair[0] for pair in pairs), *(pair[1] for pair in pairs)


def _product(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if bias_O is None:
        return torch.mm(x_MI, weight_OI.t())
    return torch.addmm(bias_O, x_MI, weight_OI.t())


def _product_slopes(
    x_MI: Tensor,
    slopes: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    wanted: Sequence[tuple[bool, bool]],
) -> tuple[Tensor, list[tuple[Tensor | None, Tensor | None]]]:
    """Return dx, and of each weight and bias the gradient, where it is wanted.

    The products of the gradient add to each other, without a pass of their own.
    """
    # forward: y_i = x W_i^T + b_i   =>   dx = sum_i dy_i W_i,  dW_i = dy_i^T x,  db_i = sum dy_i
    dx_MI: Tensor | None = None
    pairs: list[tuple[Tensor | None, Tensor | None]] = []
    for dy_MO, weight_OI, (trains, biased) in zip(slopes, weights, wanted, strict=True):
        dx_MI = dy_MO @ weight_OI if dx_MI is None else dx_MI.addmm_(dy_MO, weight_OI)
        pairs.append((dy_MO.t() @ x_MI if trains else None, dy_MO.sum(0) if biased else None))
    assert dx_MI is not None
    return dx_MI, pairs


# --- a layer of attention -------------------------------------------------------------------------


def attention_layer(
    x_BTD: Tensor,
    context_BSD: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    d_head: int,
    rotation: tuple[Tensor, Tensor] | None,
    allow: Tensor | None,
    empty: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return o(attention(q(x), k(context), v(context))), queries and keys rotated; context = x
    if None. Weights and biases are those of q, k, v and o; where `empty`, attention gives 0.

    One node of the graph: in small models a step's nodes take longer than its arithmetic.
    """
    S = (x_BTD if context_BSD is None else context_BSD).shape[1]
    if allow is not None:
        allow = allow.expand(len(x_BTD), len(weights[0]) // d_head, x_BTD.shape[1], S)
    cos, sin = (None, None) if rotation is None else (part.contiguous() for part in rotation)
    apply: Callable[..., Tensor] = _AttentionLayerPart.apply
    return apply(
        x_BTD, context_BSD, cos, sin, allow, empty, (d_head, causal, scale), *weights, *biases
    )


class _AttentionLayerPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        context_BSD: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        allow: Tensor | None,
        empty: Tensor | None,
        fixed: tuple[int, bool, float],
        *given: Tensor,
    ) -> Tensor:
        d_head, causal, scale = fixed
        weights, biases, (B, T, D) = given[:4], given[4:], x_BTD.shape
        x_MD = x_BTD.reshape(-1, D)
        c_MD = x_MD if context_BSD is None else context_BSD.reshape(-1, D)
        q_BNTH, k_BKSH, v_BKSH = (
            _product(of_MD, weight, bias).view(B, -1, len(weight) // d_head, d_head).transpose(1, 2)
            for of_MD, weight, bias in zip((x_MD, c_MD, c_MD), weights, biases, strict=False)
        )
        if cos is not None and sin is not None:
            q_BNTH, k_BKSH = (_turn(x, cos, sin, back=False) for x in (q_BNTH, k_BKSH))
        out_BNTH, kept_BNT2 = _new_heads(q_BNTH, d_head), q_BNTH.new_empty(*q_BNTH.shape[:3], 2)
        job = _attention_job(q_BNTH, k_BKSH, v_BKSH, out_BNTH, kept_BNT2, allow, causal, scale)
        _call("glass_attention_forward", job)
        if empty is not None:
            out_BNTH.masked_fill_(empty, 0.0)
        ctx.save_for_backward(
            x_MD, None if context_BSD is None else c_MD, q_BNTH, k_BKSH, v_BKSH, out_BNTH,
            kept_BNT2, cos, sin, allow, empty, *weights,
        )  # fmt: skip
        ctx.fixed, ctx.shape = fixed, x_BTD.shape
        return _product(_side_by_side(out_BNTH), weights[3], biases[3]).view(B, T, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTD: Tensor) -> Any:
        x_MD, c_MD, q_BNTH, k_BKSH, v_BKSH, out_BNTH, kept_BNT2, *rest = ctx.saved_tensors
        (cos, sin, allow, empty, *weights), (d_head, causal, scale) = rest, ctx.fixed
        (B, T, D), dy_MD = ctx.shape, dy_BTD.reshape(-1, dy_BTD.shape[-1])
        trains, biased = ctx.needs_input_grad[7:11], ctx.needs_input_grad[11:]
        wanted = [*zip(trains, biased, strict=True)]
        d_out, last = _product_slopes(
            _side_by_side(out_BNTH), [dy_MD], weights[3:], wanted=wanted[3:]
        )
        d_out_BNTH = d_out.view(B, T, -1, d_head).transpose(1, 2)
        if empty is not None:
            d_out_BNTH.masked_fill_(empty, 0.0)
        slopes = [_new_heads(x, d_head) for x in (q_BNTH, k_BKSH, v_BKSH)]
        job = _attention_job(
            q_BNTH, k_BKSH, v_BKSH, out_BNTH, kept_BNT2, allow, causal, scale,
            (d_out_BNTH, *slopes),
        )  # fmt: skip
        _call("glass_attention_backward", job)
        if cos is not None:
            slopes[:2] = (_turn(x, cos, sin, back=True) for x in slopes[:2])
        flat = [_side_by_side(x) for x in slopes]
        if c_MD is None:
            dx, first = _product_slopes(x_MD, flat, weights[:3], wanted=wanted[:3])
            d_context = None
        else:
            dx, first = _product_slopes(x_MD, flat[:1], weights[:1], wanted=wanted[:1])
            d_c, both = _product_slopes(c_MD, flat[1:], weights[1:3], wanted=wanted[1:3])
            d_context, first = d_c.view(B, -1, D), first + both
        pairs = first + last
        return (
            dx.view(ctx.shape), d_context, None, None, None, None, None,
            *(pair[0] for pair in pairs), *(pair[1] for pair in pairs),
        )  # fmt: skip


def _side_by_side(x_BNTH: Tensor) -> Tensor:
    """Return (B * T, N * H) of what `_new_heads` made: a view."""
    return x_BNTH.transpose(1, 2).flatten(2).flatten(0, 1)


# --- an embedding ---------------------------------------------------------------------------------


def embedded(tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
    """Return weight[tokens]; the gradient is added to the parameter's own, see `writes`."""
    apply: Callable[..., Tensor] = _EmbedPart.apply
    return apply(tokens_BT, weight_VD)


class _EmbedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.weight = weight_VD
        return F.embedding(tokens_BT, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTD: Tensor) -> Any:
        weight_VD, dy_BTD = ctx.weight, dy_BTD.contiguous()
        tokens_M = ctx.saved_tensors[0].flatten()
        if weight_VD.grad is None:
            weight_VD.grad = torch.zeros_like(weight_VD)
        assert weight_VD.grad.is_contiguous()
        addresses = (x.data_ptr() for x in (weight_VD.grad, dy_BTD, tokens_M))
        _call("glass_add_rows", _AddedRows(*addresses, len(tokens_M), weight_VD.shape[1], 1.0))
        return None, None


# --- SwiGLU ---------------------------------------------------------------------------------------


def gated(gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    apply: Callable[..., Tensor] = _GatePart.apply
    return apply(gate_BTF, up_BTF)


class _GatePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        gate_BTF, up_BTF = gate_BTF.contiguous(), up_BTF.contiguous()
        y = torch.empty_like(gate_BTF)
        addresses = (x.data_ptr() for x in (gate_BTF, up_BTF, y))
        width = y.shape[-1]
        sizes = (y.numel() // width, *(width,) * 5)
        job = _Gate(*addresses, None, None, *sizes, product_threads())
        _call("glass_gate_forward", job)
        ctx.save_for_backward(gate_BTF, up_BTF)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate_BTF, up_BTF = ctx.saved_tensors
        dy, d_gate, d_up = dy.contiguous(), torch.empty_like(gate_BTF), torch.empty_like(up_BTF)
        addresses = (x.data_ptr() for x in (gate_BTF, up_BTF, dy, d_gate, d_up))
        width = dy.shape[-1]
        sizes = (dy.numel() // width, *(width,) * 5)
        _call("glass_gate_backward", _Gate(*addresses, *sizes, product_threads()))
        return d_gate, d_up


# --- rotary positions -----------------------------------------------------------------------------


def turned(x_BNTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + H/2]) by its angle: cos, sin are (T, R), or (B, 1, T, R)."""
    apply: Callable[..., Tensor] = _TurnPart.apply
    return apply(x_BNTH, cos, sin)


def _turn(x_BNTH: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    x_BNTH, y_BNTH = _rows_together(x_BNTH), _new_heads(x_BNTH, x_BNTH.shape[-1])
    B, N, T, H = x_BNTH.shape
    apart = 0 if cos.ndim == 2 else cos.stride(0)
    job = _Turn(
        *_heads(x_BNTH), *_heads(y_BNTH), cos.data_ptr(), sin.data_ptr(), apart, B, N, T, H,
        cos.shape[-1], back, product_threads(),
    )  # fmt: skip
    _call("glass_turn", job)
    return y_BNTH


class _TurnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BNTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turn(x_BNTH, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BNTH: Tensor) -> Any:
        return _turn(dy_BNTH, *ctx.saved_tensors, back=True), None, None


# --- the loss -------------------------------------------------------------------------------------


def loss_rows(logits_MV: Tensor, targets_M: Tensor, weights_M: Tensor, smoothing: float) -> Tensor:
    """Replace logits by the gradient of the weighted loss; return (M, 2): plain, smoothed loss."""
    assert logits_MV.stride(1) == 1
    sums_M2 = logits_MV.new_empty(len(logits_MV), 2)
    targets_M, weights_M = targets_M.contiguous(), weights_M.contiguous()
    job = _Loss(
        logits_MV.data_ptr(), logits_MV.stride(0), *logits_MV.shape, targets_M.data_ptr(),
        weights_M.data_ptr(), sums_M2.data_ptr(), smoothing, product_threads(),
    )  # fmt: skip
    _call("glass_loss", job)
    return sums_M2


# --- the update -----------------------------------------------------------------------------------


class FusedAdamW:
    """The norm of all gradients, and clipping and update in one pass over them.

    The state is that of torch's optimizer, which is initialised as torch does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[tuple[Tensor, float]] = [
            (parameter, float(group["weight_decay"]))
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._made: tuple[list[int], Any] | None = None
        self._ready: Any = None

    @staticmethod
    def takes(optimizer: torch.optim.Optimizer) -> bool:
        """Return True for torch's AdamW of plain float32 parameters on a CPU."""
        return (
            isinstance(optimizer, torch.optim.AdamW)
            and c_library.available()
            and all(
                type(p.data) is Tensor
                and p.dtype == torch.float32
                and p.device.type == "cpu"
                and p.is_contiguous()
                for group in optimizer.param_groups
                for p in group["params"]
            )
        )

    def forget(self) -> None:
        """Look for the state's tensors again: they were replaced."""
        self._made = self._ready = None

    def norm(self) -> float:
        """Return the norm of the gradients that are there."""
        job = self._ready = self._job()
        if job is None:
            return 0.0
        return float(c_library.library().glass_total_norm(ctypes.byref(job)))

    def step(self, *, lr: float, scale: float) -> None:
        """Update by gradients times `scale`: those whose norm was taken last."""
        job, self._ready = self._ready, None
        if job is None:
            return
        group = self.optimizer.param_groups[0]
        job.lr, job.scale, job.eps = lr, scale, group["eps"]
        job.beta1, job.beta2 = group["betas"]
        c_library.library().glass_adamw(ctypes.byref(job))
        torch.autograd.graph.increment_version([p for p, _ in self.parameters])

    def _job(self) -> Any:
        """Return the job over the parameters that have a gradient; None if there are none."""
        held = [(p, decay) for p, decay in self.parameters if p.grad is not None]
        if not held:
            return None
        key = [p.data_ptr() for p, _ in held]
        if self._made is None or self._made[0] != key:
            self._made = key, self._table(held)
        job, slots, _ = self._made[1]
        gradients = [p.grad for p, _ in held if p.grad is not None]
        self._kept = [g if g.is_contiguous() else g.contiguous() for g in gradients]
        slots[:] = [g.data_ptr() for g in self._kept]
        job.threads = product_threads()
        return job

    def _table(self, held: Sequence[tuple[Tensor, float]]) -> tuple[_Update, Any, Any]:
        tensors, pieces = (_Tensor * len(held))(), []
        for i, (parameter, decay) in enumerate(held):
            state = self.optimizer.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            own = (parameter, state["exp_avg"], state["exp_avg_sq"], state["step"])
            assert all(x.is_contiguous() and x.dtype == torch.float32 for x in own)
            tensors[i] = _Tensor(*(x.data_ptr() for x in own), decay)
            size = parameter.numel()
            pieces += [
                _Piece(i, begin, min(PIECE, size - begin)) for begin in range(0, size, PIECE)
            ]
        listed = (_Piece * len(pieces))(*pieces)
        slots, sums = (ctypes.c_void_p * len(held))(), (ctypes.c_double * len(pieces))()
        job = _Update(
            *(ctypes.addressof(x) for x in (tensors, slots, listed, sums)), len(held), len(pieces)
        )
        return job, slots, (tensors, listed, sums)
