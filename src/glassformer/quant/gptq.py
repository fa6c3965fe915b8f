"""GPTQ: columns are rounded one after another, and what is not yet rounded makes up for the error.

With H = sum x x^T over calibration rows, rounding column i costs error^2 / [H^-1]_ii, and the best
answer of the later columns is to move along row i of the upper Cholesky factor of H^-1 (Frantar and
others, 2022). Grids are found group by group, from the weights as they have become by then.
"""

import torch
from torch import Tensor

from glassformer.quant.schemes import QuantizedTensor, assemble, check_matrix, least_squares_grid
from glassformer.spec.errors import InputError
from glassformer.spec.quantization import Scheme

# O outputs, I inputs, G groups, E columns of a group

#: Added to the diagonal, as a share of its mean: inputs that were seen rarely stay where they are.
DAMPING = 0.01
#: Columns that are corrected at once; corrections beyond them are made together.
BLOCK = 128


@torch.no_grad()
def quantize_with_inputs(
    weight_OI: Tensor, scheme: Scheme, *, moment_II: Tensor
) -> QuantizedTensor:
    """The matrix on its grid, rounded so that its products with inputs like those seen stay."""
    check_matrix(weight_OI, scheme)
    factor_II = _inverse_factor(moment_II)
    weight_OI = weight_OI.float().clone()
    inputs = weight_OI.shape[1]
    width = scheme.group or inputs
    levels_OI = torch.empty_like(weight_OI)
    scales, zeros = [], []
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        errors_OB = torch.zeros_like(weight_OI[:, start:end])
        for i in range(start, end):
            if i % width == 0:
                # From the weights as the corrections have left them.
                scale_O1, zero_O1 = least_squares_grid(weight_OI[:, i : i + width], scheme)
                scales.append(scale_O1)
                zeros.append(zero_O1)
            scale_O, zero_O = scales[-1][:, 0], zeros[-1][:, 0]
            column_O = weight_OI[:, i]
            level_O = torch.round(column_O / scale_O) + zero_O
            level_O = level_O.clamp(scheme.lowest, scheme.highest)
            levels_OI[:, i] = level_O
            error_O = (column_O - (level_O - zero_O) * scale_O) / factor_II[i, i]
            weight_OI[:, i + 1 : end] -= torch.outer(error_O, factor_II[i, i + 1 : end])
            errors_OB[:, i - start] = error_O
        weight_OI[:, end:] -= errors_OB @ factor_II[start:end, end:]
    return assemble(levels_OI, torch.cat(scales, 1), torch.cat(zeros, 1), scheme)


def _inverse_factor(moment_II: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped second moment."""
    moment_II = moment_II.double()
    diagonal_I = moment_II.diagonal()
    if not bool(torch.isfinite(moment_II).all()):
        raise InputError("calibration inputs that are not finite", hint="other calibration text")
    if float(diagonal_I.sum()) == 0.0:
        raise InputError(
            "calibration has seen nothing of this layer's inputs",
            hint="run some batches through the prepared model first",
        )
    damped_II = moment_II + torch.diag(torch.full_like(diagonal_I, DAMPING * diagonal_I.mean()))
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(damped_II))
    return torch.linalg.cholesky(inverse_II, upper=True).float()
