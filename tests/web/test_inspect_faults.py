"""Tests are tested: one planted mistake in what the page Inspect is sent, and a check turns red."""

import pytest

from tests.checks.faults import Fault, planted
from tests.web import test_inspect as checks
from tests.web.test_inspect import causal, lab  # noqa: F401 (fixtures)

LOOK, MAPS, SNAPSHOT = (
    "web.pages.inspect_results:InspectionResult",
    "web.pages.inspect_results:Result.map",
    "web.pages.inspect_results:SnapshotResult",
)

FAULTS = (
    Fault("masked as zero", MAPS, "torch.nan", "0.0", "masked"),
    Fault("thumbnails forget the mask", "web.pages.inspect_results:_thumbnail", "np.where(allowed, ", "np.where(allowed | True, ", "masked"),
    Fault("thumbnails take the mean", "web.pages.inspect_results:_thumbnail", "pooled(own.tensor", "0.5 * pooled(own.tensor", "thumbnails"),
    Fault("the other way round", MAPS, "own - minus.head_map(kind, layer, head)", "minus.head_map(kind, layer, head) - own", "compared"),
    Fault("tokens not compared", "lens.show.attention_map:AttentionMap.__sub__", "if words != (other.rows_words, other.columns_words):", "if False:", "tokens"),
    Fault("another head", f"{LOOK}.head_map", "maps[layer, _head_number(head)]", "maps[layer, 0]", "text"),
    Fault("mean of the wrong layer", f"{LOOK}.head_map", "maps.mean(layer)", "maps.mean(0)", "text"),
    Fault("lens of another position", f"{LOOK}._lens", "lens.kl[:, t]", "lens.kl[:, 0]", "text"),
    Fault("norms of another layer", f"{LOOK}._norms", "float(written[layer, t])", "float(written[-1, t])", "text"),
    Fault("the look before as the look", "web.pages.inspect:ablate", "inspection=ablation.after", "inspection=ablation.before", "ablation"),
    Fault("KL the other way", "lens.inspection:compare", "divergence(other_1V, ours_1V)", "divergence(ours_1V, other_1V)", "compared"),
    Fault("their probabilities are ours", "lens.inspection:compare", "other_1V[0, list(ids)]", "ours_1V[0, list(ids)]", "ablation"),
    Fault("a copy is kept for all", "web.pages.inspect:_quantized", "if precision not in NAMES:", "if False:", "bits"),
    Fault("snapshot of another example", f"{SNAPSHOT}.head_map", "self.probes.map(self.at, HeadName", "self.probes.map(0, HeadName", "snapshot"),
    Fault("snapshots of any text", "web.pages.inspect_results:read_snapshot", "if split != SPLIT or row not in probes.examples:", "if False:", "snapshot"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_noticed(fault, lab, causal, runs, tmp_path):  # noqa: F811
    run = {
        "masked": lambda: checks.test_masked_cells_are_nan_and_never_a_zero(causal),
        "thumbnails": lambda: checks.test_thumbnails_are_the_weights_in_bytes(lab, runs),
        "compared": lambda: checks.test_another_model_is_compared_on_the_same_tokens(lab, runs),
        "tokens": lambda: checks.test_maps_of_different_tokens_have_no_difference(lab),
        "text": lambda: checks.test_a_text_is_looked_at_as_python_does(lab, runs),
        "ablation": lambda: checks.test_an_ablation_tells_before_and_after(lab, runs),
        "bits": lambda: checks.test_fewer_bits_are_a_copy_and_the_model_stays(lab, runs),
        "snapshot": lambda: checks.test_a_step_without_a_checkpoint_is_shown_from_its_snapshot(
            lab, runs, tmp_path
        ),
    }[fault.caught_by]
    with planted(fault), pytest.raises(Exception):  # noqa: B017, PT011 (any way of failing will do)
        run()
