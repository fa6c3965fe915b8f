"""SGD, Adam, AdamW and Muon, in place and in a few vector operations, with torch.optim's numbers.

A model's parameters are one vector, so the cost of an update does not depend on the number of
tensors. Long vectors are updated in pieces that stay in the cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from glassformer.byhand.model import Model
from glassformer.byhand.operations import NUMPY
from glassformer.byhand.pass_context import Array
from glassformer.byhand.table import AdamRule
from glassformer.byhand.updates import clip_global_norm, global_norm, muon_update
from glassformer.spec.errors import InputError

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Muon",
    "Optimizer",
    "Slot",
    "Slotted",
    "clip_global_norm",
    "global_norm",
    "slots_of",
]

# P entries of one piece

#: Entries updated at once, to bound the scratch. Half of it costs 8 %, all at once saves 6 %.
PIECE = 64 * 1024


class Slot(NamedTuple):
    """A slice of parameters, its gradient, and whether weight decay applies to it."""

    param: Array
    grad: Array
    decay: bool


def slots_of(model: Model) -> list[Slot]:
    """Split a model's vector in two slots: with and without weight decay."""
    cut, grad = model.storage.n_decayed, model.grad_vector
    vector = model.storage.vector[: len(grad)]
    return [Slot(vector[:cut], grad[:cut], True), Slot(vector[cut:], grad[cut:], False)]


class Slotted(Protocol):
    """A layer or a model with slots of its own."""

    def slots(self) -> list[Slot]:
        """Return the slices of parameters that an optimizer updates."""


class Optimizer(ABC):
    """An optimizer: slots, and a state array for each kind and slot; `step` updates in place."""

    kinds: tuple[str, ...]

    def __init__(
        self, trained: Model | Slotted | Sequence[Slot], *, lr: float, weight_decay: float = 0.0
    ) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        self.steps = 0
        self.model = trained if isinstance(trained, Model) else None
        self.table = NUMPY if self.model is None else self.model.table
        match trained:
            case Model():
                self.slots = slots_of(trained)
            case Sequence():
                self.slots = list(trained)
            case _:
                self.slots = trained.slots()
        if not self.slots:
            raise InputError(
                f"nothing to train: {trained!r} has no parameters", hint="a layer that has some"
            )
        self.state = {kind: [np.zeros_like(s.param) for s in self.slots] for kind in self.kinds}
        longest = max(min(slot.param.size, PIECE) for slot in self.slots)
        dtype = self.slots[0].param.dtype
        self._work, self._more = np.empty(longest, dtype), np.empty(longest, dtype)

    def step(self, *, lr: float | None = None) -> None:
        """Make one update; a schedule passes the step's lr."""
        self.steps += 1
        lr = self.lr if lr is None else lr
        for slot, *state in zip(self.slots, *self.state.values(), strict=True):
            param, grad = slot.param.reshape(-1), slot.grad.reshape(-1)
            flat = [array.reshape(-1) for array in state]
            decay = self.weight_decay if slot.decay else 0.0
            for start in range(0, param.size, PIECE):
                at = slice(start, start + PIECE)
                self._update(param[at], grad[at], [array[at] for array in flat], lr, decay)

    @abstractmethod
    def _update(
        self, param_P: Array, grad_P: Array, state: list[Array], lr: float, decay: float
    ) -> None:
        """Update one piece."""

    def named_state(self) -> Iterator[tuple[str, str, Array]]:
        """Yield (kind, parameter name, view) of a model's state, for a checkpoint."""
        if self.model is None:
            raise InputError("only the optimizer of a model has names for its state")
        storage = self.model.storage
        for kind, (decayed, rest) in self.state.items():
            for name, parameter in storage.trained.items():
                start = storage.start[name]
                held = decayed[start:] if parameter.decay else rest[start - storage.n_decayed :]
                yield kind, name, held[: parameter.size].reshape(parameter.shape)

    def load_state(self, arrays: Mapping[tuple[str, str], Array], *, steps: int) -> None:
        """Load what `named_state` yielded."""
        for kind, name, view in self.named_state():
            np.copyto(view, arrays[kind, name])
        self.steps = steps


class SGD(Optimizer):
    """p -= lr g; with momentum, p -= lr m, m = momentum m + g. Weight decay is added to g."""

    kinds = ("momentum_buffer",)

    def __init__(
        self,
        trained: Model | Slotted | Sequence[Slot],
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(trained, lr=lr, weight_decay=weight_decay)
        self.momentum = momentum

    def _update(
        self, param_P: Array, grad_P: Array, state: list[Array], lr: float, decay: float
    ) -> None:
        self.table.sgd(
            param_P,
            grad_P,
            *state,
            lr=lr,
            momentum=self.momentum,
            decay=decay,
            work_P=self._work[: param_P.size],
        )


class Adam(Optimizer):
    """p -= lr m / (sqrt(v) + eps): running means of g and g^2, corrected for their start at 0.

    Weight decay is added to g, as torch.optim.Adam does; `AdamW` keeps it apart.
    """

    kinds = ("exp_avg", "exp_avg_sq")
    decoupled = False

    def __init__(
        self,
        trained: Model | Slotted | Sequence[Slot],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(trained, lr=lr, weight_decay=weight_decay)
        self.betas = betas
        self.eps = eps

    def _update(
        self, param_P: Array, grad_P: Array, state: list[Array], lr: float, decay: float
    ) -> None:
        m_P, v_P = state
        scratch = self._work[: param_P.size], self._more[: param_P.size]
        rule = AdamRule(lr, *self.betas, self.eps, decay, self.decoupled, self.steps)
        self.table.adam(param_P, grad_P, m_P, v_P, rule, scratch)


class AdamW(Adam):
    """Adam whose decay shrinks the parameter itself, p *= 1 - lr weight_decay, before the step."""

    decoupled = True

    def __init__(
        self,
        trained: Model | Slotted | Sequence[Slot],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(trained, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Muon:
    """Orthogonalised momentum on the matrices of the blocks, AdamW on all else.

    Jordan and others, 2024: a matrix moves by U V^T in place of U S V^T, so that directions in
    which its gradients are small move as far as the others. `lr_matrix` is the rate of the
    matrices; where a schedule passes `lr`, it is scaled by as much.
    """

    def __init__(
        self,
        model: Model,
        *,
        lr: float,
        lr_matrix: float = 0.02,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.model, self.lr, self.lr_matrix = model, lr, lr_matrix
        self.momentum, self.weight_decay = momentum, weight_decay
        self.steps = 0
        trained, held = model.storage.trained, model.params
        #: Running means of the gradients of matrices, by name.
        self.means = {
            name: np.zeros_like(held[name])
            for name, rule in trained.items()
            if rule.kind == "matrix" and rule.layer is not None
        }
        self.others = [name for name in trained if name not in self.means]
        slots = [Slot(held[name], model.grads[name], trained[name].decay) for name in self.others]
        self.rest = AdamW(slots, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.rest.table = model.table

    def step(self, *, lr: float | None = None) -> None:
        """Make one update; a schedule passes the step's lr."""
        self.steps += 1
        lr = self.lr if lr is None else lr
        for name, mean in self.means.items():
            muon_update(
                self.model.params[name],
                self.model.grads[name],
                mean,
                lr=lr * self.lr_matrix / self.lr,
                momentum=self.momentum,
                decay=self.weight_decay,
            )
        self.rest.step(lr=lr)

    def named_state(self) -> Iterator[tuple[str, str, Array]]:
        """Yield (kind, parameter name, view) of the state, for a checkpoint."""
        for name, mean in self.means.items():
            yield "momentum_buffer", name, mean
        for kind, arrays in self.rest.state.items():
            for name, array in zip(self.others, arrays, strict=True):
                yield kind, name, array

    def load_state(self, arrays: Mapping[tuple[str, str], Array], *, steps: int) -> None:
        """Load what `named_state` yielded."""
        for kind, name, view in self.named_state():
            np.copyto(view, arrays[kind, name])
        self.steps = self.rest.steps = steps
