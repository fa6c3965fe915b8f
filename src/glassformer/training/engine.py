"""The interface of a training engine, and what all engines share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

Array = NDArray[Any]
Arrays = dict[str, Array]

#: Logits of a batch that are computed at once: on a CPU, and on a GPU, which waits for its host
#: where they are few.
LOGITS, GPU_LOGITS = 1 << 26, 1 << 29


@dataclass(frozen=True, slots=True)
class StepResult:
    """One update: loss as differentiated, mean loss per token by head, gradient norm unclipped.

    `applied` is False where the loss or a gradient was not finite: then nothing was changed.
    `balance` is the load-balancing loss of a model with experts, mean over its layers, and
    `balance_term` what it adds to the objective; `loss` is without it.
    """

    loss: float
    nll: Mapping[str, float]
    grad_norm: float
    tokens: int
    applied: bool
    balance: float | None = None
    balance_term: float = 0.0

    @property
    def objective(self) -> float:
        """The number that was differentiated: the loss and the load-balancing term."""
        return self.loss + self.balance_term


class Engine(Protocol):
    """A model with its optimizer; `weights` and `state` determine every later step."""

    spec: ModelSpec

    @property
    def logits_at_once(self) -> int:
        """Logits that `logits` and `judge` may be asked for at once; only memory depends on it."""

    @property
    def ahead(self) -> int:
        """Steps that may be submitted before the first one's result is read; 0 for most."""

    def submit(self, batches: Sequence[Batch], *, lr: float, seed: int) -> Callable[[], StepResult]:
        """Begin one update from some batches, every token weighted equally; dropout from `seed`.

        The returned function waits for its result; results are read in the order of the steps.
        """

    def step(self, batches: Sequence[Batch], *, lr: float, seed: int) -> StepResult:
        """Make one update and wait for its result."""

    def logits(self, batch: Batch) -> Arrays:
        """Return logits by head, without dropout."""

    def judge(self, batch: Batch) -> "dict[str, Judged]":
        """Return the loss of every target and the likeliest class, by head, without dropout."""

    def weights(self) -> Arrays:
        """Return copies of the parameters by manifest name."""

    def load_weights(self, arrays: Mapping[str, Array]) -> None:
        """Load parameters by manifest name."""

    def state(self) -> Arrays:
        """Return the optimizer's arrays, named `kind.parameter`, and its step count."""

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """Load what `state` returned."""


class Judged(NamedTuple):
    """A head's answers to a batch: each target's plain loss, and the likeliest class."""

    nll: NDArray[np.float64]
    predicted: NDArray[np.int64]


#: Logits that are judged at once: as float64 they stay in the cache.
JUDGED = 1 << 18


def judge_logits(logits: Mapping[str, Array], batch: Batch) -> dict[str, Judged]:
    """Return the loss of every target and the likeliest class, by head that has targets."""
    judged = {}
    for head, target in batch.targets.items():
        if head in logits:
            known = np.where(loss_weights(batch, head) > 0, target, 0).astype(np.int64)
            V = logits[head].shape[-1]
            rows_MV, known_M1 = logits[head].reshape(-1, V), known.reshape(-1, 1)
            nll_M, best_M = np.empty(len(rows_MV)), np.empty(len(rows_MV), dtype=np.int64)
            step = max(1, JUDGED // V)
            for at in (slice(i, i + step) for i in range(0, len(rows_MV), step)):
                wide = rows_MV[at].astype(np.float64)
                wide -= wide.max(-1, keepdims=True)
                chosen_M1 = np.take_along_axis(wide, known_M1[at], -1)
                total_M = np.exp(wide, out=wide).sum(-1)
                nll_M[at] = -(chosen_M1[:, 0] - np.log(total_M))
                best_M[at] = rows_MV[at].argmax(-1)
            judged[head] = Judged(nll_M.reshape(known.shape), best_M.reshape(known.shape))
    return judged


def log_softmax(logits: Array) -> NDArray[np.float64]:
    """Return log-probabilities in float64."""
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    logp: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return logp


class AtOnce:
    """The half of an engine that never runs ahead: a submitted step is done when it returns."""

    ahead = 0
    logits_at_once = LOGITS

    def submit(
        self: "Engine", batches: Sequence[Batch], *, lr: float, seed: int
    ) -> Callable[[], StepResult]:
        """Make one update; the returned function has its result."""
        result = self.step(batches, lr=lr, seed=seed)
        return lambda: result

    def judge(self: "Engine", batch: Batch) -> dict[str, Judged]:
        """Return the loss of every target and the likeliest class, by head, without dropout."""
        return judge_logits(self.logits(batch), batch)


def loss_weights(batch: Batch, head: str) -> NDArray[np.float32]:
    """Return the weight of each target of a head: the batch's, or 1 at every real token."""
    target = batch.targets[head]
    if batch.weights is not None and batch.weights.shape == target.shape:
        return np.asarray(batch.weights, dtype=np.float32)
    if target.ndim == 1:
        return np.ones(target.shape, dtype=np.float32)
    return batch.valid.astype(np.float32)


def totals(batches: Sequence[Batch], spec: ModelSpec) -> dict[str, float]:
    """Sum the weights of each head's targets over the batches of a step; check the targets."""
    if not batches:
        raise InputError("a step without a batch", hint="give at least one")
    heads = [head for head in spec.head_names() if head in batches[0].targets]
    if not heads:
        raise InputError(
            f"no targets for any head of the model ({', '.join(spec.head_names())})",
            hint=f"the batch has targets for: {', '.join(batches[0].targets) or 'nothing'}",
        )
    for batch in batches:
        for head in heads:
            _check_targets(batch, head, spec.head_size(head))
    return {
        head: float(sum(loss_weights(batch, head).sum(dtype=np.float64) for batch in batches))
        for head in heads
    }


def balance_shares(batches: Sequence[Batch], spec: ModelSpec) -> list[dict[str, float]]:
    """Return the weight of each batch's load-balancing losses, by layer: its real tokens' share.

    An encoder's layers count the tokens of the source.
    """
    tokens: dict[bool, list[int]] = {False: [int(batch.valid.sum()) for batch in batches]}
    if spec.encoder is not None:
        tokens[True] = [
            0 if batch.source is None else int(batch.source.valid.sum()) for batch in batches
        ]
    layers = {layer: layer.startswith("encoder.") for layer in spec.mixtures()}
    return [
        {layer: tokens[side][i] / (sum(tokens[side]) or 1) for layer, side in layers.items()}
        for i in range(len(batches))
    ]


def _check_targets(batch: Batch, head: str, classes: int) -> None:
    """Require weighted targets to be classes of the head: torch would silently ignore -100."""
    if head not in batch.targets:
        raise InputError(
            f"a batch of the step has no targets for head '{head}', which the first one has"
        )
    target = batch.targets[head]
    outside = (target < 0) | (target >= classes)
    if not outside.any():
        return
    for wrong in np.argwhere(outside & (loss_weights(batch, head) > 0))[:1]:
        raise InputError(
            f"target {target[tuple(wrong)]} is not one of {classes} classes",
            where=f"targets['{head}']{wrong.tolist()}",
            hint="give it weight 0, or a target in the range",
        )
