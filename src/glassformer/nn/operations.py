"""The operations that modules call through a table: plain torch, unless another table is given.

A module has one way through it. Where a machine has another kernel for one operation, a table of
its own says so: `use(model, table)` gives it to every module. Who trains on a GPU passes the table
of `gpu.operations`, and a run's fingerprint records its name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.nn.mask import Mask
from glassformer.spec.errors import InputError
from glassformer.spec.execution import GPU_HEAD_BYTES

# B batch, T query length, S key length, N query heads, K key-value heads, H d_head, F d_ff,
# O outputs, R rank, C rows of a chunk, V classes, P >= V columns in memory


def project(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Return what each of some linear layers makes of one input."""
    return tuple(layer(x) for layer in layers)


def corrected(
    x: Tensor,
    low_R: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    factor_OR: Tensor,
    scale: float,
) -> Tensor:
    """Return x W^T + b + scale * low F^T."""
    return F.linear(x, weight_OI, bias_O) + F.linear(low_R, factor_OR) * scale


def rotate(x_BNTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + H/2]): the half-split layout of Llama and Qwen.

    Where the table is narrower than a head, the rest of the head stays as it is.
    """
    cos, sin = cos.to(x_BNTH.dtype), sin.to(x_BNTH.dtype)
    width = 2 * cos.shape[-1]
    first, second = x_BNTH[..., :width].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    rest = () if width == x_BNTH.shape[-1] else (x_BNTH[..., width:],)
    return torch.cat((*turned, *rest), dim=-1)


def attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, mask: Mask, scale: float, dropout: float
) -> Tensor:
    """softmax(q k^T scale + bias) v by torch's fused kernel; rows of nothing are the caller's."""
    T, H = q_BNTH.shape[2:]
    if q_BNTH.is_cuda and q_BNTH.dtype != torch.float64 and T > 1:
        # The fused kernels need heads of a certain multiple, those for float32 also a key for
        # every query head; otherwise all T x S weights are materialised. Padding a head with
        # zeros changes nothing.
        if q_BNTH.dtype == torch.float32:
            k_BKSH, v_BKSH = per_query_head(k_BKSH, q_BNTH), per_query_head(v_BKSH, q_BNTH)
        if missing := -H % (GPU_HEAD_BYTES // q_BNTH.element_size()):
            q_BNTH, k_BKSH, v_BKSH = (F.pad(x, (0, missing)) for x in (q_BNTH, k_BKSH, v_BKSH))
    out_BNTH = F.scaled_dot_product_attention(
        q_BNTH,
        k_BKSH,
        v_BKSH,
        attn_mask=mask.allow if mask.bias is None else mask.added(q_BNTH),
        dropout_p=dropout,
        is_causal=mask.causal and mask.bias is None,
        scale=scale,
        enable_gqa=q_BNTH.shape[1] != k_BKSH.shape[1],
    )
    return out_BNTH[..., :H]


def per_query_head(kv_BKSH: Tensor, q_BNTH: Tensor) -> Tensor:
    """Repeat each key-value head for every query head of its group."""
    group = q_BNTH.shape[1] // kv_BKSH.shape[1]
    return kv_BKSH if group == 1 else kv_BKSH.repeat_interleave(group, dim=1)


def activate(x_BTF: Tensor, activation: str) -> Tensor:
    """ReLU, its square, exact GELU, GELU by tanh, or SiLU of a fresh tensor.

    In place where no backward needs the input: it is the widest array of a layer.
    """
    spare = not torch.is_grad_enabled()
    match activation:
        case "relu":
            return F.relu(x_BTF, inplace=spare)
        case "relu2":
            return F.relu(x_BTF, inplace=spare).square()
        case "silu":
            return F.silu(x_BTF, inplace=spare)
        case "gelu":
            return torch.ops.aten.gelu_(x_BTF) if spare else F.gelu(x_BTF)
        case "gelu_tanh":
            kind = {"approximate": "tanh"}
            return torch.ops.aten.gelu_(x_BTF, **kind) if spare else F.gelu(x_BTF, **kind)
    raise InputError(f"unknown activation '{activation}'")


def gate(gate_BTF: Tensor, up_BTF: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up."""
    return activate(gate_BTF, activation) * up_BTF


def loss_rows(
    logits_CP: Tensor, targets_C: Tensor, weights_C: Tensor, *, classes: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return (C, 2), each row's weighted plain and smoothed loss, and the gradient of the logits.

    Columns from `classes` on are filling.
    """
    logits_CV = logits_CP[:, :classes]
    wide_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    logp_CV = F.log_softmax(wide_CV, -1)
    weight_C1, target_C1 = weights_C[:, None].to(logp_CV.dtype), targets_C[:, None]
    nll_C = -logp_CV.gather(1, target_C1)[:, 0]
    smoothed_C = nll_C
    if smoothing:
        smoothed_C = (1 - smoothing) * nll_C - smoothing * logp_CV.mean(1)
    grad_CV = logp_CV.exp_().mul_(weight_C1)
    if smoothing:
        grad_CV -= weight_C1 * (smoothing / classes)
    grad_CV.scatter_add_(1, target_C1, (smoothing - 1) * weight_C1)
    grad_CP = F.pad(grad_CV, (0, logits_CP.shape[1] - classes)).to(logits_CP.dtype)
    return torch.stack((nll_C, smoothed_C), 1) * weight_C1, grad_CP


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """A table of operations; each may be replaced by a function that computes the same.

    `loss_in_place`: the gradient of logits is written over them, so that it pays to take it early.
    """

    name: str = "torch"
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
    project: Callable[[Tensor, Sequence[nn.Module]], tuple[Tensor, ...]] = project
    corrected: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, float], Tensor] = corrected
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    attention: Callable[..., Tensor] = attention
    activate: Callable[[Tensor, str], Tensor] = activate
    gate: Callable[[Tensor, Tensor, str], Tensor] = gate
    loss_rows: Callable[..., tuple[Tensor, Tensor]] = loss_rows
    loss_in_place: bool = False


TORCH = Operations()


class Part(nn.Module):
    """A module that computes by a table of operations."""

    operations: Operations = TORCH


def use(model: nn.Module, operations: Operations) -> None:
    """Give a table to every module of a model."""
    for part in model.modules():
        if isinstance(part, Part):
            part.operations = operations
