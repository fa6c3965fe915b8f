"""Links in a folder of somebody else: whatever writes into it, nothing outside is changed."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.folder.lora import save_adapter
from glassformer.adapters.load import adapt
from glassformer.cli.shell.terminal import write_file
from glassformer.generation.native.stepper import NativeStepper
from glassformer.lab.runs.record import load_run_spec
from glassformer.lab.runs.run import TrainingRun
from glassformer.lab.runs.table import delete_runs, rename_run, tag_run
from glassformer.lab.sweeps.sweep import sweep
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.nn.lora import apply_lora
from glassformer.quant.convert import quantize_model
from glassformer.spec import presets
from glassformer.spec.errors import FileError, GlassError
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int8
from glassformer.spec.train import LoRA
from glassformer.store.checkpoint import publishing_file
from glassformer.store.rundir import FOLDERS, LOGS, RunDirectory
from tests.lab.runs import resumed, sample, trained
from tests.training.samples import digits

SECRET = b"precious\n" * 2000
TINY = presets.qwen(vocab_size=97, d_model=32, d_ff=64, n_layers=1)


@dataclass(frozen=True)
class Verb:
    """What writes into the folder x, and what is there before: a run, what it makes itself.

    A path that is typed may lead through links of the user's own, as in any other command.
    """

    do: Callable[[Path], object]
    before: str = "nothing"
    typed: tuple[str, ...] = ()


def resume(place: Path) -> None:
    resumed(place / "x", spec=sample("numpy", "train.steps=6"))


def overwrite(place: Path) -> None:
    run = TrainingRun(load_run_spec(RunDirectory(place / "x")), place / "x")
    with run.directory.locked():
        run.prepare(overwrite=True)
        list(run.events())


def begin(place: Path) -> None:
    trained(sample("numpy", "train.steps=3"), place / "x")


def train(place: Path) -> None:
    gf.train(digits("engine=numpy", "train.steps=3"), name="x", runs=place, progress=False)


def evaluate(place: Path) -> None:
    gf.evaluate(place / "x", split="val", write=True)


def report(place: Path) -> None:
    RunDirectory(place / "x").write("report.html", "<!doctype html>")


def sweeping(place: Path) -> None:
    sweep(
        "digits",
        vary={"train.lr": [1e-3]},
        overrides=["train.steps=2", "task.examples=60", "engine=numpy", "model.d_model=8"],
        seeds=1,
        sweeps=place,
        name="x",
        jobs=1,
        stack=False,
        progress=False,
        resume=(place / "x" / "sweep.json").is_file(),
    )


def preparing(place: Path) -> None:
    texts = [place / f"{number}.txt" for number in range(4)]
    for number, text in enumerate(texts):
        text.write_text("".join(f"line {i} of text {number}\n" for i in range(100)))
        os.utime(text, (0, 0))
    gf.prepare(texts, place / "x", vocab_size=280, shard_size=3_000, progress=False)


def keeping_prompts(place: Path) -> None:
    model = build(TINY, generator=torch.Generator().manual_seed(0))
    row = tuple((7 * i) % 97 for i in range(40))
    NativeStepper(model, prompt_cache=place / "x").start(Prompts((row,)), room=2)


def saving(place: Path) -> None:
    gf.save(build(TINY), place / "x" / "model")


def quantized(place: Path) -> None:
    model = build(TINY)
    quantize_model(model, QuantSpec(scheme=Int8()))
    gf.save(model, place / "x" / "int8")


def exporting(place: Path) -> None:
    export_hf(adapt(build(TINY)), place / "x" / "hf")


def to_gguf(place: Path) -> None:
    (place / "x").mkdir(exist_ok=True)
    with publishing_file(place / "x" / "model.gguf", size=1) as beside:
        beside.write_bytes(b"GGUF")


def adapting(place: Path) -> None:
    model, lora = build(TINY), LoRA(rank=2)
    apply_lora(model, lora)
    save_adapter(model, lora, place / "x" / "adapter")


def output(place: Path) -> None:
    (place / "x").mkdir(exist_ok=True)
    write_file(place / "x" / "curve.csv", b"step,loss\n")


VERBS = {
    "resume": Verb(resume, "a run"),
    "overwrite": Verb(overwrite, "a run"),
    "begin": Verb(begin, "a run that has not begun"),
    "train": Verb(train),
    "evaluate": Verb(evaluate, "a run"),
    "report": Verb(report, "a run"),
    "tag": Verb(lambda place: tag_run("x", add=["paper"], folder=place), "a run"),
    "rename": Verb(lambda place: rename_run("x", "y", folder=place), "a run"),
    "delete": Verb(lambda place: delete_runs(["x"], folder=place), "a run"),
    "sweep": Verb(sweeping, "its own"),
    "a new sweep": Verb(sweeping),
    "prepare": Verb(preparing, typed=(".",)),
    "prompt cache": Verb(keeping_prompts, typed=(".",)),
    "save": Verb(saving, typed=(".",)),
    "quantize": Verb(quantized, typed=(".",)),
    "export": Verb(exporting, typed=(".",)),
    "a file of one model": Verb(to_gguf, typed=(".",)),
    "adapter": Verb(adapting, typed=(".", "adapter")),
    "-o": Verb(output, typed=(".", "curve.csv")),
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[str, Path]:
    """For each verb a folder as it leaves it, and before it where it changes what is there."""
    above = tmp_path_factory.mktemp("worlds")
    run = above / "run"
    trained(sample("numpy", "train.steps=6"), run / "x", stop_at=4)
    gf.evaluate(run / "x", split="val", write=True)
    made = {}
    for name, verb in VERBS.items():
        before, after = above / f"{name}, before", above / f"{name}, after"
        before.mkdir()
        if verb.before == "its own":
            verb.do(before)
        elif verb.before != "nothing":
            shutil.copytree(run, before, dirs_exist_ok=True)
        if verb.before == "a run that has not begun":  # killed before its first record
            (before / "x" / "run.json").unlink()
            shutil.rmtree(before / "x" / "checkpoints")
        shutil.copytree(before, after)
        verb.do(after)
        made[name] = above
    return made


def names_of(folder: Path) -> set[str]:
    """Files and folders of a folder: all at the top and one level below, one file of the rest."""
    found = {p.relative_to(folder) for p in folder.rglob("*")} if folder.exists() else set()
    shallow = {path for path in found if len(path.parts) < 3}
    deep = {path for path in found if len(path.parts) == 3 and path.suffix == ".json"}
    return {path.as_posix() for path in shallow | deep}


def temporary(name: str) -> str:
    path = Path(name)
    return path.with_name(f".{path.name}.tmp").as_posix()


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
    }


def outside_of(place: Path) -> Path:
    """Files that are not to be changed, among them some of the names that a run has."""
    outside = place / "outside"
    folder = outside / "folder"
    folder.mkdir(parents=True)
    (outside / "secret").write_bytes(SECRET)
    for name in ("step-000001.safetensors", "step-000099.safetensors", "last", "run.json"):
        (folder / name).write_bytes(SECRET)
    (folder / "step-000001").mkdir()
    (folder / "step-000001" / "notes").write_bytes(SECRET)
    return outside


def plant(path: Path, kind: str, outside: Path) -> None:
    """Put a link there, instead of what is there."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    match kind:
        case "file":
            path.symlink_to(outside / "secret")
        case "nothing":
            path.symlink_to(outside / "new")
        case "folder":
            path.symlink_to(outside / "folder")
        case "hard":
            os.link(outside / "secret", path)


def cases(before: Path, after: Path) -> Iterator[tuple[str, str]]:
    """Names of what is there before or after, and the links that can stand there."""
    files, folders = set(), {".", "../.cache"}
    for place in (before / "x", after / "x", after / "y"):
        for name in names_of(place):
            (folders if (place / name).is_dir() else files).add(name)
    for name in sorted(folders):
        yield name, "folder"
    for name in sorted(files):
        yield from ((name, kind) for kind in ("file", "nothing", "hard"))
        yield temporary(name), "file"


@pytest.mark.parametrize("name", VERBS)
def test_nothing_is_written_through_a_link(name, worlds, tmp_path):
    verb, above = VERBS[name], worlds[name]
    before, after = above / f"{name}, before", above / f"{name}, after"
    wrong, tried = [], 0
    for link, kind in cases(before, after):
        if link in verb.typed:
            continue
        place = tmp_path / str(tried)
        shutil.copytree(before, place, symlinks=True)
        outside = outside_of(place)
        path = Path(os.path.normpath(place / "x" / link))
        plant(path, kind, outside)
        seen, tried = snapshot(outside), tried + 1
        with contextlib.suppress(GlassError):
            verb.do(place)
        if snapshot(outside) != seen:
            wrong.append(f"{link} as a link ({kind})")
        shutil.rmtree(place)
    assert not wrong, f"{len(wrong)} of {tried}: {wrong}"
    assert tried > 1


@pytest.mark.parametrize("name", ["checkpoints", "probes", "lock", "metrics.jsonl", "alerts.jsonl"])
def test_a_link_is_refused_by_name_before_anything_is_changed(name, worlds, tmp_path):
    shutil.copytree(worlds["resume"] / "resume, before", tmp_path / "runs")
    outside = outside_of(tmp_path)
    folder = tmp_path / "runs" / "x"
    plant(folder / name, "folder" if name in FOLDERS else "file", outside)
    seen = snapshot(folder)
    with pytest.raises(FileError, match=f"{name} is a link") as error:
        resume(tmp_path / "runs")
    assert str(folder / name) in str(error.value) and name in (*FOLDERS, *LOGS)
    assert snapshot(folder) == seen
