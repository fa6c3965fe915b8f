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
from tests.checks.faults import FAULTS
from tests.planting import Fault, planted

CHECKS = {check.name: check for check in (*PART_CHECKS, *SUBJECT_CHECKS)}


def findings_of(caught_by: str, preset: str):
    torch.manual_seed(0)
    check = CHECKS[caught_by]
    if check in PART_CHECKS:
        return list(run_part_check(check))
    return [run_subject_check(check, sample_subject(preset))]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault: Fault):
    with planted(fault):
        found = findings_of(fault.caught_by, fault.preset)
    assert any(f.failed for f in found), found
    assert all(f.verdict == "bug" for f in found if f.failed), found


@pytest.mark.parametrize(("check", "preset"), sorted({(f.caught_by, f.preset) for f in FAULTS}))
def test_a_check_is_green_once_its_faults_are_taken_out(check, preset):
    """It was red because of them alone, and nothing of them is left behind."""
    found = findings_of(check, preset)
    assert not any(f.failed for f in found), found


def test_there_are_enough_faults_with_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
