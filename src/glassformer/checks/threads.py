"""On how many threads a certificate is taken, in a scope that gives back what the caller had.

Its products are small: more threads gain little, and where other programs want the same cores they
wait for each other. On a busy machine two took many times as long as one, also for 45 million
parameters; NumPy's, which never sleep while they wait, most of all.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from glassformer.kernels.threads import taking, threads_for

#: Parameters for which a thread more is worth its while: a minute or two of certificate.
PARAMETERS = 100_000_000


@contextlib.contextmanager
def few_threads(parameters: Mapping[str, Tensor] | None) -> Iterator[None]:
    """torch's threads by the model's size, as they are where nobody knows it; one of NumPy's."""
    count = torch.get_num_threads()
    if parameters is not None:
        count = threads_for(sum(p.numel() for p in parameters.values()), PARAMETERS)
    with taking(count), one_numpy_thread():
        yield


@contextlib.contextmanager
def one_numpy_thread() -> Iterator[None]:
    """NumPy's products on one thread, where its BLAS is the one of its wheels; else as they are."""
    try:
        blas = ctypes.CDLL(np._core._multiarray_umath.__file__)
        asked, take = blas.scipy_openblas_get_num_threads64_, blas.scipy_openblas_set_num_threads64_
    except (OSError, AttributeError):
        yield
        return
    before = asked()
    take(1)
    try:
        yield
    finally:
        take(before)
