"""Planted faults in curves, tables and plots: each is caught by a test of theirs."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glassformer.spec.errors import GlassError
from tests.checks.faults import Fault, planted
from tests.lab import (
    test_confusion,
    test_curve_figure,
    test_curves,
    test_metric_lines,
    test_terminal_plot,
)

READ, SERIES = "lab.runs.curves:read_curves", "lab.runs.curves:_series"

FAULTS = (
    Fault(
        "a torn line is read", READ, 'whole = data.rfind(b"\\n") + 1', "whole = len(data)", "torn"
    ),
    Fault(
        "tokens begin at 0 again",
        READ,
        "Spent() if restarted or spent is None else spent",
        "Spent()",
        "torn",
    ),
    Fault(
        "a cut log goes on",
        "lab.runs.curves:_read",
        'start if file.read(1) == b"\\n" else 0',
        "start",
        "cut",
    ),
    Fault(
        "old steps stay",
        "lab.runs.curves:_lasting",
        "step[:-1] < lowest_after",
        "step[:-1] >= 0",
        "again",
    ),
    Fault("tokens are not summed", SERIES, "np.cumsum(lines.tokens)", "lines.tokens", "torn"),
    Fault(
        "a step before the first",
        "lab.runs.metrics_file:parse_line",
        'not 0 <= found["step"]',
        'not -1 <= found["step"]',
        "as json",
    ),
    Fault(
        "large values stay",
        "lab.runs.metrics_file:_number",
        "else number * math.inf",
        "else number",
        "as json",
    ),
    Fault(
        "seconds a token",
        "lab.runs.metrics_file:_Columns.add",
        "tokens / seconds",
        "seconds / tokens if tokens and seconds else 0.0",
        "as json",
    ),
    Fault(
        "NaN becomes 0",
        "lab.runs.metrics_file:_number",
        "_NOT_FINITE.get(value)",
        "0.0",
        "not finite",
    ),
    Fault(
        "the mean loses a block where its window begins one",
        "lab.runs.metrics_file:_centred",
        "first % width == 0",
        "first % width <= 1",
        "mean",
    ),
    Fault(
        "one point of a bucket is kept",
        "lab.runs.metrics_file:extremes",
        "kept.add(first + int(high[first:last].argmax()))",
        "pass",
        "extremes",
    ),
    Fault(
        "too many points are kept",
        "lab.runs.metrics_file:extremes",
        "(most - 2) // 2 + 1",
        "most",
        "extremes",
    ),
    Fault(
        "shares of the column",
        "lab.measure.evaluate:shares",
        "sum(table[row].values())",
        "len(table[row])",
        "diagonal",
    ),
    Fault(
        "upside down",
        "lab.plots.curves:_Canvas.draw",
        "(1 - y) * (high - 1)",
        "y * (high - 1)",
        "falls",
    ),
    Fault(
        "alerts one run later",
        "lab.plots.curves:_draw_alerts",
        "[x[place]]",
        "[x[place] + 1]",
        "panel",
    ),
    Fault(
        "the raw line is hidden", "lab.plots.curves:_draw_panel", "alpha=0.3", "alpha=1.0", "panel"
    ),
    Fault(
        "one dash for all",
        "lab.plots.curves:_draw_panel",
        "DASHES[number % len(DASHES)]",
        "DASHES[0]",
        "dash",
    ),
)


def in_a_folder(check: Callable[[Path], None]) -> Callable[[], None]:
    """The check in a folder of its own."""

    def run() -> None:
        with TemporaryDirectory() as name:
            check(Path(name))

    return run


CHECKS: dict[str, Callable[[], None]] = {
    "torn": in_a_folder(test_curves.test_a_torn_last_line_waits_for_the_next_reading),
    "cut": in_a_folder(test_curves.test_a_log_that_was_cut_back_is_read_anew),
    "again": in_a_folder(test_curves.test_a_step_that_comes_again_replaces_what_it_was),
    "not finite": in_a_folder(test_curves.test_what_is_not_finite_is_read_as_such),
    "as json": test_metric_lines.test_every_odd_line_is_read_as_json_reads_it,
    "mean": lambda: test_curves.test_the_mean_is_taken_twice_over_windows_that_are_centred(53, 7.0),
    "extremes": test_curves.test_thinning_keeps_the_extremes_of_every_bucket,
    "diagonal": test_confusion.test_what_is_right_lies_on_the_diagonal,
    "falls": test_terminal_plot.test_a_line_that_falls_begins_above_and_ends_below,
    "panel": in_a_folder(test_curve_figure.test_a_panel_shows_raw_and_smooth_alerts_and_names),
    "dash": in_a_folder(test_curve_figure.test_runs_differ_by_dash_and_name_as_well_as_colour),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    CHECKS[fault.caught_by]()
    with planted(fault), pytest.raises((AssertionError, ValueError, GlassError)):
        CHECKS[fault.caught_by]()
