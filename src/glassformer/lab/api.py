"""Training, fine-tuning, the learning-rate finder and evaluation, each as one call.

The commands of the same names call these functions, so that both do the same.

A training shows its progress: a bar where somebody watches, greppable lines on stderr elsewhere.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from glassformer.adapters.folder.paths import checkpoint_of
from glassformer.adapters.load import AnyModel, adapt, load_model, load_native
from glassformer.data.own_code import allow_own_code
from glassformer.data.task import Task
from glassformer.kernels.threads import check_threads, taking, threads_of_decoding
from glassformer.lab.bar import Bar, clock, is_watched
from glassformer.lab.measure import evaluate as evaluation
from glassformer.lab.measure.scores import decoded_scores
from glassformer.lab.next_steps import resume_command
from glassformer.lab.recipes import (
    FINETUNE,
    built_task,
    override_parts,
    own_task_overrides,
    planned_run,
    read_config,
    spelled_out,
    trains_on,
    usual_name,
)
from glassformer.lab.runs.artifacts import Sample, engine_stepper
from glassformer.lab.runs.assemble import (
    Parts,
    Peers,
    assemble,
    check_tokens,
    in_turn,
    read_checkpoint,
)
from glassformer.lab.runs.planned import PlannedRun, check_fit
from glassformer.lab.runs.process import recorded_threads, threads_of_run
from glassformer.lab.runs.record import check_data, load_run_spec, recorded_hash, spec_hash
from glassformer.lab.runs.run import Alert, Evaluated, Event, Saved, TrainingRun
from glassformer.models.model import model_of
from glassformer.spec.checks import named_options
from glassformer.spec.errors import InputError
from glassformer.spec.own import OwnTask
from glassformer.spec.serialize import override, to_dict
from glassformer.spec.tasks import Task as TaskSpec
from glassformer.spec.tasks import is_config
from glassformer.spec.train import SGD, LoRA, RunSpec, TrainSpec
from glassformer.spec.units import visible
from glassformer.store.checkpoint import is_quantized
from glassformer.store.rundir import RunDirectory, RunRef, cache_folder, run_folder
from glassformer.training.engine import Engine
from glassformer.training.fit import RateRange, StepRecord, find_rate
from glassformer.training.torch_engine import TorchEngine


@named_options
def train(
    what: str | Path | RunSpec,
    *,
    steps: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    runs: str | Path = "runs",
    overrides: Iterable[str] = (),
    device: str = "cpu",
    threads: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
) -> TrainingRun:
    """Train a recipe by name, a config file or a `RunSpec` to its end; return the finished run.

    `resume` continues a run that exists. Without `threads`, a batch decides how many are worth it.
    `progress` shows a bar (lines, where there is no terminal); without it, one is shown on a
    terminal and in a notebook.
    """
    given = list(overrides)
    given += [f"train.steps={steps}"] if steps is not None else []
    given += [f"train.seed={seed}"] if seed is not None else []
    run, count = open_run(
        what, given, name=name, runs=Path(runs), device=device, threads=threads, resume=resume
    )
    with run.directory.locked(), taking(count):
        begin(run, resume=resume, overwrite=overwrite)
        follow(run, progress=is_watched() if progress is None else progress)
    return run


def follow(run: TrainingRun, *, progress: bool = True) -> None:
    """Train a run that has begun to its end or to a stop, showing progress."""
    if not progress:
        for _ in run.events():
            pass
        return
    title, steps = run.directory.folder.name, run.spec.train.steps
    with Narrator(title, steps=steps, start=run.progress.step) as narrator:
        for event in run.events():
            narrator.see(event)


@named_options
def finetune(
    base: str | Path,
    data: str | Path,
    *,
    lora: int | LoRA | None = None,
    steps: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    runs: str | Path = "runs",
    overrides: Iterable[str] = (),
    device: str = "cpu",
    threads: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
) -> TrainingRun:
    """Fine-tune a model on a file of examples, all of its parameters or by LoRA of a rank.

    `base` is a run, a checkpoint or a Hugging Face folder; `data` lines of JSON, as for
    `glass train finetune base=MODEL data=FILE lora=8`. Without `steps`: three epochs.
    """
    given = [f"base={base}", f"data={data}"]
    if isinstance(lora, int):
        given.append(f"lora={lora}")
    elif lora is not None:
        given += [f"lora.{key}={json.dumps(value)}" for key, value in to_dict(lora).items()]
    return train(
        FINETUNE,
        steps=steps,
        seed=seed,
        name=name,
        runs=runs,
        overrides=[*given, *overrides],
        device=device,
        threads=threads,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
    )


@named_options
def lr_find(
    what: str | Path | RunSpec,
    *,
    overrides: Iterable[str] = (),
    device: str = "cpu",
    threads: int | None = None,
) -> RateRange:
    """Measure the loss at rising learning rates, on a model of its own; suggest a rate."""
    return rates_of(planned_run(what, list(overrides)), device=device, threads=threads)


def rates_of(plan: PlannedRun, *, device: str, threads: int | None) -> RateRange:
    """Measure the loss at rising learning rates for a run that is planned."""
    parts = assemble(plan, device=device)
    with taking(threads_of_run(plan.spec, parts.task, asked=threads, device=device)):
        return find_rate(parts.engine, parts.task, plan.spec.train)


# --- runs -----------------------------------------------------------------------------------------


def open_run(
    what: str | Path | RunSpec,
    overrides: list[str],
    *,
    name: str | None,
    runs: Path,
    device: str,
    threads: int | None,
    resume: bool,
    peers: Peers | None = None,
    plan: PlannedRun | None = None,
) -> tuple[TrainingRun, int]:
    """Return a run in its folder, not yet begun, and the number of threads that it takes.

    `plan`: what these settings mean, where it is known already.
    """
    if not isinstance(what, str | Path | RunSpec):
        raise InputError(
            f"{type(what).__name__} is neither a task's name, nor a config file, nor a RunSpec",
            hint='a task of your own is named by its file: gf.train("my_task.py:MyTask")',
        )
    usual = "run" if isinstance(what, RunSpec) else usual_name(str(what))
    folder = run_folder(runs, usual if name is None else name)
    if peers is None:  # of several processes, one may have the lock already
        RunDirectory(folder).check_free()
    exists = resume and (folder / "config.json").is_file()
    if exists:
        plan = PlannedRun(spec=resumed_spec(folder, what, overrides))
    elif plan is None:
        plan = in_turn(peers, lambda: planned_run(what, overrides, cache=cache_folder(runs)))
    spec = plan.spec
    check_threads(threads, engine=spec.engine)
    run = TrainingRun(plan, folder, device=device, peers=peers)
    if resume and threads is None and spec.engine != "numpy":
        threads = recorded_threads(folder)
    count = threads_of_run(spec, run.task, asked=threads, device=device)
    if peers is not None and threads is None:  # the processes of one machine share its cores
        count = min(count, max(1, (os.cpu_count() or 1) // peers.ranks.local_size))
    return run, count


def begin(run: TrainingRun, *, resume: bool, overwrite: bool) -> list[str]:
    """Write the files of a new run, or read back the state of one; return notes for people."""
    if run.agreed(resume and (run.directory.folder / "config.json").is_file()):
        return run.resume()
    run.prepare(overwrite=overwrite)
    return ["there is no such run yet: starting at step 0"] if resume else []


def resumed_spec(folder: Path, what: str | Path | RunSpec, overrides: list[str]) -> RunSpec:
    """Return the spec that the run has; only its number of steps may change when it goes on.

    What the run was begun with is it; so is a config with all of its settings, such as its own.
    """
    spec = load_run_spec(RunDirectory(folder))
    if isinstance(what, RunSpec) or is_config(what):
        begun = what if isinstance(what, RunSpec) else read_config(Path(what))
        given = [begun, override_parts(begun, overrides)]
        given += [replace(each, engine=spec.engine) for each in given if each.engine == "auto"]
        same = any(spec_hash(each) == spec_hash(spec) for each in given)
    else:
        same = trains_on(str(what), spec.task)
        overrides = spelled_out(overrides) if what == FINETUNE else overrides
        if same and isinstance(spec.task, OwnTask):
            allow_own_code(spec.task.source)  # the source as it was typed
            overrides = own_task_overrides(overrides)
    if not same:
        title = "this spec" if isinstance(what, RunSpec) else what
        raise InputError(
            f"the run {folder.name} is not one of {title}",
            hint=f"{{{resume_command(folder)}|its own task or config}} resumes it; another "
            "{--name|name} starts a run of its own",
        )
    # What `auto` chose when the run began is what it goes on with.
    free = ("train.steps=", "engine=auto")
    other = [text for text in overrides if not text.startswith(free)]
    if override_parts(spec, other) != spec:
        changes = [text for text in other if override_parts(spec, [text]) != spec]
        raise InputError(
            f"a resumed run keeps its spec, and {', '.join(changes)} changes it",
            hint="leave it out, or start a run of another {--name|name}",
        )
    return override(spec, [text for text in overrides if text.startswith("train.steps=")])


# --- evaluation -----------------------------------------------------------------------------------


@named_options
def evaluate(
    model: str | Path | TrainingRun | AnyModel,
    task: "Task | TaskSpec | str | None" = None,
    *,
    split: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    write: bool = False,
) -> "evaluation.Evaluation":
    """Measure a model on one split of a task: a run (`RUN`, `RUN@last`, `RUN@120`) on its own.

    `task`: a task, its spec, the name of a recipe, or `file.py:Name` of one's own; needed for
    anything but a run. An encoder-decoder also decodes each source on its own, token after token.
    `write` leaves the results in the run's `eval/` folder, as `glass evaluate` does. A model stays
    on its device.
    """
    model = model.path if isinstance(model, TrainingRun) else model
    if task is None and isinstance(model, str | Path):
        engine, built = opened(model, device=device or "cpu")
        spec = load_run_spec(RunRef.parse(model).directory)
        count = threads_of_run(spec, built, asked=threads, device=device or "cpu")
    else:
        if write:
            raise InputError("only a run has a folder for results", hint="leave out `write`")
        engine, built = engine_for(model, task, device=device)
        count = threads_of_decoding(engine.spec, asked=threads, device=str(engine.device))
    with taking(count):
        result = evaluation.evaluate(engine, built, split=split)
        if engine.spec.encoder is not None:
            own = decoded_scores(engine_stepper(engine), built, split=result.split)
            result = replace(result, decoded=own)
    if write:
        result.write(RunRef.parse(str(model)).directory)
    return result


def engine_for(
    model: str | Path | AnyModel,
    task: "Task | TaskSpec | str | None",
    *,
    device: str | None,
) -> tuple[TorchEngine, Task]:
    """Return an engine around a model in eval mode, and the task, checked to fit each other."""
    if task is None:
        raise InputError(
            "a model is measured on a task", hint='evaluate(model, "digits"), or give a run'
        )
    built = built_task(task)
    adapter = load_native(model) if isinstance(model, str | Path) else adapt(model)
    bare = model_of(adapter)
    check_fit(bare.spec, built)
    check_tokens(built, adapter.get_tokenizer(), where=str(model) if isinstance(model, str) else "")
    bare = bare.eval() if device is None else bare.eval().to(device)
    return TorchEngine(bare, TrainSpec(optimizer=SGD())), built


def opened(run: str | Path, *, device: str = "cpu") -> tuple[Engine, Task]:
    """Return an engine with the checkpoint of a run, and the task it was trained on."""
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
    """Return the cache beside a run, if it exists; evaluation creates none."""
    cache = cache_folder(RunRef.parse(path).folder.parent)
    return cache if cache.is_dir() else None


def _check_tokens(parts: Parts, folder: Path) -> None:
    """Refuse a task whose tokenizer is no longer the one that the model was trained with."""
    file = folder / "tokenizer.json"
    ours = parts.files.get(file.name)
    if ours is not None and file.is_file() and file.read_bytes() != ours:
        raise InputError(
            "the task's tokens are not those that the model was trained on: its data has changed",
            where=str(folder),
            hint="bring the data back, or the Python version whose manuals they are",
        )


def result_of(run: TrainingRun) -> dict[str, Any]:
    """Return the results of a run as a few numbers."""
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


#: The step after which the first line tells how long it will take.
EARLY = 10


class Narrator:
    """The progress of a training: one live line on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str, *, steps: int, start: int) -> None:
        self.steps, self.start = steps, start
        self.bar = Bar(title, total=steps, done=start)
        self.began = time.perf_counter()
        self.tokens = 0
        self.loss = self.val = float("nan")
        self.rate = 0.0
        self.samples: tuple[Sample, ...] = ()

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bar.__exit__(*raised)
        for sample in self.samples:
            self.bar.tell(f"--- {sample.opening.strip()!r} goes on:\n{visible(sample.text)}")

    def see(self, event: Event) -> None:
        """Record an event, and print it when it is time."""
        match event:
            case StepRecord():
                self.tokens += event.tokens
                self.loss, self.rate = event.first_loss, event.lr
                self._tell(event.step, now=False)
            case Evaluated():
                self.val = event.evaluation.loss
                self.samples = event.samples
                self._tell(event.step, now=True)
            case Alert():
                self.bar.tell(f"alert at step {event.step}: {event.kind}: {event.message}")
            case Saved():
                pass

    def _tell(self, step: int, *, now: bool) -> None:
        passed = max(1e-9, time.perf_counter() - self.began)
        left = passed / max(1, step - self.start) * (self.steps - step)
        speed = self.tokens / passed
        if self.bar.live:
            val = "" if self.val != self.val else f"  val {self.val:.4f}"
            facts = f"{step:,}/{self.steps:,}  loss {self.loss:.4f}{val}  {speed:,.0f} tokens/s"
            self.bar.show(step, f"{facts}  {clock(left)} left")
        elif self.bar.is_due(now=now or step == self.start + EARLY):
            val = "" if self.val != self.val else f"val={self.val:.4f} "
            self.bar.tell(
                f"step={step}/{self.steps} loss={self.loss:.4f} {val}"
                f"lr={self.rate:.2e} tokens/s={speed:,.0f} left={left:.0f}s"
            )
