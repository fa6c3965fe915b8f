"""Every claim holds; and every planted fault turns its named check red."""

import pytest

from glassformer.kernels import int_matmul
from glassformer.spec.errors import InputError
from tests.checks.faults import planted
from tests.quant.faults import CHECKS, FAULTS

RED = (AssertionError, IndexError, KeyError, RuntimeError, AttributeError, InputError, ValueError)

pytestmark = pytest.mark.filterwarnings(
    "ignore::glassformer.quant.backends.choose.SlowQuantization"  # a machine without a C compiler
)


@pytest.fixture(scope="module")
def sound():
    """Checks that were seen green; backends are probed then, not with a fault in them."""
    return set()


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_the_claim_holds(check):
    check()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault, sound):
    if ":Native" in fault.where:
        assert int_matmul.available(), int_matmul.why_not()
    if fault.caught_by not in sound:
        CHECKS[fault.caught_by]()
        sound.add(fault.caught_by)
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by]()


def test_there_are_enough_faults_with_names_of_their_own():
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.caught_by for fault in FAULTS} == set(CHECKS)
