"""The threads of checks: few inside, and the caller's own again outside, whatever happens."""

import contextlib
import ctypes

import numpy as np
import pytest
import torch

from glassformer.kernels.threads import VERIFIED_PARAMETERS, one_numpy_thread, verifying


def test_numpy_has_one_thread_inside_and_its_own_again_after_an_error():
    blas = ctypes.CDLL(np._core._multiarray_umath.__file__)
    asked, take = blas.scipy_openblas_get_num_threads64_, blas.scipy_openblas_set_num_threads64_
    had = asked()
    take(2)
    try:
        with one_numpy_thread():
            assert asked() == 1
        assert asked() == 2
        with contextlib.suppress(KeyError), one_numpy_thread():
            raise KeyError
        assert asked() == 2
    finally:
        take(had)


@pytest.mark.parametrize(
    ("count", "inside"),
    [(10, 1), (3 * VERIFIED_PARAMETERS, 3), (9 * VERIFIED_PARAMETERS, 5), (None, 5)],
)
def test_torch_takes_threads_by_the_size_and_no_more_than_it_had(count, inside):
    had = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        with verifying(count):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(had)
