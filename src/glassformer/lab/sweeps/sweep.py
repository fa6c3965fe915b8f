"""`gf.sweep`: plan, run to the end, rank; in a folder from which it goes on after any kill.

sweeps/NAME/
  sweep.json      what is varied, the cells with their settings, parameters and notes
  cells.jsonl     the complete run of each cell
  runs/c003-s1/   the run of cell 3 with seed 1: a run folder like any other
  results.jsonl   what became of each run, in the order in which they ended; made of the folders
  table.csv, ranking.json, report.html
"""

import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.data.task import Task
from glassformer.lab.bar import Bar, clock, is_watched
from glassformer.lab.recipes import named_configs, override_parts, usual_name
from glassformer.lab.runs.process import stopping
from glassformer.lab.sweeps import report
from glassformer.lab.sweeps.executors import (
    Job,
    Result,
    Stepped,
    Told,
    Update,
    is_done,
    optional_library,
    read_result,
    run_here,
    run_processes,
    run_ray,
    run_stacked,
    stacks_of,
)
from glassformer.lab.sweeps.plan import (
    Cell,
    Plan,
    Planner,
    make_plan,
    plan_files,
    plan_of_runs,
    read_plan,
    run_name,
    runs_of,
)
from glassformer.lab.sweeps.ranking import Effect, Ranking, crossings, main_effects, rank
from glassformer.spec.checks import at_least, named_options
from glassformer.spec.errors import GlassError, InputError
from glassformer.spec.own import is_source
from glassformer.spec.serialize import json_numbers, to_dict
from glassformer.spec.sweep import (
    METRICS,
    Choices,
    Range,
    SweepSpec,
    design_factors,
    is_sweep,
    read_sweep,
    split_settings,
    with_settings,
)
from glassformer.spec.train import RunSpec
from glassformer.store.rundir import RunDirectory, cache_folder, run_folder

#: Seconds between two records of the progress, which the page shows.
RECORD_SECONDS = 1.0
#: Cells below the best whose curves are held against its.
CROSSED = 10
#: The most stacks that train on a GPU at the same time, each driven by a process.
GPU_STACKS = 8


class Sweep:
    """A sweep in its folder: the plan, what became of each run, and the ranking."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.directory = RunDirectory(folder)
        self.plan = plan
        self.results: dict[str, Result] = {}
        self.stopped = self.goes_on = False

    @classmethod
    def open(cls, folder: str | Path) -> "Sweep":
        """Open a sweep that was begun; its results are read from its runs."""
        sweep = cls(Path(folder), read_plan(Path(folder)))
        sweep.read_results()
        return sweep

    @property
    def path(self) -> Path:
        """The folder of the sweep."""
        return self.directory.folder

    @property
    def ranking(self) -> Ranking:
        """The ranking of the cells that have all their seeds."""
        return ranking_of(self.plan, self.results)

    def run_path(self, cell: int, seed: int) -> Path:
        """Return the folder of a run, which every command takes."""
        return self.path / "runs" / run_name(cell, seed)

    @classmethod
    def glance(cls, folder: Path) -> "Sweep":
        """Open a sweep by its list of results alone: hundreds of cells in a moment."""
        sweep = cls(folder, read_plan(folder))
        with contextlib.suppress(OSError):
            for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short by a kill
                    found = Result.from_dict(json.loads(line))
                    sweep.results[found.name] = found
        return sweep

    def read_results(self) -> None:
        """Read what became of each run from its folder."""
        for cell, seed in runs_of(self.plan):
            name = run_name(cell.index, seed)
            found = read_result(name, self.path / "runs" / name)
            if found is not None and found.status != "running":
                self.results[name] = found

    def text(self, *, width: int = 120) -> str:
        """Return the ranking as a table for a terminal, with what can be said about it."""
        return report.ranking_text(self.plan, self.ranking, self.results, width=width)

    def __repr__(self) -> str:
        return f"{self.text(width=100)}\nsaved in {self.path}"

    # --- running ----------------------------------------------------------------------------------

    def begin(self, *, resume: bool, overwrite: bool) -> None:
        """Write the plan; refuse a folder that holds another sweep."""
        if (self.path / "sweep.json").is_file():
            if overwrite:
                self.directory.remove(
                    "runs", "results.jsonl", "table.csv", "ranking.json", "report.html"
                )
            elif not (resume or self.goes_on):
                raise InputError(
                    f"the sweep {self.path.name} exists",
                    hint="{--resume|resume=True} goes on with it, {--overwrite|overwrite=True} "
                    "starts anew, {--name|name} gives another",
                )
            else:
                had = read_plan(self.path)
                if had.sweep != self.plan.sweep:
                    what = _difference(had, self.plan)
                    raise InputError(
                        f"the sweep {self.path.name} is not this one: {what}",
                        hint="the same settings as before, or another {--name|name}",
                    )
                if not self.plan.sweep.is_adaptive and had.cells != self.plan.cells:
                    raise InputError(
                        f"the cells of the sweep {self.path.name} were made by another version",
                        hint=f"glass sweep {self.path} goes on with them as they are",
                    )
        self.write_plan()
        self.read_results()
        lines = (json.dumps(json_numbers(r.to_dict())) + "\n" for r in self.results.values())
        self.directory.write("results.jsonl", "".join(lines))

    def write_plan(self) -> None:
        """Write the cells; an Optuna sampler adds some later."""
        for name, text in plan_files(self.plan).items():
            self.directory.write(name, text)

    def jobs(
        self, cells: Sequence[Cell] | None = None, *, until: int | None, device: str, threads: int
    ) -> list[Job]:
        """Return the runs of some cells; those that have come as far as requested have `ended`.

        One that has failed is not among them.
        """
        made = []
        for cell, seed in runs_of(self.plan, cells):
            spec, name = cell.run(seed), run_name(cell.index, seed)
            job = Job(
                name=name,
                folder=self.path / "runs" / name,
                spec=spec,
                device=device,
                threads=threads,
                until=until,
                own_code=tuple(_sources(to_dict(spec))),
            )
            found = self.results.get(name)
            if found is not None and is_done(job, found):
                job = replace(job, ended=found.step)
            if found is None or found.status != "failed":
                made.append(job)
        return made

    def keep(self, result: Result) -> None:
        """Keep a result, in memory and in the list of results."""
        self.results[result.name] = result
        with self.directory.append(self.path / "results.jsonl") as file:
            file.write(json.dumps(json_numbers(result.to_dict())) + "\n")
            self.directory.sync(file)

    def write_report(self) -> None:
        """Write table.csv, ranking.json and report.html."""
        found = self.ranking
        self.directory.write("table.csv", report.table_csv(self.plan, found, self.results))
        self.directory.write_json("ranking.json", found.to_dict())
        title = f"Sweep {self.path.name}"
        curves = {row.cell: mean_curve(self.plan, self.results, row.cell) for row in found.rows}
        text = report.html(self.plan, found, self.results, curves, title=title)
        self.directory.write("report.html", text)


def _difference(ours: Plan, theirs: Plan) -> str:
    before, now = to_dict(ours.sweep), to_dict(theirs.sweep)
    return ", ".join(f"{key} differs" for key in before if before[key] != now[key])


def _sources(data: Any) -> Iterator[str]:
    """Yield the sources of users' own parts in a run's spec."""
    if isinstance(data, dict):
        source = data.get("source")
        if isinstance(source, str) and is_source(source):
            yield source
        for value in data.values():
            yield from _sources(value)
    elif isinstance(data, list):
        for value in data:
            yield from _sources(value)


# --- ranking --------------------------------------------------------------------------------------


def ranking_of(plan: Plan, results: Mapping[str, Result]) -> Ranking:
    """Rank the cells whose seeds have all finished; list the others with the reason."""
    metric, seeds = plan.metric, plan.sweep.seeds
    stopped = stopped_at(plan, results)
    rows: list[list[float]] = []
    ranked: list[Cell] = []
    incomplete: list[tuple[int, str, str]] = []
    for cell in plan.cells:
        found = [results.get(run_name(cell.index, seed)) for seed in range(seeds)]
        values = [
            None if one is None or one.status != "finished" else one.at(None, metric)
            for one in found
        ]
        known = [value for value in values if value is not None]
        if len(known) == seeds:
            ranked.append(cell)
            rows.append(known)
        else:
            incomplete.append((cell.index, cell.name, _why(found, stopped.get(cell.index), metric)))
    base = plan.baseline
    smaller, unit = METRICS[metric]
    values_CS = np.array(rows).reshape(-1, seeds)
    made = rank(
        [cell.name for cell in ranked],
        values_CS,
        metric=metric,
        unit=unit,
        smaller_is_better=smaller,
        baseline=base if any(cell.index == base for cell in ranked) else None,
        difference=plan.sweep.difference,
        cells=[cell.index for cell in ranked],
    )
    effects: tuple[Effect, ...] = ()
    if plan.sweep.sampler == "grid" and not incomplete:
        effects = main_effects([cell.settings for cell in ranked], values_CS, plan.factors())
    near = [row.cell for row in made.rows[: CROSSED + 1]]
    curves = {cell: mean_curve(plan, results, cell) for cell in near}
    return replace(
        made,
        effects=effects,
        crossings=crossings(made, curves, most=CROSSED),
        incomplete=tuple(incomplete),
        notes=tuple(_notes(plan, stopped)),
    )


def mean_curve(plan: Plan, results: Mapping[str, Result], cell: int) -> dict[int, float]:
    """Return the mean of the metric over seeds at every evaluation that all seeds have."""
    metric = "loss" if plan.metric == "best_loss" else plan.metric
    found = [results.get(run_name(cell, seed)) for seed in range(plan.sweep.seeds)]
    curves = [one.curve for one in found if one is not None]
    shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {
        step: math.fsum(curve[step][metric] for curve in curves) / len(curves)
        for step in sorted(shared)
        if all(metric in curve[step] for curve in curves)
    }


def _why(found: Sequence[Result | None], rung: int | None, metric: str) -> str:
    if rung is not None:
        return f"stopped at step {rung:,}"
    states = [one.status if one is not None else "not begun" for one in found]
    bad = [state for state in states if state in ("failed", "diverged")]
    if bad:
        kinds = ", ".join(f"{bad.count(kind)} {kind}" for kind in dict.fromkeys(bad))
        reason = next((one.why for one in found if one is not None and one.status == "failed"), "")
        return f"{kinds} of {len(found)} seeds{f': {reason}' if reason else ''}"
    done = states.count("finished")
    if done == len(found):
        return f"it has no {metric}"
    return f"{done} of {len(found)} seeds done"


def _notes(plan: Plan, stopped: Mapping[int, int]) -> Iterator[str]:
    if stopped:
        at = ", ".join(
            f"{list(stopped.values()).count(rung)} at step {rung:,}"
            for rung in sorted(set(stopped.values()))
        )
        yield f"successive halving stopped {len(stopped)} cells ({at}): this ranks the survivors"
    if plan.sweep.is_adaptive:
        yield (
            f"the {plan.sweep.sampler} sampler chose cells by earlier results: cells are more "
            "alike than sampled ones, and the best of many looks better than it is"
        )
    joined = [c for c in plan.cells if any(n.startswith("the same design as") for n in c.notes)]
    if joined:
        yield f"{len(joined)} designs answer more than one wish; {{--multiple 1}} tells more apart"


# --- successive halving ---------------------------------------------------------------------------


def survivors(
    plan: Plan, results: Mapping[str, Result], cells: Sequence[Cell], rung: int
) -> list[Cell] | None:
    """Return the cells that go on after a rung, in order; None while a run is not there yet.

    Jamieson and Talwalkar, "Non-stochastic best arm identification", AISTATS 2016. The mean over
    seeds decides; a cell with a run that diverged or failed does not go on.
    """
    metric = "loss" if plan.metric == "best_loss" else plan.metric
    sign = 1.0 if plan.smaller_is_better else -1.0
    scores: list[tuple[float, int]] = []
    for cell in cells:
        values = []
        for seed in range(plan.sweep.seeds):
            found = results.get(run_name(cell.index, seed))
            value = None if found is None else found.at(rung, metric)
            if value is None and (found is None or found.status not in ("diverged", "failed")):
                return None
            values.append(math.inf if value is None else sign * value)
        scores.append((math.fsum(values), cell.index))
    count = max(1, math.ceil(len(cells) * plan.sweep.keep - 1e-9))
    kept = {index for score, index in sorted(scores)[:count] if score < math.inf}
    return [cell for cell in cells if cell.index in kept]


def stopped_at(plan: Plan, results: Mapping[str, Result]) -> dict[int, int]:
    """Return the rung at which each cell was stopped, as far as results decide it."""
    cells, stopped = list(plan.cells), dict[int, int]()
    for rung in plan.sweep.rungs:
        kept = survivors(plan, results, cells, rung)
        if kept is None:
            break
        stopped |= {cell.index: rung for cell in cells if cell not in kept}
        cells = kept
    return stopped


# --- the driver -----------------------------------------------------------------------------------

Execute = Callable[[list[Job], Callable[[], bool]], Iterator[Update]]


def run_sweep(
    sweep: Sweep,
    planner: Planner,
    execute: Execute,
    *,
    device: str,
    threads: int,
    progress: bool,
) -> None:
    """Run everything that is missing, and write the report; a first signal ends it in order."""
    with stopping() as caught:

        def stop() -> bool:
            return bool(caught)

        def run(cells: Sequence[Cell] | None = None, until: int | None = None) -> None:
            jobs = sweep.jobs(cells, until=until, device=device, threads=threads)
            missing = [job for job in jobs if job.ended is None]
            if not missing or stop():
                return
            with _Progress(sweep, missing, shown=progress) as shown:
                for update in execute(jobs, stop):
                    shown.see(update)
                    if isinstance(update, Result):
                        sweep.keep(update)

        if sweep.plan.sweep.is_adaptive:
            _search(sweep, planner, run, stop)
        elif sweep.plan.sweep.rungs:
            cells = list(sweep.plan.cells)
            for rung in sweep.plan.sweep.rungs:
                run(cells, rung)
                cells = survivors(sweep.plan, sweep.results, cells, rung) or []
            if cells:
                run(cells)
        else:
            run()
        sweep.stopped = stop()
    sweep.write_report()


def _search(
    sweep: Sweep,
    planner: Planner,
    run: Callable[[Sequence[Cell]], None],
    stop: Callable[[], bool],
) -> None:
    """Let an Optuna sampler choose cells, some at a time; a resumed search asks the same again."""
    optuna = optional_library("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    plan = sweep.plan
    kinds = {"tpe": "TPESampler", "gp": "GPSampler", "cmaes": "CmaEsSampler"}
    sampler = getattr(optuna.samplers, kinds[plan.sweep.sampler])
    study = optuna.create_study(
        direction="minimize" if plan.smaller_is_better else "maximize",
        sampler=sampler(seed=plan.sweep.draw_seed),
    )
    space = {
        factor.path: _distribution(optuna, factor.values)
        for factor in (*plan.sweep.factors, *plan.sweep.designs)
    }
    by_name = {tuple(cell.settings.items()): cell for cell in plan.cells}
    asked = 0
    while asked < plan.sweep.draws and not stop():
        batch: list[tuple[Any, Cell | None]] = []
        for _ in range(min(plan.sweep.batch, plan.sweep.draws - asked)):
            trial = study.ask(space)
            asked += 1
            settings = {path: _as_text(trial.params[path]) for path in space}
            key = tuple(settings.items())
            if key not in by_name:
                try:
                    by_name[key] = planner.cell(len(plan.cells), settings)
                    plan.cells.append(by_name[key])
                except GlassError:  # a combination that no model has
                    batch.append((trial, None))
                    continue
            batch.append((trial, by_name[key]))
        sweep.write_plan()
        run([cell for cell in plan.cells if any(cell is one for _, one in batch)])
        for trial, cell in batch:
            value = None if cell is None else _mean(sweep, cell)
            if value is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, value)


def _distribution(optuna: Any, values: Choices | Range) -> Any:
    kinds = optuna.distributions
    if isinstance(values, Choices):
        return kinds.CategoricalDistribution(list(values.values))
    if values.is_whole:
        return kinds.IntDistribution(int(values.low), int(values.high), step=values.step)
    return kinds.FloatDistribution(values.low, values.high, log=values.log)


def _as_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _mean(sweep: Sweep, cell: Cell) -> float | None:
    values = []
    for seed in range(sweep.plan.sweep.seeds):
        found = sweep.results.get(run_name(cell.index, seed))
        value = None if found is None else found.at(None, sweep.plan.metric)
        if value is None:
            return None
        values.append(value)
    return math.fsum(values) / len(values)


class _Progress:
    """Runs done, running and failed, and the time left, from the steps that were made so far."""

    def __init__(self, sweep: Sweep, jobs: Sequence[Job], *, shown: bool) -> None:
        self.shown, self.sweep = shown, sweep
        self.goal = {job.name: job.until or job.spec.train.steps for job in jobs}
        self.steps = {
            job.name: min(self.goal[job.name], found.step)
            if (found := sweep.results.get(job.name))
            else 0
            for job in jobs
        }
        self.first = sum(self.steps.values())
        self.running: set[str] = set()
        self.done = self.failed = 0
        self.began = time.monotonic()
        self.recorded = 0.0
        self.bar = Bar(sweep.path.name, total=sum(self.goal.values()), done=self.first)

    def __enter__(self) -> "_Progress":
        if self.shown:
            self.bar.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        if self.shown:
            self.bar.__exit__(*details)

    def see(self, update: Update) -> None:
        """Note an update, and show the progress if it is time."""
        if isinstance(update, Told):
            if self.shown:
                self.bar.tell(update.text)
            return
        if isinstance(update, Stepped):
            self.running.add(update.name)
            self.steps[update.name] = max(self.steps[update.name], update.step)
        else:
            self.running.discard(update.name)
            self.steps[update.name] = self.goal[update.name]
            bad = update.status in ("failed", "diverged")
            self.failed += bad
            self.done += not bad
            if bad and self.shown:
                cell = self.sweep.plan.cells[int(update.name[1:].partition("-")[0])]
                self.bar.tell(f"{update.name} ({cell.name}): {update.status}: {update.why}")
        now, made = time.monotonic(), sum(self.steps.values())
        if not self.shown and now - self.recorded < RECORD_SECONDS:
            return
        rate = (made - self.first) / max(1e-9, now - self.began)
        left = (sum(self.goal.values()) - made) / rate if rate > 0 else 0.0
        if now - self.recorded >= RECORD_SECONDS or not self.running:
            self.recorded = now
            self.sweep.directory.write_json(
                "progress.json",
                {"running": sorted(self.running), "left": round(left, 1), "steps": self.steps},
            )
        if self.shown:
            self._show(made, left)

    def _show(self, made: int, left: float) -> None:
        facts = (
            f"{self.done}/{len(self.goal)} runs done, {len(self.running)} running, "
            f"{self.failed} failed, {clock(left)} left"
        )
        if self.bar.live:
            self.bar.show(made, facts)
        elif self.bar.is_due(now=self.done + self.failed == len(self.goal)):
            self.bar.tell(facts)


# --- the door -------------------------------------------------------------------------------------


def sweep_spec(
    what: str | Path,
    *,
    overrides: Iterable[str] = (),
    vary: Mapping[str, Any] | None = None,
    design: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> SweepSpec:
    """Return the sweep of a task, a config or a sweep's TOML file, with settings and options."""
    given = [*overrides, *(f"{path}={_listed(value)}" for path, value in (vary or {}).items())]
    chosen = dict(options or {})
    if str(what).endswith(".toml") and Path(what).is_file():
        text = Path(what).read_text(encoding="utf-8")
        if is_sweep(text):
            made = with_settings(read_sweep(text, where=str(what)), given)
            if design:
                chosen["designs"] = design_factors({n: _listed(v) for n, v in design.items()})
            return replace(made, **chosen)
    factors, fixed = split_settings(given)
    designs = design_factors({name: _listed(value) for name, value in (design or {}).items()})
    return SweepSpec(what=str(what), factors=factors, fixed=fixed, designs=designs, **chosen)


def _listed(value: Any) -> str:
    if isinstance(value, str):
        return value
    values = value if isinstance(value, (list, tuple)) else [value]
    return ",".join(one if isinstance(one, str) else json.dumps(one) for one in values)


def _has_begun(what: Any) -> bool:
    return isinstance(what, (str, Path)) and (Path(what) / "sweep.json").is_file()


def sweep_folder(what: Any, *, name: str | None, sweeps: Path) -> Path:
    """Return the folder of a sweep: the given one, if it goes on, else that of a name."""
    if _has_begun(what):
        return Path(what)
    one = what.what if isinstance(what, SweepSpec) else what
    usual = usual_name(str(one)) if isinstance(one, (str, Path)) else "runs"
    return run_folder(sweeps, name or usual)


def prepare_sweep(
    what: "str | Path | SweepSpec | Sequence[str | Path] | Mapping[str, RunSpec]",
    *,
    folder: Path,
    options: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    vary: Mapping[str, Any] | None = None,
    design: Mapping[str, Any] | None = None,
    yes: bool = False,
    dry: bool = False,
) -> tuple[Sweep, Planner]:
    """Return the sweep with all its cells, checked; nothing has run.

    A text keeps its tokens in the sweep's folder, unless it is a dry run, which writes nothing. The
    folder of a sweep goes on as it is.
    """
    if _has_begun(what):
        assert isinstance(what, (str, Path))
        if any((options, [*overrides], vary, design)):
            raise InputError(
                "a sweep that goes on keeps its settings",
                hint=f"{{glass sweep {what}|gf.sweep('{what}')}} alone",
            )
        found = Sweep.open(what)
        found.goes_on = True
        return found, Planner(found.plan.sweep, cache=cache_folder(found.path / "runs"))
    cache = None if dry else cache_folder(folder / "runs")
    if isinstance(what, (list, tuple)):
        what = named_configs(what)
    if isinstance(what, Mapping):
        given = [*overrides, *(f"{path}={_listed(value)}" for path, value in (vary or {}).items())]
        factors, fixed = split_settings(given)
        if factors or design:
            varied = factors[0].path if factors else next(iter(design or {}))
            raise InputError(
                f"several runs are compared as they are, and {varied} has several values",
                hint="one value for all of them; or vary one task or config",
            )
        spec = SweepSpec(what="runs", fixed=fixed, **dict(options or {}))
        planner = Planner(spec, cache=cache)
        runs = {name: override_parts(run, fixed) for name, run in what.items()}
        return Sweep(folder, plan_of_runs(spec, runs, planner)), planner
    assert isinstance(what, (str, Path, SweepSpec))
    spec = (
        what
        if isinstance(what, SweepSpec)
        else sweep_spec(what, overrides=overrides, vary=vary, design=design, options=options)
    )
    spec.check_size(confirmed=yes)
    planner = Planner(spec, cache=cache)
    if spec.is_adaptive:
        optional_library("optuna")
        settings = {f.path: _first(f.values) for f in (*spec.factors, *spec.designs)}
        planner.cell(0, settings)  # an unknown field is an error now
        kept = folder / "sweep.json"
        if kept.is_file():
            had = read_plan(folder)
            if had.sweep == spec:
                return Sweep(folder, had), planner
    return Sweep(folder, make_plan(spec, planner)), planner


def _first(values: Choices | Range) -> str:
    return values.values[0] if isinstance(values, Choices) else values.at(0.5)


def executor(
    *, jobs: int | None, ray: str | None, stack: bool | None, device: str
) -> tuple[str, Execute]:
    """Return how runs are executed, in words, and the executor.

    On a GPU runs of one shape are stacked unless `stack` is False, or `ray` is given; `jobs` stacks
    share the GPU, by default as many as half of the cores can drive.
    """
    if jobs is not None:
        at_least("jobs", jobs)
    if ray is not None and (jobs is not None or stack):
        raise InputError(
            "runs are executed in one way",
            hint="either {--ray|ray}, or {--jobs and --stack|jobs and stack}",
        )
    if ray is not None:
        optional_library("ray")
        return f"Ray at {ray}", lambda work, stop: run_ray(
            [job for job in work if job.ended is None], address=ray, stop=stop
        )
    cuda = device.startswith("cuda")
    stacked = cuda if stack is None else stack
    cores = os.cpu_count() or 1
    if cuda:
        count = jobs or (max(1, min(cores // 2, GPU_STACKS)) if stacked else 1)
    else:
        count = jobs or (1 if stacked else cores)

    def execute(work: list[Job], stop: Callable[[], bool]) -> Iterator[Update]:
        missing = [job for job in work if job.ended is None]
        groups = stacks_of(work, workers=count) if stacked else [[job] for job in missing]
        at_once = min(count, len(groups))
        if at_once > 1:
            groups.sort(key=len, reverse=True)  # the longest first: nobody waits for it at the end
            return run_processes(groups, count=at_once, stop=stop)
        if not stacked:
            return run_here(missing, stop=stop)
        tasks: dict[object, Task] = {}
        every = (run_stacked(group, tasks=tasks, stop=stop) for group in groups)
        return itertools.chain.from_iterable(every)

    at_once = f"{count} at a time"
    if stacked:
        return "runs of one shape as one" + (f", {at_once}" if count > 1 else ""), execute
    return f"{at_once} on this machine", execute


@named_options
def sweep(
    what: "str | Path | SweepSpec | Sequence[str | Path] | Mapping[str, RunSpec]",
    *,
    vary: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    design: Mapping[str, Any] | None = None,
    seeds: int | None = None,
    sampler: str | None = None,
    draws: int | None = None,
    rungs: Sequence[int] | None = None,
    keep: float | None = None,
    metric: str | None = None,
    baseline: str | None = None,
    difference: float | None = None,
    name: str | None = None,
    sweeps: str | Path = "sweeps",
    device: str = "cpu",
    threads: int = 1,
    jobs: int | None = None,
    ray: str | None = None,
    stack: bool | None = None,
    resume: bool = False,
    overwrite: bool = False,
    yes: bool = False,
    progress: bool | None = None,
) -> Sweep:
    """Train every cell of a grid, or of sampled settings, with several seeds, and rank them.

    `gf.sweep("digits", vary={"train.lr": [1e-3, 3e-3]}, seeds=5).ranking`. `design` are options of
    a parameter budget, lists where they vary: every cell's model is then the solver's. `what` may
    be a task, a config, a sweep's TOML file, its folder (which goes on), several configs,
    `["one.toml", "two.toml"]`, or complete runs by name; with several, settings hold for all.
    Runs are trained `jobs` at a time in processes, those of one shape as one with `stack` (on a GPU
    by default), or on a `ray` cluster; the ranking is the same.
    """
    given = {
        "seeds": seeds,
        "sampler": sampler,
        "draws": draws,
        "rungs": None if rungs is None else tuple(rungs),
        "keep": keep,
        "metric": metric,
        "baseline": baseline,
        "difference": difference,
    }
    made, planner = prepare_sweep(
        what,
        folder=sweep_folder(what, name=name, sweeps=Path(sweeps)),
        options={key: value for key, value in given.items() if value is not None},
        overrides=overrides,
        vary=vary,
        design=design,
        yes=yes,
    )
    _, execute = executor(jobs=jobs, ray=ray, stack=stack, device=device)
    with made.directory.locked():
        made.begin(resume=resume, overwrite=overwrite)
        run_sweep(
            made,
            planner,
            execute,
            device=device,
            threads=threads,
            progress=is_watched() if progress is None else progress,
        )
    return made
