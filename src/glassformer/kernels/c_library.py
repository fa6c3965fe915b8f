"""The compiled library: whether it can be used and why not, its variants, whose threads it runs.

It works on the threads of the OpenMP runtime that torch was linked with, whatever its name: one
pool, which torch's own operations keep warm, instead of two that compete for the cores.
"""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from glassformer.kernels.build import COMMAND, LIBRARY, digest
from glassformer.spec.errors import InputError, MachineError, nearest

#: From the plainest to the fastest; the numbers are those of native.h.
VARIANTS = ("portable", "avx2", "avx512-vnni")


def why_not() -> str:
    """Why the library cannot be used here, and what to do; empty where it can."""
    return _loaded()[1]


def available() -> bool:
    """Whether the library is compiled, from the sources that lie beside it, and loads."""
    return not why_not()


def library() -> ctypes.CDLL:
    """The library, or an error that says how to get it."""
    found, reason = _loaded()
    if found is None:
        raise MachineError(reason, where=str(LIBRARY), hint=COMMAND)
    return found


def variant() -> str:
    """The instructions in use: the machine's best, or what `use_variant` asked for."""
    return VARIANTS[library().glass_variant()]


def variants() -> tuple[str, ...]:
    """Those that this machine can run."""
    return VARIANTS[: library().glass_best_variant() + 1]


@contextmanager
def use_variant(name: str) -> Iterator[None]:
    """Another variant for a while, for tests and comparisons; the whole process is affected."""
    if name not in variants():
        raise InputError(f"no variant '{name}' on this machine", hint=nearest(name, variants()))
    before = library().glass_variant()
    library().glass_force_variant(VARIANTS.index(name))
    try:
        yield
    finally:
        library().glass_force_variant(before)


def shares_threads() -> bool:
    """Whether torch's thread pool was found; if not, products run on the caller's thread alone."""
    return bool(library() and _torch_pool())


def open_library(path: Path) -> ctypes.CDLL:
    """A compiled library with its functions declared, on torch's threads."""
    found = ctypes.CDLL(str(path))
    pointer, wide, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    found.glass_source.restype = ctypes.c_char_p
    found.glass_use_threads_of.argtypes = [pointer]
    found.glass_use_threads_of.restype = None
    found.glass_floating.argtypes = [pointer, pointer, pointer, wide, number, number]
    found.glass_floating.restype = None
    found.glass_integer.argtypes = [pointer, pointer, pointer, pointer, wide, number]
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
    """The address of GOMP_parallel among the libraries that torch was linked with, if there."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        try:
            linked = ctypes.CDLL(str(path), getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW)
            return ctypes.cast(linked.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
