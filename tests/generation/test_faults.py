"""The tests are tested: every planted fault turns its named check red."""

import inspect

import pytest

from glassformer.spec.errors import InputError
from tests.checks.faults import planted
from tests.generation import (
    test_beam,
    test_constraint,
    test_decode,
    test_decoder,
    test_samplers,
    test_stepper,
    test_text,
)
from tests.generation.faults import CHECKS, FAULTS

#: A damaged step may also fail outright: an index out of range is noticed too.
RED = (AssertionError, IndexError, RuntimeError, InputError, pytest.fail.Exception)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by]()


def test_every_check_is_a_test_of_its_own():
    """The tests that call the checks show that they are green without a fault."""
    tests = [
        inspect.getsource(function)
        for module in (
            test_beam,
            test_constraint,
            test_decode,
            test_decoder,
            test_samplers,
            test_stepper,
            test_text,
        )
        for name, function in vars(module).items()
        if name.startswith("test_")
    ]
    for name in CHECKS:
        assert any(f"{name}(" in source for source in tests), name


def test_there_are_enough_faults_with_names_of_their_own():
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.caught_by for fault in FAULTS} == set(CHECKS)
