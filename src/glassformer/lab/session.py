"""Training and evaluation as one call each, for Python and for the sources' own faces."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from glassformer.adapters.load import checkpoint_of
from glassformer.data.build import build_task
from glassformer.lab import evaluate as evaluation
from glassformer.lab.recipes import recipe
from glassformer.lab.record import load_run_spec
from glassformer.lab.run import TrainingRun, build_engine
from glassformer.spec.train import RunSpec
from glassformer.spec.tree import override
from glassformer.store.checkpoint import load_checkpoint
from glassformer.store.rundir import RunDirectory, run_folder


def train(
    what: str | RunSpec,
    *,
    steps: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    runs: str | Path = "runs",
    overrides: Iterable[str] = (),
    device: str = "cpu",
    overwrite: bool = False,
) -> TrainingRun:
    """Train a task by name, or a whole `RunSpec`, to its end, and give back the finished run."""
    given = list(overrides)
    given += [f"train.steps={steps}"] if steps is not None else []
    given += [f"train.seed={seed}"] if seed is not None else []
    spec = recipe(what, given) if isinstance(what, str) else override(what, given)
    folder = run_folder(Path(runs), name or (what if isinstance(what, str) else "run"))
    run = TrainingRun(spec, folder, device=device)
    with run.directory.locked():
        run.prepare(overwrite=overwrite)
        for _ in run.events():
            pass
    return run


def evaluate(
    run: str | Path, *, split: str | None = None, device: str = "cpu"
) -> "evaluation.Evaluation":
    """Measure the checkpoint of a run (`RUN`, `RUN@last`, `RUN@120`) on one split."""
    path = str(run)
    spec = load_run_spec(RunDirectory(Path(path.partition("@")[0])))
    _, weights = load_checkpoint(checkpoint_of(path))
    engine = build_engine(spec, device=device)
    engine.load_weights(weights)
    return evaluation.evaluate(engine, build_task(spec.task), split=split)


def result_of(run: TrainingRun) -> dict[str, Any]:
    """The outcome of a run in a few numbers."""
    progress = run.progress
    val = progress.val or {}
    return {
        "run": run.directory.folder.name,
        "steps": progress.step,
        "loss": progress.recent[-1] if progress.recent else None,
        "val_loss": val.get("loss"),
        "val_accuracy": val.get("accuracy"),
    }
