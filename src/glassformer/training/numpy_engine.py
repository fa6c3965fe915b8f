"""The engine without torch: gradients derived by hand, the same steps, by NumPy or in C.

Its operations are a table's: with NumPy's it is `engine=numpy`, in float32 or float64, and with
the one in C it is `engine=native`, in float32.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, assert_never

import numpy as np

from glassformer.byhand import optim
from glassformer.byhand.c_table import C
from glassformer.byhand.inputs import Inputs
from glassformer.byhand.model import Model
from glassformer.byhand.operations import NUMPY
from glassformer.byhand.table import Table
from glassformer.data.batch import Batch
from glassformer.kernels.threads import one_numpy_thread
from glassformer.spec.checks import check_tree
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import OwnOptimizer
from glassformer.spec.train import SGD, AdamW, LoRA, Muon, TrainSpec, check_arrays
from glassformer.training.engine import (
    Array,
    Arrays,
    AtOnce,
    StepResult,
    balance_shares,
    loss_weights,
    totals,
)


class Sums(NamedTuple):
    """What a step differentiates: the loss, each head's plain loss, and the balance's part."""

    loss: float
    nll: dict[str, float]
    balance: float
    balance_term: float


def _unwarned() -> np.errstate:
    """Return a context without NumPy's warnings: the result says that a step is not finite."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


class NumpyEngine(AtOnce):
    """A by-hand model with its optimizer."""

    def __init__(self, model: Model, train: TrainSpec) -> None:
        self.spec: ModelSpec = model.spec
        self.model = model
        self.train = train
        check_tree(train)
        check_arrays(train, native=model.table is C)
        match train.optimizer:
            case SGD(momentum=momentum):
                self.optimizer: optim.SGD | optim.AdamW | optim.Muon = optim.SGD(
                    model, lr=train.lr, momentum=momentum
                )
            case AdamW() as adam:
                self.optimizer = optim.AdamW(
                    model,
                    lr=train.lr,
                    betas=(adam.beta1, adam.beta2),
                    eps=adam.eps,
                    weight_decay=adam.weight_decay,
                )
            case Muon() as muon:
                self.optimizer = optim.Muon(
                    model,
                    lr=train.lr,
                    lr_matrix=muon.lr_matrix,
                    momentum=muon.momentum,
                    betas=(muon.beta1, muon.beta2),
                    eps=muon.eps,
                    weight_decay=muon.weight_decay,
                )
            case OwnOptimizer():
                raise AssertionError("what is lacking was refused")
            case _ as unreachable:
                assert_never(unreachable)

    @classmethod
    def fresh(
        cls,
        spec: ModelSpec,
        train: TrainSpec,
        *,
        table: Table = NUMPY,
        base: Mapping[str, Array] | None = None,
        lora: LoRA | None = None,
    ) -> "NumpyEngine":
        """Make a new model, initialised from the training's seed.

        `base` are weights to start from. With `lora`, only its factors train, and `weights` and
        `load_weights` are about them.
        """
        dtype = np.float64 if train.precision == "float64" else np.float32
        rng = np.random.default_rng(train.seed)
        return cls(Model(spec, params=base, rng=rng, dtype=dtype, table=table, lora=lora), train)

    def _threads(self) -> AbstractContextManager[None]:
        """Return what keeps NumPy's own threads asleep: the table in C shares products out."""
        return one_numpy_thread() if self.model.table is C else nullcontext()

    def inputs(self, batch: Batch) -> Inputs:
        """Return checked arrays; a mask that is True everywhere is dropped, as in torch."""
        source = batch.source
        return self.model.inputs(
            batch.tokens,
            valid_BT=None if batch.valid.all() else batch.valid,
            segments_BT=batch.segments,
            source_tokens_BS=None if source is None else source.tokens,
            source_valid_BS=None if source is None or source.valid.all() else source.valid,
        )

    def step(self, batches: Sequence[Batch], *, lr: float, seed: int) -> StepResult:
        with self._threads(), _unwarned():
            sums = self.gradients(batches, seed=seed)
            size = self.model.table.global_norm(self.model.grad_vector)
            applied = math.isfinite(sums.loss + sums.balance_term) and math.isfinite(size)
            if applied:
                if self.train.clip and size + 1e-6 > self.train.clip:
                    grads = self.model.grad_vector
                    self.model.table.clip_global_norm(grads, max_norm=self.train.clip)
                self.optimizer.step(lr=lr)
        tokens = sum(int(batch.valid.sum()) for batch in batches)
        routed = (sums.balance, sums.balance_term) if self.spec.mixtures() else (None, 0.0)
        return StepResult(sums.loss, sums.nll, size, tokens, applied, *routed)

    def gradients(self, batches: Sequence[Batch], *, seed: int) -> Sums:
        """Fill the model's gradients with those of a step; dropout from `seed`."""
        counts, many = totals(batches, self.spec), len(batches)
        rng = np.random.default_rng(seed)
        shares, mixtures = balance_shares(batches, self.spec), len(self.spec.mixtures())
        loss, nll = 0.0, dict.fromkeys(counts, 0.0)
        balance = balance_term = 0.0
        for i, batch in enumerate(batches):
            weights = {head: loss_weights(batch, head) for head in counts}
            share = {
                head: float(weights[head].sum(dtype=np.float64)) / count if count else 0.0
                for head, count in counts.items()
            }
            result = self.model.loss_and_grads(
                self.inputs(batch),
                targets={head: batch.targets[head] for head in counts},
                weights=weights,
                # Means of this batch, scaled to its share of all tokens: `scale` is the penalty's.
                head_weights={
                    head: self.train.head_weight(head) * part * many for head, part in share.items()
                },
                label_smoothing=self.train.label_smoothing,
                rng=rng,
                accumulate=i > 0,
                scale=1.0 / many,
                balance_shares={layer: part * many for layer, part in shares[i].items()},
            )
            plain = result.total - result.balance
            loss += plain / many if many > 1 else plain
            balance_term += result.balance / many
            for layer, found in result.balances.items():
                balance += shares[i][layer] * found / mixtures
            for head in counts:
                nll[head] += share[head] * result.nll[head]
        return Sums(loss, nll, balance, balance_term)

    def logits(self, batch: Batch) -> Arrays:
        source = batch.source
        with self._threads(), _unwarned():
            return self.model.forward(
                batch.tokens,
                valid_BT=None if batch.valid.all() else batch.valid,
                segments_BT=batch.segments,
                source_tokens_BS=None if source is None else source.tokens,
                source_valid_BS=None if source is None or source.valid.all() else source.valid,
            )

    def weights(self) -> Arrays:
        return {name: self.model.params[name].copy() for name in self._saved()}

    def load_weights(self, arrays: Mapping[str, Array]) -> None:
        self.model.storage.load(arrays, self._saved())

    def _saved(self) -> Collection[str]:
        """Return the names of the weights that a checkpoint has."""
        storage = self.model.storage
        return storage.owners if self.model.lora is None else storage.trained

    def state(self) -> Arrays:
        arrays: Arrays = {"steps": np.array(self.optimizer.steps)}
        for kind, name, view in self.optimizer.named_state():
            arrays[f"{kind}.{name}"] = view.copy()
        return arrays

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        held = {}
        for key, array in arrays.items():
            kind, _, name = key.partition(".")
            if name:
                held[kind, name] = array
        self.optimizer.load_state(held, steps=int(arrays["steps"]))
