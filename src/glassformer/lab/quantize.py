"""From a model folder to a quantized one beside it, and the comparison of the two."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from glassformer.adapters.load import folder_of, load
from glassformer.adapters.native import NativeAdapter
from glassformer.adapters.saving import save_model
from glassformer.data.task import Task
from glassformer.lab.assemble import assemble
from glassformer.lab.material import Material, joined, of_model, of_task, of_text
from glassformer.lab.own_data import check_data, data_file, recorded_hash
from glassformer.lab.precision import Comparison, compare
from glassformer.lab.record import load_run_spec
from glassformer.models.model import Model
from glassformer.quant.auto import Timing, keeping_float, time_layers
from glassformer.quant.convert import (
    Select,
    dequantize_model,
    prepare_model_for_quantization,
    quantize_model,
)
from glassformer.quant.in_turn import quantize_in_turn
from glassformer.quant.report import is_model_quantized
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schedule import CosineSchedule
from glassformer.spec.tasks import FinetuneTask
from glassformer.spec.train import RunSpec
from glassformer.spec.tree import to_json
from glassformer.store.checkpoint import WEIGHTS
from glassformer.store.rundir import RunDirectory
from glassformer.train.fit import StepRecord, fit
from glassformer.train.torch_engine import TorchEngine

#: Training with rounded weights goes on gently: a share of the rate that the run began with.
QAT_RATE = 0.1

Watch = Callable[[StepRecord], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What `glass quantize` was asked for."""

    spec: QuantSpec
    calibrate: Path | None = None
    qat_steps: int = 0
    auto: bool = False
    backend: str = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The folder that was written, the comparison, and the timings that `auto` went by."""

    folder: Path
    comparison: Comparison
    layers: int
    kept: tuple[str, ...]
    timings: list[Timing] = field(default_factory=list)


def quantize_folder(path: str, out: Path, wish: Wish, *, watch: Watch | None = None) -> Outcome:
    """Open, calibrate or train if asked, quantize, write, open again, compare."""
    if out.exists():
        raise InputError(f"{out} exists", hint="choose another --out, or remove it first")
    adapter = load(path)
    if not isinstance(adapter, NativeAdapter):
        raise InputError("only a model of our own parts can be quantized", where=path)
    if is_model_quantized(adapter.model):
        raise InputError(
            "the model is quantized already", where=path, hint="--dequantize undoes it"
        )
    full = adapter.model.float()
    run = run_of(path)
    recorded = None if run is None else recorded_hash(_folder(path), run.task)
    task = None if run is None else assemble(run).task
    if task is not None:
        check_data(task, recorded)
    material = _material(wish, adapter, task)
    small, timings, select = copy.deepcopy(full), [], None
    if wish.auto:
        timings = time_layers(small, wish.spec, backend=wish.backend)
        if not any(timing.wins for timing in timings):
            raise InputError(
                "float is faster for every layer of this model, on this machine",
                where=path,
                hint="leave out --auto to save memory all the same",
            )
        select = keeping_float(timings)
    small = _quantized(small, wish, material, run, task, select, watch)
    files = dict(adapter.files())
    if run is not None:
        files |= {"config.json": to_json(_whole(run, small.spec)).encode(), **data_file(recorded)}
    save_model(out, small, files=files)
    opened = load(out).model
    disk = (_bytes(folder_of(path)), _bytes(out))
    comparison = compare(full, opened, material.measuring, material=material.origin)
    kept = tuple(timing.path for timing in timings if not timing.wins)
    layers = len(is_model_quantized(opened).layers)
    return Outcome(
        folder=out,
        comparison=replace(comparison, disk=disk),
        layers=layers,
        kept=kept,
        timings=timings,
    )


def dequantize_folder(path: str, out: Path) -> Path:
    """The float32 model of exactly the weights that a quantized folder holds."""
    if out.exists():
        raise InputError(f"{out} exists", hint="choose another --out, or remove it first")
    adapter = load(path)
    dequantize_model(adapter.model)
    files = dict(adapter.files())
    run = run_of(path)
    if run is not None:
        files["config.json"] = to_json(_whole(run, adapter.model.spec)).encode()
        files |= data_file(recorded_hash(_folder(path), run.task))
    save_model(out, adapter.model, files=files)
    return out


def _whole(run: RunSpec, model: ModelSpec) -> RunSpec:
    """The run of a folder that holds every weight: no LoRA, a base only where data needs one."""
    needed = run.tuning if isinstance(run.task, FinetuneTask) else None
    tuning = None if needed is None else replace(needed, lora=None)
    return replace(run, model=model, tuning=tuning)


def _folder(path: str) -> Path:
    """`runs/digits` of `runs/digits@120`."""
    return Path(path.partition("@")[0])


def run_of(path: str) -> RunSpec | None:
    """What a run, or a folder made from one, says of its task; None for other models."""
    directory = RunDirectory(_folder(str(path)))
    ours = directory.steps() or (directory.folder / "MANIFEST.json").is_file()
    if not ours or not (directory.folder / "config.json").is_file():
        return None
    return load_run_spec(directory)


def _material(wish: Wish, adapter: NativeAdapter, task: Task | None) -> Material:
    text = None
    if wish.calibrate is not None:
        tokenizer = adapter.get_tokenizer()
        if tokenizer is None:
            raise InputError("a model without a tokenizer cannot read a text")
        text = of_text(wish.calibrate, tokenizer, adapter.model)
    if task is not None:
        own = of_task(task)
        return own if text is None else joined(text, own)
    return of_model(adapter.model) if text is None else text


def _quantized(
    model: Model,
    wish: Wish,
    material: Material,
    run: RunSpec | None,
    task: Task | None,
    select: Select | None,
    watch: Watch | None,
) -> Model:
    if wish.qat_steps:
        if run is None or task is None:
            raise InputError(
                "training with rounded weights needs a run, which knows its task",
                hint="give a run, or calibrate on a text instead",
            )
        prepare_model_for_quantization(model, wish.spec, mode="qat", select=select)
        for record in _trained(model, run, task, steps=wish.qat_steps):
            if watch is not None:
                watch(record)
        return quantize_model(model, backend=wish.backend)
    if wish.spec.way == "gptq":
        batches = material.calibrating
        return quantize_in_turn(model, batches, wish.spec, select=select, backend=wish.backend)
    return quantize_model(model, wish.spec, select=select, backend=wish.backend)


def _trained(model: Model, run: RunSpec, task: Task, *, steps: int) -> Iterator[StepRecord]:
    """The one loop, on, at a rate that falls to 0."""
    train = replace(
        run.train, steps=steps, lr=run.train.lr * QAT_RATE, schedule=CosineSchedule(), compile=False
    )
    yield from fit(TorchEngine(model, train), task, train)


def _bytes(folder: Path) -> int:
    """Of the weights of a model folder."""
    if folder.is_file():
        return folder.stat().st_size
    own = folder / WEIGHTS
    files = [own] if own.is_file() else [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(file.stat().st_size for file in files)
