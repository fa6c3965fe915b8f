"""Tiny runs of each kind, engines with the same weights, and batches of uneven lengths."""

from dataclasses import replace

import numpy as np

from glassformer.byhand.c_table import C
from glassformer.byhand.table import Table
from glassformer.data.batch import Batch
from glassformer.data.build_task import build_task
from glassformer.spec import presets
from glassformer.spec.model import ModelSpec
from glassformer.spec.serialize import override
from glassformer.spec.tasks import DigitsTask, FsmTask, SequenceTask
from glassformer.spec.train import CosineSchedule, HeadWeight, RunSpec, TrainSpec
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import TorchEngine


class NativeEngine(NumpyEngine):
    """The engine without torch, with the table in C."""

    @classmethod
    def fresh(cls, spec: ModelSpec, train: TrainSpec, *, table: Table = C) -> "NativeEngine":
        made = super().fresh(spec, train, table=table)
        assert isinstance(made, NativeEngine)
        return made


ENGINES = {"torch": TorchEngine, "numpy": NumpyEngine}
#: Those that train in float32.
SINGLE = ENGINES | {"native": NativeEngine}
TRAIN = TrainSpec(
    steps=30,
    batch_size=8,
    lr=1e-2,
    schedule=CosineSchedule(warmup=5),
    evaluate_every=7,
    evaluate_examples=20,
    checkpoint_every=3,
)


def digits(*changes: str) -> RunSpec:
    """Answers read at the last token; 48 examples to train on, so six batches of 8 an epoch."""
    model = presets.digits(d_model=8, n_heads=2, n_layers=1, d_ff=13)
    task = DigitsTask(examples=60, max_length=4)
    return override(RunSpec(model=model, task=task, train=TRAIN), changes)


def machine(*changes: str) -> RunSpec:
    """Three heads at every position, of different weights; a factorized embedding with L1."""
    task = FsmTask(machine="random-3", max_length=9, examples=80, longer=2)
    made = build_task(task)
    model = presets.fsm_probe(
        vocab_size=made.tokenizer.vocab_size,
        num_classes=made.heads["class"],
        num_states=made.heads["state"],
        d_model=8,
        n_heads=2,
        d_ff=13,
        max_seq_len=16,
        rank=3,
        l1=1e-2,
    )
    weights = (HeadWeight(head="class", weight=0.3), HeadWeight(head="state", weight=0.7))
    run = RunSpec(model=model, task=task, train=replace(TRAIN, head_weights=weights))
    return override(run, changes)


def reverse(*changes: str) -> RunSpec:
    """An encoder and a decoder, padded on both sides."""
    model = presets.seq2seq(
        vocab_size=11, d_model=8, n_heads=2, d_ff=13, n_layers=1, max_seq_len=16, dropout=0.0
    )
    task = SequenceTask(vocab_size=11, min_length=2, max_length=7, examples=80, longer=1)
    return override(RunSpec(model=model, task=task, train=TRAIN), changes)


RUNS = {"digits": digits, "machine": machine, "reverse": reverse}


def engine_of(run: RunSpec, kind: str | None = None) -> TorchEngine | NumpyEngine:
    """A fresh engine of the run, or of another kind with the very weights the torch one draws."""
    kind = run.engine if kind is None else kind
    kind = "torch" if kind == "auto" else kind
    made = SINGLE[kind].fresh(run.model, run.train)
    made.load_weights(TorchEngine.fresh(run.model, run.train).weights())
    return made


def gradients(engine: TorchEngine | NumpyEngine) -> dict[str, np.ndarray]:
    """Copies of the gradients that the last step left, by parameter."""
    if isinstance(engine, NumpyEngine):
        return {name: grad.copy() for name, grad in engine.model.grads.items()}
    return {
        name: np.zeros(p.shape) if p.grad is None else p.grad.numpy().copy()
        for name, p in engine.model.named_parameters()
    }


def uneven(run: RunSpec, count: int, *, split: str = "train") -> Batch:
    """The first `count` examples, whose lengths differ."""
    task = build_task(run.task)
    assert len(set(task.lengths(split)[:count])) > 2
    return task.batch(split, np.arange(count))


def worst_relative(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest difference of any entry, relative to the largest entry of the whole gradient.

    Not tensor by tensor: the bias of the keys has a gradient of 0 by theory, so of rounding only.
    """
    assert set(ours) == set(theirs)
    largest = max(float(np.abs(array).max()) for array in theirs.values())
    return worst_absolute(ours, theirs) / largest


def worst_absolute(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest difference of any entry."""
    assert set(ours) == set(theirs)
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)
