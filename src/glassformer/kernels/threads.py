"""Thread policy: how many threads a piece of work is worth, and how idle ones wait.

A thread with too little work waits for the others more than it computes, and where other programs
want the same cores, all of them wait for the one that does not run. So small models take one thread
on any machine; the number of cores is only the upper bound.

The environment must be set before torch and NumPy are loaded, so this module imports neither. In a
command that never loads torch, the number of threads is kept here (`current`, `taking`).
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glassformer.spec.model import ModelSpec

#: FLOPs of one batch, forward and backward, that justify a thread: 20 to 30 ms.
FLOPS = 1_000_000_000
#: Weights read by one decoding step that justify a thread: 20 MB, about 3 ms.
WEIGHTS = 5_000_000
#: Parameters of a verified model that justify a thread: a minute or two of checks. More threads
#: gain little on products this small: on a busy machine two took many times as long as one.
VERIFIED_PARAMETERS = 100_000_000

#: Spins of GNU's OpenMP, which torch has on Linux, before a waiting thread sleeps.
SPINS = 1_000
#: Variables by which a user chooses how OpenMP threads wait; any of them is respected.
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
#: The variable by which OpenBLAS is told whose kernels to take, and what its AVX-512 kernels need.
CORE = "OPENBLAS_CORETYPE"
AVX512 = {f"avx512{part}" for part in ("f", "bw", "dq", "vl", "cd")}


# --- in the environment, before the libraries are loaded -----------------------------------------


def sleep_soon_while_waiting() -> None:
    """Let waiting OpenMP threads, torch's and the C kernels', sleep after a short spin.

    By default they spin for milliseconds. Where another program needs that core, the thread that
    everyone waits for does not run: steps on two threads took up to 25 times as long as on one.
    Asleep at once, they lose on a quiet machine what a second thread gains: docs/training.md has
    the figures.
    """
    if not any(name in os.environ for name in OPENMP):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def widest_blas(cpuinfo: str = "/proc/cpuinfo") -> None:
    """Let NumPy's OpenBLAS use AVX-512 on processors of AMD that have it: there it takes kernels of
    AVX2, and products twice the time. A user's own choice is respected.
    """
    if "numpy" in sys.modules or CORE in os.environ:
        return
    try:
        with open(cpuinfo, encoding="ascii", errors="replace") as file:
            first = file.read(1 << 13).partition("\n\n")[0]
    except OSError:
        return
    told = {key.strip(): value for key, _, value in (x.partition(":") for x in first.split("\n"))}
    if "AuthenticAMD" in told.get("vendor_id", "") and {*told.get("flags", "").split()} >= AVX512:
        os.environ[CORE] = "SkylakeX"


def one_blas_thread() -> None:
    """Give NumPy one thread, in commands whose products are small: its threads never sleep while
    they wait, and their number is read when NumPy is loaded.
    """
    if "numpy" not in sys.modules:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


# --- while running -------------------------------------------------------------------------------


_without_torch: list[int] = []  # the numbers of `taking`, the last one in use


def current() -> int:
    """Return the number of threads in use: torch's own, or what it would be without torch."""
    if "torch" in sys.modules:
        import torch

        return torch.get_num_threads()
    return _without_torch[-1] if _without_torch else _cores()


@functools.cache
def _cores() -> int:
    """Return what torch would take: OMP_NUM_THREADS, or the cores that this process may use.

    Two hardware threads of one core count once.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            with open(path, encoding="ascii") as file:
                cores.add(file.read().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def threads_for(amount: float, grain: int) -> int:
    """Return one thread per grain of work: at least one, at most what torch would take."""
    return max(1, min(current(), round(amount / grain)))


def check_threads(threads: int | None, *, engine: str = "torch") -> None:
    """Refuse a number of threads that cannot be taken; None leaves the choice to the run."""
    if threads is None:
        return
    from glassformer.spec.checks import at_least
    from glassformer.spec.errors import InputError

    at_least("threads", threads)
    here = os.cpu_count() or 1
    if threads > here:
        raise InputError(f"threads {threads} is more than this machine has", hint=f"{here} at most")
    if engine == "numpy":
        raise InputError(
            "NumPy decides on its threads before it starts",
            hint=f"set OPENBLAS_NUM_THREADS={threads} and leave out the option",
        )


def threads_of_decoding(
    model: "ModelSpec", *, asked: int | None = None, device: str = "cpu"
) -> int:
    """Return the requested number, else what reading every weight once is worth."""
    from glassformer.spec.manifest import count_parameters

    check_threads(asked)
    if asked is not None:
        return asked
    if not device.startswith("cpu"):
        return current()
    return threads_for(count_parameters(model), WEIGHTS)


def take(threads: int) -> None:
    """Let torch, and the C kernels on its pool, compute on this many threads from now on."""
    if "torch" not in sys.modules:
        _without_torch.append(threads)
        return
    import torch

    torch.set_num_threads(threads)


@contextlib.contextmanager
def taking(threads: int) -> Iterator[None]:
    """Let torch, and the C kernels on its pool, compute on this many threads."""
    if "torch" not in sys.modules:
        _without_torch.append(threads)
        try:
            yield
        finally:
            _without_torch.pop()
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def product_threads() -> int:
    """Return the number of threads of a C product."""
    return current()


@functools.cache
def _blas() -> list[Any]:
    """Return the controllers of NumPy's OpenBLAS, as in its wheels; empty for another BLAS."""
    import numpy as np  # noqa: F401  its library must be there to be found
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    found: list[Any] = ThreadpoolController().select(internal_api="openblas").lib_controllers
    return found


def blas_libraries() -> list[Any]:
    """Return NumPy's OpenBLAS as loaded libraries; empty for another BLAS."""
    return [one.dynlib for one in _blas()]


def blas_kernels() -> list[str]:
    """Return what the bits of NumPy's products depend on: OpenBLAS's version and kernels."""
    return [f"OpenBLAS {one.version} {one.architecture}" for one in _blas()]


@contextlib.contextmanager
def numpy_taking(count: int) -> Iterator[None]:
    """Let NumPy's products run on this many threads where its BLAS is OpenBLAS."""
    before = [(one, one.get_num_threads()) for one in _blas()]
    for one, had in before:
        if had != count:
            one.set_num_threads(count)
    try:
        yield
    finally:
        for one, had in before:
            if had != count:
                one.set_num_threads(had)


@contextlib.contextmanager
def one_numpy_thread() -> Iterator[None]:
    """Let NumPy's products run on one thread."""
    with numpy_taking(1):
        yield


@contextlib.contextmanager
def verifying(parameters: int | None) -> Iterator[None]:
    """Take threads for checks of a model of this size (unchanged if None), and one of NumPy's."""
    import torch

    count = torch.get_num_threads()
    if parameters is not None:
        count = threads_for(parameters, VERIFIED_PARAMETERS)
    with taking(count), one_numpy_thread():
        yield
