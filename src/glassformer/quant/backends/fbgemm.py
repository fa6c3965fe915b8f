"""INT8 products on x86 by FBGEMM, which is part of torch.

8-bit activations saturate on machines without VNNI, so they get 7 bits: steps of 1/63, from -64 to
63. The op takes one scale for the batch, which would make a row depend on its neighbours, so every
row is divided by its largest entry and the result multiplied by it. The packed matrix replaces the
levels and unpacks without loss. Torch has deprecated these ops: the probe checks that they exist.
"""

import warnings

import torch
from torch import Tensor

from glassformer.quant.schemes import QuantizedTensor
from glassformer.spec.schemes import Int8, Scheme

# M rows, O outputs, I inputs

STEPS = 63


class FbgemmForm:
    """A packed INT8 matrix."""

    def __init__(self, tensor: QuantizedTensor) -> None:
        assert isinstance(tensor.scheme, Int8)
        self.scheme = tensor.scheme
        zero_O = torch.zeros(len(tensor.scale)) if tensor.zero is None else tensor.zero
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch has deprecated these ops; the probe notices if they are gone
            made = torch._make_per_channel_quantized_tensor(
                tensor.qweight, tensor.scale.double(), zero_O.long(), 0
            )
            self.packed = torch.ops.quantized.linear_prepack(made, None)
        self.nbytes = tensor.nbytes

    @torch.no_grad()
    def product(self, x_MI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b, each row quantized with its own scale."""
        largest_M1 = x_MI.abs().amax(-1, keepdim=True)
        largest_M1 = torch.where(largest_M1 == 0, 1.0, largest_M1)
        out_MO: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x_MI / largest_M1, 1.0 / STEPS, 64, self.packed
        )
        out_MO = out_MO.mul_(largest_M1)
        return out_MO if bias_O is None else out_MO.add_(bias_O)

    def unpack(self) -> QuantizedTensor:
        """Return the stored form again."""
        made, _ = torch.ops.quantized.linear_unpack(self.packed)
        zero = None if self.scheme.symmetric else made.q_per_channel_zero_points().to(torch.int8)
        scale = made.q_per_channel_scales().float()
        return QuantizedTensor(made.int_repr(), scale, zero, self.scheme)


class Fbgemm:
    """INT8 per channel on the CPU."""

    name = "fbgemm"
    schemes = (Int8,)

    def why_not(
        self, scheme: Scheme, shape: tuple[int, int], device: torch.device, *, lookup: bool
    ) -> str:
        """Return the reason why it cannot serve such a matrix; empty if it can."""
        if device.type != "cpu":
            return "runs on the CPU only"
        if lookup:
            return "cannot look up rows without unpacking everything"
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return "this torch has no FBGEMM"
        if not hasattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32"):
            return "this torch has lost the op"
        return ""

    def pack(self, tensor: QuantizedTensor, *, lookup: bool) -> FbgemmForm:
        """Return the run-time form."""
        return FbgemmForm(tensor)

    def bound(self, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the error bound (M, O) against the reference: half a step of each activation."""
        step_M1 = x_MI.abs().amax(-1, keepdim=True) / STEPS
        return 0.5 * step_M1 * weight_OI.abs().sum(-1)
