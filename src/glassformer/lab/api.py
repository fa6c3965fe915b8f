"""Training and evaluation as one call each, for Python and for the sources' own faces."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.load import checkpoint_of, load_model
from glassformer.data.build_task import build_task
from glassformer.data.task import Task
from glassformer.kernels.threads import taking
from glassformer.lab.measure import evaluate as evaluation
from glassformer.lab.measure.exact_match import decoded_scores
from glassformer.lab.recipes import named_task, plan_run, usual_name
from glassformer.lab.runs.assemble import Parts, PlannedRun, assemble, check_fit, read_checkpoint
from glassformer.lab.runs.provenance import check_data, recorded_hash
from glassformer.lab.runs.record import load_run_spec
from glassformer.lab.runs.run import TrainingRun
from glassformer.lab.runs.samples import engine_stepper
from glassformer.lab.runs.threads import threads_of_decoding, threads_of_run
from glassformer.models.model import Model, model_of
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import override
from glassformer.spec.tasks import Task as TaskSpec
from glassformer.spec.train import SGD, RunSpec, TrainSpec
from glassformer.store.quantized import is_quantized
from glassformer.store.run_ref import RunRef
from glassformer.store.rundir import RunDirectory, cache_folder, run_folder
from glassformer.training.engine import Engine
from glassformer.training.torch_engine import TorchEngine


def train(
    what: str | RunSpec,
    *,
    steps: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    runs: str | Path = "runs",
    overrides: Iterable[str] = (),
    device: str = "cpu",
    threads: int | None = None,
    overwrite: bool = False,
) -> TrainingRun:
    """Train a task by name, or a whole `RunSpec`, to its end, and give back the finished run.

    Without `threads` as many are taken as a batch is worth.
    """
    given = list(overrides)
    given += [f"train.steps={steps}"] if steps is not None else []
    given += [f"train.seed={seed}"] if seed is not None else []
    cache = cache_folder(Path(runs))
    if isinstance(what, str):
        plan = plan_run(what, given, cache=cache)
    else:
        plan = PlannedRun(spec=override(what, given))
    usual = usual_name(what) if isinstance(what, str) else "run"
    folder = run_folder(Path(runs), usual if name is None else name)
    run = TrainingRun(plan, folder, device=device)
    count = threads_of_run(run.spec, run.task, asked=threads, device=device)
    with run.directory.locked(), taking(count):
        run.prepare(overwrite=overwrite)
        for _ in run.events():
            pass
    return run


def evaluate(
    model: str | Path | BaseAdapter | Model,
    task: "Task | TaskSpec | str | None" = None,
    *,
    split: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    write: bool = False,
) -> "evaluation.Evaluation":
    """Measure a model on one split of a task: a run (`RUN`, `RUN@last`, `RUN@120`) on its own.

    `task`: a task, its spec, or the name of a recipe; needed for anything but a run. An
    encoder-decoder also decodes each source on its own, token after token. `write` leaves the
    results in the run's `eval/` folder, as `glass evaluate` does. A model stays on its device.
    """
    if task is None and isinstance(model, str | Path):
        engine, built = opened(model, device=device or "cpu")
        spec = load_run_spec(RunRef.parse(model).directory)
        count = threads_of_run(spec, built, asked=threads, device=device or "cpu")
    else:
        if write:
            raise InputError("only a run has a folder for results", hint="leave out `write`")
        engine, built = _engine_for(model, task, device=device)
        count = threads_of_decoding(engine.spec, asked=threads, device=str(engine.device))
    with taking(count):
        result = evaluation.evaluate(engine, built, split=split)
        if engine.spec.encoder is not None:
            own = decoded_scores(engine_stepper(engine), built, split=result.split)
            result = replace(result, decoded=own)
    if write:
        result.write(RunRef.parse(str(model)).directory)
    return result


def _engine_for(
    model: str | Path | BaseAdapter | Model,
    task: "Task | TaskSpec | str | None",
    *,
    device: str | None,
) -> tuple[TorchEngine, Task]:
    """Return an engine around a model in eval mode, and the task, checked to fit each other."""
    if task is None:
        raise InputError(
            "a model is measured on a task", hint='evaluate(model, "digits"), or give a run'
        )
    if isinstance(task, str):
        task = named_task(task)
    built = build_task(task) if isinstance(task, get_args(TaskSpec)) else task
    bare = load_model(model) if isinstance(model, str | Path) else model_of(model)
    if not isinstance(bare, Model):
        raise InputError(
            f"{type(bare).__name__} is not one of our models", hint='load it with backend="native"'
        )
    check_fit(bare.spec, built)
    bare = bare.eval() if device is None else bare.eval().to(device)
    return TorchEngine(bare, TrainSpec(optimizer=SGD())), built


def opened(run: str | Path, *, device: str = "cpu") -> tuple[Engine, Task]:
    """The checkpoint of a run, ready to be measured, and the task it was trained on."""
    path = str(run)
    folder = RunRef.parse(path).folder
    spec = load_run_spec(RunDirectory(folder))
    recorded = recorded_hash(folder, spec.task)
    parts = assemble(spec, device=device, cache=_known_cache(path))
    check_data(parts.task, recorded)
    _check_tokens(parts, checkpoint_of(path))
    if is_quantized(checkpoint_of(path)):
        engine = TorchEngine(load_model(path).to(device), replace(spec.train, optimizer=SGD()))
        return engine, parts.task
    parts.engine.load_weights(read_checkpoint(checkpoint_of(path), spec))
    return parts.engine, parts.task


def _known_cache(path: str) -> Path | None:
    """The cache beside a run, if there is one: measuring makes none."""
    cache = cache_folder(RunRef.parse(path).folder.parent)
    return cache if cache.is_dir() else None


def _check_tokens(parts: Parts, folder: Path) -> None:
    """A text that has changed since gives other tokens, which would mean nothing to the model."""
    file = folder / "tokenizer.json"
    ours = parts.files.get(file.name)
    if ours is not None and file.is_file() and file.read_bytes() != ours:
        raise InputError(
            "the task's tokens are not those that the model was trained on: its data has changed",
            where=str(folder),
            hint="bring the data back, or the Python version whose manuals they are",
        )


def result_of(run: TrainingRun) -> dict[str, Any]:
    """The outcome of a run in a few numbers."""
    progress = run.progress
    val = progress.val or {}
    bits = val.get("oracle", {}).get("bits_per_byte")
    return {
        "run": run.directory.folder.name,
        "steps": progress.step,
        "loss": progress.loss,
        "val_loss": val.get("loss"),
        "val_accuracy": val.get("accuracy"),
        **({"bits_per_byte": bits} if bits is not None else {}),
    }
