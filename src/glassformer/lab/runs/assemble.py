"""The assembly of a run's spec into a task and an engine that fit each other.

A fine-tuned run uses its base's tokens and starts from its base's weights, so there the two are
made together. A checkpoint of a run holds what trains: the complete model, or LoRA's factors in
PEFT's format with the name and the hash of the base that they correct.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from glassformer.adapters.folder.lora import check_base, peft_files, read_peft, read_tuning
from glassformer.adapters.opening import TUNING
from glassformer.byhand.c_table import C
from glassformer.data.task import Task
from glassformer.data.tokenizers.own import same_tokens
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.gpu.operations import operations_on
from glassformer.gpu.training_graphs import graphs_for
from glassformer.lab.corpus import built
from glassformer.lab.finetune import Base, check_trains, open_base
from glassformer.lab.runs.planned import PlannedRun, check_fit
from glassformer.models.model import build
from glassformer.models.weights import weights_of
from glassformer.nn.lora import apply_lora
from glassformer.quant.contents import is_model_quantized
from glassformer.spec.disk import small_text
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import ModelSpec
from glassformer.spec.serialize import from_json, to_json
from glassformer.spec.tasks import FinetuneTask
from glassformer.spec.train import RunSpec, Tuning, lora_manifest
from glassformer.store.checkpoint import (
    SPEC,
    Contents,
    load_checkpoint,
    save_checkpoint,
    write_folder,
)
from glassformer.store.tensors import Deferred
from glassformer.training.distributed import DistributedEngine, Ranks
from glassformer.training.engine import Array, Arrays, Engine
from glassformer.training.engine_choice import native_lacks, settled
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import TorchEngine

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of a run. `files` go into every checkpoint; `notes` are for people to read."""

    task: Task
    engine: Engine
    files: Mapping[str, bytes]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Peers:
    """The processes that train together; `sharded` splits the model over them (FSDP2)."""

    ranks: Ranks
    sharded: bool = False

    def __str__(self) -> str:
        return f"{self.ranks.size}, sharded" if self.sharded else str(self.ranks.size)


def assemble(
    run: RunSpec | PlannedRun,
    *,
    device: str = "cpu",
    cache: Path | None = None,
    peers: Peers | None = None,
) -> Parts:
    """Build the task and the engine of a run, fitting each other; a base is opened once for both.

    `cache` is a folder where a text keeps its token files.
    """
    plan = run if isinstance(run, PlannedRun) else PlannedRun(spec=run)
    processes = 1 if peers is None else peers.ranks.size
    spec = settled(plan.spec, device=device, processes=processes)
    why: list[str] = []
    if plan.spec.engine == "auto" and spec.engine == "torch" and device == "cpu" and peers is None:
        lack = native_lacks(plan.spec, device=device, processes=processes)
        why = [f"trained by torch: {lack}"]
    if spec.tuning is None:
        task = plan.task or in_turn(peers, lambda: built(spec.task, cache=cache))
        check_fit(spec.model, task)
        engine = build_engine(spec, device=device, peers=peers)
        return Parts(task=task, engine=engine, files=task.files(), notes=[*task.notes(), *why])
    base = plan.base or open_base(spec.tuning.base)
    plan.base = None
    check_base(base.model, spec.tuning, where=spec.tuning.base)
    if base.model.spec != spec.model:
        raise InputError(
            "a fine-tuned model keeps its base's spec", hint="leave out what begins with `model.`"
        )
    if plan.task is not None:
        task = plan.task
    elif isinstance(spec.task, FinetuneTask):
        task = base.task(spec.task)
    else:
        task = in_turn(peers, lambda: built(spec.task, cache=cache))
    check_fit(spec.model, task, has_base=True)
    check_tokens(task, base.speech.tokenizer, where=spec.tuning.base)
    notes = [*task.notes(), *why, trainable(spec.model, spec.tuning)]
    engine = _tuned_engine(spec, base, device=device, peers=peers)
    return Parts(task=task, engine=engine, files=base.files, notes=notes)


def in_turn(peers: Peers | None, build: Callable[[], T]) -> T:
    """Build in one process of a machine before the others, which find what it has cached."""
    return build() if peers is None else peers.ranks.in_turn(build)


def build_engine(spec: RunSpec, *, device: str = "cpu", peers: Peers | None = None) -> Engine:
    """Return the engine that the run names, with fresh weights."""
    if spec.engine in ("native", "numpy"):
        return _array_engine(spec, None, device=device, peers=peers)
    if peers is None:
        return TorchEngine.fresh(
            spec.model,
            spec.train,
            device=device,
            operations=operations_on(device),
            graphs=graphs_for(device),
        )
    # A sharded model is built on the host; sharding moves it to the device block by block.
    place = "cpu" if peers.sharded else device
    generator = torch.Generator().manual_seed(spec.train.seed)
    model = build(spec.model, generator=generator, device=place)
    if spec.train.precision == "float64":
        model.double()
    return DistributedEngine(
        model,
        spec.train,
        peers.ranks,
        device=device,
        sharded=peers.sharded,
        operations=operations_on(device),
    )


def _array_engine(
    spec: RunSpec, base: Arrays | None, *, device: str, peers: Peers | None
) -> NumpyEngine:
    """Return an engine without torch, or say why it cannot train this run."""
    lora = None if spec.tuning is None else spec.tuning.lora
    if spec.engine == "numpy":
        if peers is not None:
            raise InputError("the NumPy engine trains in one process", hint="engine=torch")
        return NumpyEngine.fresh(spec.model, spec.train, base=base, lora=lora)
    processes = 1 if peers is None else peers.ranks.size
    if lack := native_lacks(spec, device=device, processes=processes):
        raise InputError(lack, hint="engine=torch")
    return NumpyEngine.fresh(spec.model, spec.train, table=C, base=base, lora=lora)


def _tuned_engine(spec: RunSpec, base: Base, *, device: str, peers: Peers | None) -> Engine:
    """Return an engine on the base's weights, in the training's own precision."""
    assert spec.tuning is not None
    model, lora = base.model, spec.tuning.lora
    check_trains(model, lora, where=spec.tuning.base)
    if peers is not None and is_model_quantized(model):
        raise InputError("a quantized base is tuned in one process", hint="a float base")
    if spec.engine in ("native", "numpy") and is_model_quantized(model):
        raise InputError("a quantized base is tuned by torch", hint="engine=torch")
    model = model.to(torch.float64 if spec.train.precision == "float64" else torch.float32)
    if spec.engine in ("native", "numpy"):
        return _array_engine(spec, weights_of(model), device=device, peers=peers)
    if lora is not None:
        apply_lora(model, lora, generator=torch.Generator().manual_seed(spec.train.seed))
    if peers is None:
        table, graphs = operations_on(device), graphs_for(device)
        return TorchEngine(model.to(device), spec.train, lora=lora, operations=table, graphs=graphs)
    return DistributedEngine(
        model if peers.sharded else model.to(device),
        spec.train,
        peers.ranks,
        device=device,
        lora=lora,
        sharded=peers.sharded,
        operations=operations_on(device),
    )


def trainable(model: ModelSpec, tuning: Tuning) -> str:
    """Return a sentence on how many of the parameters train."""
    whole = count_parameters(model)
    if tuning.lora is None:
        return f"fine-tuning all {whole:,} parameters of {tuning.base}"
    factors = lora_manifest(model, tuning.lora)
    size = sum(factor.size for factor in factors.values())
    return (
        f"LoRA of rank {tuning.lora.rank} on {len(factors) // 2} projections of {tuning.base}: "
        f"{size:,} parameters train, {size / whole:.2%} of {whole:,}"
    )


def check_tokens(task: Task, tokenizer: Tokenizer | None, *, where: str = "") -> None:
    """Refuse running text in other tokens than the model's: its ids mean something else there."""
    if not task.is_running_text or tokenizer is None:
        return
    if not same_tokens(task.tokenizer, tokenizer):
        raise InputError(
            "the text is encoded with another tokenizer than the model's: its ids mean other words",
            where=where,
            hint="glass prepare PATH -o FOLDER --tokenizer MODEL encodes it with the model's",
        )


# --- checkpoints of a run -------------------------------------------------------------------------


def write_checkpoint(
    folder: Path,
    spec: RunSpec,
    weights: Mapping[str, Array | Deferred],
    *,
    files: Mapping[str, Contents],
) -> None:
    """Write what the run trains, and the files that go with it."""
    if spec.tuning is None:
        save_checkpoint(folder, spec.model, weights, files=files)
        return
    contents = {**files, TUNING: to_json(spec.tuning).encode()}
    if spec.tuning.lora is None:
        save_checkpoint(folder, spec.model, weights, files=contents)
        return
    factors = {n: a.read() if isinstance(a, Deferred) else a for n, a in weights.items()}
    adapter = peft_files(spec.model, spec.tuning.lora, factors, base=spec.tuning.base)
    write_folder(folder, {**contents, SPEC: to_json(spec.model).encode(), **adapter})


def read_checkpoint(folder: Path, spec: RunSpec) -> Arrays:
    """Read and verify what `write_checkpoint` wrote; refuse the weights of another model."""
    if spec.tuning is None or spec.tuning.lora is None:
        model, weights = load_checkpoint(folder)
        if model != spec.model:
            raise InputError("the checkpoint is of another model", where=str(folder))
        return weights
    tuning = read_tuning(folder)
    if tuning is None:
        raise FileError("the checkpoint holds no LoRA", where=str(folder))
    model = from_json(ModelSpec, small_text(folder / SPEC))
    if model != spec.model or tuning != spec.tuning:
        raise InputError("the checkpoint is of another model", where=str(folder))
    return read_peft(folder, model)[1]
