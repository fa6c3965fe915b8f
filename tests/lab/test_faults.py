"""Tests are tested: one planted mistake in training or runs, and the named check turns red."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glassformer.spec.errors import GlassError
from tests.lab import test_curves, test_evaluate, test_run
from tests.lab.conftest import MEMORY
from tests.lab.runs import KEPT, assert_same, killed_after, outcome, resumed, sample, trained
from tests.planting import Binary, Call, Constant, Fault, Name, mutate, planted
from tests.spec import test_train
from tests.training import (
    test_accumulation,
    test_engine,
    test_fit,
    test_losses,
)


def in_a_folder(check: Callable[[Path], None]) -> Callable[[], None]:
    def run() -> None:
        with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
            check(Path(name))

    return run


def one_resume(folder: Path) -> None:
    trained(sample("torch", KEPT, "train.steps=12"), folder / "whole")
    copy = killed_after(folder / "whole", 6, to=folder / "copy")
    resumed(copy)
    assert_same(outcome(copy), outcome(folder / "whole"))
    assert len(outcome(copy)["metrics"]) == 12 + 2


def damage_is_noticed(folder: Path) -> None:
    test_run.test_a_damaged_checkpoint_is_passed_over_with_a_note(
        "flipped bit", "state.safetensors", folder
    )


CHECKS: dict[str, Callable[[], None]] = {
    "weights": test_losses.weights_are_the_batchs_else_one_where_a_token_is,
    "accumulation, torch": lambda: test_accumulation.small_batches_are_a_large_one(
        "machine", "torch", "float64"
    ),
    "decay": lambda: test_engine.decay_touches_what_the_manifest_says("torch"),
    "step by number": test_fit.a_step_is_a_function_of_its_number,
    "warmup": test_train.warmup_is_a_line_from_the_first_step,
    "resume, torch": in_a_folder(one_resume),
    "damage": in_a_folder(damage_is_noticed),
    "pruning": in_a_folder(test_run.pointers_and_pruning_keep_best_and_last),
    "torn": in_a_folder(test_curves.test_a_torn_last_line_waits_for_the_next_reading),
    "not finite": in_a_folder(test_curves.test_what_is_not_finite_is_read_as_such),
    "evaluation": lambda: test_evaluate.evaluation_is_the_slow_one("machine"),
}

FAULTS = (
    Fault("PAD in the loss", mutate("training.engine:loss_weights", Call("astype"), to="np.ones(target.shape, dtype={args[0]})"), "weights"),
    Fault("mean of means", mutate("training.torch_engine:TorchEngine._loss", Binary("+"), part="right", to="{left} / float(loss_weights(batch, head).sum()) / 4"), "accumulation, torch"),
    Fault("decay on biases", mutate("training.torch_engine:_adamw", Constant(0.0), to="adam.weight_decay"), "decay"),
    Fault("sampler restarted on resume", mutate("training.fit:fit", Name("step"), to="{it} - start"), "step by number"),
    Fault("warmup starts at 0", mutate("spec.train:_warm", Binary("+"), to="{left}"), "warmup"),
    Fault("optimizer state dropped on load", mutate("lab.runs.run:TrainingRun.resume", Binary("/"), drop=True), "resume, torch"),
    Fault("a damaged checkpoint is used", mutate("store.rundir:RunDirectory.newest_whole", Name("step"), drop=True), "damage"),
    Fault("the best one is pruned", mutate("store.rundir:RunDirectory.prune", Call("pointed"), to="None"), "pruning"),
    Fault("PAD counted in accuracy", mutate("lab.measure.evaluate:_Tally.add", Binary("*", nth=1), to="{left}"), "evaluation"),
    Fault("a torn line is read", mutate("lab.runs.curves:read_curves", Binary("+"), to="len(data)"), "torn"),
    Fault("NaN becomes 0", mutate("lab.runs.metrics_file:_number", Call("get"), to="0.0"), "not finite"),
)  # fmt: skip
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
