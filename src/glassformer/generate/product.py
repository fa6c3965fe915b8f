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
#: Rows up to which one choice holds; with more the arithmetic matters, not the layout.
CLASSES = (1, 5, 16)
TRIED_AT = (1, 4, 8)  # rows of the trials for these classes
TRIES = 3
SMALL_BYTES = 1 << 16  # weights that any cache holds: the call costs more than the reading
MANY_BYTES = 1 << 26  # the trials go around more memory than caches hold, as decoding does


class Product:
    """x W^T + b, and residual + x W^T + b; `routines` has one choice for each class of rows."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, routines: Sequence[Routine]
    ) -> None:
        for routine in routines:
            if routine not in ROUTINES:
                raise InputError(f"no routine '{routine}'", hint=f"known: {', '.join(ROUTINES)}")
        self.bias_O = bias_O
        self.weight_OI = weight_OI
        plain_IO = weight_OI.t()
        turned_IO = plain_IO.contiguous() if "transposed" in routines else plain_IO
        #: By number of rows: the weights that are multiplied from the right; None for columns.
        self.by_rows: list[Tensor | None] = [plain_IO]
        for routine, most in zip(routines, CLASSES, strict=True):
            form = {"linear": plain_IO, "transposed": turned_IO, "columns": None}[routine]
            self.by_rows += [form] * (most + 1 - len(self.by_rows))
        self.by_rows.append(plain_IO)

    def __call__(self, x_BI: Tensor) -> Tensor:
        weight_IO = self.by_rows[min(x_BI.shape[0], CLASSES[-1] + 1)]
        if weight_IO is None:
            out_BO = torch.mm(self.weight_OI, x_BI.t()).t()
            return out_BO.contiguous() if self.bias_O is None else out_BO + self.bias_O
        if self.bias_O is None:
            return torch.mm(x_BI, weight_IO)
        return torch.addmm(self.bias_O, x_BI, weight_IO)

    def onto(self, residual_BO: Tensor, x_BI: Tensor) -> Tensor:
        """residual + x W^T + b; the residual is spent."""
        weight_IO = self.by_rows[min(x_BI.shape[0], CLASSES[-1] + 1)]
        if weight_IO is None:
            residual_BO = residual_BO.add_(torch.mm(self.weight_OI, x_BI.t()).t())
        else:
            residual_BO = torch.addmm(residual_BO, x_BI, weight_IO)
        return residual_BO if self.bias_O is None else residual_BO.add_(self.bias_O)


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
        every = [routine] * len(CLASSES)
        products = [Product(weight_OI.clone(), None, routines=every) for _ in range(copies)]
        taken = []
        for attempt in range(TRIES * copies):
            begin = time.perf_counter()
            products[attempt % copies](x_BI)
            taken.append(time.perf_counter() - begin)
        times[routine] = sorted(taken)[len(taken) // 2]
    return min(times, key=lambda routine: times[routine])
