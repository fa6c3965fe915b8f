"""The checks are checked: the C files are damaged, compiled beside, and held against them."""

import pytest

from glassformer.kernels import c_library
from tests.kernels.checks import CHECKS
from tests.kernels.faults import FAULTS, damaged_library, new_memory_is_nan
from tests.planting import Choice, Constant, Fault, mutate, planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault, tmp_path, monkeypatch):
    if fault.needs not in c_library.variants():
        pytest.skip("this machine cannot run the damaged line")
    damaged = c_library.open_library(damaged_library(fault, tmp_path))
    monkeypatch.setattr(c_library, "_loaded", lambda: (damaged, ""))
    with new_memory_is_nan(), pytest.raises(AssertionError):
        CHECKS[fault.caught_by]()


#: Damage to what calls the kernels: parts that are made of several, or of torch's products.
CALLERS = (
    Fault(
        "rows that attend to nothing attend",
        mutate("kernels.train_kernels:_AttentionLayerPart.forward", Constant(0.0), drop=True),
        "attention_layers_are_torchs",
    ),
    Fault(
        "an input's gradient is the last product's",
        mutate("kernels.train_kernels:_product_slopes", Choice(), to="{body}"),
        "products_are_torchs",
    ),
)


@pytest.mark.parametrize("fault", CALLERS, ids=lambda fault: fault.name)
def test_every_fault_of_a_caller_is_caught(fault):
    with planted(fault), pytest.raises(AssertionError):
        CHECKS[fault.caught_by]()
    CHECKS[fault.caught_by]()


def test_every_check_has_a_fault():
    assert {fault.caught_by for fault in (*FAULTS, *CALLERS)} == set(CHECKS)
