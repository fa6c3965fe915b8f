"""SIGKILL at every kind of moment: both engines, sweeps, preparing data; then the same command.

Half of the kills come at a random time. The others are aimed: every rename, deletion and opening of
a file in the folder is counted, and the process dies just before one of them, so that the windows
between a checkpoint and its pointers, within pruning and within `run.json` are hit as often as the
rest. What is left goes on to its end, which must be bit for bit that of the run that never died.
"""

import functools
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.attack import Found, Plan, chance, in_child, warm
from bench.attack_files import make_models
from bench.kills import outcome, sample, train
from glassformer.spec.serialize import override, to_json

SECONDS, MEGABYTES = 120.0, 4_000.0
STEPS = 12
WATCHED = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "open"}
Ended = Any


@functools.cache
def _spec(engine: str) -> str:
    return to_json(override(sample(engine), [f"train.steps={STEPS}", "train.evaluate_every=5"]))


def _run(engine: str) -> Callable[[Path], None]:
    return lambda folder: train(_spec(engine), folder / "run")


def _lora(folder: Path) -> None:
    from glassformer.lab.api import finetune

    world, begun = make_models(), (folder / "run" / "config.json").is_file()
    finetune(
        world / "runs" / "lm",
        world / "documents.jsonl",
        lora=2,
        steps=STEPS,
        name="run",
        runs=folder,
        overrides=["task.length=16", "train.batch_size=4", "train.checkpoint_every=2"],
        threads=1,
        resume=begun,
        progress=False,
    )


def _prepare(folder: Path) -> None:
    import glassformer as gf

    documents = make_models() / "documents.jsonl"
    gf.prepare([documents], folder / "corpus", vocab_size=300, shard_size=3_000, progress=False)


def _sweep(folder: Path) -> None:
    from bench.sweep import TINY
    from glassformer.lab.sweeps.sweep import sweep

    place = folder / "sweeps" / "digits"
    small = [*(text for text in TINY if "steps" not in text), "train.steps=6"]
    if (place / "sweep.json").is_file():
        sweep(place, jobs=1, stack=False, progress=False)
    else:
        sweep(
            "digits",
            vary={"train.lr": [1e-3, 3e-3]},
            overrides=small,
            seeds=2,
            sweeps=folder / "sweeps",
            jobs=1,
            stack=False,
            progress=False,
            overwrite=place.exists(),
        )


def _end_of_run(folder: Path) -> Ended:
    return outcome(folder / "run")


def _end_of_corpus(folder: Path) -> Ended:
    files = sorted(p for p in (folder / "corpus").rglob("*") if p.is_file() and p.name != "lock")
    return [(str(p.relative_to(folder)), hashlib.sha256(p.read_bytes()).hexdigest()) for p in files]


def _end_of_sweep(folder: Path) -> Ended:
    runs = sorted((folder / "sweeps" / "digits" / "runs").glob("*/run.json"))
    return [(p.parent.name, outcome(p.parent)) for p in runs]


#: How often each: what is done, and what is compared.
WORK: dict[str, tuple[int, Callable[[Path], None], Callable[[Path], Ended]]] = {
    "torch": (4, _run("torch"), _end_of_run),
    "numpy": (4, _run("numpy"), _end_of_run),
    "lora": (2, _lora, _end_of_run),
    "prepare": (2, _prepare, _end_of_corpus),
    "sweep": (1, _sweep, _end_of_sweep),
}


def _hook(folder: Path, events: list[int], at: int) -> None:
    """Count what touches the folder's files, and die just before the one that is aimed at."""
    inside = str(folder)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WATCHED or not any(inside in str(word) for word in arguments[:2]):
            return
        events[0] += 1
        if events[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)


def _child(folder: Path, work: Callable[[Path], None], *, at: int = 0) -> Callable[[], int]:
    def body() -> int:
        events = [0]
        _hook(folder, events, at)
        work(folder)
        (folder.parent / "events").write_text(str(events[0]))
        return 0

    return body


@functools.cache
def _whole(kind: str, place: Path) -> tuple[Ended, int, float]:
    """Do the work undisturbed; return its end, how many events it had, and its seconds."""
    _, work, end = WORK[kind]
    folder = place / f"whole-{kind}" / "x"
    for _ in range(2):  # the first warms the caches
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        ended = in_child(
            _child(folder, work), folder=folder.parent, seconds=SECONDS, megabytes=MEGABYTES
        )
        assert ended.code == 0, ended.err[-2000:]
    return end(folder), int((folder.parent / "events").read_text()), ended.seconds


def attack(plan: Plan, cases: Iterable[int]) -> Iterator[tuple[int, Found]]:
    """Kill, go on, compare."""
    make_models()
    warm()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        for case in cases:
            yield case, killed(Path(name), chance("kills", plan.seed, case))


def killed(place: Path, r: random.Random) -> Found:
    """Kill one to three times, then let it end; compare the end."""
    kind = r.choices(list(WORK), [one[0] for one in WORK.values()])[0]
    _, work, end = WORK[kind]
    whole, events, seconds = _whole(kind, place)
    folder = place / "case" / "x"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    told, kills = [], 0
    for _ in range(r.choice((1, 1, 2, 3))):
        aimed = r.random() < 0.6
        at = r.randint(1, events) if aimed else 0
        after = SECONDS if aimed else r.uniform(0.0, seconds)
        ended = _let(folder, work, at=at, seconds=after)
        told.append(f"at event {at} of {events}" if aimed else f"after {after:.3f} s")
        kills += ended == -signal.SIGKILL
        if ended not in (0, -signal.SIGKILL):
            return Found(f"{kind}: exit {ended}", fault=True, detail=f"{told} {_err(folder)}")
    code = _let(folder, work, at=0, seconds=SECONDS)
    detail = f"{kind}: killed {', '.join(told)}"
    if code != 0:
        return Found(f"{kind}: could not go on", True, detail=f"{detail}\n{_err(folder)}")
    if json.dumps(end(folder)) != json.dumps(whole):
        return Found(f"{kind}: ANOTHER END", fault=True, detail=detail)
    strays = [p for p in folder.rglob(".*") if p.name.startswith(".tmp-") or p.suffix == ".tmp"]
    if strays:
        return Found(f"{kind}: left {strays[0].name}", fault=True, detail=detail)
    return Found(f"{kind}: the same bits", detail=detail, kills=kills)


def _err(folder: Path) -> str:
    path = folder.parent / "err"
    return path.read_text()[-1500:] if path.is_file() else ""


def _let(folder: Path, work: Callable[[Path], None], *, at: int, seconds: float) -> int:
    """Let a child work until it ends, or is killed after so many seconds; return its code."""
    ended = in_child(
        _child(folder, work, at=at),
        folder=folder.parent,
        seconds=seconds,
        megabytes=MEGABYTES,
        grace=0.0,
        ask_first=False,
    )
    return ended.code
