"""NumPy's BLAS on one thread, as torch is in all tests.

Two threads that wait for each other by spinning make a step a hundred times slower when another
process wants the second core, and a test run is not alone.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest


def _openblas() -> ctypes.CDLL | None:
    """The library inside NumPy's wheel; a NumPy with another BLAS keeps its threads."""
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    for path in folder.glob("libscipy_openblas*"):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "scipy_openblas_set_num_threads64_"):
            return library
    return None


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    library = _openblas()
    before = 0 if library is None else library.scipy_openblas_get_num_threads64_()
    if library is not None:
        library.scipy_openblas_set_num_threads64_(1)
    yield
    if library is not None:
        library.scipy_openblas_set_num_threads64_(before)
