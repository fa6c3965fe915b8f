"""The runs that the browser's tests look at are what those tests take them for."""

import json

from glassformer.lab.runs.curves import read_curves
from glassformer.store.rundir import RunDirectory
from tests.browser.laboratory import shared_laboratory


def test_the_laboratory_is_what_the_pages_tests_expect(tmp_path_factory):
    """Checkpoints to choose from, a digits run that has learned, seeds that differ, a sweep."""
    shared = shared_laboratory(tmp_path_factory)
    steps = {run.name: RunDirectory(run).steps() for run in (shared / "runs").iterdir()}
    assert steps["digits"] == [320, 400, 480]
    assert steps["reverse"] == steps["text"] + [150] == [50, 100, 150]
    loss = read_curves(shared / "runs" / "digits").series["loss"].value
    assert loss[-20:].mean() < loss[:20].mean() - 0.3
    seeds = [read_curves(shared / "runs" / f"digits-seed{seed}") for seed in (1, 2, 3)]
    assert len({float(one.series["loss"].value[-1]) for one in seeds}) == 3
    results = (shared / "sweeps" / "rates" / "results.jsonl").read_text().splitlines()
    assert len(results) == 8 and all(json.loads(line) for line in results)
