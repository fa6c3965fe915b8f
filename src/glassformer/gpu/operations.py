"""The GPU's table of operations: Triton kernels, packed attention, and products in widths that fit.

What is for compiled code alone asks `torch.compiler.is_compiling()`; everything falls back to plain
torch in a format that a kernel does not compute in, and where Triton is not installed.
"""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.nn import operations as plain
from glassformer.nn.linear import Linear
from glassformer.nn.mask import Mask
from glassformer.nn.operations import TORCH, Operations
from glassformer.spec.execution import GPU_JOINED, GPU_WIDTHS

# B batch, T length, N query heads, K key-value heads, H d_head, O outputs, I inputs, R rank

#: Kernels of our own are written in Triton, and compute in these formats.
HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: What the kernel of packed sequences takes: these formats, widths of a head in these steps.
HALF, PACKED_HEADS, PACKED_MOST = (torch.bfloat16, torch.float16), 8, 256


def operations_on(device: torch.device | str) -> Operations:
    """Return the table for training on a device."""
    return gpu_operations() if torch.device(device).type == "cuda" else TORCH


def table_name() -> str:
    """Return the name of the GPU's table on this machine, which a run's fingerprint records."""
    return "triton" if HAS_TRITON else "cuda"


def gpu_operations() -> Operations:
    """Return the GPU's table; it is made where nothing is compiled yet, for it imports kernels."""
    return Operations(
        name=table_name(),
        linear=linear,
        project=project,
        corrected=corrected,
        attention=packed_attention(),
        **(_triton() if HAS_TRITON else {}),
    )


def compiled_for(*tensors: Tensor) -> bool:
    """Return True in code that is compiled for a GPU, in a format that kernels compute in."""
    return torch.compiler.is_compiling() and all(
        x.is_cuda and x.dtype in TRITON_DTYPES for x in tensors
    )


# --- products -------------------------------------------------------------------------------------


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b; compiled, with widths filled up by zeros, which change nothing.

    The compiler makes the filling part of the kernels before and after.
    """
    d_out, d_in = weight_OI.shape
    more_in, more_out = -d_in % GPU_WIDTHS, -d_out % GPU_WIDTHS
    if not (more_in or more_out) or not (torch.compiler.is_compiling() and x.is_cuda):
        return F.linear(x, weight_OI, bias_O)
    weight = F.pad(weight_OI, (0, more_in, 0, more_out))
    bias = None if bias_O is None else F.pad(bias_O, (0, more_out))
    return F.linear(F.pad(x, (0, more_in)), weight, bias)[..., :d_out]


def project(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Return what each of some linear layers makes of one input; compiled, as one product.

    That saves launches and is worth it for small weights; with large ones, what reads a slice of
    the result loses more. The compiler joins the weights where it casts them.
    """
    plain_layers = [layer for layer in layers if type(layer) is Linear]
    small = sum(layer.weight.numel() for layer in plain_layers) <= GPU_JOINED
    here = torch.compiler.is_compiling() and x.is_cuda and small
    if not here or len(plain_layers) < len(layers):
        return plain.project(x, layers)
    weight, bias = torch.cat([layer.weight for layer in plain_layers]), None
    if any(layer.bias is not None for layer in plain_layers):
        zeros = weight.new_zeros
        bias = torch.cat([zeros(p.d_out) if p.bias is None else p.bias for p in plain_layers])
    outputs: tuple[Tensor, ...] = linear(x, weight, bias).split(
        [layer.d_out for layer in plain_layers], dim=-1
    )
    return outputs


def corrected(
    x: Tensor,
    low_R: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    factor_OR: Tensor,
    scale: float,
) -> Tensor:
    """Return x W^T + b + scale * low F^T; compiled over frozen weights, as one product."""
    trains = weight_OI.requires_grad or (bias_O is not None and bias_O.requires_grad)
    missing = (x.shape[-1] + low_R.shape[-1]) % GPU_WIDTHS
    if trains or missing or not (torch.compiler.is_compiling() and x.is_cuda):
        return plain.corrected(x, low_R, weight_OI, bias_O, factor_OR, scale)
    return joined_product(x, low_R, weight_OI, scale * factor_OR, bias_O)


def joined_product(
    x: Tensor, low_R: Tensor, weight_OI: Tensor, factor_OR: Tensor, bias_O: Tensor | None
) -> Tensor:
    """Return x W^T + b + low F^T as one product: nothing of width O is added afterwards.

    W and b are frozen. In the precision of autocast, where it is on.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    bias_O = None if bias_O is None else bias_O.to(dtype)
    operands = (x.to(dtype), low_R.to(dtype), weight_OI.to(dtype), factor_OR.to(dtype), bias_O)
    product: Callable[..., Tensor] = _Corrected.apply
    return product(*operands)


class _Corrected(torch.autograd.Function):
    """y = [x, low] [W, F]^T + b.  =>  [dx, dlow] = dy [W, F],  dF = dy^T low.

    Autograd would also compute the gradient of W, which is frozen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        low_R: Tensor,
        weight_OI: Tensor,
        factor_OR: Tensor,
        bias_O: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(low_R, weight_OI, factor_OR)
        both = torch.cat((weight_OI, factor_OR), dim=1)
        return F.linear(torch.cat((x, low_R), dim=-1), both, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        low_R, weight_OI, factor_OR = ctx.saved_tensors
        both = grad @ torch.cat((weight_OI, factor_OR), dim=1)
        grad_x, grad_low = both.split((weight_OI.shape[1], factor_OR.shape[1]), dim=-1)
        grad_factor = grad.flatten(0, -2).T @ low_R.flatten(0, -2)
        return grad_x, grad_low, None, grad_factor, None


# --- attention ------------------------------------------------------------------------------------


def packed_attention() -> Callable[..., Tensor]:
    """Return attention that leaves out what the mask of a packed batch excludes, where this torch
    has the kernel; 2.10's has neither window nor scale.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler: seconds
    except ImportError:
        return plain.attention
    kernel: Callable[..., Any] = varlen_attn
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known:
        return plain.attention
    # How a release is told of fewer key-value heads; where it cannot be, its kernel sees it.
    groups = {"enable_gqa": True} if "enable_gqa" in known else {}

    def attention(
        q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, mask: Mask, scale: float, dropout: float
    ) -> Tensor:
        """Attention within each run alone."""
        (B, _, T, H), dtype = q_BNTH.shape, _kernel_dtype(q_BNTH)
        fits = dtype in HALF and H % PACKED_HEADS == 0 and H <= PACKED_MOST
        packed = mask.packed
        if packed is None or mask.bias is not None or dropout > 0.0 or not fits:
            return plain.attention(q_BNTH, k_BKSH, v_BKSH, mask=mask, scale=scale, dropout=dropout)
        rows = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (q_BNTH, k_BKSH, v_BKSH))
        out_MNH = kernel(
            *rows,
            packed.runs_R,
            packed.runs_R,
            T,
            T,
            scale=scale,
            window_size=(packed.left, packed.right),
            **groups,
        )
        out_BTNH: Tensor = out_MNH.unflatten(0, (B, T))
        return out_BTNH.transpose(1, 2)

    return attention


def _kernel_dtype(x: Tensor) -> torch.dtype | None:
    """Return what a fused kernel would compute in on this GPU; None elsewhere."""
    if not x.is_cuda:
        return None
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


# --- Triton ---------------------------------------------------------------------------------------


def _triton() -> dict[str, Any]:
    """Return the operations that are kernels of ours."""
    from glassformer.gpu.triton_loss import loss_rows as loss_kernel
    from glassformer.gpu.triton_step import biased_gelu, gated, turned_heads

    def rotate(x_BNTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate queries or keys whose table is as wide as a head."""
        if not compiled_for(x_BNTH) or 2 * cos.shape[-1] != x_BNTH.shape[-1]:
            return plain.rotate(x_BNTH, cos, sin)
        flat_BTD, N = x_BNTH.transpose(1, 2).flatten(2), x_BNTH.shape[1]
        out_BNTH: Tensor = turned_heads(flat_BTD, cos.float(), sin.float(), N, 0)[0]
        return out_BNTH

    def activate(x_BTF: Tensor, activation: str) -> Tensor:
        """Return GELU by a kernel."""
        if activation != "gelu" or not compiled_for(x_BTF):
            return plain.activate(x_BTF, activation)
        hidden_BTF: Tensor = biased_gelu(x_BTF, None)
        return hidden_BTF

    def gate(gate_BTF: Tensor, up_BTF: Tensor, activation: str) -> Tensor:
        """Return silu(gate) * up by a kernel."""
        if activation != "silu" or not compiled_for(gate_BTF, up_BTF):
            return plain.gate(gate_BTF, up_BTF, activation)
        hidden_BTF: Tensor = gated(gate_BTF, up_BTF)
        return hidden_BTF

    def loss_rows(
        logits_CP: Tensor, targets_C: Tensor, weights_C: Tensor, *, classes: int, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Write the gradient over the logits."""
        if not (logits_CP.is_cuda and logits_CP.dtype in TRITON_DTYPES):
            return plain.loss_rows(
                logits_CP, targets_C, weights_C, classes=classes, smoothing=smoothing
            )
        return loss_kernel(logits_CP, targets_C, weights_C, classes, smoothing), logits_CP

    return {
        "rotate": rotate,
        "activate": activate,
        "gate": gate,
        "loss_rows": loss_rows,
        "loss_in_place": True,
    }
