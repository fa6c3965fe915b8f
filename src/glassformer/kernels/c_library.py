"""Load the compiled library: report why it cannot be used, select variants, share torch's threads.

The library runs on the OpenMP runtime that torch was linked with: one thread pool, which torch's
own operations keep warm, instead of two that compete for the cores. Torch itself is not imported:
where a command does without it, the runtime is loaded from the file that torch would load.
"""

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glassformer.kernels.build import COMMAND, LIBRARY, digest
from glassformer.spec.errors import InputError, MachineError, nearest

#: The slowest first; an index is the variant's number in native.h.
VARIANTS = ("portable", "avx2", "avx512-vnni")
#: Passes of a training step, each of which takes one structure (training.py).
TRAINING = (
    "attention_forward",
    "attention_backward",
    "loss",
    "norm_forward",
    "norm_backward",
    "gate_forward",
    "gate_backward",
    "sum",
    "columns_sum",
    "turn",
    "add_rows",
    "adam",
    "product",
)


def unavailable() -> str:
    """Return the reason why the library cannot be used, and what to do; empty if it can."""
    return _loaded()[1]


def available() -> bool:
    """Return True if the library is compiled from the current sources and loads."""
    return not unavailable()


def library() -> ctypes.CDLL:
    """Return the library; raise an error with the build command if there is none."""
    found, reason = _loaded()
    if found is None:
        raise MachineError(reason, where=str(LIBRARY), hint=COMMAND)
    return found


def variant() -> str:
    """Return the variant in use: the machine's best, or that of `use_variant`."""
    return VARIANTS[library().glass_variant()]


def variants() -> tuple[str, ...]:
    """Return the variants that this machine can run."""
    return VARIANTS[: library().glass_best_variant() + 1]


@contextmanager
def use_variant(name: str) -> Iterator[None]:
    """Use another variant in this block, for tests and comparisons; it affects all threads."""
    if name not in variants():
        raise InputError(f"no variant '{name}' on this machine", hint=nearest(name, variants()))
    before = library().glass_variant()
    library().glass_force_variant(VARIANTS.index(name))
    try:
        yield
    finally:
        library().glass_force_variant(before)


def shares_threads() -> bool:
    """Return True if torch's thread pool is available; if not, products run on one thread."""
    return bool(library() and _torch_pool())


def open_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library, declare its functions, and connect it to torch's threads."""
    found = ctypes.CDLL(str(path))
    pointer, wide, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    found.glass_source.restype = ctypes.c_char_p
    found.glass_use_threads_of.argtypes = [pointer]
    found.glass_use_threads_of.restype = None
    found.glass_floating.argtypes = [pointer, pointer, pointer, wide, number, number]
    found.glass_floating.restype = None
    found.glass_integer.argtypes = [pointer, pointer, pointer, pointer, wide, number]
    found.glass_unpack.argtypes = [number, pointer, pointer, wide, number]
    found.glass_finite.argtypes = [pointer, wide, number, number]
    found.glass_scales_finite.argtypes = [number, pointer, wide, number]
    found.glass_grids.argtypes = [pointer, number]
    found.glass_columns.argtypes = [pointer, number]
    found.glass_step.argtypes = [pointer]
    found.glass_greedy.argtypes = [pointer]
    found.glass_greedy.restype = wide
    found.glass_likeliest.argtypes = [pointer, wide, pointer, wide, pointer]
    found.glass_likeliest.restype = wide
    found.glass_beams.argtypes = [pointer]
    found.glass_beams.restype = wide
    found.glass_reserve.argtypes = [pointer, pointer, wide, pointer, wide, wide]
    found.glass_reserve.restype = wide
    found.glass_reorder.argtypes = [pointer, pointer, wide, pointer, pointer, wide, wide]
    found.glass_reorder.restype = None
    for name in TRAINING:
        getattr(found, f"glass_{name}").argtypes = [pointer]
        getattr(found, f"glass_{name}").restype = number if "attention" in name else None
    found.glass_norm_pieces.argtypes, found.glass_norm_pieces.restype = [wide], wide
    found.glass_squares.argtypes, found.glass_squares.restype = [pointer], ctypes.c_double
    found.glass_use_threads_of(_torch_pool())
    return found


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    if not LIBRARY.exists():
        return None, f"the C kernels are not compiled: run `{COMMAND}`"
    try:
        found = open_library(LIBRARY)
    except (OSError, AttributeError) as error:
        return None, f"the C kernels cannot be loaded ({error}): run `{COMMAND}`"
    if found.glass_source().decode() != digest():
        return None, f"the C kernels were compiled from other sources: run `{COMMAND}`"
    return found, ""


@functools.cache
def _torch_pool() -> int | None:
    """Return the address of GOMP_parallel in the libraries that torch was linked with, if any."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "lib"
    loaded = getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW
    names = {folder / name: loaded for name in ("libtorch_cpu.so", "libtorch_cpu.dylib")}
    if "torch" not in sys.modules:  # the same file that torch would load, later perhaps
        names = dict.fromkeys(folder.glob("libgomp*.so*"), os.RTLD_NOW)
    for path, mode in names.items():
        try:
            linked = ctypes.CDLL(str(path), mode)
            return ctypes.cast(linked.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
