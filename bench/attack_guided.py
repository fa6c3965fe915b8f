"""Mutated files of models and runs, guided by coverage: a mutant that reaches a new line of the
readers, from another line than before, is kept and mutated further.

The lines are counted by `sys.settrace` in the packages that read files. What a case is depends on
what was found before, so a case is not repeated by its number: the file of a fault is kept in
`guided/` below the ledger, and so are the mutants that reached something new, by kind.
"""

import hashlib
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from bench.attack import Found, Plan, chance, many_in_child
from bench.attack_files import (
    MEGABYTES,
    SECONDS,
    TARGETS,
    caused,
    make_models,
    mutated_bytes,
    mutated_json,
    mutated_tensors,
    opened,
    planted,
    use_model,
    watch,
)

Mutate = Callable[[bytes, random.Random], bytes]


def mutated_lines(data: bytes, r: random.Random) -> bytes:
    """Change a line of a log of JSON, repeat it, or change any bytes."""
    lines = data.split(b"\n")
    at = r.randrange(len(lines))
    match r.randrange(3):
        case 0 if lines[at].startswith(b"{"):
            lines[at] = mutated_json(lines[at], r)
        case 1:
            lines[at:at] = [lines[at]] * r.choice((1, 100, 10_000))
        case _:
            return mutated_bytes(data, r)
    return b"\n".join(lines)


def grown_json(data: bytes, r: random.Random) -> bytes:
    """Put a list or an object of up to a million items into a JSON text, at a key of its own."""
    made = json.loads(data)
    count = r.choice((1_000, 100_000, 1_000_000))
    item: Any = r.choice((0, {}, [], "", "ab", None, 1e300))
    many = {f"{i:x}": item for i in range(count)} if r.random() < 0.5 else [item] * count
    holder = made
    while isinstance(holder, dict) and r.random() < 0.7:
        inner = [value for value in holder.values() if isinstance(value, dict | list) and value]
        if not inner:
            break
        holder = r.choice(inner)
    if isinstance(holder, dict):
        holder[r.choice((*holder, "x"))] = many
    elif isinstance(holder, list):
        holder.append(many)
    return json.dumps(made).encode("utf-8", "surrogatepass")


def grown_tensors(data: bytes, r: random.Random) -> bytes:
    """The same in the header of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    header = grown_json(data[8 : 8 + size], r)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def grown_gguf(data: bytes, r: random.Random) -> bytes:
    """Put lists of up to two million values in front of a GGUF's settings; its tensors stay."""
    (keys,) = struct.unpack_from("<Q", data, 16)
    more, made = r.choice((1, 3, 30)), b""
    for number in range(more):
        kind, width = r.choice(((0, 1), (2, 2), (6, 4), (8, 8), (10, 8)))
        count = r.choice((1_000, 200_000, 1_999_999))
        name = f"grown.{number}".encode()
        made += struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, kind, count)
        made += (b"\x00" if kind == 8 else r.randbytes(1)) * (count * width)
    pad = -(len(made) + 8 + 3 + 4 + 8) % 32
    made += struct.pack("<Q", 3) + b"pad" + struct.pack("<IQ", 8, pad) + b"x" * pad
    return data[:16] + struct.pack("<Q", keys + more + 1) + made + data[24:]


def grown(mutate: Mutate) -> Mutate:
    """Return what grows a file that this mutates."""
    known: dict[Mutate, Mutate] = {mutated_json: grown_json, mutated_tensors: grown_tensors}
    return known.get(mutate, grown_gguf)


#: The share of mutants that grow: their sizes are what costs, so they are not mutated further.
GROWS = 0.05

RUN, LAST = "runs/digits", "checkpoints/step-000006/"
#: Files of a run, which is listed, opened, evaluated from its record and gone on with.
OF_A_RUN: dict[str, tuple[int, str, str, Mutate]] = {
    "a run's record": (3, RUN, "run.json", mutated_json),
    "a run's config": (4, RUN, "config.json", mutated_json),
    "a run's metrics": (3, RUN, "metrics.jsonl", mutated_lines),
    "a run's state": (4, RUN, f"{LAST}state.json", mutated_json),
    "a run's moments": (2, RUN, f"{LAST}state.safetensors", mutated_tensors),
    "a run's manifest": (2, RUN, f"{LAST}MANIFEST.json", mutated_json),
    "a run's pointer": (1, RUN, "checkpoints/best", mutated_bytes),
    "a run's probes": (2, RUN, "probes/step-000006.safetensors", mutated_tensors),
}
KINDS = {**{kind: TARGETS[kind] for kind in TARGETS if kind != "template"}, **OF_A_RUN}


def use_run(folder: Path) -> str:
    """List a run, read its curves and probes, and go on with it."""
    from glassformer.lab.runs.artifacts import probe_files
    from glassformer.lab.runs.curves import read_curves
    from glassformer.lab.runs.record import load_run_spec
    from glassformer.lab.runs.run import TrainingRun
    from glassformer.lab.runs.table import runs
    from glassformer.lens.measure.probes import read_probes
    from glassformer.spec.errors import GlassError
    from glassformer.store.rundir import RunDirectory

    words = []
    directory = RunDirectory(folder)

    def resume() -> None:
        run = TrainingRun(load_run_spec(directory), folder)
        with run.directory.locked():
            run.resume()

    for work in (
        lambda: str(runs(folder.parent)),
        lambda: read_curves(folder),
        lambda: [read_probes(path) for path in probe_files(directory).values()],
        resume,
    ):
        try:
            work()
            words.append("used")
        except GlassError:
            words.append("refused")
    return ", ".join(words)


class Guide:
    """The mutants that reached new lines, by kind, and the lines that were reached."""

    def __init__(self, world: Path, kept: Path) -> None:
        self.world, self.kept = world, kept
        self.corpus: dict[str, list[bytes]] = {}
        self.known: set[tuple[int, int, int]] = set()
        self.process = 0

    def choose(self, kind: str, r: random.Random) -> bytes:
        """Return a file to mutate: the original, one of the newest, or any that was kept."""
        if self.process != os.getpid():  # the one before ended: take over what it kept
            self.process, self.corpus, self.known = os.getpid(), {}, set()
        if kind not in self.corpus:
            _, source, name, _ = KINDS[kind]
            first = self.world / source / name if name else self.world / source
            files = sorted(self._folder(kind).glob("*"), key=lambda path: path.stat().st_mtime_ns)
            self.corpus[kind] = [path.read_bytes() for path in (first, *files)]
        files_of = self.corpus[kind]
        return r.choice((files_of[0], r.choice(files_of[-8:]), r.choice(files_of)))

    def learn(self, kind: str, data: bytes, lines: set[tuple[int, int, int]]) -> bool:
        """Keep a file that reached something new."""
        if lines <= self.known:
            return False
        self.known |= lines
        self.corpus[kind].append(data)
        self.keep(kind, data)
        return True

    def keep(self, kind: str, data: bytes) -> Path:
        """Write a file to the corpus on disk; the same one twice is one."""
        path = self._folder(kind) / hashlib.sha256(data).hexdigest()[:20]
        path.write_bytes(data)
        return path

    def _folder(self, kind: str) -> Path:
        folder = self.kept / kind.replace(" ", "-").replace("'", "")
        folder.mkdir(parents=True, exist_ok=True)
        return folder


#: The packages that read files.
READERS = ("adapters", "data", "lab/runs", "lens/measure/probes", "spec", "store")


def traced(work: Callable[[], str]) -> tuple[str, set[tuple[int, int, int]]]:
    """Do some work; return its outcome, and each line that was reached and the one before it."""
    import glassformer

    house = Path(glassformer.__path__[0])
    places = tuple(str(house / reader) for reader in READERS)
    reads: dict[int, bool] = {}
    seen: set[tuple[int, int, int]] = set()

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        code = id(frame.f_code)
        if code not in reads:
            reads[code] = frame.f_code.co_filename.startswith(places)
        if not reads[code]:
            return None
        before = 0

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "line":
                seen.add((code, before, frame.f_lineno))
                before = frame.f_lineno
            return step

        return step

    had = sys.gettrace()
    sys.settrace(begin)
    try:
        return work(), seen
    finally:
        sys.settrace(had)


def judged(guide: Guide, place: Path, r: random.Random) -> Found:
    """Mutate a file that was kept, use it under the trace, keep it if it reached something."""
    kind = r.choices(list(KINDS), [target[0] for target in KINDS.values()])[0]
    _, source, name, mutate = KINDS[kind]
    data = guide.choose(kind, r)
    grows = r.random() < GROWS and mutate not in (mutated_lines, mutated_bytes)
    try:
        data = (grown(mutate) if grows else mutate)(data, r)
    except (
        ValueError,
        TypeError,
        RecursionError,
        struct.error,
    ):  # of a mutant that is no such JSON any more
        data = mutated_bytes(data, r)
    use = use_run if kind in OF_A_RUN else use_model

    def prepared() -> Path:
        shutil.rmtree(place / "runs", ignore_errors=True)
        (place / "runs").mkdir()
        folder = planted(guide.world, place / "runs", source, name, data)
        opened.clear()
        return folder

    try:
        folder = prepared()
        began = time.process_time()
        outcome, lines = traced(lambda: use(folder))
        seconds = time.process_time() - began
        if seconds > SECONDS:  # the trace is slow: once more without it
            folder = prepared()
            began = time.process_time()
            use(folder)
            seconds = time.process_time() - began
    except BaseException:
        guide.keep(f"fault in {kind}", data)
        raise
    if not grows:
        guide.learn(kind, data, lines)
    happened = caused(place)
    fault = bool(happened) or seconds > SECONDS
    if fault:
        happened += f" {guide.keep(f'fault in {kind}', data)}"
    return Found(f"{kind}: {outcome}", fault, seconds, happened)


def attack(plan: Plan, cases: Iterable[int]) -> Iterator[tuple[int, Found]]:
    """Open each mutant in a process with bounds; the next process goes on with what was kept."""
    world = make_models()
    watch()
    guide = Guide(world, plan.ledger / f"guided-{plan.seed}")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:

        def judge(case: int) -> Found:
            return judged(guide, Path(name), chance("guided", plan.seed, case))

        judge(0)
        yield from many_in_child(judge, cases, seconds=SECONDS * 9, megabytes=MEGABYTES)
