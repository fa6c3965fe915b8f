"""Matrix products of a few rows, by the routine that this machine runs fastest.

A decoding step reads every weight once, so it is bound by memory. Four routines compute the same
product, and their times differ by 2 x and more: torch's `linear` (the module's layout),
`transposed` (a copy, inputs first) and `columns` (weights times a column), and our C routine `c`,
which reads the module's layout in memory order. Results differ by rounding only; with `c` a row's
result does not depend on the other rows.

The choice among them is made by timing each weight shape once. A trial cycles through more memory
than the caches hold, as decoding does. Near ties go to the routine that comes first in `ROUTINES`:
ours, whose results do not depend on the batch, then those without a copy. Choices last as long as
the process; they are written to disk only at a given path.
"""

import ctypes
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glassformer.kernels import c_library
from glassformer.kernels.build import digest
from glassformer.kernels.threads import product_threads
from glassformer.spec.disk import replace_file
from glassformer.spec.errors import FileError, InputError, MachineError, nearest

# B rows, I inputs, O outputs, P tiles of columns

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
        ("form", ctypes.c_int32),
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
        self._call(self._address, x_BI.data_ptr(), y_BO.data_ptr(), rows, onto, product_threads())
        return y_BO if onto or residual_BO is None else residual_BO + y_BO

    def _c_bfloat16(self, x_BI: Tensor, residual_BO: Tensor | None) -> Tensor:
        """Multiply by bfloat16 weights, half the bytes, with sums in float32."""
        y_BO = self._c(x_BI.float(), None)
        return y_BO.to(x_BI.dtype) if residual_BO is None else residual_BO.add_(y_BO)


class Gained(NamedTuple):
    """Rows before an RMS norm, prepared for it by whoever made them (`cuda_rows`).

    The rows as they are, times the norm's gain, and their sums of squares by tiles of columns.
    """

    rows_BI: Tensor
    gained_BI: Tensor
    squares_PB: Tensor


def plain_rows(x_BI: "Tensor | Gained") -> Tensor:
    """Return the rows themselves."""
    return x_BI.rows_BI if isinstance(x_BI, Gained) else x_BI


def joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Stack linear layers that share an input into one; a missing bias is 0."""
    weight = torch.cat([weight for weight, _ in parts])
    if all(bias is None for _, bias in parts):
        return weight, None
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts]
    return weight, torch.cat(biases)


# --- the fastest routine of this machine ----------------------------------------------------------

FORMAT = 1
TRIED_AT = (1, 4, 8)  # the number of rows in a trial, for each class of rows
LEAST_TRIES, MOST_TRIES, MOST_SECONDS = 5, 200, 0.25  # for each number of rows
MANY_BYTES, MANY_COPIES = 1 << 27, 64  # more than caches hold
COPY_BYTES = 1 << 26  # larger weights are not copied
NEAR = 1.1  # times within this factor of the fastest are ties
SMALL = 1 << 12  # with fewer weights the call costs more than the product


def candidates(weight_OI: Tensor, *, compiled: bool = False) -> tuple[Routine, ...]:
    """Return the routines to try: only torch's in a compiled step, and no copy of large weights."""
    if weight_OI.device.type != "cpu" or weight_OI.numel() < SMALL:
        return ("linear",)
    ruled_out: set[Routine] = set()
    if compiled or why_not_c(weight_OI):
        ruled_out.add("c")
    if weight_OI.nbytes > COPY_BYTES:
        ruled_out.add("transposed")
    return tuple(routine for routine in ROUTINES if routine not in ruled_out)


def fastest(weight_OI: Tensor, *, among: Sequence[Routine]) -> tuple[Routine, ...]:
    """Time the routines; return, for each class of rows, the first that ties with the fastest."""
    if len(among) == 1:
        return tuple(among) * len(CLASSES)
    copies = [weight_OI]
    while sum(copy.nbytes for copy in copies) < MANY_BYTES and len(copies) < MANY_COPIES:
        copies.append(weight_OI.clone())
    products = {
        routine: [Product(copy, None, routines=(routine,) * len(CLASSES)) for copy in copies]
        for routine in among
    }
    return tuple(_first_of_the_fast(products, rows=rows) for rows in TRIED_AT)


def _first_of_the_fast(products: dict[Routine, list[Product]], *, rows: int) -> Routine:
    """Time routines in turn, on memory that the last did not read; compare lower quartiles."""
    copies = len(products[next(iter(products))])
    weight_OI = products[next(iter(products))][0].weight_OI
    x_BI = weight_OI.new_ones(rows, weight_OI.shape[1])
    times: dict[Routine, list[float]] = {routine: [] for routine in products}
    start = time.perf_counter()
    for attempt in range(MOST_TRIES):
        for turn, routine in enumerate(products):
            product = products[routine][(attempt + turn * copies // len(products)) % copies]
            begin = time.perf_counter()
            product(x_BI)
            times[routine].append(time.perf_counter() - begin)
        if attempt + 1 >= LEAST_TRIES and time.perf_counter() - start > MOST_SECONDS:
            break
    quick = {routine: sorted(taken)[len(taken) // 4] for routine, taken in times.items()}
    limit = NEAR * min(quick.values())
    return next(routine for routine in products if quick[routine] <= limit)


class Choices:
    """The chosen routines by shape, dtype and number of threads; `of` times new shapes."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Routine, ...]] = {}

    @torch.inference_mode()
    def of(self, weight_OI: Tensor, *, compiled: bool = False) -> tuple[Routine, ...]:
        """Return one routine for each of `CLASSES`."""
        among = candidates(weight_OI, compiled=compiled)
        outputs, inputs = weight_OI.shape
        kind = f"{outputs}x{inputs} {str(weight_OI.dtype).removeprefix('torch.')}"
        key = f"{kind}, {torch.get_num_threads()} threads, {'/'.join(among)}"
        if key not in self.known:
            self.known[key] = fastest(weight_OI, among=among)
        return self.known[key]

    def write(self, path: Path) -> None:
        """Write the choices as JSON, with the machine that they are valid for."""
        content = {"format": FORMAT, "machine": machine(), "choices": self.known}
        try:
            replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            raise MachineError(f"cannot write the choices: {error}", where=str(path)) from error

    def read(self, path: Path) -> int:
        """Load choices that were written on a machine like this one; return how many."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            same = content["format"] == FORMAT and content["machine"] == machine()
            taken = {str(key): tuple(names) for key, names in content["choices"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"not a file of choices: {error}", where=str(path)) from error
        if not same:
            return 0
        for key, names in taken.items():
            allowed = key.rpartition(", ")[2].split("/")
            if len(names) != len(CLASSES) or not set(names) <= set(allowed) & set(ROUTINES):
                raise FileError(f"no choice for '{key}': {names}", where=str(path))
        self.known |= taken
        return len(taken)


def machine() -> dict[str, object]:
    """Return what a choice depends on besides the weights."""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "variant": c_library.variant() if c_library.available() else None,
        "kernels": digest() if c_library.available() else None,
        "torch": torch.__version__,
    }


#: The choices of this process.
CHOICES = Choices()
