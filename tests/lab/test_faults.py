"""Tests are tested: one planted mistake in training or runs, and the named check turns red."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glassformer.spec.errors import GlassError
from tests.checks.faults import planted
from tests.lab import test_evaluate, test_resume, test_run
from tests.lab.conftest import MEMORY
from tests.lab.faults import FAULTS
from tests.lab.runs import KEPT, assert_same, killed_after, outcome, resumed, sample, trained
from tests.spec import test_schedule
from tests.training import (
    test_accumulation,
    test_engines,
    test_fit,
    test_losses,
    test_lr_find,
    test_not_finite,
)


def in_a_folder(check: Callable[[Path], None]) -> Callable[[], None]:
    def run() -> None:
        with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
            check(Path(name))

    return run


def with_patches(check: Callable[..., None], *arguments: object) -> Callable[[], None]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            check(patch, *arguments)

    return run


def one_resume(engine: str) -> Callable[[], None]:
    def check(folder: Path) -> None:
        trained(sample(engine, KEPT, "train.steps=12"), folder / "whole")
        copy = killed_after(folder / "whole", 6, to=folder / "copy")
        resumed(copy)
        assert_same(outcome(copy), outcome(folder / "whole"))
        assert len(outcome(copy)["metrics"]) == 12 + 2

    return in_a_folder(check)


def damage_is_noticed(folder: Path) -> None:
    test_run.test_a_damaged_checkpoint_is_passed_over_with_a_note(
        "flipped bit", "state.safetensors", folder
    )


def another_spec_is_refused(folder: Path) -> None:
    test_run.test_a_checkpoint_of_another_spec_is_refused("train.lr=0.5", folder)


TOO_LARGE = "a gradient too large for its norm"
CHECKS: dict[str, Callable[[], None]] = {
    "weights": test_losses.weights_are_the_batchs_else_one_where_a_token_is,
    "hidden by weight 0": test_losses.what_a_zero_weight_hides_is_never_read,
    "plain sums": lambda: test_losses.losses_are_weighted_sums(0.0),
    "smoothed sums": lambda: test_losses.losses_are_weighted_sums(0.1),
    "pieces": with_patches(test_losses.pieces_are_the_whole, 0.0),
    "pieces computed again": with_patches(test_losses.pieces_are_the_whole, 0.0, "capped"),
    "accumulation, torch": lambda: test_accumulation.small_batches_are_a_large_one(
        "machine", "torch", "float64"
    ),
    "accumulation, numpy": lambda: test_accumulation.small_batches_are_a_large_one(
        "machine", "numpy", "float64"
    ),
    "penalty, torch": lambda: test_accumulation.the_penalty_counts_once("torch"),
    "penalty, numpy": lambda: test_accumulation.the_penalty_counts_once("numpy"),
    "not finite, torch": lambda: test_not_finite.nothing_is_changed("torch", "NaN in a weight"),
    "not finite, numpy": lambda: test_not_finite.nothing_is_changed("numpy", "NaN in a weight"),
    "gradient too large, torch": lambda: test_not_finite.nothing_is_changed("torch", TOO_LARGE),
    "decay": lambda: test_engines.decay_touches_what_the_manifest_says("torch"),
    "engines, AdamW": lambda: test_engines.engines_agree("AdamW with decay"),
    "engines, clipping": lambda: test_engines.engines_agree("clipping"),
    "engines, smoothing": lambda: test_engines.engines_agree("smoothing"),
    "dropout": lambda: test_engines.dropout_is_drawn_from_the_seed_alone("torch"),
    "step by number": test_fit.a_step_is_a_function_of_its_number,
    "chance by step": test_fit.every_step_has_chance_of_its_own,
    "epoch": test_fit.an_epoch_shows_every_example_once,
    "warmup": test_schedule.warmup_is_a_line_from_the_first_step,
    "cosine": test_schedule.cosine_ends_at_its_floor,
    "resume, torch": one_resume("torch"),
    "resume, numpy": one_resume("numpy"),
    "early stop": in_a_folder(test_resume.early_stop_is_remembered),
    "damage": in_a_folder(damage_is_noticed),
    "other spec": in_a_folder(another_spec_is_refused),
    "lock": in_a_folder(lambda folder: test_run.a_second_writer_is_refused(folder / "run")),
    "pruning": in_a_folder(test_run.pointers_and_pruning_keep_best_and_last),
    "bad steps": in_a_folder(test_run.counts_start_again_after_a_good_step),
    "spikes": in_a_folder(test_run.spikes_are_told),
    "evaluation": lambda: test_evaluate.evaluation_is_the_slow_one("machine"),
    "exact match": lambda: test_evaluate.evaluation_is_the_slow_one("copy"),
    "chunks": with_patches(test_evaluate.chunks_change_nothing),
    "rates": test_lr_find.the_rate_lies_where_the_loss_falls,
}
#: What a check says when it is red; anything else is a fault that is not one.
RED = (
    pytest.fail.Exception,
    AssertionError,
    GlassError,
    IndexError,
    KeyError,
    RuntimeError,
    ValueError,
)


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_passes_without_a_fault(name):
    CHECKS[name]()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises(RED):
        CHECKS[fault.caught_by]()


def test_there_are_enough_faults_with_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
    assert {fault.caught_by for fault in FAULTS} == set(CHECKS)
