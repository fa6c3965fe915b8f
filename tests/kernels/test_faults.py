"""The checks are checked: the C files are damaged, compiled beside, and held against them."""

import pytest

from glassformer.kernels import c_library
from tests.kernels.checks import CHECKS
from tests.kernels.faults import FAULTS, damaged_library, new_memory_is_nan


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault, tmp_path, monkeypatch):
    if fault.needs not in c_library.variants():
        pytest.skip("this machine cannot run the damaged line")
    damaged = c_library.open_library(damaged_library(fault, tmp_path))
    monkeypatch.setattr(c_library, "_loaded", lambda: (damaged, ""))
    with new_memory_is_nan(), pytest.raises(AssertionError):
        CHECKS[fault.caught_by]()


def test_every_check_has_a_fault():
    assert {fault.caught_by for fault in FAULTS} == set(CHECKS)
