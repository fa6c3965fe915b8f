"""Two processes train as one does; `python -m bench distributed` does so for every preset."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.ranks import FAULTS

ROUNDING = 1e-12


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What rank 0 found in each case, and rank 1."""
    folder = tmp_path_factory.mktemp("ranks")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.training.ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            cwd=root,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [child.communicate()[1] for child in children]
    for child, text in zip(children, errors, strict=True):
        assert child.returncode == 0, text[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_are_one(found):
    for rank in found:
        assert max(rank["equal"].values()) <= ROUNDING, rank["equal"]


def test_two_ranks_are_one_in_float32(found):
    for rank in found:
        assert max(rank["narrow"].values()) <= 1e-4, rank["narrow"]


@pytest.mark.parametrize("fault", [fault.name for fault in FAULTS])
def test_a_planted_fault_is_seen(found, fault):
    assert found[0]["faults"][fault] > 1e-6


@pytest.mark.parametrize("fault", [fault.name for fault in FAULTS])
def test_a_planted_fault_turns_the_row_of_the_certificate_red(found, fault):
    assert found[0]["row"][""] <= ROUNDING < found[0]["row"][fault]


def test_a_rank_without_rows_takes_part(found):
    assert max(found[0]["idle"].values()) <= ROUNDING, found[0]["idle"]


def test_what_is_not_finite_on_one_rank_is_applied_on_none(found):
    for rank in found:
        assert rank["not_finite"] == {"copies": [False, True], "sharded": [False, True]}


def test_dropout_is_the_same_bits_for_as_many_ranks(found):
    assert found[0]["dropout"] == {"again": True, "ranks": True, "alone": False}


def test_an_evaluation_is_shared_out(found):
    for rank in found:
        for gap, same in rank["evaluation"].values():
            assert gap <= ROUNDING
            assert same


def test_ranks_that_do_not_fit_are_refused_by_name(found):
    for number, rank in enumerate(found):
        assert rank["refusals"]["data"].startswith("rank 1 has data different from rank 0's | ")
        assert rank["refusals"]["size"] == (
            f"rank {number}: 2 processes cannot share a batch of 9 evenly | "
            "1 processes, or train.batch_size=8"
        )


def test_a_run_goes_on_with_another_number_of_ranks(found):
    for rank in found:
        crossed = rank["crossing"]
        for sharded in ("False", "True"):
            assert crossed[f"{sharded}, gap"] <= ROUNDING
            assert crossed[f"{sharded}, step 3"] == [3, True]
            assert crossed[f"{sharded}, step 9"] == [9, False]
