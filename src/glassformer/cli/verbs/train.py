"""`glass train`, `resume`, `finetune`: start or resume a run, stop at a signal, print the result.

`glass lr-find`: the range test of a learning rate, its curve and the command that follows.
"""

import json
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassformer.cli.shell.options import (
    AnyModel,
    AsJson,
    Device,
    Fsdp,
    Nproc,
    Overrides,
    RunName,
    Runs,
    Threads,
    Trainable,
    out_file,
)
from glassformer.cli.shell.process import (
    check_device,
    ending_at_once,
    is_a_rank,
    join,
    keep_freed_memory,
    launch,
    reporting,
    was_restarted,
)
from glassformer.cli.shell.resolve import find_data, find_model, find_run
from glassformer.cli.shell.terminal import (
    columns,
    end,
    ending_of,
    is_unicode,
    target_of,
    tell,
    write_file,
)
from glassformer.kernels.threads import check_threads, one_blas_thread, taking
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError
from glassformer.spec.options import option, settings_text
from glassformer.spec.serialize import json_numbers
from glassformer.spec.tasks import check_task_name
from glassformer.spec.train import TrainSpec, check_settings

if TYPE_CHECKING:
    from glassformer.lab.runs.assemble import Peers
    from glassformer.lab.runs.planned import PlannedRun
    from glassformer.training.fit import RateRange


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where a run trains, in how many processes, and what is printed."""

    device: Device = "cpu"
    threads: Threads = None
    nproc: Nproc = None
    fsdp: Fsdp = False
    runs: Runs = "runs"
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """How a run begins: its name, two settings in short, anew or not."""

    name: str | None = option(None, help="Name of the run; by default the task's.")
    steps: int | None = option(None, help="Short for train.steps=N.")
    seed: int | None = option(None, help="Short for train.seed=N.")
    resume: bool = option(False, help="Go on with a run that was stopped.")
    overwrite: bool = option(False, help="Delete the run of this name and start anew.")

    def overrides(self) -> list[str]:
        """Return the settings that these options are short for."""
        short = {"train.steps": self.steps, "train.seed": self.seed}
        return [f"{key}={value}" for key, value in short.items() if value is not None]


def _list_settings(wanted: bool) -> None:
    """Print the settings of training, with defaults and limits, and end."""
    if wanted:
        typer.echo(settings_text(TrainSpec, prefix="train."))
        raise typer.Exit()


def train(
    what: Trainable,
    overrides: Overrides = None,
    *,
    beginning: Beginning,
    engine: str | None = option(
        None, help="auto (native on a CPU where it can), torch, native or numpy."
    ),
    machine: Machine,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings", is_eager=True, callback=_list_settings, help="List every train.KEY."
        ),
    ] = False,
) -> None:
    """Train a model on a task, or repeat a run from its config.

    It can be killed at any moment; --resume goes on, to the same bits on the same machine with the
    same torch, number of threads and engine. Examples:

      glass train reverse

      glass train digits --engine numpy --name by-hand train.steps=500

      glass train runs/reverse/config.toml --name again

      glass train digits --nproc 2
    """
    check_task(what, Path(machine.runs))  # before torch is imported
    check_settings(overrides or ())
    given = [*(overrides or ()), *beginning.overrides()]
    given += [f"engine={engine}"] if engine is not None else []
    _start(what, given, beginning, machine)


def resume(
    run: RunName,
    steps: int | None = option(None, help="Train up to this step, where the run had fewer."),
    *,
    machine: Machine,
) -> None:
    """Go on with a run that was stopped or killed.

    Its settings are its own; only the number of steps may be another. Examples:

      glass resume reverse

      glass resume reverse --steps 5000
    """
    folder = Path(find_run(run, Path(machine.runs)))
    if steps is not None:
        at_least("--steps", steps)
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(
            f"{run} is no run that can be resumed: it has no config.json",
            where=str(folder),
            hint="glass list shows the runs",
        )
    beginning = Beginning(name=folder.name, steps=steps, resume=True)
    there = replace(machine, runs=str(folder.parent))
    _start(str(config), beginning.overrides(), beginning, there)


def check_task(what: str, runs: Path) -> None:
    """Refuse what names no task; of a run, print what goes on with it."""
    try:
        check_task_name(what)
    except InputError as error:
        if not (runs / what / "config.json").is_file():
            raise
        raise InputError(
            f"'{what}' is a run, not a task",
            hint=f"glass resume {what} goes on with it; "
            f"glass train {runs / what / 'config.toml'} --name NEW repeats it",
        ) from error


def finetune(
    model: AnyModel,
    data: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="JSON lines of messages, prompt and completion, or text."
        ),
    ],
    overrides: Overrides = None,
    lora: int | None = option(
        None, metavar="RANK", help="Train LoRA of this rank, not all weights."
    ),
    *,
    beginning: Beginning,
    machine: Machine,
) -> None:
    """Go on training a model on your own examples.

    All weights train, or with --lora a correction of low rank; three epochs, unless --steps says
    otherwise. The result is a run. Examples:

      glass finetune Qwen/Qwen3-0.6B chats.jsonl --lora 8 --name helper

      glass finetune runs/lm notes.txt --steps 200 train.lr=1e-4
    """
    base = find_model(model, runs=Path(machine.runs))
    given = [f"base={base}", f"data={find_data(data)}", *(overrides or [])]
    given += [f"lora={lora}"] if lora is not None else []
    _start("finetune", [*given, *beginning.overrides()], beginning, machine)


def found_base(overrides: list[str], runs: Path) -> list[str]:
    """Resolve `base=NAME` as MODEL is resolved in every other command."""
    made = []
    for text in overrides:
        key, _, value = text.partition("=")
        made.append(f"base={find_model(value, runs=runs)}" if key == "base" and value else text)
    return made


def _start(what: str, overrides: list[str], beginning: Beginning, machine: Machine) -> None:
    """Train, handle signals, print the result; exit unless it trained to its end."""
    one_blas_thread()
    if machine.nproc is not None:
        raise typer.Exit(launch(machine.nproc))
    if code := run_training(what, overrides, beginning, machine):
        raise typer.Exit(code)


def run_training(what: str, overrides: list[str], beginning: Beginning, machine: Machine) -> int:
    """Train in this process, alone or as one of several; return the exit code."""
    from glassformer.lab.recipes import FINETUNE

    machine = replace(machine, device=check_device(machine.device))
    keep_freed_memory()
    if beginning.resume and beginning.overwrite:
        raise InputError(
            "--resume goes on with the run, --overwrite starts it anew",
            hint="leave out one of the two",
        )
    if what == FINETUNE:
        overrides = found_base(overrides, Path(machine.runs))
    if not is_a_rank():
        if machine.fsdp:
            raise InputError("--fsdp shards over several processes", hint="--nproc N, or torchrun")
        return _train(what, overrides, beginning, machine)
    from glassformer.lab.runs.assemble import Peers

    if was_restarted():
        beginning = replace(beginning, resume=True, overwrite=False)
    ranks = join(machine.device)
    with reporting(ranks):
        code = _train(what, overrides, beginning, machine, peers=Peers(ranks, sharded=machine.fsdp))
        ranks.leave()
    return code


def _planned(
    what: str, overrides: list[str], beginning: Beginning, machine: Machine
) -> "PlannedRun | None":
    """Plan a new run, and refuse what cannot be, before torch is imported.

    None for a run that goes on: its plan is its own.
    """
    from glassformer.lab.recipes import planned_run, usual_name
    from glassformer.lab.runs.planned import check_fit
    from glassformer.store.rundir import RunDirectory, cache_folder, run_folder

    runs, threads = Path(machine.runs), machine.threads
    name = usual_name(what) if beginning.name is None else beginning.name
    directory = RunDirectory(run_folder(runs, name))
    directory.check_free()
    check_threads(threads)
    if beginning.resume and (directory.folder / "config.json").is_file():
        return None
    if not (beginning.resume or beginning.overwrite):
        directory.check_new()
    plan = planned_run(what, overrides, cache=cache_folder(runs))
    check_threads(threads, engine=plan.spec.engine)
    if plan.task is not None:
        check_fit(plan.spec.model, plan.task, has_base=plan.base is not None)
    return plan


def _train(
    what: str,
    overrides: list[str],
    beginning: Beginning,
    machine: Machine,
    *,
    peers: "Peers | None" = None,
) -> int:
    with ending_at_once():
        plan = None
        if peers is None:  # of several processes one builds the data for all
            plan = _planned(what, overrides, beginning, machine)
        from glassformer.lab import api
        from glassformer.lab.next_steps import after_training, before_training, trained_text
        from glassformer.lab.runs.process import stopping

        run, count = api.open_run(
            what,
            overrides,
            name=beginning.name,
            runs=Path(machine.runs),
            device=machine.device,
            threads=machine.threads,
            resume=beginning.resume,
            peers=peers,
            plan=plan,
        )
    reports = run.directory.writes  # one of several processes
    for note in run.notes if reports else ():
        tell(note)
    began, code = time.perf_counter(), 0
    with run.directory.locked(), stopping(run.request_stop) as caught, taking(count):
        notes = api.begin(run, resume=beginning.resume, overwrite=beginning.overwrite)
        if reports:
            for line in [*notes, *before_training(run, threads=count)]:
                tell(line)
        began = time.perf_counter()
        api.follow(run, progress=reports)
    if run.stopped:
        code = 128 + (caught[0] if caught else signal.SIGINT)
    if not reports:
        return code
    if run.stopped:
        tell(f"stopped at step {run.progress.step}, state saved; go on with --resume")
    result = api.result_of(run)
    result["seconds"] = round(time.perf_counter() - began, 2)
    if machine.as_json:
        print(json.dumps(json_numbers(result), allow_nan=False))
    else:
        print(trained_text(run, result), flush=True)
        end("", after_training(run))
    return code


# --- glass lr-find --------------------------------------------------------------------------------


ENDINGS = ("png", "svg", "pdf", "csv")


def lr_find(
    what: Trainable,
    overrides: Overrides = None,
    out: Annotated[
        str | None,
        out_file("Write the curve, as .png, .svg, .pdf or .csv."),
    ] = None,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Find a learning rate: a curve, a stable range, a command.

    Examples:

      glass lr-find reverse

      glass lr-find digits train.batch_size=128 -o rates.png
    """
    check_task_name(what)  # before torch is imported
    check_settings(overrides or ())
    one_blas_thread()
    from glassformer.lab.recipes import planned_run

    target, given = target_of(out, ENDINGS), list(overrides or [])
    device = check_device(device)
    plan = planned_run(what, given)
    from glassformer.lab import api  # imports torch
    from glassformer.lab.plots.figures import lr_text

    tested = api.rates_of(plan, device=device, threads=threads)
    found = _as_json(tested, what, given)
    if target is not None:
        _save(tested, target)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(lr_text(tested, width=columns(), unicode=is_unicode()))
    typer.echo(
        f"lr {found['lr']:.1e}  (falls steadily from {found['low']:.1e} to {found['high']:.1e})"
    )
    typer.echo(str(found["command"]))


def _as_json(found: "RateRange", what: str, overrides: list[str]) -> dict[str, Any]:
    """Return the rate, its range, the command to paste, and the curve."""
    rate = float(f"{found.suggestion:.1e}")
    return {
        "lr": rate,
        "low": found.low,
        "high": found.high,
        "command": f"glass train {what} {' '.join([*overrides, f'train.lr={rate}'])}",
        "curve": [list(point) for point in found.curve],
    }


def _save(found: "RateRange", path: Path) -> None:
    """Write the range test as a figure, or its points as CSV."""
    from glassformer.lab.plots.figures import lr_chart
    from glassformer.lens.show.chart_figure import figure_bytes
    from glassformer.spec.csv_text import csv_text

    ending = ending_of(path, ENDINGS)
    if ending == "csv":
        lines = [[rate, loss] for rate, loss in found.curve]
        write_file(path, csv_text(["lr", "loss"], lines).encode())
    else:
        write_file(path, figure_bytes(lr_chart(found), ending))
