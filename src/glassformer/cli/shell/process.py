"""Settings of the process: what the C library does with freed memory, and which devices exist."""

import ctypes
import re

from glassformer.spec.errors import InputError, MachineError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST, KEPT = 32 << 20, 1 << 30  # glibc takes no larger threshold for maps


def keep_freed_memory() -> bool:
    """Keep arrays of up to 32 MB for the next step instead of giving them back to the system.

    By default glibc maps each large array anew, and the system fills every page with zeros: a fifth
    of the time of a small language model's step. Where the C library has no such setting nothing
    is done; results are the same bits.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, KEPT))


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have."""
    number = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", device)
    if number is None and device != "cpu":
        raise InputError(f"unknown device '{device[:60]}'", hint="cpu, cuda, or cuda:1")
    if number is None:
        return
    import torch

    if not torch.cuda.is_available():
        raise MachineError("no CUDA device on this machine", hint="--device cpu")
    if int(number[1] or 0) >= torch.cuda.device_count():
        raise MachineError(
            f"no device {device} on this machine", hint=f"it has {torch.cuda.device_count()}"
        )
