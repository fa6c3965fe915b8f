"""Taps: activations read, replaced, or followed backwards, by name.

A `Taps` is passed into a forward like a cache. Without one nothing is registered and nothing is
computed: each tap in the code is one `is None` test.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Protocol

from torch import Tensor

from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import ModelSpec
from glassformer.spec.taps import tap_shapes

Edit = Tensor | Callable[[Tensor], Tensor]


class Taps:
    """What to read (patterns), what to replace (tensors or functions), and what was seen.

    `seen` is a plain dict by full name. With `gradients`, what was read keeps its gradient:
    after a backward, `taps.gradients()` gives it by the same names.
    """

    def __init__(
        self,
        *,
        read: str | Sequence[str] = (),
        edit: Mapping[str, Edit] | None = None,
        gradients: bool = False,
    ) -> None:
        self.patterns = (read,) if isinstance(read, str) else tuple(read)
        self.edits = dict(edit or {})
        self.keep_gradients = gradients
        self.seen: dict[str, Tensor] = {}
        self.reads = _matching(self.patterns)

    def wants(self, name: str) -> bool:
        """Whether anything is to be done at this tap."""
        return name in self.edits or self.reads(name)

    def visit(self, name: str, x: Tensor) -> Tensor:
        """Replace and record x at this tap, and give back what the model goes on with."""
        if name in self.edits:
            x = _replaced(name, x, self.edits[name])
        if self.reads(name):
            if self.keep_gradients and x.requires_grad:
                x.retain_grad()
            self.seen[name] = x
        return x

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of what was read, where the last backward reached it."""
        kept = {name: x for name, x in self.seen.items() if x.retains_grad or x.is_leaf}
        return {name: x.grad for name, x in kept.items() if x.grad is not None}

    def check(self, spec: ModelSpec) -> None:
        """Refuse a pattern or an edit that matches no tap of this model."""
        _check(spec, self.patterns, tuple(self.edits))


@lru_cache
def _check(spec: ModelSpec, patterns: tuple[str, ...], edits: tuple[str, ...]) -> None:
    """Remembered, like what matches: one forward after the other asks for the same."""
    known = tap_shapes(spec)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise InputError(f"no tap matches '{pattern}'", hint=nearest(pattern, known))
    for name in edits:
        if name not in known:
            raise InputError(f"no tap '{name}' to edit", hint=nearest(name, known))


@lru_cache
def _matching(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a name matches; remembered, as every forward asks for the same names."""
    either = re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")
    return cache(lambda name: either.match(name) is not None)


def _replaced(name: str, x: Tensor, edit: Edit) -> Tensor:
    new = edit(x) if callable(edit) else edit.to(x)
    if new.shape != x.shape:
        raise InputError(
            f"the edit of '{name}' has shape {tuple(new.shape)}", hint=f"use {tuple(x.shape)}"
        )
    return new


class TapsAt:
    """A `Taps` seen from one place of the model: names are relative to a prefix."""

    def __init__(self, taps: Taps, prefix: str) -> None:
        self.taps = taps
        self.prefix = prefix

    def wants(self, leaf: str) -> bool:
        """Whether anything is to be done at this leaf."""
        return self.taps.wants(self.prefix + leaf)

    def visit(self, leaf: str, x: Tensor) -> Tensor:
        """`Taps.visit` under the prefix."""
        return self.taps.visit(self.prefix + leaf, x)

    def under(self, prefix: str) -> "TapsAt":
        """One level further in."""
        return TapsAt(self.taps, self.prefix + prefix)


def tap(taps: TapsAt | None, leaf: str, x: Tensor) -> Tensor:
    """x itself, unless somebody asked for it."""
    return x if taps is None else taps.visit(leaf, x)


def under(taps: TapsAt | None, prefix: str) -> TapsAt | None:
    """The same taps one level further in."""
    return None if taps is None else taps.under(prefix)


class Traceable(Protocol):
    """A model that can be traced: it looks at `scoped_taps` when no taps are passed."""

    spec: ModelSpec
    scoped_taps: Taps | None


@contextmanager
def trace(
    model: Traceable,
    *,
    read: str | Sequence[str] = (),
    edit: Mapping[str, Edit] | None = None,
    gradients: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Within the block, every call of `model` fills the dict by tap name.

    with trace(model, read="blocks.*.attn.weights") as seen:
        model(tokens)
    """
    taps = Taps(read=read, edit=edit, gradients=gradients)
    taps.check(model.spec)
    before = model.scoped_taps
    model.scoped_taps = taps
    try:
        yield taps.seen
    finally:
        model.scoped_taps = before
