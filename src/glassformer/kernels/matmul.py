"""Matrix products of a few rows, by the routine that this machine runs fastest.

A decoding step reads every weight once, so it is bound by memory. Four routines compute the same
product, and their times differ by 2 x and more: torch's `linear` (the module's layout),
`transposed` (a copy, inputs first) and `columns` (weights times a column), and our C routine `c`,
which reads the module's layout in memory order. Results differ by rounding only; with `c` a row's
result does not depend on the other rows. `autotune.py` chooses among them.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from glassformer.kernels import c_library
from glassformer.spec.errors import InputError, nearest

# B rows, I inputs, O outputs

Routine = Literal["linear", "transposed", "columns", "c"]
ROUTINES: tuple[Routine, ...] = ("c", "linear", "columns", "transposed")
#: The largest number of rows of each class; with more rows the layout no longer matters.
CLASSES = (1, 5, 16)
#: A routine with its weights: takes rows and a residual or None, returns the sum.
Bound = Callable[[Tensor, Tensor | None], Tensor]
C_DTYPES = (torch.float32, torch.bfloat16)


class _Form(ctypes.Structure):
    """`struct floating` of floating.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
        ("bfloat16", ctypes.c_int32),
    )


def why_not_c(weight_OI: Tensor) -> str:
    """Return the reason why the C routine cannot use these weights; empty if it can."""
    if weight_OI.device.type != "cpu":
        return f"weights are on {weight_OI.device}, and the C kernels run on the CPU"
    if weight_OI.dtype not in C_DTYPES:
        return f"weights are {weight_OI.dtype}, and the C kernels read float32 and bfloat16"
    return c_library.why_not()


class Product:
    """x W^T + b, and residual + x W^T + b; `routines` has one choice for each class of rows.

    There are no gradients: `c` refuses inputs that require them.
    """

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, routines: Sequence[Routine]
    ) -> None:
        for routine in routines:
            if routine not in ROUTINES:
                raise InputError(f"no routine '{routine}'", hint=nearest(routine, ROUTINES))
        self.weight_OI, self.bias_O = weight_OI, bias_O
        self.turned_IO = weight_OI.t()
        if "transposed" in routines:
            self.turned_IO = self.turned_IO.contiguous()
        if "c" in routines:
            self._prepare_c()
        by_name: dict[Routine, Bound] = {
            "linear": self._linear,
            "transposed": self._transposed,
            "columns": self._columns,
            "c": self._c if weight_OI.dtype == torch.float32 else self._c_bfloat16,
        }
        #: By number of rows; the last is for more rows than any class has.
        self.by_rows: list[Bound] = [self._linear]
        for routine, most in zip(routines, CLASSES, strict=True):
            self.by_rows += [by_name[routine]] * (most + 1 - len(self.by_rows))
        self.by_rows.append(self._linear)

    def __call__(self, x_BI: Tensor) -> Tensor:
        return self.by_rows[min(x_BI.shape[0], CLASSES[-1] + 1)](x_BI, None)

    def onto(self, residual_BO: Tensor, x_BI: Tensor) -> Tensor:
        """Return residual + x W^T + b; the residual may be overwritten."""
        return self.by_rows[min(x_BI.shape[0], CLASSES[-1] + 1)](x_BI, residual_BO)

    def _linear(self, x_BI: Tensor, residual_BO: Tensor | None) -> Tensor:
        return self._times(x_BI, self.weight_OI.t(), residual_BO)

    def _transposed(self, x_BI: Tensor, residual_BO: Tensor | None) -> Tensor:
        return self._times(x_BI, self.turned_IO, residual_BO)

    def _times(self, x_BI: Tensor, weight_IO: Tensor, residual_BO: Tensor | None) -> Tensor:
        if residual_BO is not None:
            out_BO = torch.addmm(residual_BO, x_BI, weight_IO)
            return out_BO if self.bias_O is None else out_BO.add_(self.bias_O)
        if self.bias_O is None:
            return torch.mm(x_BI, weight_IO)
        return torch.addmm(self.bias_O, x_BI, weight_IO)

    def _columns(self, x_BI: Tensor, residual_BO: Tensor | None) -> Tensor:
        out_BO = torch.mm(self.weight_OI, x_BI.t()).t()
        if residual_BO is not None:
            out_BO = residual_BO.add_(out_BO)
            return out_BO if self.bias_O is None else out_BO.add_(self.bias_O)
        return out_BO.contiguous() if self.bias_O is None else out_BO + self.bias_O

    def _prepare_c(self) -> None:
        reason = why_not_c(self.weight_OI)
        if reason:
            raise InputError(f"no routine 'c' here: {reason}", hint="another routine, or 'auto'")
        self._weight_OI = self.weight_OI.contiguous()
        self._bias_O = None if self.bias_O is None else self.bias_O.float().contiguous()
        self._call = c_library.library().glass_floating
        self._form = _Form(
            self._weight_OI.data_ptr(),
            None if self._bias_O is None else self._bias_O.data_ptr(),
            *self.weight_OI.shape,
            self.weight_OI.dtype == torch.bfloat16,
        )
        self._address = ctypes.addressof(self._form)

    def _c(self, x_BI: Tensor, residual_BO: Tensor | None) -> Tensor:
        if x_BI.requires_grad and torch.is_grad_enabled():
            raise InputError("the C kernels have no gradients", hint="call under torch.no_grad()")
        x_BI = x_BI.contiguous()
        rows, onto = x_BI.shape[0], residual_BO is not None and residual_BO.is_contiguous()
        if residual_BO is None or not onto:
            y_BO = x_BI.new_empty(rows, self._form.outputs)
        else:
            y_BO = residual_BO
        self._call(
            self._address, x_BI.data_ptr(), y_BO.data_ptr(), rows, onto, torch.get_num_threads()
        )
        return y_BO if onto or residual_BO is None else residual_BO + y_BO

    def _c_bfloat16(self, x_BI: Tensor, residual_BO: Tensor | None) -> Tensor:
        """Multiply by bfloat16 weights, half the bytes, with sums in float32."""
        y_BO = self._c(x_BI.float(), None)
        return y_BO.to(x_BI.dtype) if residual_BO is None else residual_BO.add_(y_BO)


def joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Stack linear layers that share an input into one; a missing bias is 0."""
    weight = torch.cat([weight for weight, _ in parts])
    if all(bias is None for _, bias in parts):
        return weight, None
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts]
    return weight, torch.cat(biases)
