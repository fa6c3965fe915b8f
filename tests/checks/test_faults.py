"""The tests are tested: every planted fault turns its named check red."""

import pytest
import torch

from glassformer.checks.catalogue import (
    PART_CHECKS,
    SUBJECT_CHECKS,
    run_part_check,
    run_subject_check,
)
from glassformer.checks.preset_subjects import sample_subject
from tests.checks.faults import FAULTS, Fault, planted

CHECKS = {check.name: check for check in (*PART_CHECKS, *SUBJECT_CHECKS)}


def findings_of(caught_by: str, preset: str):
    torch.manual_seed(0)
    check = CHECKS[caught_by]
    if check in PART_CHECKS:
        return list(run_part_check(check))
    return [run_subject_check(check, sample_subject(preset))]


@pytest.fixture(scope="module")
def sound():
    """Checks that were seen green without a fault: once before their first, once after the last."""
    seen = {}
    yield seen
    for caught_by, preset in seen:
        found = findings_of(caught_by, preset)
        assert not any(f.failed for f in found), f"a fault was not taken out: {found}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault: Fault, sound):
    examined = fault.caught_by, fault.preset
    if examined not in sound:
        sound[examined] = findings_of(*examined)
    assert not any(f.failed for f in sound[examined]), "red before the fault was planted"
    with planted(fault):
        found = findings_of(*examined)
    assert any(f.failed for f in found), found
    assert all(f.verdict == "bug" for f in found if f.failed), found


def test_there_are_enough_faults_with_names_of_their_own():
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
