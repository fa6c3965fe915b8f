"""Taps: read or replace activations by name, or read their gradients.

A `Taps` is passed into a forward like a cache. Without one nothing is registered and nothing is
computed: each tap in the code is one `is None` test.
"""

import copy
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Protocol, runtime_checkable

from torch import Tensor

from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import ModelSpec, tap_shapes

Edit = Tensor | Callable[[Tensor], Tensor]


class Taps:
    """Activations to read (patterns) and to replace (tensors or functions), and those read.

    `seen` is a plain dict by full name. With `gradients`, activations that were read keep their
    gradient: after a backward, `taps.gradients()` returns it by the same names. `outer` are the
    taps of a block around these: their edits come first, and both read what all edits leave.
    `names` are those that `seen` has in place of the full ones.
    """

    def __init__(
        self,
        *,
        read: str | Sequence[str] = (),
        edit: Mapping[str, Edit] | None = None,
        gradients: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.outer: Taps | None = None
        self.names = {} if names is None else names
        self.patterns = (read,) if isinstance(read, str) else tuple(read)
        self.edits = dict(edit or {})
        self.keep_gradients = gradients
        self.seen: dict[str, Tensor] = {}
        self.reads = _matching(self.patterns)

    def within(self, outer: "Taps | None") -> "Taps":
        """Return these taps inside of others, which then see every call that these see."""
        if outer is None:
            return self
        inner = copy.copy(self)
        inner.outer = outer if inner.outer is None else inner.outer.within(outer)
        return inner

    def wants(self, name: str) -> bool:
        """True if this tap is read or edited."""
        if name in self.edits or self.reads(name):
            return True
        return self.outer is not None and self.outer.wants(name)

    def visit(self, name: str, x: Tensor) -> Tensor:
        """Replace and record x at this tap, and return what the model continues with."""
        x = self._edit(name, x)
        self._record(name, x)
        return x

    def _edit(self, name: str, x: Tensor) -> Tensor:
        if self.outer is not None:
            x = self.outer._edit(name, x)
        return _replaced(name, x, self.edits[name]) if name in self.edits else x

    def _record(self, name: str, x: Tensor) -> None:
        if self.outer is not None:
            self.outer._record(name, x)
        if self.reads(name):
            if self.keep_gradients and x.requires_grad:
                x.retain_grad()
            self.seen[self.names.get(name, name)] = x

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of what was read, where the last backward reached it."""
        kept = {name: x for name, x in self.seen.items() if x.retains_grad or x.is_leaf}
        return {name: x.grad for name, x in kept.items() if x.grad is not None}

    def check(self, spec: ModelSpec) -> None:
        """Refuse a pattern or an edit that matches no tap of this model."""
        _check(spec, self.patterns, tuple(self.edits))


@lru_cache
def _check(spec: ModelSpec, patterns: tuple[str, ...], edits: tuple[str, ...]) -> None:
    """Check patterns and edits; cached, because every forward has the same ones."""
    known = tap_shapes(spec)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise InputError(f"no tap matches '{pattern}'", hint=nearest(pattern, known))
    for name in edits:
        if name not in known:
            raise InputError(f"no tap '{name}' to edit", hint=nearest(name, known))


@lru_cache
def _matching(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a test for names that match; cached, because every forward has the same names."""
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
    """A `Taps` at one part of the model: names are relative to a prefix."""

    def __init__(self, taps: Taps, prefix: str) -> None:
        self.taps = taps
        self.prefix = prefix

    def wants(self, leaf: str) -> bool:
        """True if this leaf is read or edited."""
        return self.taps.wants(self.prefix + leaf)

    def visit(self, leaf: str, x: Tensor) -> Tensor:
        """Call `Taps.visit` under the prefix."""
        return self.taps.visit(self.prefix + leaf, x)

    def under(self, prefix: str) -> "TapsAt":
        """Return these taps one level deeper."""
        return TapsAt(self.taps, self.prefix + prefix)


def tap(taps: TapsAt | None, leaf: str, x: Tensor) -> Tensor:
    """Return x, replaced and recorded if the tap is edited or read."""
    return x if taps is None else taps.visit(leaf, x)


def under(taps: TapsAt | None, prefix: str) -> TapsAt | None:
    """Return the same taps one level deeper."""
    return None if taps is None else taps.under(prefix)


@runtime_checkable
class Traceable(Protocol):
    """A model that can be traced: it uses `scoped_taps` when no taps are passed."""

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
    """Read or edit taps of every call of `model` within the block; yield the dict of those read.

    with trace(model, read="blocks.*.attn.weights") as seen:
        model(tokens)

    Blocks within each other add up, and `gf.inspect` of the model is a call of it.
    """
    if not isinstance(model, Traceable):
        raise InputError(
            f"a {type(model).__name__} has no taps of ours",
            hint="gf.load a folder of it; gf.inspect takes a by-hand model",
        )
    with scope(model, Taps(read=read, edit=edit, gradients=gradients)) as seen:
        yield seen


@contextmanager
def scope(model: Traceable, taps: Taps) -> Iterator[dict[str, Tensor]]:
    """Let these taps see every call of `model` within the block; yield their dict."""
    taps.check(model.spec)
    before = model.scoped_taps
    model.scoped_taps = taps.within(before)
    try:
        yield taps.seen
    finally:
        model.scoped_taps = before
