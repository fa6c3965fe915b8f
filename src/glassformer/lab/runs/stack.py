"""Many runs trained as one, each with a run directory of its own, as if it had been trained alone.

`StackedRuns` drives one `StackedEngine` and a `TrainingRun` for each model: every run logs,
evaluates, saves, stops early and diverges by itself; one that has ended leaves the stack.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from glassformer.costs.estimates import flops
from glassformer.data.task import Task
from glassformer.generation.stepper import TorchStepper
from glassformer.gpu.training_graphs import graphs_for
from glassformer.kernels.threads import FLOPS, threads_for
from glassformer.lab.corpus import built
from glassformer.lab.runs.artifacts import Sample, probe_models, write_samples
from glassformer.lab.runs.assemble import Parts
from glassformer.lab.runs.planned import check_fit
from glassformer.lab.runs.run import Event, TrainingRun
from glassformer.lens.measure.probes import Probes
from glassformer.spec.errors import DivergedError, InputError
from glassformer.spec.train import RunSpec
from glassformer.store.rundir import cache_folder
from glassformer.training.fit import StepRecord
from glassformer.training.stacked import StackedEngine, fit_stack, lacking, stack_key

#: Threads that write checkpoints while a GPU goes on training.
WRITERS = 8


@dataclass(frozen=True, slots=True)
class Left:
    """A run has left the stack: it is finished, has stopped, or has diverged (`error`)."""

    step: int
    error: DivergedError | None = None


def stack_groups(specs: Sequence[RunSpec]) -> list[list[int]]:
    """Return the indices of runs that can train as one; a run that cannot is a group of its own."""
    groups: dict[object, list[int]] = {}
    for index, spec in enumerate(specs):
        key = stack_key(spec) if not lacking(spec) else index
        groups.setdefault(key, []).append(index)
    return list(groups.values())


class StackedRuns:
    """Runs of one model's shape, each in its folder, trained as one.

    `runs[i]` is the run of `specs[i]`: call its `prepare()` or its `resume()` first, as for a run
    alone. Setting `stop_requested` ends all of them after the current step, with their state saved.
    `tasks` keeps what was built, for the next stack; `sharing` stacks use the device at a time.
    `ended` are runs that are not trained any more, with the step at which they ended: they hold
    their positions in the stack until then, so that the others compute what they did beside them.
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        folders: Sequence[Path],
        *,
        device: str = "cpu",
        tasks: dict[object, Task] | None = None,
        sharing: int = 1,
        ended: Mapping[int, int] | None = None,
    ) -> None:
        if len(folders) != len(specs) or len(set(folders)) < len(folders):
            raise InputError(
                f"{len(specs)} runs and {len(set(folders))} different folders", hint="one each"
            )
        self.engine = StackedEngine(
            specs, device=device, sharing=sharing, graphs=graphs_for(device)
        )
        self.stop_requested = False
        self.ended = {} if ended is None else dict(ended)
        tasks = {} if tasks is None else tasks
        self.runs: list[TrainingRun] = []
        for spec, folder, member in zip(specs, folders, self.engine.members, strict=True):
            if spec.task not in tasks:
                tasks[spec.task] = built(spec.task, cache=cache_folder(folder.parent))
            task = tasks[spec.task]
            check_fit(spec.model, task)
            files = {"tokenizer.json": task.tokenizer.to_json().encode()}
            parts = Parts(task=task, engine=member, files=files, notes=task.notes())
            self.runs.append(TrainingRun(spec, folder, device=device, parts=parts))
        for i, run in enumerate(self.runs):
            run.samples = functools.partial(self._samples, i)
            run.probes = functools.partial(self._probes, i)

    @property
    def threads(self) -> int:
        """The number of threads that a stacked step is worth on a CPU."""
        work = 0.0
        for run in self.runs:
            length = max(1, round(float(run.task.lengths("train").mean())))
            work += flops(run.spec.model, length=length).training * run.spec.train.batch_size
        return threads_for(work, FLOPS)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock every run for this process."""
        with contextlib.ExitStack() as locks:
            for i, run in enumerate(self.runs):
                if i not in self.ended:
                    locks.enter_context(run.directory.locked())
            yield

    def events(self) -> Iterator[tuple[int, Event | Left]]:
        """Train all runs to their ends; yield what happens, with the number of its run."""
        runs = self.runs
        with contextlib.ExitStack() as open_runs:
            writer = open_runs.enter_context(ThreadPoolExecutor(WRITERS))
            sessions = [contextlib.ExitStack() for _ in runs]
            for i, (session, run) in enumerate(zip(sessions, runs, strict=True)):
                if i in self.ended:
                    continue
                open_runs.push(session)
                session.enter_context(run.training(writer))
                if run.has_ended or run.progress.step >= run.spec.train.steps:
                    self.ended[i] = run.progress.step
                    yield from self._end(i, session)
            steps = fit_stack(
                self.engine,
                [run.task for run in runs],
                starts=[run.progress.step for run in runs],
                ended=self.ended,
                stopping=lambda: self.stop_requested,
            )
            for records in steps:
                yield from self._after(records, sessions)

    def _after(
        self, records: Mapping[int, StepRecord], sessions: Sequence[contextlib.ExitStack]
    ) -> Iterator[tuple[int, Event | Left]]:
        """Give each run its record; those that evaluate now judge the same batches as one."""
        settled = any(record.settled for record in records.values())
        evaluating = [i for i, record in records.items() if self._evaluates(i, record.step)]
        self.engine.expect(evaluating if settled else ())
        for i, record in records.items():
            run, session = self.runs[i], sessions[i]
            if i not in self.engine.live:
                continue  # it has diverged a few steps before
            run.stop_requested = self.stop_requested
            try:
                for event in run.after(record):
                    yield i, event
            except DivergedError as error:
                with contextlib.suppress(DivergedError):
                    session.__exit__(type(error), error, error.__traceback__)
                yield i, Left(run.progress.step, error)
                self.engine.leave([i])
        ended = [i for i in records if i in self.engine.live and self.runs[i].has_ended]
        for i in ended:
            yield from self._end(i, sessions[i])
        self.engine.leave(ended)

    def _samples(self, i: int) -> tuple[Sample, ...]:
        """Return a run's samples."""
        task = self.runs[i].task
        if not task.is_running_text:
            return ()
        return write_samples(TorchStepper(self.engine.alone(i)), task)

    def _probes(self, i: int) -> Probes:
        """Return a run's probes."""
        run = self.runs[i]
        examples, step = run.spec.train.probes, run.progress.step
        return probe_models(self.engine.alone(i), run.task, examples=examples, step=step)

    def _evaluates(self, i: int, step: int) -> bool:
        train = self.runs[i].spec.train
        return step % train.evaluate_every == 0 or step == train.steps

    def _end(self, i: int, session: contextlib.ExitStack) -> Iterator[tuple[int, Event | Left]]:
        """Wait for a run's last checkpoint, and close its files."""
        for event in self.runs[i].written():
            yield i, event
        session.close()
        yield i, Left(self.runs[i].progress.step)
