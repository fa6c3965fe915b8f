"""`doctor` of our own runs, and of the trainings of any library.

A run of ours is planned and assembled as `glass train` would; a set-up of others is what a
factory returns.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

import glasscheck.diagnosis
from glasscheck.diagnosis import KINDS, SECONDS, Finding, as_it_was, examined, kinds_of, made_by
from glasscheck.patients import BATCHES, EXAMPLES, Call, Patient, Rows, View
from glasscheck.setups import Setup, setup_of
from glassformer.checks.errors import as_ours
from glassformer.checks.subject import named
from glassformer.data.batch import Batch
from glassformer.data.own_code import learning_rate
from glassformer.data.rng import Sampler
from glassformer.data.task import Task
from glassformer.kernels.threads import verifying
from glassformer.lab.recipes import RECIPES, planned_run
from glassformer.lab.runs.assemble import assemble
from glassformer.lab.runs.planned import PlannedRun
from glassformer.models.model import Model
from glassformer.spec.errors import InputError
from glassformer.spec.own import is_source
from glassformer.spec.tasks import is_config
from glassformer.spec.train import RunSpec, TrainSpec
from glassformer.training.engine import loss_weights, totals
from glassformer.training.losses import head_loss
from glassformer.training.recorded import precision
from glassformer.training.torch_engine import TorchEngine

__all__ = ["KINDS", "Diagnosis", "Finding", "doctor"]


class OwnRun(Patient):
    """A run of ours: the task's batches, the model of its spec, the engine's optimizers."""

    ours = True

    def __init__(self, engine: TorchEngine, task: Task, train: TrainSpec, *, name: str) -> None:
        self.task, self.train_spec, self.engine = task, train, engine
        super().__init__(Setup(model=engine.model, name=name, clip=train.clip))
        self.optimizers = [optimizer for optimizer, _ in engine.optimizers]
        self.base = [
            train.lr * share
            for optimizer, share in engine.optimizers
            for _ in optimizer.param_groups
        ]
        self.tokenizer, self.accumulate, self.steps = task.tokenizer, train.accumulate, train.steps
        size = task.sizes()["train"]
        sampler = Sampler(
            size, batch_size=train.batch_size, seed=train.seed, lengths=task.lengths("train")
        )
        count = max(BATCHES, 2 * min(train.accumulate, 8))
        self.batches = [task.batch("train", sampler.rows(step)) for step in range(count)]
        rows = np.arange(min(task.sizes().get("val", 0), 64))
        self.val_batches = [task.batch("val", rows)] if len(rows) else []
        self.floor = self._oracle_floor(sampler.rows(0))
        self.knows_truth = task.oracle("train", sampler.rows(0)) is not None

    def _oracle_floor(self, rows: Any) -> float | None:
        oracle, batch = self.task.oracle("train", rows), self.task.batch("train", rows)
        heads = self.engine.spec.head_names()
        if oracle is None or len(heads) > 1:
            return None
        weights = loss_weights(batch, heads[0])
        if oracle.entropy.shape != weights.shape or not weights.sum():
            return None
        return float((oracle.entropy * weights).sum() / weights.sum())

    @property
    def classes(self) -> int:
        """The vocabulary of the spec."""
        return self.engine.spec.vocab_size

    @property
    def context(self) -> int | None:
        """The longest input of the spec."""
        return self.engine.spec.max_seq_len

    def special(self, name: str) -> int | None:
        """Return a special id of the task's tokenizer."""
        found: int | None = getattr(self.task.tokenizer, name, None)
        return found

    def rates(self, count: int) -> list[float]:
        """Return the rates of the run's schedule."""
        return [learning_rate(self.train_spec, step) for step in range(count)]

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch, as the engine differentiates it."""
        return self.loss_of_step([batch])

    def loss_of_step(self, batches: Sequence[Any]) -> Tensor:
        """Return the loss of a step: every token weighs the same."""
        model, spec = self.engine.model, self.engine.spec
        counts = totals(batches, spec)
        total = model.penalty()
        for batch in batches:
            inputs = model.inputs(batch)
            with precision(self.train_spec, self.device):
                hidden = model.hidden(inputs)
                for head, count in counts.items():
                    sums = head_loss(
                        model, hidden, head,
                        torch.as_tensor(batch.targets[head], device=self.device).long(),
                        torch.as_tensor(loss_weights(batch, head), device=self.device),
                        valid_BT=inputs.valid_BT, label_smoothing=self.train_spec.label_smoothing,
                    )  # fmt: skip
                    share = self.train_spec.head_weight(head) / (count or 1.0)
                    total = total + share * sums.smoothed
        return total

    def logits(self, batch: Any, change: Callable[[Tensor], Tensor] | None = None) -> Call:
        """Return the logits of the first head, its tokens changed if requested."""
        assert isinstance(batch, Batch)
        model = cast(Model, self.model).eval()
        tokens = torch.as_tensor(batch.tokens)
        if change is not None:
            tokens = change(tokens)
            batch = dataclasses.replace(batch, tokens=tokens.numpy())
        with torch.no_grad(), precision(self.train_spec, self.device):
            logits = next(iter(model(batch).values()))
        return Call(tokens=tokens, valid=torch.as_tensor(batch.valid), logits=logits.float().cpu())

    def read(self, batch: Any) -> list[View]:
        """Return the targets and weights of each head: those of the batch."""
        assert isinstance(batch, Batch)
        self.model.eval()
        with torch.no_grad(), precision(self.train_spec, self.device):
            answers = cast(Model, self.model)(batch)
        found = []
        for head, logits in answers.items():
            if head not in batch.targets:
                continue
            weights = torch.as_tensor(loss_weights(batch, head))
            targets = torch.as_tensor(batch.targets[head]).long()
            flat, share = logits.float().cpu(), weights / weights.sum().clamp(min=1e-30)
            known = torch.where(weights > 0, targets, 0)
            nll = -flat.log_softmax(-1).gather(-1, known[..., None])[..., 0]
            view = View(
                head=head,
                tokens=torch.as_tensor(batch.tokens),
                valid=torch.as_tensor(batch.valid),
                targets=known,
                weights=share,
                logits=flat,
                loss=float((nll * share).sum()),
            )
            found.append(view)
        return found

    def rows(self, split: str) -> Rows:
        """Return the examples of a split as data."""
        found, size = Rows(), self.task.sizes().get(split, 0)
        for begin in range(0, min(size, EXAMPLES), 500):
            batch = self.task.batch(split, np.arange(begin, min(begin + 500, size, EXAMPLES)))
            side = batch if batch.source is None else batch.source
            head = next(iter(batch.targets))
            weights, targets = loss_weights(batch, head), batch.targets[head]
            for i in range(len(batch.tokens)):
                row = tuple(int(t) for t in side.tokens[i][side.valid[i]])
                found.longest = max(found.longest, len(row))
                if batch.source is not None:
                    row += tuple(int(t) for t in batch.tokens[i][batch.valid[i]])
                if head == "next" and batch.source is None and weights[i].any():
                    row += (int(targets[i][weights[i] > 0][-1]),)  # the input ends before it
                found.tokens.append(row)
                found.answers.append(int(targets[i]) if targets.ndim == 1 else None)
                found.counted.append(int((weights[i] > 0).sum()) if targets.ndim == 2 else None)
        return found


class Diagnosis(glasscheck.diagnosis.Diagnosis):
    """The findings of all examinations; printed, and shown in a notebook, as text."""

    __slots__ = ()
    COMMAND: ClassVar[str] = "glass doctor"

    def raise_if_failed(self) -> None:
        """Raise an exception that names the first mistake."""
        with as_ours():
            super().raise_if_failed()


def doctor(
    thing: object,
    *,
    overrides: Iterable[str] = (),
    quick: bool = False,
    seconds: float = SECONDS,
    only: str | None = None,
    device: str = "cpu",
    name: str = "",
) -> Diagnosis:
    """Look for mistakes in a training that has not begun.

    `thing`: a task's name, a config file, a `RunSpec` or `file.py:Task`, with `overrides` as for
    `train`; or a training of any library: a `Setup`, a dict with its fields, a module, or
    `package.module:factory` that returns one of these. `quick` leaves out what trains some steps.
    """
    with as_ours():
        kinds = kinds_of(only, quick=quick, seconds=seconds)
        found = _opened(thing, list(overrides))
    title = name or (thing if isinstance(thing, str) else "")
    if isinstance(found, Setup):
        if list(overrides):
            raise InputError("overrides are for tasks of ours", hint="change the set-up itself")
        setup = replace(found, name=found.name or title)
        with as_ours(), as_it_was(setup.model):
            return Diagnosis(examined(Patient(setup), kinds, seconds), setup.name)
    parts = assemble(planned_run(found, _on_torch(found, list(overrides))), device=device)
    engine = cast(TorchEngine, parts.engine)
    with as_it_was(engine.model):
        own = OwnRun(engine, parts.task, engine.train, name=title or parts.task.name)
        with verifying(sum(q.numel() for q in own.model.parameters())):
            return Diagnosis(examined(own, kinds, seconds), own.setup.name)


def _on_torch(what: "str | RunSpec | PlannedRun", overrides: list[str]) -> list[str]:
    """Return overrides that examine a run of the NumPy engine by its twin in torch."""
    return [text for text in overrides if not text.startswith("engine=")] + ["engine=torch"]


# --- what is examined -----------------------------------------------------------------------------


def _opened(thing: object, overrides: list[str]) -> "Setup | str | RunSpec | PlannedRun":
    """Return a set-up of others, or what `planned_run` takes."""
    if isinstance(thing, Path):
        return str(thing)
    if isinstance(thing, RunSpec | PlannedRun):
        return thing
    if not isinstance(thing, str):
        return setup_of(thing)
    if thing in RECIPES or is_config(thing) or not is_source(thing):
        return thing
    made = named(thing)
    if isinstance(made, type) and issubclass(made, Task):
        return thing
    return setup_of(made_by(made, where=thing), name=thing)
