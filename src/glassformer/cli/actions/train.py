"""What `glass train` does: begin or resume a run, watch the signals, tell what happens."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from glassformer.cli.shell.process import check_device, keep_freed_memory
from glassformer.cli.shell.progress import Narrator, tell
from glassformer.cli.shell.resolve import find_model
from glassformer.kernels.threads import taking
from glassformer.lab import api
from glassformer.lab.finetune.recipe import NAME as FINETUNE
from glassformer.lab.finetune.recipe import spelled_out
from glassformer.lab.own_parts import override_parts, own_task_overrides
from glassformer.lab.recipes import plan_run, read_config, trains_on, usual_name
from glassformer.lab.runs.assemble import PlannedRun
from glassformer.lab.runs.record import load_run_spec, spec_hash
from glassformer.lab.runs.run import TrainingRun
from glassformer.lab.runs.threads import check_threads, recorded_threads, threads_of_run
from glassformer.spec.errors import InputError
from glassformer.spec.own import OwnTask
from glassformer.spec.own_code import allow_own_code
from glassformer.spec.serialize import override
from glassformer.spec.train import RunSpec
from glassformer.store.rundir import RunDirectory, cache_folder, plain_numbers, run_folder


def planned_run(what: str, overrides: list[str], *, cache: Path | None = None) -> PlannedRun:
    """A recipe by name, or a TOML file, with overrides."""
    if what.endswith((".toml", ".json")):
        return PlannedRun(spec=read_config(Path(what), overrides))
    return plan_run(what, overrides, cache=cache)


def found_base(overrides: list[str], runs: Path) -> list[str]:
    """`base=NAME` means what MODEL means in every other command."""
    made = []
    for text in overrides:
        key, _, value = text.partition("=")
        made.append(f"base={find_model(value, runs=runs)}" if key == "base" and value else text)
    return made


def train(
    what: str,
    overrides: list[str],
    *,
    name: str | None,
    runs: Path,
    device: str,
    threads: int | None,
    resume: bool,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Train, watch the signals, print the result; the exit code."""
    check_device(device)
    keep_freed_memory()
    overrides = found_base(overrides, runs) if what == FINETUNE else overrides
    if resume and overwrite:
        raise InputError(
            "--resume goes on with the run, --overwrite starts it anew",
            hint="leave out one of the two",
        )
    folder = run_folder(runs, usual_name(what) if name is None else name)
    if resume and (folder / "config.json").is_file():
        plan = PlannedRun(spec=resumed_spec(folder, what, overrides))
    else:
        plan = planned_run(what, overrides, cache=cache_folder(runs))
    spec = plan.spec
    check_threads(threads, engine=spec.engine)
    run = TrainingRun(plan, folder, device=device)
    if resume and threads is None and spec.engine == "torch":
        threads = recorded_threads(folder)
    threads = threads_of_run(spec, run.task, asked=threads, device=device)
    for note in run.notes:
        tell(note)
    began, code = time.perf_counter(), 0
    with run.directory.locked(), stopping(run) as caught, taking(threads):
        if resume and (folder / "config.json").is_file():
            for note in run.resume():
                tell(note)
        else:
            if resume:
                tell("there is no such run yet: starting at step 0")
            run.prepare(overwrite=overwrite)
        follow(run)
    if run.stopped:
        tell(f"stopped at step {run.progress.step}, state saved; go on with --resume")
        code = 128 + (caught[0] if caught else signal.SIGINT)
    result = api.result_of(run)
    result["seconds"] = round(time.perf_counter() - began, 2)
    show_result(result, as_json=as_json)
    return code


def follow(run: TrainingRun) -> None:
    """Train to the end or to a stop, telling how it goes."""
    title, steps = run.directory.folder.name, run.spec.train.steps
    with Narrator(title, steps=steps, start=run.progress.step) as narrator:
        for event in run.events():
            narrator.see(event)


def resumed_spec(folder: Path, what: str, overrides: list[str]) -> RunSpec:
    """The spec that the run has; only the number of steps may be changed when it goes on."""
    spec = load_run_spec(RunDirectory(folder))
    if what.endswith((".toml", ".json")):
        same = spec_hash(read_config(Path(what))) == spec_hash(spec)
    else:
        same = trains_on(what, spec.task)
        overrides = spelled_out(overrides) if what == FINETUNE else overrides
        if same and isinstance(spec.task, OwnTask):
            allow_own_code(spec.task.source)  # the source as it was typed
            overrides = own_task_overrides(overrides)
    if not same:
        raise InputError(
            f"the run {folder.name} is not one of {what}",
            hint="resume it by its own task or config, or start a run of another --name",
        )
    other = [text for text in overrides if not text.startswith("train.steps=")]
    if override_parts(spec, other) != spec:
        changes = [text for text in other if override_parts(spec, [text]) != spec]
        raise InputError(
            f"a resumed run keeps its spec, and {', '.join(changes)} changes it",
            hint="leave it out, or start a run of another --name",
        )
    return override(spec, [text for text in overrides if text.startswith("train.steps=")])


@contextlib.contextmanager
def stopping(run: TrainingRun) -> Iterator[list[int]]:
    """The first signal asks for a stop after the step; the second one ends at once."""
    caught: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        run.stop_requested = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_result(result: Mapping[str, Any], *, as_json: bool) -> None:
    """The last line: what was trained, and how well."""
    if as_json:
        print(json.dumps(plain_numbers(result), allow_nan=False))
    else:
        print(" ".join(f"{key}={value}" for key, value in result.items() if value is not None))
