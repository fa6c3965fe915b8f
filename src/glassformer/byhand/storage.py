"""All parameters in one vector, all gradients in another, and names that are views into both.

Parameters with weight decay come first, so that an optimizer updates everything in a few
vector operations. q, k and v of one attention are neighbours, so their joined matrix is a view too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import numpy as np

from glassformer.byhand.pass_context import Array
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.init import Constant, Gaussian, Rule, Uniform
from glassformer.spec.manifest import Parameter, manifest
from glassformer.spec.model import ModelSpec


class Storage:
    """`vector` holds every parameter that owns its numbers; `views` are its parts by name."""

    def __init__(self, spec: ModelSpec, dtype: "np.dtype[Any]") -> None:
        every = manifest(spec)
        own = [p for p in every if p.tied_to is None]
        self.owners: dict[str, Parameter] = {p.name: p for p in own}
        ordered = sorted(own, key=lambda p: not p.decay)  # stable: the manifest's order within both
        self.start: dict[str, int] = {}
        total = 0
        for parameter in ordered:
            self.start[parameter.name] = total
            total += parameter.size
        #: Entries before this one decay.
        self.n_decayed = sum(p.size for p in own if p.decay)
        self.vector = np.zeros(total, dtype)
        self.views = self._views(self.vector)
        #: Every manifest name, tied ones too, to the name that owns the numbers.
        self.owner_of = {p.name: p.tied_to or p.name for p in every}

    def _views(self, vector: Array) -> dict[str, Array]:
        views = {}
        for name, parameter in self.owners.items():
            start = self.start[name]
            views[name] = vector[start : start + parameter.size].reshape(parameter.shape)
        return views

    def twin(self) -> tuple[Array, dict[str, Array]]:
        """Return a vector of zeros of the same layout, and its views: for gradients or moments."""
        vector = np.zeros_like(self.vector)
        return vector, self._views(vector)

    def draw(self, rng: np.random.Generator) -> None:
        """Initialise by the manifest's rules, in the manifest's order."""
        for name, parameter in self.owners.items():
            fill(self.views[name], rule=parameter.init, rng=rng)

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Copy arrays in; a missing, unexpected or misshapen one is an error that names it."""
        for name in arrays:
            if name not in self.owner_of:
                raise InputError(f"no parameter '{name}'", hint=nearest(name, self.owners))
        for name, view in self.views.items():
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
        return neighbours and first.shape[1:] == second.shape[1:]

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
