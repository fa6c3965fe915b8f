"""One flipped bit in one file of a run, a quantized model, an exported folder, a prepared corpus.

A flip must be noticed (an error, or a note on resume), or it must be harmless: what is read and
computed is bit for bit what it was. Anything else is a wrong answer in silence, and a fault.
"""

import contextlib
import hashlib
import io
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.attack import Found, Plan, chance, many_in_child
from bench.attack_files import make_models
from glassformer.spec.errors import GlassError

#: Seconds and megabytes of a case.
SECONDS, MEGABYTES = 30.0, 2_000.0


def answers(folder: Path) -> Any:
    """Return what a model folder gives: its weights, its predictions, its tokens, its texts."""
    import torch

    from glassformer.adapters.load import load

    model = load(folder)
    tokens = torch.arange(1, 9)[None]
    with torch.inference_mode():
        logits = model.forward(tokens)
    if isinstance(logits, dict):
        logits = torch.cat([value.flatten() for _, value in sorted(logits.items())])
    total = hashlib.sha256(logits.detach().float().numpy().tobytes())
    for name, value in sorted(model.model.state_dict().items()):
        total.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    tokenizer = model.get_tokenizer()
    texts: list[Any] = []
    if tokenizer is not None:
        size = tokenizer.vocab_size
        texts = [tokenizer.decode([i]) for i in range(min(size, 400))]
        with contextlib.suppress(GlassError):
            texts.append(tokenizer.encode("the cat sat on 7 3 9"))
        texts += [tokenizer.pad, tokenizer.bos, tokenizer.eos]
    return [repr(model.spec), total.hexdigest(), texts]


def resumed(folder: Path) -> Any:
    """Go on with a run that has two more steps to go; return its end, and what it told."""
    from glassformer.lab.runs.record import load_run_spec
    from glassformer.lab.runs.run import TrainingRun
    from glassformer.store.rundir import RunDirectory

    directory = RunDirectory(folder)
    run = TrainingRun(load_run_spec(directory), folder)
    with run.directory.locked():
        notes = run.resume()
        for _ in run.events():
            pass
    if notes != ["resuming at step 4"]:
        raise Told(str(notes))
    last = directory.pointed("last")
    assert last is not None
    kept = directory.step_folder(last) / "model.safetensors"
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    return [last, directory.pointed("best"), hashlib.sha256(kept.read_bytes()).hexdigest(), lines]


class Told(Exception):
    """A resume that says what it found."""


def batches(folder: Path) -> Any:
    """Return every row that training on a prepared corpus reads."""
    import numpy as np

    from glassformer.data.build_task import build_task
    from glassformer.spec.tasks import TextTask

    task = build_task(TextTask(path=str(folder), length=32))
    total = hashlib.sha256()
    for split, count in task.sizes().items():
        made = task.batch(split, np.arange(count))
        total.update(made.tokens.tobytes() + made.targets["next"].tobytes())
    texts = [task.tokenizer.decode([i]) for i in range(task.tokenizer.vocab_size)]
    return [total.hexdigest(), task.sizes(), texts]


#: How often each: the folder of the world, and what is asked of it.
TARGETS: dict[str, tuple[int, str, Callable[[Path], Any]]] = {
    "run": (3, "runs/digits", answers),
    "resume": (2, "stopped", resumed),
    "checkpoint": (3, "native", answers),
    "int8": (3, "quantized", answers),
    "int4": (3, "quantized-4", answers),
    "exported": (4, "exported", answers),
    "shard": (3, "corpus", batches),
}
#: What a run can do without, and says nothing of a model: its answers are compared all the same.
SKIPPED = ("lock",)


def attack(plan: Plan, cases: Iterable[int]) -> Iterator[tuple[int, Found]]:
    """Flip a bit for each case; yield what became of it."""
    world = make_models()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        place = Path(name)
        _stop(world / "runs" / "digits", place / "stopped")
        folders = {
            kind: (place if source == "stopped" else world) / source
            for kind, (_, source, _) in TARGETS.items()
        }
        whole = {kind: _asked(folders[kind], place / "case", TARGETS[kind][2]) for kind in TARGETS}

        def judge(case: int) -> Found:
            r = chance("flips", plan.seed, case)
            kind = r.choices(list(TARGETS), [target[0] for target in TARGETS.values()])[0]
            return flipped(kind, folders[kind], place / "case", whole[kind], r)

        yield from many_in_child(judge, cases, seconds=SECONDS * 3, megabytes=MEGABYTES)


def _stop(run: Path, folder: Path) -> None:
    """Make of a finished run one that was stopped two steps before its end."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000006")
    for name in ("last", "best"):
        (folder / "checkpoints" / name).write_text("step-000004\n")


def _asked(source: Path, place: Path, ask: Callable[[Path], Any]) -> Any:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place, copy_function=shutil.copyfile)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return ask(place)


def flipped(kind: str, source: Path, place: Path, whole: Any, r: random.Random) -> Found:
    """Flip one bit of one file, and ask again."""
    ask = TARGETS[kind][2]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place, copy_function=shutil.copyfile)
    files = sorted(p for p in place.rglob("*") if p.is_file() and p.name not in SKIPPED)
    path = r.choice([file for file in files if file.stat().st_size])
    data = bytearray(path.read_bytes())
    bit = r.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    where = f"{path.relative_to(place)} bit {bit}"
    try:
        with contextlib.redirect_stderr(io.StringIO()) as told:
            found = ask(place)
    except Told as noted:
        return Found(f"{kind}: told", detail=f"{where}: {noted}"[:300])
    except GlassError as error:
        return Found(f"{kind}: refused", detail=f"{where}: {error.what}"[:300])
    if found == whole:
        return Found(f"{kind}: harmless, the same bits", detail=where)
    return Found(
        f"{kind}: WRONG IN SILENCE", fault=True, detail=f"{where} {told.getvalue()[-200:]}"
    )
