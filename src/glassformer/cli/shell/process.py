"""How threads wait for each other, decided before the libraries that have them are loaded.

An OpenMP thread that has nothing to do turns in a circle for milliseconds before it sleeps. Where
another program needs that core, the thread that everyone waits for does not run: steps of two
threads took up to 25 times as long as of one. Asleep at once, they lose on a quiet machine what a
second thread gains. So they turn for microseconds, then sleep: docs/training.md has the figures.

What the C library does with memory that training frees at every step.

Whether the device that was asked for is here.
"""

import ctypes
import os
import re
import sys

from glassformer.spec.errors import InputError, MachineError

#: Turns of GNU's OpenMP, which torch has on Linux; others do not read it.
TURNS = 1_000
#: Whoever has set one of these knows better.
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def waiting_briefly() -> None:
    """Let OpenMP's threads, torch's and those of the C kernels, sleep soon while they wait."""
    if not any(name in os.environ for name in OPENMP):
        os.environ["GOMP_SPINCOUNT"] = str(TURNS)


def one_blas_thread() -> None:
    """Let NumPy's products have one thread, in verbs whose products are small: these do not sleep
    while they wait, and their number is read when NumPy is loaded.
    """
    if "numpy" not in sys.modules:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


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
    """Refuse a device that is not here."""
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
