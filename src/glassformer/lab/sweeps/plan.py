"""The plan of a sweep: every cell as a complete `RunSpec`, checked before anything runs.

The task of a cell is built once for all cells that share it. A cell of a budget gets its model from
the solver, for the vocabulary and the length of its task, and keeps what gave way.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glassformer.budget.answer import Answer
from glassformer.budget.design import solve
from glassformer.budget.infeasible import InfeasibleBudget, Undecided
from glassformer.budget.question import Budget
from glassformer.costs.timing import Rates, step_time
from glassformer.data.task import Task
from glassformer.lab.corpus import built
from glassformer.lab.recipes import FINETUNE, override_parts, planned_run
from glassformer.lab.runs.planned import PlannedRun, check_fit
from glassformer.spec.errors import GlassError, InputError, nearest
from glassformer.spec.manifest import count_parameters
from glassformer.spec.options import Option, options_of
from glassformer.spec.serialize import from_dict, to_dict
from glassformer.spec.sweep import METRICS, Choices, SweepSpec
from glassformer.spec.tasks import TextTask, is_config
from glassformer.spec.train import RunSpec, setting_for

#: Options of a budget that the task decides.
OF_THE_TASK = ("vocab", "length")
#: Problems of cells that one error lists.
LISTED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One combination of settings. `notes`: how its budget was met, and what gave way.

    `text` is the complete run as JSON: it is parsed when it is needed, so that a list of hundreds
    of cells is read at once.
    """

    index: int
    name: str
    settings: Mapping[str, str]
    text: str
    parameters: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        index: int,
        name: str,
        settings: Mapping[str, str],
        spec: RunSpec,
        notes: tuple[str, ...] = (),
    ) -> "Cell":
        """Make a cell of a run's spec."""
        return cls(
            index=index,
            name=name,
            settings=dict(settings),
            text=json.dumps(to_dict(spec)),
            parameters=count_parameters(spec.model),
            notes=notes,
        )

    @property
    def spec(self) -> RunSpec:
        """The run of the first seed."""
        return _parsed(self.text)

    def run(self, seed: int) -> RunSpec:
        """Return the run of a seed, counted from 0: its order of the data is that of all cells."""
        train = self.spec.train
        return replace(self.spec, train=replace(train, seed=train.seed + seed))


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> RunSpec:
    return from_dict(RunSpec, json.loads(text))


def run_name(cell: int, seed: int) -> str:
    """Return the name of a run of a sweep: `c003-s1`."""
    return f"c{cell:03d}-s{seed}"


@dataclass(slots=True)
class Plan:
    """A sweep and its cells; an Optuna sampler adds cells as it goes."""

    sweep: SweepSpec
    cells: list[Cell] = field(default_factory=list)
    score: str = field(default="", compare=False)

    @property
    def metric(self) -> str:
        """The score by which cells are ranked: as requested, as recorded, or as the task has it."""
        if self.sweep.metric or self.score:
            return self.sweep.metric or self.score
        text = bool(self.cells) and all(isinstance(c.spec.task, TextTask) for c in self.cells)
        return "bits_per_byte" if text else "loss"

    @property
    def smaller_is_better(self) -> bool:
        """True if the metric is a loss."""
        return METRICS[self.metric][0]

    @property
    def baseline(self) -> int | None:
        """The index of the stated baseline, if there is one."""
        if not self.sweep.baseline:
            return None
        wanted = dict(text.partition("=")[::2] for text in self.sweep.baseline.split())
        found = [c.index for c in self.cells if wanted.items() <= _named(c).items()]
        if len(found) != 1:
            what = "no cell has" if not found else f"{len(found)} cells have"
            names = ", ".join(cell.name for cell in self.cells[:LISTED])
            raise InputError(
                f"{what} the baseline's settings {self.sweep.baseline}", hint=f"cells: {names}, ..."
            )
        return found[0]

    def factors(self) -> list[str]:
        """Return the paths that vary."""
        every = (*self.sweep.factors, *self.sweep.designs)
        return [
            f.path for f in every if not isinstance(f.values, Choices) or len(f.values.values) > 1
        ]


def _named(cell: Cell) -> dict[str, str]:
    """Return the settings by complete path and by last word."""
    return {**{path.rpartition(".")[2]: v for path, v in cell.settings.items()}, **cell.settings}


# --- making it ------------------------------------------------------------------------------------


class Planner:
    """Makes the cells of a sweep; the tasks that it builds are shared by them."""

    def __init__(self, sweep: SweepSpec, *, cache: Path | None = None) -> None:
        self.sweep = sweep
        self.cache = cache
        self._bases: dict[tuple[str, ...], PlannedRun] = {}
        self._tasks: dict[Any, Task] = {}
        self._answers: dict[Budget, Answer] = {}
        self.designs = {factor.path for factor in sweep.designs}
        if self.designs and "params" not in self.designs:
            raise InputError(
                "a budget needs a number of parameters", hint="{--params 300k|params='300k'}"
            )
        known = [each.name for each in options_of(Budget) if each.name not in OF_THE_TASK]
        for name in self.designs - set(known):
            hint = "the task decides it" if name in OF_THE_TASK else nearest(name, known)
            raise InputError(f"a sweep's budget has no option '{name}'", hint=hint)

    def cell(self, index: int, settings: Mapping[str, str]) -> Cell:
        """Return one cell; raise what is wrong with it."""
        given = [*self.sweep.fixed]
        given += [f"{path}={v}" for path, v in settings.items() if path not in self.designs]
        plan = self._planned(given)
        notes: tuple[str, ...] = ()
        spec = plan.spec
        if self.designs:
            spec, notes = self._designed(plan, settings, given)
        if spec.tuning is None:
            check_fit(spec.model, self._task(plan, spec))
        return Cell.of(
            index, cell_name(settings, Plan(self.sweep).factors()), settings, spec, notes
        )

    def length(self, spec: RunSpec) -> int:
        """Return the mean length of the task's examples, in tokens."""
        task = self._tasks.get(spec.task)
        if task is None:
            return spec.model.max_seq_len
        return max(1, round(float(task.lengths("train").mean())))

    def _planned(self, given: list[str]) -> PlannedRun:
        """Plan a run; of cells that differ outside of their task only the first is planned."""
        what = self.sweep.what
        if what == FINETUNE or is_config(what):
            return planned_run(what, given, cache=self.cache)
        key = tuple(text for text in given if text.startswith("task."))
        if key not in self._bases:
            self._bases[key] = planned_run(what, key, cache=self.cache)
        base = self._bases[key]
        rest = [text for text in given if not text.startswith("task.")]
        if self.designs:  # what changes the model applies to the designed one
            rest = [text for text in rest if not text.startswith("model.")]
        return PlannedRun(spec=override_parts(base.spec, _spelled(rest)), task=base.task)

    def _task(self, plan: PlannedRun, spec: RunSpec) -> Task:
        if spec.task not in self._tasks:
            self._tasks[spec.task] = plan.task or built(spec.task, cache=self.cache)
        return self._tasks[spec.task]

    def _designed(
        self, plan: PlannedRun, settings: Mapping[str, str], given: Sequence[str]
    ) -> tuple[RunSpec, tuple[str, ...]]:
        """Return the run with the solver's model, and how the budget was met."""
        task = self._task(plan, plan.spec)
        options = {each.name: each for each in options_of(Budget)}
        wanted = {n: _budget_value(options[n], v) for n, v in settings.items() if n in options}
        budget = Budget.from_options(
            {**wanted, "vocab": task.tokenizer.vocab_size, "length": task.longest()}
        )
        if budget not in self._answers:
            self._answers[budget] = solve(budget, alternatives=False)
        answer = self._answers[budget]
        spec = replace(plan.spec, model=answer.spec)
        spec = override_parts(spec, [text for text in given if text.startswith("model.")])
        if count_parameters(spec.model) != answer.best.params:
            raise InputError(
                "a setting changes the number of parameters of a design",
                hint="give it as an option of the budget, or leave the budget out",
            )
        return spec, (str(answer.best), *(f"gave way: {line}" for line in answer.gave_way))


def _spelled(settings: list[str]) -> list[str]:
    """Return settings as they are; raise for a word that is another setting's short name."""
    for text in settings:
        path = text.partition("=")[0]
        known = setting_for(path) if "." not in path else None
        if known is not None and path != "engine":
            raise InputError(f"unknown key '{path}'", hint=f"did you mean '{known}'?")
    return settings


def _budget_value(option: Option, text: str) -> Any:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if option.typed is bool:
        if text.lower() not in words:
            raise InputError(f"{option.name} {text!r} is neither yes nor no", hint="yes,no")
        return words[text.lower()]
    return text


def cell_name(settings: Mapping[str, str], varied: Sequence[str]) -> str:
    """Return `lr=1e-3 d_model=64`: last words of the paths, longer where two are alike."""
    words = {path: path.rpartition(".")[2] for path in varied}
    alike = [path for path in varied if list(words.values()).count(words[path]) > 1]
    words |= {path: ".".join(path.split(".")[-2:]) for path in alike}
    parts = [f"{words[path]}={settings[path]}" for path in varied if path in settings]
    return " ".join(parts) or "the only cell"


def make_plan(sweep: SweepSpec, planner: Planner) -> Plan:
    """Return the plan with all its cells; every problem of a cell is reported before any run."""
    plan = Plan(sweep)
    if sweep.is_adaptive:
        return plan
    problems: list[tuple[str, GlassError]] = []
    for index, settings in enumerate(sweep.cells()):
        try:
            plan.cells.append(planner.cell(index, settings))
        except (InputError, InfeasibleBudget, Undecided) as error:
            problems.append((cell_name(settings, plan.factors()), error))
    if problems:
        raise _refusal(problems, sweep.count())
    plan.cells = merged(plan.cells)
    _check_rungs(plan)
    _ = plan.baseline  # a baseline that is no cell is an error now
    return plan


def merged(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with those that are the same run as an earlier one joined to it.

    The solver may give one design for two wishes, where whole widths leave it no other.
    """
    first: dict[str, list[Cell]] = {}
    for cell in cells:
        first.setdefault(cell.text, []).append(cell)
    made = []
    for index, (one, *others) in enumerate(first.values()):
        notes = (*one.notes, *(f"the same design as: {other.name}" for other in others))
        made.append(replace(one, index=index, notes=notes))
    return made


def plan_of_runs(sweep: SweepSpec, runs: Mapping[str, RunSpec], planner: Planner) -> Plan:
    """Return a plan whose cells are complete runs by name."""
    plan = Plan(sweep)
    for index, (name, spec) in enumerate(runs.items()):
        if spec.tuning is None:
            check_fit(spec.model, planner._task(PlannedRun(spec=spec), spec))
        plan.cells.append(Cell.of(index, name, {"run": name}, spec))
    _check_rungs(plan)
    _ = plan.baseline
    return plan


def _refusal(problems: list[tuple[str, GlassError]], cells: int) -> InputError:
    same = len({str(error) for _, error in problems}) == 1
    if same and len(problems) == cells:  # all for one reason: say it once
        error = problems[0][1]
        return InputError(error.what, where=error.where, hint=error.hint)
    lines = [
        f"\n  {name}: {error.what}" + (f" ({error.hint})" if error.hint else "")
        for name, error in problems[:LISTED]
    ]
    more = f"\n  and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    return InputError(f"{len(problems)} of {cells} cells cannot be run:{''.join(lines)}{more}")


def _check_rungs(plan: Plan) -> None:
    for cell in plan.cells:
        train = cell.spec.train
        for rung in plan.sweep.rungs:
            if rung >= train.steps:
                raise InputError(
                    f"the rung {rung} is not before the last step, {train.steps}",
                    hint="rungs below train.steps",
                )
            if rung % train.evaluate_every:
                raise InputError(
                    f"no evaluation at the rung {rung}: they come every {train.evaluate_every}",
                    hint=f"train.evaluate_every={plan.sweep.rungs[0]}, or rungs that are multiples",
                )


# --- on disk --------------------------------------------------------------------------------------


def plan_files(plan: Plan) -> dict[str, str]:
    """Return the files of a plan: the complete run of each cell, and the sweep with its cells.

    They are written in this order: a kill between them leaves runs that no sweep names yet.
    """
    named = ("name", "settings", "parameters", "notes")
    cells = [{key: getattr(cell, key) for key in named} for cell in plan.cells]
    head = {
        "format": 1,
        "sweep": to_dict(plan.sweep),
        "metric": plan.metric,
        "baseline": plan.baseline,
        "factors": plan.factors(),
        "steps": max((cell.spec.train.steps for cell in plan.cells), default=0),
        "cells": cells,
    }
    lines = "".join(f"{cell.text}\n" for cell in plan.cells)
    return {"cells.jsonl": lines, "sweep.json": json.dumps(head, indent=1) + "\n"}


def read_plan(folder: Path) -> Plan:
    """Read back what `plan_files` made."""
    try:
        head = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
        specs = (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines()
        plan = Plan(from_dict(SweepSpec, head["sweep"]), score=str(head["metric"]))
        specs = specs[: len(head["cells"])]
        for index, (cell, line) in enumerate(zip(head["cells"], specs, strict=True)):
            name, settings = str(cell["name"]), dict(cell["settings"])
            size, notes = int(cell["parameters"]), tuple(cell["notes"])
            made = Cell(
                index=index, name=name, settings=settings, text=line, parameters=size, notes=notes
            )
            plan.cells.append(made)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"not the folder of a sweep: {error}", where=str(folder)) from error
    return plan


# --- what it will take ----------------------------------------------------------------------------


def predicted_seconds(plan: Plan, planner: Planner, rates: Rates) -> dict[int, float]:
    """Return the predicted seconds of one run of each cell: its steps and its evaluations."""
    found = {}
    for cell in plan.cells:
        train, length = cell.spec.train, planner.length(cell.spec)
        step = step_time(cell.spec.model, rates, batch=train.batch_size, length=length).total
        looks = -(-train.steps // train.evaluate_every)
        rows = train.evaluate_examples / train.batch_size
        # a forward pass is a third of a step
        found[cell.index] = step * (train.steps * train.accumulate + looks * rows / 3)
    return found


def runs_of(plan: Plan, cells: Sequence[Cell] | None = None) -> Iterator[tuple[Cell, int]]:
    """Yield every run: seed by seed, so that an early end leaves complete seeds behind."""
    for seed in range(plan.sweep.seeds):
        for cell in plan.cells if cells is None else cells:
            yield cell, seed
