"""Loss of power: `bench.power` with a few cuts, and with syncs that are left out."""

import pytest
from bench.power import cuts

import glassformer.spec.disk
import glassformer.store.checkpoint
import glassformer.store.rundir
from glassformer.store.rundir import RunDirectory


def test_a_run_opens_at_the_newest_checkpoint_or_the_one_before():
    found = list(cuts(24, resume=3))
    assert [cut["fault"] for cut in found] == [""] * 24
    assert len({cut["step"] for cut in found}) > 2


@pytest.mark.parametrize("left_out", ["folders", "the log"])
def test_a_sync_that_is_left_out_is_noticed(left_out, monkeypatch):
    if left_out == "folders":
        for module in (glassformer.spec.disk, glassformer.store.checkpoint):
            monkeypatch.setattr(module, "sync_folder", lambda folder: None)
    else:
        monkeypatch.setattr(RunDirectory, "sync", lambda self, log: log.flush())
    assert any(cut["fault"] for cut in cuts(24, resume=0))
