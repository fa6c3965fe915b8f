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


def check_device(device: str) -> str:
    """Return the device to compute on, `auto` resolved; refuse one that this machine lacks."""
    number = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", device)
    if number is None and device not in ("cpu", "mps", "auto"):
        raise InputError(f"unknown device '{device[:60]}'", hint="auto, cpu, cuda, cuda:1 or mps")
    if device == "cpu":
        return device
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if number is None:
        if not torch.backends.mps.is_available():
            raise MachineError("no Apple GPU on this machine", hint="--device cpu")
        return device
    if not torch.cuda.is_available():
        raise MachineError("no CUDA device on this machine", hint="--device cpu")
    if int(number[1] or 0) >= torch.cuda.device_count():
        raise MachineError(
            f"no device {device} on this machine", hint=f"it has {torch.cuda.device_count()}"
        )
    return device
