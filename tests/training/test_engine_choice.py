"""`engine=auto` settles on the native engine where nothing is lacking, and what is, is named."""

from pathlib import Path

import pytest

from glassformer.lab.runs.run import TrainingRun
from glassformer.spec.errors import InputError
from glassformer.spec.train import RunSpec
from glassformer.training.engine_choice import native_lacks, settled
from tests.training.samples import RUNS, digits

LACKING = {
    "train.precision=float64": "the native engine has no train.precision=float64",
    "train.precision=bf16": "the native engine has no train.precision=bf16",
    "train.compile=on": "the native engine has no train.compile=on",
    "train.gradient_checkpointing=true": (
        "the native engine has no train.gradient_checkpointing=True"
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_cpu_in_float32_is_native(name: str) -> None:
    run = RUNS[name]("engine=auto")
    assert native_lacks(run) == ""
    assert settled(run).engine == "native"
    assert settled(run, device="cuda").engine == settled(run, processes=2).engine == "torch"


@pytest.mark.parametrize("engine", ["torch", "numpy", "native"])
def test_an_engine_that_is_named_is_kept(engine: str) -> None:
    run = digits(f"engine={engine}")
    assert settled(run, device="cpu") is run


@pytest.mark.parametrize("change", LACKING)
def test_what_is_lacking_is_named(change: str, tmp_path: Path) -> None:
    run: RunSpec = digits("engine=auto", change)
    assert native_lacks(run) == LACKING[change]
    assert settled(run).engine == "torch"
    with pytest.raises(InputError, match=LACKING[change]):
        digits("engine=native", change)
    if "compile" not in change:  # which would compile here
        made = TrainingRun(run, tmp_path / "run")
        assert made.spec.engine == "torch"
        assert f"trained by torch: {LACKING[change]}" in made.notes
