"""The tests are tested: every planted fault turns its named check red."""

import pytest

from glassformer.spec.errors import InputError
from tests.checks.faults import planted
from tests.lens.faults import CHECKS, FAULTS

#: A damaged look may also fail outright: an index out of range is noticed too.
RED = (
    AssertionError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    InputError,
    pytest.fail.Exception,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by]()


def test_there_are_enough_faults_with_names_of_their_own():
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.caught_by for fault in FAULTS} == set(CHECKS)
