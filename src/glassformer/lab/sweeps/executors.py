"""Executors of runs: one after another here, in processes, stacked on one device, on Ray.

All leave the same run folders. A run is done when its folder says so: an executor that was killed
anywhere is called again with the same jobs, goes on with what has begun, and repeats nothing that
has ended. A run that diverges or fails is a result; a worker that dies has its run done again.

`python -m glassformer.lab.sweeps.executors` is a worker: groups of jobs as JSON lines on stdin,
what happens on stdout. It ends when its stdin does, so that no worker outlives a killed driver.
"""

import contextlib
import hashlib
import importlib
import io
import json
import os
import queue
import selectors
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

from glassformer.data.own_code import allow_own_code
from glassformer.data.task import Task
from glassformer.kernels.threads import taking
from glassformer.lab.runs.table import number, read_record
from glassformer.spec.disk import folder_beside, remove, rename, sync_tree
from glassformer.spec.errors import DivergedError, FileError, GlassError, InputError, MachineError
from glassformer.spec.serialize import from_dict, json_numbers, to_dict
from glassformer.spec.train import RunSpec
from glassformer.store.rundir import RunDirectory
from glassformer.training.fit import StepRecord

#: Statuses after which a run is not continued.
ENDED = ("finished", "diverged", "failed")
#: Times that a run is begun by a worker that dies before the run counts as failed.
ATTEMPTS = 3
#: Seconds between two reports of a worker's step.
REPORT_SECONDS = 0.5
#: Seconds that a run's lock may still be held by a worker whose driver was killed.
LOCK_SECONDS = 10.0
FAILED = "failed.json"
#: The most runs in one stack: more of them gain nothing on the largest GPU, and cost memory.
STACKED = 64
#: The fewest runs of a stack that was divided among workers.
DIVIDED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run to be trained in a folder, to its end or to the step `until`.

    One that has `ended`, at that step, is not trained: it holds its position in a stack.
    """

    name: str
    folder: Path
    spec: RunSpec
    device: str = "cpu"
    threads: int = 1
    until: int | None = None
    own_code: tuple[str, ...] = ()
    ended: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a worker."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {"folder": str(self.folder), "spec": to_dict(self.spec)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Job":
        """Read what `to_dict` made."""
        for source in data["own_code"]:
            allow_own_code(source)
        own = {"folder": Path(data["folder"]), "spec": from_dict(RunSpec, data["spec"])}
        return cls(**{**data, **own, "own_code": tuple(data["own_code"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What became of a run. `scores` at its end, and at every evaluation in `curve`."""

    name: str
    status: str
    step: int = 0
    scores: Mapping[str, float] = field(default_factory=dict)
    curve: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    why: str = ""

    @property
    def has_ended(self) -> bool:
        """True if nothing more will come of it."""
        return self.status in ENDED

    def at(self, step: int | None, metric: str) -> float | None:
        """Return a score at an evaluation (None: the last), if the run came that far."""
        if self.status in ("diverged", "failed"):
            return None
        return (self.scores if step is None else self.curve.get(step, {})).get(metric)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"curve": {str(step): dict(v) for step, v in self.curve.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Result":
        """Read what `to_dict` made."""
        curve = {int(step): values for step, values in data["curve"].items()}
        return cls(**{**data, "curve": curve})


@dataclass(frozen=True, slots=True)
class Stepped:
    """A run has reached a step; it begins with step 0 or where it was."""

    name: str
    step: int


@dataclass(frozen=True, slots=True)
class Told:
    """Something that whoever watches should know; the runs go on."""

    text: str


Update = Stepped | Result | Told
Stop = Callable[[], bool]


# --- one run --------------------------------------------------------------------------------------


def read_result(name: str, folder: Path) -> Result | None:
    """Return what a folder says about its run; None if nothing has begun there."""
    if (folder / FAILED).is_file():
        why = str(read_record(folder, FAILED).get("why"))
        return Result(name=name, status="failed", why=why)
    try:
        record = read_record(folder, "run.json")
    except (FileError, InputError):
        return None
    status = str(record.get("status"))
    clock = record.get("clock")
    curve = dict(_evaluations(folder / "metrics.jsonl"))
    last = curve[max(curve)] if curve else {}
    if last and "loss" in last:
        losses = [values["loss"] for values in curve.values() if "loss" in values]
        last = {**last, "best_loss": min(losses)}
    diverged = status == "diverged" or (status == "finished" and not last)
    return Result(
        name=name,
        status="diverged" if diverged else status,
        step=int(number(record.get("step")) or 0),
        scores=last,
        curve=curve,
        seconds=float((clock if isinstance(clock, dict) else {}).get("seconds") or 0.0),
        why="the loss is not finite" if diverged else "",
    )


def _evaluations(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the finite scores of each evaluation of a run."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        if '"val": {' not in line:
            continue
        try:
            data = json.loads(line)
            val, step = data["val"], int(data["step"])
        except (ValueError, KeyError, TypeError):
            continue  # a line that a kill cut short
        oracle = val.get("oracle") or {}
        scores = {key: number(val.get(key)) for key in ("loss", "accuracy", "exact_match")}
        scores |= {key: number(oracle.get(key)) for key in ("bits_per_byte", "excess")}
        yield step, {key: float(v) for key, v in scores.items() if v is not None}


def is_done(job: Job, found: Result | None) -> bool:
    """Return True if a job's run has ended, or has come as far as was requested."""
    if found is None:
        return False
    if found.has_ended:
        return True
    return job.until is not None and found.status == "stopped" and found.step >= job.until


def train_job(job: Job, *, stop: Stop = lambda: False) -> Generator[Stepped, None, Result]:
    """Train a run from where it is to where the job ends, step by step; a failure is a result."""
    found = read_result(job.name, job.folder)
    if found is not None and is_done(job, found):
        return found
    yield Stepped(job.name, 0)
    try:
        _wait_for_lock(job.folder)
        with taking(job.threads):
            yield from _train(job, stop=stop)
    except DivergedError:
        pass  # its run.json says so
    except Exception as error:
        text = error.what if isinstance(error, GlassError) else f"{type(error).__name__}: {error}"
        return record_failure(job, text)
    made = read_result(job.name, job.folder)
    assert made is not None, "a run that was trained has a record"
    return made


def record_failure(job: Job, why: str) -> Result:
    """Leave the reason in the run's folder: a failed run is not begun again."""
    RunDirectory(job.folder).write_json(FAILED, {"why": why[:500]})
    return Result(name=job.name, status="failed", why=why[:500])


def _train(job: Job, *, stop: Stop) -> Iterator[Stepped]:
    from glassformer.lab.runs.run import TrainingRun  # imports torch, as do stacks

    run = TrainingRun(job.spec, job.folder, device=job.device)
    with run.directory.locked():
        if (job.folder / "config.json").is_file():
            run.resume()
        else:
            run.prepare()
        for event in run.events():
            if isinstance(event, StepRecord):
                yield Stepped(job.name, event.step)
                if event.step == job.until or stop():
                    run.request_stop()


def _wait_for_lock(folder: Path) -> None:
    """Wait for a worker of a driver that was just killed to end."""
    end = time.monotonic() + LOCK_SECONDS
    while RunDirectory(folder).held() and time.monotonic() < end:
        time.sleep(0.05)


# --- here, one after another ----------------------------------------------------------------------


def run_here(jobs: Iterable[Job], *, stop: Stop = lambda: False) -> Iterator[Update]:
    """Train one job after another in this process."""
    for job in jobs:
        if stop():
            return
        yield (yield from train_job(job, stop=stop))


# --- processes on this machine --------------------------------------------------------------------


class _Worker:
    """A process that trains the groups of jobs it is given, one group at a time."""

    def __init__(self, threads: int, *, compilers: int) -> None:
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        paths = [p for p in (*sys.path, os.environ.get("PYTHONPATH", "")) if p]
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(compilers),
            **os.environ,
            **dict.fromkeys(names, str(threads)),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "glassformer.lab.sweeps.executors"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a signal from the terminal is the driver's to pass on
        )
        self.jobs: dict[str, Job] = {}
        self.unread = b""

    @property
    def is_idle(self) -> bool:
        """True if it has nothing left to train."""
        return all(job.ended is not None for job in self.jobs.values())

    @property
    def output(self) -> IO[bytes]:
        """What the worker reports."""
        assert self.process.stdout is not None
        return self.process.stdout

    def send(self, line: str) -> bool:
        """Send a line; False if the worker is gone."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()
        except OSError:
            return False
        return True

    def lines(self) -> list[str] | None:
        """Return the complete lines that have arrived; None at the end of the worker."""
        data = os.read(self.output.fileno(), 1 << 16)
        if not data:
            return None
        *whole, self.unread = (self.unread + data).split(b"\n")
        return [line.decode() for line in whole]

    def end(self) -> None:
        """End the process."""
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run_processes(
    groups: Iterable[Sequence[Job]], *, count: int, stop: Stop = lambda: False
) -> Iterator[Update]:
    """Train `count` groups at a time, each in a process; a process that dies is replaced.

    A group of one is a run, a larger one is trained as one.
    """
    waiting, attempts = deque(groups), dict[str, int]()
    workers: list[_Worker] = []
    compilers = max(1, (os.cpu_count() or 1) // count)
    told = False
    with selectors.DefaultSelector() as selector:

        def give(worker: _Worker) -> None:
            if not waiting or told:
                return
            group = waiting.popleft()
            worker.jobs = {job.name: job for job in group}
            for job in group:
                if job.ended is None:
                    attempts[job.name] = attempts.get(job.name, 0) + 1
            line = {"sharing": count, "jobs": [job.to_dict() for job in group]}
            worker.send(json.dumps(line))  # if it is gone, its end is noticed below

        def start() -> None:
            worker = _Worker(waiting[0][0].threads, compilers=compilers)
            workers.append(worker)
            selector.register(worker.output, selectors.EVENT_READ, worker)
            give(worker)

        try:
            while len(workers) < count and waiting:
                start()
            while not all(worker.is_idle for worker in workers):
                if stop() and not told:
                    told = True
                    for worker in workers:
                        worker.send("stop")
                for key, _ in selector.select(REPORT_SECONDS):
                    worker = key.data
                    lines = worker.lines()
                    if lines is None:  # it died
                        selector.unregister(worker.output)
                        workers.remove(worker)
                        worker.end()
                        yield from _lost(worker, waiting, attempts)
                        if waiting and not told:
                            start()
                        continue
                    for line in lines:
                        update = _update(line)
                        yield update
                        if isinstance(update, Result):
                            job = worker.jobs[update.name]
                            worker.jobs[update.name] = replace(job, ended=update.step)
                            if worker.is_idle:
                                worker.jobs = {}
                                give(worker)
        finally:
            for worker in workers:
                worker.end()


def _lost(
    worker: _Worker, waiting: "deque[Sequence[Job]]", attempts: Mapping[str, int]
) -> Iterator[Update]:
    """Do the runs of a dead worker again; after several attempts one has failed."""
    jobs, worker.jobs = [*worker.jobs.values()], {}
    lost = [job for job in jobs if job.ended is None and attempts[job.name] >= ATTEMPTS]
    again = [job for job in jobs if job not in lost]
    if any(job.ended is None for job in again):
        waiting.appendleft(again)
    code = worker.process.returncode
    for job in lost:
        why = f"its process ended {ATTEMPTS} times, with exit code {code}"
        yield record_failure(job, why)


def _update(line: str) -> Update:
    data = json.loads(line)
    if "status" in data:
        return Result.from_dict(data)
    if "text" in data:
        return Told(data["text"])
    return Stepped(data["name"], data["step"])


def work() -> None:
    """Train groups of jobs from stdin until it ends; `stop` saves the current runs and ends."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints must not disturb the reports
    groups: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
    stopping = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "stop":
                stopping.set()
                groups.put(None)
            else:
                groups.put(json.loads(line))
        os._exit(0)  # the driver is gone: a run goes on from its last checkpoint

    threading.Thread(target=listen, daemon=True).start()

    def send(update: Update) -> None:
        data = update.to_dict() if isinstance(update, Result) else asdict(update)
        try:
            report.write(json.dumps(json_numbers(data)) + "\n")
            report.flush()
        except BrokenPipeError:
            os._exit(0)  # the driver is gone

    tasks: dict[object, Task] = {}
    while (group := groups.get()) is not None:
        jobs, told = [Job.from_dict(data) for data in group["jobs"]], dict[str, float]()
        for update in run_stacked(
            jobs, sharing=group["sharing"], tasks=tasks, stop=stopping.is_set
        ):
            if isinstance(update, Stepped):
                now = time.monotonic()
                if now - told.get(update.name, 0.0) < REPORT_SECONDS:
                    continue
                told[update.name] = now
            send(update)


# --- stacked on one device ------------------------------------------------------------------------


def stacks_of(jobs: Sequence[Job], *, workers: int = 1) -> list[list[Job]]:
    """Return jobs in groups that train as one; a run that cannot be stacked is alone.

    Where there are fewer groups than workers, large groups are divided: writing a run's files takes
    a core longer than training it takes a GPU. Runs that have ended are in the groups in which they
    were trained; a group of only such ones is left out.
    """
    from glassformer.lab.runs.stack import stack_groups

    groups = [[jobs[i] for i in group] for group in stack_groups([job.spec for job in jobs])]
    stacks = [
        group[start : start + STACKED]
        for group in groups
        for start in range(0, len(group), STACKED)
    ]
    while len(stacks) < workers and len(largest := max(stacks, key=len)) >= 2 * DIVIDED:
        stacks.remove(largest)
        middle = (len(largest) + 1) // 2
        stacks += [largest[:middle], largest[middle:]]
    return [stack for stack in stacks if any(job.ended is None for job in stack)]


def run_stacked(
    jobs: Iterable[Job],
    *,
    sharing: int = 1,
    tasks: dict[object, Task] | None = None,
    stop: Stop = lambda: False,
) -> Iterator[Update]:
    """Train runs of one shape as one, shape after shape; a run that cannot be stacked alone.

    A stack that fails as a whole, mostly for want of memory, is tried again in halves, and the
    reason is told: each run goes on from its last checkpoint. `sharing` processes do this on the
    device at the same time; `tasks` keeps what was built.
    """
    waiting = deque(stacks_of([*jobs]))
    tasks = {} if tasks is None else tasks
    while waiting and not stop():
        group = waiting.popleft()
        if len(group) == 1:
            yield from run_here(group, stop=stop)
            continue
        ended: set[str] = set()
        try:
            for update in _train_stack(group, tasks, sharing=sharing, stop=stop):
                if isinstance(update, Result):
                    ended.add(update.name)
                yield update
        except (RuntimeError, MemoryError, GlassError) as error:
            rest = [job for job in group if job.ended is None and job.name not in ended]
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            yield Told(f"{len(rest)} runs did not train as one, so they go on in halves: {reason}")
            middle = (len(rest) + 1) // 2
            waiting.extendleft(half for half in (rest[middle:], rest[:middle]) if half)


def _train_stack(
    group: list[Job], tasks: dict[object, Task], *, sharing: int, stop: Stop
) -> Iterator[Update]:
    ended = {i: job.ended for i, job in enumerate(group) if job.ended is not None}
    for i, job in enumerate(group):
        if i not in ended:
            _wait_for_lock(job.folder)
            found = read_result(job.name, job.folder)
            if found is not None and is_done(job, found):  # killed before it was told
                ended[i] = found.step
                yield found
    from glassformer.lab.runs.stack import Left, StackedRuns

    stack = StackedRuns(
        [job.spec for job in group],
        [job.folder for job in group],
        device=group[0].device,
        tasks=tasks,
        sharing=sharing,
        ended=ended,
    )
    with taking(group[0].threads), stack.locked():
        for i, (job, run) in enumerate(zip(group, stack.runs, strict=True)):
            if i in ended:
                continue
            if (job.folder / "config.json").is_file():
                run.resume()
            else:
                run.prepare()
            yield Stepped(job.name, run.progress.step)
        for number, event in stack.events():
            job = group[number]
            if isinstance(event, StepRecord):
                yield Stepped(job.name, event.step)
                if event.step == job.until:
                    stack.runs[number].stop_requested = True
                if stop():
                    stack.stop_requested = stack.runs[number].stop_requested = True
            elif isinstance(event, Left):
                made = read_result(job.name, job.folder)
                assert made is not None, "a run that was trained has a record"
                yield made


# --- Ray ------------------------------------------------------------------------------------------


def optional_library(name: str) -> Any:
    """Import a library of the `sweep` extra, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MachineError(f"this needs the library {name}", hint=f"pip install {name}") from error


def run_ray(jobs: Iterable[Job], *, address: str, stop: Stop = lambda: False) -> Iterator[Update]:
    """Train jobs on a Ray cluster: `auto` joins the one that runs here, `local` starts one.

    A worker trains in a folder of its own machine and sends it back when the run has ended, so that
    no file system is shared. Ray does the run of a dead worker again.
    """
    ray = optional_library("ray")
    joined = not ray.is_initialized()
    if joined:
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, OSError) as error:
            raise MachineError(
                f"no Ray cluster at {address}: {str(error).splitlines()[0][:200]}",
                hint="--ray local starts one here; `ray start --head` starts one to join",
            ) from error
    try:
        waiting, running = deque(jobs), dict[Any, Job]()
        here = str(waiting[0].folder.parent.resolve()) if waiting else ""
        sweep = hashlib.sha256(here.encode()).hexdigest()[:12]
        while waiting or running:
            cores = int(ray.cluster_resources().get("CPU", 1))
            while waiting and len(running) < 2 * cores and not stop():
                job = waiting.popleft()
                remote = ray.remote(
                    num_cpus=job.threads,
                    num_gpus=1 if job.device.startswith("cuda") else 0,
                    max_retries=ATTEMPTS,
                )(train_away)
                begun = _packed(job.folder) if job.folder.is_dir() else b""
                running[remote.remote(job.to_dict(), begun, sweep)] = job
                yield Stepped(job.name, 0)
            if stop():
                for task in running:
                    ray.cancel(task, force=True)
                return
            done, _ = ray.wait(list(running), timeout=REPORT_SECONDS)
            for task in done:
                job = running.pop(task)
                yield _returned(ray, task, job)
    finally:
        if joined:
            ray.shutdown()


def _returned(ray: Any, task: Any, job: Job) -> Result:
    """Unpack a run that came back; one whose workers died every time has failed."""
    try:
        data = ray.get(task)
    except ray.exceptions.RayError as error:
        return record_failure(job, f"Ray lost it: {type(error).__name__}")
    _unpack(data, job.folder)
    made = read_result(job.name, job.folder)
    assert made is not None, "a run that came back has a record"
    return made


def train_away(data: Mapping[str, Any], begun: bytes, sweep: str) -> bytes:
    """Train a job in a folder of this machine, and return the folder as a tar archive.

    Runs of one sweep share the folder above, where a text keeps its tokens.
    """
    job = Job.from_dict(data)
    above = Path(tempfile.gettempdir()) / f"glassformer-ray-{sweep}"
    folder = above / f"{job.name}-{os.getpid()}"
    if begun:
        _unpack(begun, folder)
    away = replace(job, folder=folder, own_code=(), ended=None)
    try:
        deque(train_job(away), maxlen=0)  # to its end
        return _packed(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _packed(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != "lock":
                archive.add(path, path.relative_to(folder).as_posix())
    return buffer.getvalue()


def _unpack(data: bytes, folder: Path) -> None:
    """Put a run's folder in place in one rename: a kill leaves the old one or the new one."""
    with folder_beside(folder) as beside:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(beside, filter="data")
        sync_tree(beside)
        remove(folder)
        rename(beside, folder)


if __name__ == "__main__":
    work()
