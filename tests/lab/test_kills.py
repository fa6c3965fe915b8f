"""SIGKILL at random moments and during a write: `bench.kills` with a few kills."""

import pytest
from bench.kills import row, trials

from tests.training.samples import ENGINES


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_goes_on_to_the_same_bits(engine, tmp_path):
    found = list(trials(3, engine=engine, seed=1, within=tmp_path))
    assert all(trial["equal"] for trial in found)
    assert row(engine, found)["name"] == "3 of 3 equal"
