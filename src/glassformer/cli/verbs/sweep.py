"""`glass sweep`: print the plan, run it, print the ranking; options of a budget take lists."""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassformer.budget.question import Budget
from glassformer.cli.shell.options import AsJson, Device, takes
from glassformer.cli.shell.process import check_device, keep_freed_memory
from glassformer.cli.shell.terminal import columns, end, tell
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.errors import InputError
from glassformer.spec.options import Option, check_options, option, options_of
from glassformer.spec.serialize import json_numbers
from glassformer.spec.sweep import SweepSpec
from glassformer.spec.tasks import check_task_name, is_config

if TYPE_CHECKING:
    from glassformer.lab.sweeps.plan import Planner
    from glassformer.lab.sweeps.sweep import Sweep

#: Options of a budget that the task decides, and the one that has three spellings here.
_ELSEWHERE = ("vocab", "length", "tied")


def _as_list(option: Option) -> Option:
    """Return an option of a budget that takes several values, which the solver's own code reads."""
    if option.typed is bool:
        return option
    return replace(
        option,
        type=str,
        typed=str,
        parse=None,
        help=f"Budget: {option.help[:1].lower()}{option.help[1:]}",
        metavar="VALUES",
        show_default=option.name != "params",
        at_least=None,
        above=None,
        at_most=None,
        below=None,
        choices=(),
    )


LISTS = tuple(_as_list(each) for each in options_of(Budget) if each.name not in _ELSEWHERE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """Where the runs of a sweep are trained, and how the sweep begins."""

    name: str | None = option(None, help="Name of the sweep; by default the task's.")
    sweeps: str = option("sweeps", metavar="FOLDER", help="The folder of the sweeps.")
    device: Device = "cpu"
    threads: int = option(1, at_least=1, help="CPU threads of each run.")
    jobs: int | None = option(
        None,
        help="Runs at a time, a process each; by default one per core. With --stack: stacks.",
    )
    stack: Annotated[
        bool | None,
        typer.Option(
            "--stack/--no-stack",
            help="Train runs of one shape as one; by default on a GPU.",
            show_default=False,
        ),
    ] = None
    ray: str | None = option(
        None,
        metavar="ADDRESS",
        help="Train on a Ray cluster: its address, auto for the one that runs here, local to "
        "start one.",
    )
    resume: bool = option(False, help="Go on with a sweep that was stopped.")
    overwrite: bool = option(False, help="Delete the sweep of this name and start anew.")
    dry_run: bool = option(False, help="Print the cells, their parameters and the time; no runs.")
    yes: bool = option(False, help="Confirm a very large sweep.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.resume and self.overwrite:
            raise InputError(
                "--resume goes on with the sweep, --overwrite starts it anew",
                hint="leave out one of the two",
            )


@takes(SweepSpec, into="options")
@takes(LISTS, into="budget")
def sweep(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TASK|CONFIG|SWEEP",
            help="A task of `glass list`, a run's config (or several), a sweep's .toml, or a "
            "sweep's folder, which goes on.",
        ),
    ],
    options: dict[str, Any],
    budget: dict[str, Any],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|SETTING=VALUES",
            help="train.lr=1e-3,3e-3 model.d_model=64,96 train.steps=500 ...; a range is sampled: "
            "log:1e-4..1e-2, 0.0..0.3, 32..128/16. With several configs, one value for all.",
        ),
    ] = None,
    tied: bool = option(False, help="Budget: tied embeddings."),
    untied: bool = option(False, help="Budget: an output head of its own weights."),
    both: Annotated[bool, typer.Option("--tied,--untied", help="Budget: vary the two.")] = False,
    *,
    running: Running,
    as_json: AsJson = False,
) -> None:
    """Train many settings with several seeds each, and rank them.

    It can be killed at any moment, and --resume goes on. Runs that fail are results. Examples:

      glass sweep digits train.lr=1e-3,3e-3,1e-2 train.steps=500 --seeds 5

      glass sweep text train.lr=log:1e-4..1e-2 --sampler random --draws 20 --seeds 3

      glass sweep text --params 300k --embedding-ratio 0.25,0.35,0.45 --tied,--untied --dry-run

      glass sweep one.toml two.toml train.steps=500 --seeds 3

      glass sweep sweeps/text
    """
    if not what.endswith(".toml") and not Path(what).is_dir():
        check_task_name(what)  # before torch is imported
    one_blas_thread()
    wish = ["true"] * tied + ["false"] * untied if not both else ["true", "false"]
    design = {key: str(value) for key, value in budget.items()}
    design |= {"tied": ",".join(wish)} if wish else {}
    configs = [text for text in settings or [] if is_config(text) and "=" not in text]
    rest = [text for text in settings or [] if text not in configs]
    code = _run([what, *configs], rest, running, options=options, design=design, as_json=as_json)
    if code:
        raise typer.Exit(code)


def _run(
    named: list[str],
    settings: list[str],
    running: Running,
    *,
    options: Mapping[str, Any],
    design: Mapping[str, str],
    as_json: bool,
) -> int:
    """Plan, run and rank; return the exit code."""
    from glassformer.lab.recipes import usual_name
    from glassformer.lab.sweeps.sweep import (
        executor,
        prepare_sweep,
        run_sweep,
        sweep_folder,
    )

    device = check_device(running.device)
    what, *others = named
    if others and not is_config(what):
        raise InputError(
            f"{what} and {others[0]} are several things to sweep",
            hint="one task, or several configs: glass sweep one.toml two.toml",
        )
    keep_freed_memory()
    how, execute = executor(jobs=running.jobs, ray=running.ray, stack=running.stack, device=device)
    name = running.name or ("-".join(map(usual_name, named)) if others else None)
    sweep, planner = prepare_sweep(
        named if others else what,
        folder=sweep_folder(what, name=name, sweeps=Path(running.sweeps)),
        options=options,
        overrides=settings,
        design=design,
        yes=running.yes,
        dry=running.dry_run,
    )
    if running.dry_run:
        _print_plan(sweep, planner, device=device, how=how, as_json=as_json)
        return 0
    cells = len(sweep.plan.cells) or sweep.plan.sweep.draws
    runs = cells * sweep.plan.sweep.seeds
    tell(f"{cells} cells, {sweep.plan.sweep.seeds} seeds: {runs} runs, {how}")
    with sweep.directory.locked():
        sweep.begin(resume=running.resume, overwrite=running.overwrite)
        run_sweep(sweep, planner, execute, device=device, threads=running.threads, progress=True)
    if as_json:
        print(json.dumps(json_numbers(sweep.ranking.to_dict()), allow_nan=False))
    else:
        print(sweep.text(width=columns()), flush=True)
        following = [(f"glass sweep {sweep.path}", "go on with it, or see the ranking again")]
        if sweep.ranking.rows:
            path = sweep.run_path(sweep.ranking.rows[0].cell, 0)
            following.append((f"glass evaluate {path}", "the best cell's first run, by group"))
        following.append((f"glass explore {sweep.path.parent}", "the page Sweeps"))
        end(sweep.path / "report.html", following)
    if sweep.stopped:
        tell(f"stopped, state saved; go on with: glass sweep {sweep.path}")
        return 128 + signal.SIGINT
    return 0


def _print_plan(
    sweep: "Sweep", planner: "Planner", *, device: str, how: str, as_json: bool
) -> None:
    """Print every cell with its parameters, what gave way, and the predicted time."""
    from glassformer.kernels.threads import taking
    from glassformer.lab.measure.machine_rates import calibrate
    from glassformer.lab.runs.table import duration
    from glassformer.lab.sweeps.plan import predicted_seconds

    plan = sweep.plan
    with taking(1):
        seconds = predicted_seconds(plan, planner, calibrate(device=device, seconds=0.8))
    total = sum(seconds.values()) * plan.sweep.seeds
    if as_json:
        named = ("name", "settings", "parameters", "notes")
        cells = [
            {key: getattr(cell, key) for key in named} | {"seconds": round(seconds[cell.index], 2)}
            for cell in plan.cells
        ]
        found = {"cells": cells, "seeds": plan.sweep.seeds, "seconds": round(total, 1)}
        print(json.dumps(found))
        return
    if plan.sweep.is_adaptive:
        print(
            f"{plan.sweep.draws} cells, {plan.sweep.seeds} seeds each: the {plan.sweep.sampler} "
            "sampler chooses them as results arrive"
        )
        return
    wide = max(len(cell.name) for cell in plan.cells)
    wide = max(20, min(wide, columns() - 34))
    print(f"{'cell':<{wide}}  {'parameters':>10}  one run takes about")
    for cell in plan.cells:
        took = duration(seconds[cell.index])
        print(f"{cell.name[:wide]:<{wide}}  {cell.parameters:>10,}  {took}")
        for note in cell.notes:
            print(f"    {note}")
    runs = len(plan.cells) * plan.sweep.seeds
    print(
        f"{len(plan.cells)} cells x {plan.sweep.seeds} seeds = {runs} runs, {how}; one after "
        f"another about {duration(total)} on this machine ({device})"
    )
