"""Matrix products of a few rows, in the layout that this machine reads fastest.

A step of decoding reads every weight once, so it costs what reading costs. The same product can be
asked for in three ways, and libraries differ by 2 x between them: `linear` (the module's layout),
`transposed` (a copy, inputs first) and `columns` (weights times a column). Which is best is found
by a short trial for each shape, or said by the caller; answers differ by rounding only.
"""

import time
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from glassformer.spec.errors import InputError

# B rows, I inputs, O outputs

Routine = Literal["linear", "transposed", "columns"]
ROUTINES: tuple[Routine, ...] = ("linear", "transposed", "columns")
FEW = 16  # rows up to which the layout matters more than the arithmetic
TRIES = 3
SMALL_BYTES = 1 << 16  # weights that any cache holds: the call costs more than the reading
MANY_BYTES = 1 << 26  # the trials go around more memory than caches hold, as decoding does


class Product:
    """x W^T + b, and residual + x W^T + b: one routine for a single row, another for a few."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, one: Routine, few: Routine
    ) -> None:
        for routine in (one, few):
            if routine not in ROUTINES:
                raise InputError(f"no routine '{routine}'", hint=f"known: {', '.join(ROUTINES)}")
        self.bias_O = bias_O
        self.weight_OI = weight_OI
        self.few_are_columns = few == "columns"
        plain_IO = weight_OI.t()
        turned_IO = plain_IO.contiguous() if "transposed" in (one, few) else plain_IO
        self.one_IO = turned_IO if one == "transposed" else plain_IO
        self.few_IO = turned_IO if few == "transposed" else plain_IO
        self.many_IO = plain_IO

    def __call__(self, x_BI: Tensor) -> Tensor:
        rows = x_BI.shape[0]
        if self.few_are_columns and 1 < rows <= FEW:
            out_BO = torch.mm(self.weight_OI, x_BI.t()).t()
            return out_BO.contiguous() if self.bias_O is None else out_BO + self.bias_O
        weight_IO = self._weight(rows)
        if self.bias_O is None:
            return torch.mm(x_BI, weight_IO)
        return torch.addmm(self.bias_O, x_BI, weight_IO)

    def onto(self, residual_BO: Tensor, x_BI: Tensor) -> Tensor:
        """residual + x W^T + b; the residual is spent."""
        rows = x_BI.shape[0]
        if self.few_are_columns and 1 < rows <= FEW:
            residual_BO = residual_BO.add_(torch.mm(self.weight_OI, x_BI.t()).t())
        else:
            residual_BO = torch.addmm(residual_BO, x_BI, self._weight(rows))
        return residual_BO if self.bias_O is None else residual_BO.add_(self.bias_O)

    def _weight(self, rows: int) -> Tensor:
        if rows == 1:
            return self.one_IO
        return self.few_IO if rows <= FEW else self.many_IO


def joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Several linear layers of one input as one: weights and biases stacked, 0 where one lacks."""
    weight = torch.cat([weight for weight, _ in parts])
    if all(bias is None for _, bias in parts):
        return weight, None
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts]
    return weight, torch.cat(biases)


def fastest_routine(weight_OI: Tensor, *, rows: int) -> Routine:
    """The routine with the shortest trial on this machine, for so many rows.

    Off the CPU, and for weights that any cache holds, nothing is tried.
    """
    if weight_OI.device.type != "cpu" or weight_OI.nbytes <= SMALL_BYTES:
        return "linear"
    copies = max(2, min(32, MANY_BYTES // weight_OI.nbytes))
    x_BI = weight_OI.new_ones(rows, weight_OI.shape[1])
    times: dict[Routine, float] = {}
    for routine in ROUTINES:
        if routine == "columns" and rows == 1:
            continue  # the same call as linear's
        products = [
            Product(weight_OI.clone(), None, one=routine, few=routine) for _ in range(copies)
        ]
        taken = []
        for attempt in range(TRIES * copies):
            begin = time.perf_counter()
            products[attempt % copies](x_BI)
            taken.append(time.perf_counter() - begin)
        times[routine] = sorted(taken)[len(taken) // 2]
    return min(times, key=lambda routine: times[routine])
