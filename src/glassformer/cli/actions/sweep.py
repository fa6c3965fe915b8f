"""Run `glass sweep`: print the plan, run it, print the ranking."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glassformer.cli.shell.output import end
from glassformer.cli.shell.process import check_device, keep_freed_memory
from glassformer.cli.shell.terminal import columns, tell
from glassformer.lab.recipes import usual_name
from glassformer.lab.runs.table import duration
from glassformer.lab.sweeps.plan import Planner, predicted_seconds
from glassformer.lab.sweeps.sweep import Sweep, executor, prepare_sweep, run_sweep
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import json_numbers
from glassformer.store.rundir import cache_folder, run_folder


def run(
    what: str,
    settings: list[str],
    *,
    options: Mapping[str, Any],
    design: Mapping[str, str],
    name: str | None,
    sweeps: Path,
    device: str,
    threads: int,
    jobs: int | None,
    ray: str | None,
    stack: bool | None,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Plan, run and rank; return the exit code."""
    device = check_device(device)
    at_least("threads", threads)
    keep_freed_memory()
    if resume and overwrite:
        raise InputError(
            "--resume goes on with the sweep, --overwrite starts it anew",
            hint="leave out one of the two",
        )
    how, execute = executor(jobs=jobs, ray=ray, stack=stack, device=device)
    if (Path(what) / "sweep.json").is_file():
        if settings or options or design:
            raise InputError(
                "a sweep that goes on keeps its settings", hint=f"glass sweep {what} alone"
            )
        sweep, resume = Sweep.open(what), True
        planner = Planner(sweep.plan.sweep, cache=cache_folder(sweep.path / "runs"))
    else:
        folder = run_folder(sweeps, usual_name(what) if name is None else name)
        sweep, planner = prepare_sweep(
            what,
            folder=folder,
            options=options,
            overrides=settings,
            design=design,
            yes=yes,
            dry=dry_run,
        )
    if dry_run:
        _print_plan(sweep, planner, device=device, how=how, as_json=as_json)
        return 0
    cells = len(sweep.plan.cells) or sweep.plan.sweep.draws
    runs = cells * sweep.plan.sweep.seeds
    tell(f"{cells} cells, {sweep.plan.sweep.seeds} seeds: {runs} runs, {how}")
    with sweep.directory.locked():
        sweep.begin(resume=resume, overwrite=overwrite)
        run_sweep(sweep, planner, execute, device=device, threads=threads, progress=True)
    if as_json:
        print(json.dumps(json_numbers(sweep.ranking.to_dict()), allow_nan=False))
    else:
        print(sweep.text(width=columns()), flush=True)
        best = sweep.ranking.rows[0].cell if sweep.ranking.rows else None
        following = [(f"glass sweep {sweep.path}", "go on with it, or see the ranking again")]
        if best is not None:
            path = sweep.run_path(best, 0)
            following.append((f"glass inspect {path} TEXT", "look inside the best cell"))
        following.append((f"glass explore {sweep.path.parent}", "the page Sweeps"))
        end(sweep.path / "report.html", following)
    if sweep.stopped:
        tell(f"stopped, state saved; go on with: glass sweep {sweep.path}")
        return 128 + signal.SIGINT
    return 0


def _print_plan(sweep: Sweep, planner: Planner, *, device: str, how: str, as_json: bool) -> None:
    """Print every cell with its parameters, what gave way, and the predicted time."""
    from glassformer.kernels.threads import taking
    from glassformer.lab.measure.machine_rates import calibrate

    plan = sweep.plan
    with taking(1):
        seconds = predicted_seconds(plan, planner, calibrate(device=device, seconds=0.8))
    total = sum(seconds.values()) * plan.sweep.seeds
    if as_json:
        cells = [
            {
                "name": cell.name,
                "settings": dict(cell.settings),
                "parameters": cell.parameters,
                "notes": list(cell.notes),
                "seconds": round(seconds[cell.index], 2),
            }
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
