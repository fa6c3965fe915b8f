"""All parameters in one vector, all gradients in another, and names that are views into both.

Parameters with weight decay come first, so that an optimizer updates everything in a few
vector operations; what does not train comes last and has no gradient. q, k and v of one attention
are neighbours, so their joined matrix is a view too.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, assert_never

import numpy as np

from glassformer.byhand.pass_context import Array
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.init import Constant, Gaussian, Rule, Uniform
from glassformer.spec.manifest import Parameter


class Storage:
    """`vector` holds every parameter that owns its numbers; `views` are its parts by name.

    `trained` are the names of those that train, by default all.
    """

    def __init__(
        self,
        every: Sequence[Parameter],
        dtype: "np.dtype[Any]",
        *,
        trained: Collection[str] | None = None,
    ) -> None:
        own = [p for p in every if p.tied_to is None]
        self.owners: dict[str, Parameter] = {p.name: p for p in own}
        for name in trained or ():
            if name not in self.owners:
                raise InputError(f"no parameter '{name}'", hint=nearest(name, self.owners))
        train = {p.name for p in own if trained is None or p.name in trained}
        # stable: the manifest's order within each
        ordered = sorted(own, key=lambda p: (p.name not in train, not p.decay))
        self.trained: dict[str, Parameter] = {p.name: p for p in own if p.name in train}
        self.start: dict[str, int] = {}
        total = 0
        for parameter in ordered:
            self.start[parameter.name] = total
            total += parameter.size
        #: Entries before these decay, and train.
        self.n_decayed = sum(p.size for p in self.trained.values() if p.decay)
        self.n_trained = sum(p.size for p in self.trained.values())
        self.vector = np.zeros(total, dtype)
        self.views = self._views(self.vector, self.owners)
        #: Every manifest name, tied ones too, to the name that owns the numbers.
        self.owner_of = {p.name: p.tied_to or p.name for p in every}

    def _views(self, vector: Array, which: Mapping[str, Parameter]) -> dict[str, Array]:
        views = {}
        for name, parameter in which.items():
            start = self.start[name]
            views[name] = vector[start : start + parameter.size].reshape(parameter.shape)
        return views

    def twin(self) -> tuple[Array, dict[str, Array]]:
        """Return a vector of zeros for what trains, and its views: gradients or moments."""
        vector = np.zeros(self.n_trained, self.vector.dtype)
        return vector, self._views(vector, self.trained)

    def draw(self, rng: np.random.Generator, names: Iterable[str] | None = None) -> None:
        """Initialise these, or all, by the manifest's rules, in the manifest's order."""
        for name in self.owners if names is None else names:
            fill(self.views[name], rule=self.owners[name].init, rng=rng)

    def load(self, arrays: Mapping[str, Array], names: Collection[str] | None = None) -> None:
        """Copy these parameters in, or all.

        A missing, unexpected or misshapen one is an error that names it.
        """
        wanted = self.owners if names is None else names
        for name in arrays:
            if self.owner_of.get(name) not in wanted:
                raise InputError(f"no parameter '{name}'", hint=nearest(name, wanted))
        for name in wanted:
            view = self.views[name]
            if name not in arrays:
                raise InputError(
                    f"parameter '{name}' is missing", hint=f"it has shape {view.shape}"
                )
            if arrays[name].shape != view.shape:
                raise InputError(
                    f"parameter '{name}' has shape {arrays[name].shape}", hint=f"use {view.shape}"
                )
            np.copyto(view, arrays[name], casting="same_kind")

    def follows(self, before: str, name: str) -> bool:
        """Return whether a parameter stands right after another, row by row."""
        first, second = self.owners[before], self.owners[name]
        neighbours = self.start[before] + first.size == self.start[name]
        alike = (before in self.trained) == (name in self.trained)
        return neighbours and alike and first.shape[1:] == second.shape[1:]

    def joined(self, vector: Array, names: Sequence[str]) -> Array:
        """Return neighbours as one array: their rows, one after the other."""
        start, size = self.start[names[0]], sum(self.owners[name].size for name in names)
        return vector[start : start + size].reshape(-1, *self.owners[names[0]].shape[1:])


def fill(array: Array, *, rule: Rule, rng: np.random.Generator) -> None:
    """Sample an array by a rule of the manifest."""
    match rule:
        case Constant(value=value):
            array.fill(value)
        case Uniform(bound=bound):
            array[...] = rng.uniform(-bound, bound, array.shape)
        case Gaussian(std=std):
            array[...] = rng.normal(0.0, std, array.shape)
        case _ as unreachable:
            assert_never(unreachable)
