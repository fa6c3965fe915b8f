"""What integer.py's products compute, in plain torch: the same operations in the same order.

Whole numbers are multiplied in float64, where their sums are exact, so that the C file can be held
against these bit for bit, in every variant and for any batch.
"""

import torch
from torch import Tensor

# B rows, I inputs, O outputs, G groups

STEPS = 127


def reference_int8(
    x_BI: Tensor, qweight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None
) -> Tensor:
    """What `Int8Weight.product` computes, in plain torch and bit for bit."""
    xq_BI, a_B1 = _quantized(x_BI)
    sum_BO = (xq_BI.double() @ qweight_OI.double().t()).float()  # whole numbers: exact
    y_BO = sum_BO * scale_O.float() * a_B1
    return y_BO if bias_O is None else y_BO + bias_O


def reference_int4(
    x_BI: Tensor,
    qweight_OI: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor | None = None,
    bias_O: Tensor | None = None,
) -> Tensor:
    """What `Int4Weight.product` computes, in plain torch and bit for bit; q is (O, I)."""
    xq_BI, a_B1 = _quantized(x_BI)
    groups = scale_OG.shape[1]
    acc_BO = x_BI.new_zeros(len(x_BI), len(qweight_OI))
    for g, (xq, q) in enumerate(
        zip(xq_BI.chunk(groups, 1), qweight_OI.chunk(groups, 1), strict=True)
    ):
        zero = 8.0 if zero_OG is None else zero_OG[:, g].float()
        sum_BO = (xq.double() @ q.double().t()).float()
        acc_BO = acc_BO + (sum_BO - zero * xq.sum(1, keepdim=True)) * scale_OG[:, g].float()
    y_BO = acc_BO * a_B1
    return y_BO if bias_O is None else y_BO + bias_O


def _quantized(x_BI: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers in [-127, 127] as float32, and what one step is worth in each row."""
    most_B1 = x_BI.abs().amax(1, keepdim=True)
    a_B1 = (most_B1 / STEPS).masked_fill(~most_B1.isfinite(), torch.nan)
    xq_BI = torch.round(x_BI / a_B1).clamp(-STEPS, STEPS)
    return torch.where(a_B1 > 0, xq_BI, 0.0), a_B1
