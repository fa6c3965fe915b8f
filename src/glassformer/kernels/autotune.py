"""Choose the routine that this machine runs fastest, by timing each weight shape once.

A trial cycles through more memory than the caches hold, as decoding does. Near ties go to the
routine that comes first in `ROUTINES`: ours, whose results do not depend on the batch, then those
without a copy. Choices last as long as the process; they are written to disk only at a given path.
"""

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from glassformer.kernels import c_library
from glassformer.kernels.build import digest
from glassformer.kernels.matmul import CLASSES, ROUTINES, Product, Routine, why_not_c
from glassformer.spec.errors import FileError, MachineError

# I inputs, O outputs

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
        beside = path.with_name(path.name + ".new")
        try:
            beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            beside.replace(path)
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
