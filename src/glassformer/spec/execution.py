"""Constants of execution that the cost estimates need too, and the machine's memory."""

import os
from pathlib import Path

from glassformer.spec.errors import MachineError
from glassformer.spec.units import format_bytes

#: Fused attention on a GPU needs a head width that is a multiple of this many bytes.
GPU_HEAD_BYTES = 16
#: A compiled product on a GPU fills its widths up to a multiple of this many numbers, the classes
#: of a large head to a multiple of that many: its matrix units take no others at full speed.
GPU_WIDTHS = 8
GPU_CLASSES = 128
#: Products of one input are joined, in a compiled step, while their weights have this many numbers.
GPU_JOINED = 1 << 21
#: Logits with more entries than this are computed in chunks: of CHUNK entries where the gradient is
#: taken at once, of this many where the backward pass computes them again.
PIECE = 1 << 25
#: 512 rows of 16,000 classes: half and twice as many took 1 to 4 % longer, four times as many 9 %.
CHUNK = 1 << 23
#: The same for a step that is recorded on a GPU, where the gradient is taken at once instead.
RECORDED_PIECE = 1 << 28
#: Compiled for a GPU, the gradient of so many logits is taken at once even if they are one chunk.
FUSED_PIECE = 1 << 24
#: An expert's group of tokens is filled up to a multiple of this many rows. Matrix products of
#: fewer than four rows round differently on a CPU; filled up, a token's result does not depend on
#: how many others chose the same expert, and changing the future changes no bit of the past (seen
#: for layers of a dozen inputs and more; in smaller ones a row's index in the group matters too).
GROUP_ROWS = 8
#: Numbers of a key or a value that share a scale, a float32, where they are kept in 8 bits.
KV_GROUP = 32


def machine_memory() -> int:
    """Return the bytes of memory that this process may use at most; 0 where it cannot be known."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return total
    return min(total, limit)


def check_memory(what: str, needed: int, *, hint: str) -> None:
    """Refuse what cannot fit, before any of it is allocated."""
    there = machine_memory()
    if there and needed > there:
        raise MachineError(
            f"{what} needs {format_bytes(needed)} of memory, and this machine has "
            f"{format_bytes(there)}",
            hint=hint,
        )
