"""Attacks on the product, seeded and counted: `python -m bench attack [--only KIND]`.

kills   SIGKILL, at random and aimed at the windows of a save, over both engines, sweeps and prepare
flips   one bit of one file of a run, a quantized model, an exported folder, a token shard
files   mutated model files: safetensors, GGUF, configs, indexes, tokenizers, templates
guided  the same and files of runs, guided by the lines of the readers that a mutant reaches
lines   random command lines and configs
server  the explorer's server: bad requests, slow clients, many at once
serve   `glass serve`: the same, clients killed, idle connections, files deleted

A case is a kind, a seed and a number, and can be repeated alone with `--case`. What was found is
kept, a line a case, in a ledger below build/attack; an attack that was stopped goes on there with
`--resume`, and `--cases 0:500` does a piece of one. A row counts what became of the cases; its last
word is what must be none.

Slowness is judged on a machine that may be crowded: a case over its limit of wall time is repeated
alone. The limit of the repetition is the same number of CPU seconds, and of wall seconds as many
times more as the case was kept waiting: the load per core, or the case's own time on the run queue.
"""

import argparse
import collections
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import random
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.clock import said

#: How many cases of each kind a full attack has, and what `--quick` takes.
FULL = {"kills": 1000, "flips": 10_000, "files": 20_000, "lines": 5_000, "server": 10_000}
FULL |= {"serve": 5_000, "guided": 2_000}
QUICK = {"kills": 4, "flips": 40, "files": 60, "lines": 20, "server": 40, "serve": 40}
QUICK |= {"guided": 20}
MEGABYTE = 1 << 20
RULE = (
    "a case over its limit is repeated alone, and is a fault if it takes more CPU seconds than"
    " that, or more wall seconds times the load per core or its own waiting for a core"
)


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a case: a word for the count, whether it is a fault, and the evidence."""

    outcome: str
    fault: bool = False
    seconds: float = 0.0
    detail: str = ""
    megabytes: float = 0.0
    cpu: float = 0.0
    kills: int = 0


@dataclass(slots=True)
class Plan:
    """What is attacked, how often, from which seed, and where the results are kept."""

    kinds: tuple[str, ...]
    counts: dict[str, int]
    seed: int = 0
    seconds: float = float("inf")
    ledger: Path = Path("build/attack")
    began: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """Return True when the time for this slice is used up."""
        return time.monotonic() - self.began > self.seconds


def chance(kind: str, seed: int, case: int) -> random.Random:
    """Return the source of everything random in one case."""
    return random.Random(f"{kind}/{seed}/{case}")


def warm() -> None:
    """Import all of the package, so that forked children need not: 0.05 s a case instead of 1 s."""
    import glassformer

    for module in pkgutil.walk_packages(glassformer.__path__, "glassformer."):
        with contextlib.suppress(ImportError):  # of another machine
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")  # which the first optimizer imports
    gc.collect()
    gc.freeze()


# --- a child with limits --------------------------------------------------------------------------


def used_megabytes() -> float:
    """Return this process's address space, which a limit is set above."""
    return (
        int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") / MEGABYTE
    )


def confine(megabytes: float) -> None:
    """Let this process take so much address space above what it has, and write no core."""
    most = int((used_megabytes() + megabytes) * MEGABYTE)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def crowding(process: int) -> float:
    """Return how many times longer than alone a process takes here and now, 1 at least.

    That is the load per core, or its time on and off the run queue over its time on a core.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    waiting = 1.0
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        running, queued, _ = Path(f"/proc/{process}/schedstat").read_text().split()
        waiting = (int(running) + int(queued)) / int(running)
    return max(1.0, load, waiting)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended; `stopped` says that it was asked to, after its time; `over` that it was
    killed, since it did not end then.
    """

    code: int
    out: str
    err: str
    seconds: float
    megabytes: float
    cpu: float = 0.0
    stopped: bool = False
    over: bool = False


def in_child(
    work: Callable[[], int],
    *,
    folder: Path,
    seconds: float,
    megabytes: float,
    grace: float = 10.0,
    ask_first: bool = True,
    crowded: bool = False,
) -> Ended:
    """Run a call in a forked process, its output in files; after its time it gets a SIGTERM, and
    after the grace a SIGKILL, or that at once. `crowded` stretches both by the crowding.
    """
    out, err = folder / "out", folder / "err"
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setpgid(0, 0)
            _redirect(out, err)
            confine(megabytes)
            code = work()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    stopped = over = False
    since, limit = began, seconds
    while not _has_ended(child, since + limit):
        now = time.monotonic()
        if crowded and now - since < seconds * crowding(child):
            limit = now - since + 1.0
            continue
        over = stopped or not ask_first
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL if over else signal.SIGTERM)
        if over:
            break
        stopped, since, limit, seconds = True, now, grace, grace
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it left behind
    return Ended(
        os.waitstatus_to_exitcode(status),
        _text(out),
        _text(err),
        time.monotonic() - began,
        usage.ru_maxrss / 1024,
        usage.ru_utime + usage.ru_stime,
        stopped,
        over,
    )


def _has_ended(child: int, deadline: float) -> bool:
    """Wait for a child's end, until a time at most; it stays to be reaped."""
    handle = os.pidfd_open(child)
    try:
        left = max(0.0, deadline - time.monotonic())
        return bool(select.select([handle], [], [], left)[0])
    finally:
        os.close(handle)


def _redirect(out: Path, err: Path) -> None:
    for path, number, flags in (
        (Path(os.devnull), 0, os.O_RDONLY),
        (out, 1, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (err, 2, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1
    )


def _text(path: Path, most: int = 200_000) -> str:
    try:
        with path.open("rb") as file:
            return file.read(most).decode("utf-8", "replace")
    except FileNotFoundError:  # killed before its first line
        return ""


def many_in_child(
    judge: Callable[[int], Found],
    cases: Iterable[int],
    *,
    seconds: float,
    megabytes: float,
) -> Iterator[tuple[int, Found]]:
    """Judge cases one after another in a forked process with limits; yield each as it is done.

    A case that takes too long is repeated; one that does so again, or ends the process, is a fault.
    The next one gets a new process.
    """
    left = collections.deque(cases)
    again: set[int] = set()
    while left:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                confine(megabytes)
                with open(writing, "w", encoding="utf-8", buffering=1) as pipe:
                    for case in left:
                        pipe.write(json.dumps([case, _judged(judge, case)]) + "\n")
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb", buffering=0) as pipe:
            yield from _answers(pipe.fileno(), child, left, seconds, again)


def _judged(judge: Callable[[int], Found], case: int) -> dict[str, Any]:
    began = time.monotonic()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak of this case, not of all before
    try:
        found = judge(case)
    except MemoryError:
        found = Found("memory", fault=True, detail=traceback.format_exc()[-2000:])
    except BaseException as error:
        detail = traceback.format_exc()[-2000:]
        found = Found(f"traceback {type(error).__name__}", fault=True, detail=detail)
    status = Path("/proc/self/status").read_text()
    peak = float(status.partition("VmHWM:")[2].split()[0]) / 1024
    return {
        "outcome": found.outcome,
        "fault": found.fault,
        "seconds": round(time.monotonic() - began, 3),
        "detail": found.detail,
        "megabytes": round(peak),
    }


def _answers(
    pipe: int, child: int, left: collections.deque[int], seconds: float, again: set[int]
) -> Iterator[tuple[int, Found]]:
    pending = b""
    while True:
        limit = seconds * (crowding(child) if left and left[0] in again else 1.0)
        ready, _, _ = select.select([pipe], [], [], limit)
        chunk = os.read(pipe, 1 << 16) if ready else b""
        if not ready:
            os.kill(child, signal.SIGKILL)
        if not chunk:
            break
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            case, values = json.loads(line)
            assert case == left.popleft()
            yield case, Found(**values)
    _, status = os.waitpid(child, 0)
    if left and not ready and left[0] not in again:
        again.add(left[0])
    elif left:
        code = os.waitstatus_to_exitcode(status)
        what = "hang" if not ready else f"process ended {code}"
        yield left.popleft(), Found(what, fault=True, seconds=seconds)


# --- the ledger -----------------------------------------------------------------------------------


class Ledger:
    """The cases of one kind that were judged, a line each, and the trees that were attacked."""

    def __init__(self, plan: Plan, kind: str, *, resume: bool = True) -> None:
        self.path = plan.ledger / f"{kind}-{plan.seed}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[int, Found] = {}
        self.trees: list[str] = []
        if self.path.is_file() and not resume:
            self.path.replace(self.path.with_suffix(".before"))
        if self.path.is_file():
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the line of a kill
                    self._read(json.loads(line))

    def _read(self, values: dict[str, Any]) -> None:
        if "tree" in values:
            self.trees += [] if values["tree"] in self.trees else [values["tree"]]
        else:
            case = values.pop("case")
            self.found[case] = Found(**values)

    def begin(self) -> None:
        """Keep the tree that is attacked from here on."""
        self._write({"tree": tree(), "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime())})
        self._read({"tree": tree()})

    def add(self, case: int, found: Found) -> None:
        """Keep one case."""
        self.found[case] = found
        values = {name: getattr(found, name) for name in Found.__dataclass_fields__}
        self._write({"case": case, **values})

    def _write(self, values: dict[str, Any]) -> None:
        text = json.dumps(values) + "\n"
        begun = self.path.is_file() and self.path.stat().st_size > 0
        with self.path.open("rb+" if begun else "wb") as file:
            if begun and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
                text = "\n" + text  # after the half line of a kill
        with self.path.open("a") as file:
            file.write(text)

    def missing(self, count: int) -> list[int]:
        """Return the cases that are not judged yet."""
        return [case for case in range(count) if case not in self.found]

    def rows(self, kind: str) -> Iterator[dict[str, object]]:
        """Count the outcomes; the last row is that of the faults."""
        counts = collections.Counter(found.outcome for found in self.found.values())
        for outcome, count in counts.most_common():
            yield _row(kind, f"{count:,} {outcome}")
        faults = [(case, found) for case, found in self.found.items() if found.fault]
        longest = max((found.seconds for found in self.found.values()), default=0.0)
        most = max((found.megabytes for found in self.found.values()), default=0.0)
        kills = sum(found.kills for found in self.found.values())
        killed = f", {kills:,} kills" if kills else ""
        told = f"{len(self.found):,} cases{killed}: {len(faults)} faults"
        yield _row(f"{kind}, the longest; at most {most:.0f} MB", told, ms=longest * 1e3)
        yield _row(f"{kind}, attacked", f"tree {', '.join(self.trees) or 'not recorded'}")
        for case, found in faults[:50]:
            print(f"{kind} --case {case}: {found.outcome}\n{found.detail}", file=sys.stderr)


@functools.cache
def tree() -> str:
    """Return the commit that is attacked, with a plus where files were changed since."""
    words = ["git", "describe", "--always", "--dirty=+", "--abbrev=10"]
    try:
        done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


_row = partial(said, "attack")


# --- the command ----------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    """Add what an attack can be told."""
    parser.add_argument("--only", choices=tuple(FULL), help="one kind of attack")
    parser.add_argument("--count", type=int, help="cases of each kind, instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="then stop; go on later"
    )
    parser.add_argument("--ledger", type=Path, default=Path("build/attack"))
    parser.add_argument("--case", type=int, help="judge this one alone, and show it")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the ledger; without it, one begins anew"
    )
    parser.add_argument("--cases", default="", metavar="FIRST:END", help="this piece of an attack")


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Attack, as far as the time goes; yield the counts of all cases so far."""
    kinds = (asked.only,) if asked.only else tuple(FULL)
    counts = dict(QUICK if quick else FULL)
    if asked.count is not None:
        counts = dict.fromkeys(counts, asked.count)
    plan = Plan(kinds, counts, asked.seed, asked.seconds, asked.ledger)
    import torch

    torch.set_num_threads(1)  # children are forked
    for kind in kinds:
        module = importlib.import_module(f"bench.attack_{kind}")
        if asked.case is not None:
            for _, found in module.attack(plan, [asked.case]):
                print(found.outcome, f"{found.seconds:.2f} s", found.detail, sep="\n")
            continue
        ledger = Ledger(plan, kind, resume=asked.resume)
        ledger.begin()
        missing = ledger.missing(counts[kind])
        if asked.cases:
            first, _, end = asked.cases.partition(":")
            missing = [case for case in missing if int(first or 0) <= case < int(end or 1e9)]
        for case, found in module.attack(plan, missing):
            ledger.add(case, found)
            if plan.is_over():
                break
        yield from ledger.rows(kind)
    if asked.case is None:
        print(f"The rule for slowness: {RULE}.", file=sys.stderr)
