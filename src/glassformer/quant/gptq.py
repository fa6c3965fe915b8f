"""GPTQ: round columns one after another; the remaining ones compensate for the error.

With H = sum x x^T over calibration rows, rounding column i costs error^2 / [H^-1]_ii, and the later
columns compensate best by moving along row i of the upper Cholesky factor of H^-1 (Frantar et al.,
2022). Each group's grid is fitted to its weights after the corrections so far.

That is greedy: early columns are rounded before later errors are known. So for schemes of few
levels, each column is then rounded again with the others fixed, and the scales are set to their
least-squares values; each such step lowers the error of the products, except for the rounding of
the scales themselves.
"""

import torch
from torch import Tensor

from glassformer.quant.schemes import (
    Codec,
    QuantizedTensor,
    check_matrix,
    codec,
    least_squares_grid,
)
from glassformer.spec.errors import InputError
from glassformer.spec.schemes import Scheme

# O outputs, I inputs, G groups, E columns of a group

#: Added to the diagonal, as a share of its mean: weights of rare inputs hardly move.
DAMPING = 0.1
#: Columns that are corrected one by one; later columns are corrected once per block.
BLOCK = 128
#: Passes over all columns after the first.
SWEEPS = 3


@torch.no_grad()
def quantize_with_inputs(
    weight_OI: Tensor, scheme: Scheme, *, moment_II: Tensor
) -> QuantizedTensor:
    """Quantize a matrix so that its products with inputs like the calibration's change least."""
    rules = codec(check_matrix(weight_OI, scheme))
    moment_II = _damped(moment_II)
    factor_II = _inverse_factor(moment_II)
    wanted_OI = weight_OI.float()
    weight_OI = wanted_OI.clone()
    inputs = weight_OI.shape[1]
    width = inputs // rules.groups(inputs)
    levels_OI = torch.empty_like(weight_OI)
    scales, zeros = [], []
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        errors_OB = torch.zeros_like(weight_OI[:, start:end])
        for i in range(start, end):
            if i % width == 0:
                # From the weights as the corrections have left them.
                scale_O1, zero_O1 = least_squares_grid(weight_OI[:, i : i + width], rules)
                scales.append(scale_O1)
                zeros.append(zero_O1)
            scale_O, zero_O = scales[-1][:, 0], zeros[-1][:, 0]
            column_O = weight_OI[:, i]
            level_O = rules.nearest(column_O, scale_O, zero_O)
            levels_OI[:, i] = level_O
            error_O = (column_O - (level_O - zero_O) * scale_O) / factor_II[i, i]
            weight_OI[:, i + 1 : end] -= torch.outer(error_O, factor_II[i, i + 1 : end])
            errors_OB[:, i - start] = error_O
        weight_OI[:, end:] -= errors_OB @ factor_II[start:end, end:]
    scale_OG, zero_OG = torch.cat(scales, 1), torch.cat(zeros, 1)
    if rules.coarse:
        for _ in range(SWEEPS):
            levels_OI = _rounded_again(levels_OI, scale_OG, zero_OG, wanted_OI, moment_II, rules)
            scale_OG = _scales_again(levels_OI, scale_OG, zero_OG, wanted_OI, moment_II, rules)
    return rules.assemble(levels_OI, scale_OG, zero_OG)


def making_up(weight_OI: Tensor, *, moment_II: Tensor, cross_II: Tensor) -> Tensor:
    """Return the weights that, on the actual inputs y, best give the products of W with inputs x.

    x are the float model's inputs to the layer: W (sum x y^T) (sum y y^T)^-1, damped.
    """
    damped_II = _damped(moment_II)
    extra_II = damped_II - moment_II.double()
    wanted_OI = weight_OI.double() @ (cross_II.double() + extra_II)
    moved_OI: Tensor = torch.linalg.solve(damped_II, wanted_OI, left=False)
    return moved_OI.float()


def _rounded_again(
    levels_OI: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor,
    wanted_OI: Tensor,
    moment_II: Tensor,
    rules: Codec,
) -> Tensor:
    """Round each column to its best level, given the others: slope = (rounded - wanted) H."""
    levels_OI, inputs = levels_OI.clone(), wanted_OI.shape[1]
    width, moment_II = inputs // rules.groups(inputs), moment_II.float()
    slope_OI = (rules.values(levels_OI, scale_OG, zero_OG) - wanted_OI) @ moment_II
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        steps_OB = torch.zeros_like(slope_OI[:, start:end])
        for i in range(start, end):
            scale_O, zero_O = scale_OG[:, i // width], zero_OG[:, i // width]
            before_O = (levels_OI[:, i] - zero_O) * scale_O
            best_O = before_O - slope_OI[:, i] / moment_II[i, i]
            levels_OI[:, i] = rules.nearest(best_O, scale_O, zero_O)
            step_O = (levels_OI[:, i] - zero_O) * scale_O - before_O
            slope_OI[:, start:end] += torch.outer(step_O, moment_II[i, start:end])
            steps_OB[:, i - start] = step_O
        slope_OI[:, end:] += steps_OB @ moment_II[start:end, end:]
    return levels_OI


def _scales_again(
    levels_OI: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor,
    wanted_OI: Tensor,
    moment_II: Tensor,
    rules: Codec,
) -> Tensor:
    """Return the scales of least squared error of the products, solved for all groups of a row."""
    groups = scale_OG.shape[1]
    units_OI = rules.values(levels_OI, torch.ones_like(scale_OG), zero_OG).double()
    units_OGE, moment_GEI = (
        units_OI.unflatten(1, (groups, -1)),
        moment_II.unflatten(0, (groups, -1)),
    )
    left_OGG = units_OI.new_empty(len(units_OI), groups, groups)
    right_OG = units_OI.new_empty(len(units_OI), groups)
    for g in range(groups):
        pull_OI = units_OGE[:, g] @ moment_GEI[g]
        left_OGG[:, g] = (pull_OI.unflatten(1, (groups, -1)) * units_OGE).sum(-1)
        right_OG[:, g] = (pull_OI * wanted_OI).sum(-1)
    # A group of zero levels makes the system singular; a small diagonal keeps it solvable.
    size_O = left_OGG.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-30)
    left_OGG.diagonal(dim1=1, dim2=2).add_(1e-9 * size_O[:, None])
    found_OG = torch.linalg.solve(left_OGG, right_OG).half().float()
    return torch.where((found_OG > 0) & found_OG.isfinite(), found_OG, scale_OG)


def _damped(moment_II: Tensor) -> Tensor:
    """Return the second moment with a share of its mean on the diagonal, in float64."""
    moment_II = moment_II.double()
    diagonal_I = moment_II.diagonal()
    if not bool(torch.isfinite(moment_II).all()):
        raise InputError("calibration inputs that are not finite", hint="other calibration text")
    if float(diagonal_I.sum()) == 0.0:
        raise InputError(
            "calibration has seen nothing of this layer's inputs",
            hint="run some batches through the prepared model first",
        )
    return moment_II + torch.diag(torch.full_like(diagonal_I, float(DAMPING * diagonal_I.mean())))


def _inverse_factor(damped_II: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse."""
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(damped_II))
    factor_II: Tensor = torch.linalg.cholesky(inverse_II, upper=True)
    return factor_II.float()
