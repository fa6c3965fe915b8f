"""Tests are tested: one planted mistake in roles, positions or probes, and a check turns red."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glassformer.spec.errors import GlassError
from tests.checks.faults import planted
from tests.contracts import test_positional as positions
from tests.lab import test_probes as runs
from tests.lens import test_probes as probes
from tests.lens import test_roles as roles
from tests.lens.roles.faults import FAULTS


def in_a_folder(check):
    def run():
        with TemporaryDirectory() as name:
            check(Path(name))

    return run


CHECKS = {
    "maps": roles.known_maps_score_as_they_must,
    "induction": roles.induction_is_what_followed_the_earlier_copy,
    "padding": roles.padding_is_no_place,
    "groups": roles.groups_score_what_moves_between_them,
    "induction model": roles.a_hand_made_induction_model_is_found_out,
    "places": positions.the_right_place_holds_the_answer,
    "mass": positions.masses_and_routes_are_the_slow_ones,
    "one layer": positions.one_layer_has_no_way_round,
    "cuts": positions.cuts_close_one_place_of_one_layer,
    "numbers": lambda: probes.a_snapshot_shows_what_a_look_shows(False),
    "cut": probes.what_is_long_is_cut,
    "thinning": runs.what_stays_is_bounded_nested_and_even_by_logarithm,
    "resumed": in_a_folder(runs.a_resumed_run_leaves_the_same),
    "fixed": in_a_folder(runs.the_examples_are_fixed_and_held_out),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_faults_are_noticed(fault):
    with planted(fault), pytest.raises((AssertionError, GlassError, IndexError)):
        CHECKS[fault.caught_by]()
