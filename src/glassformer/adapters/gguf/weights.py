"""The tensors of a GGUF file: bounds and kinds checked first, then mapped one at a time."""

from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from glassformer.adapters.gguf.head import Head, read_head
from glassformer.adapters.gguf.kinds import FLOATS, Kind, kind_of, unpacked
from glassformer.adapters.table import Shape
from glassformer.adapters.weights import check_finite
from glassformer.spec.errors import FileError


class GGUFWeights:
    """`Weights` of a file: floats as they are stored, packed kinds as float32."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        self.head: Head = read_head(path)
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._kinds: dict[str, Kind] = {}
        spans = []
        for name, stored in self.head.tensors.items():
            kind = kind_of(stored.kind)
            if kind is None:
                raise self._bad(name, f"is of kind {stored.kind}, which cannot be read as numbers")
            if not kind.fits(stored.shape):
                raise self._bad(name, f"of kind {kind.name} has rows of {stored.shape[-1]} numbers")
            size = kind.bytes_of(stored.shape)
            start = self.head.data + stored.offset
            if stored.offset % self.head.alignment or start + size > self.head.size:
                raise self._bad(name, "lies outside of the file, or between its places")
            spans.append((start, start + size, name))
            self.shapes[name] = stored.shape
            self.dtypes[name] = FLOATS.get(stored.kind, torch.float32)
            self._kinds[name] = kind
        end = 0
        for start, stop, name in sorted(spans):
            if start < end:
                raise self._bad(name, "shares bytes with another one")
            end = stop

    def _bad(self, name: str, what: str) -> FileError:
        return FileError(f"tensor {name[:80]} {what}", where=self.where)

    @property
    def packed_kinds(self) -> Counter[str]:
        """How many tensors of each kind are unpacked when they are read."""
        return Counter(kind.name for kind in self._kinds.values() if kind.number not in FLOATS)

    def read(self, name: str, *, again: bool = False) -> Tensor:
        """Each has a map of its own, copied when written to, so `again` makes no difference."""
        kind, shape = self._kinds[name], self.shapes[name]
        size = kind.bytes_of(shape)
        start = self.head.data + self.head.tensors[name].offset
        try:
            data = np.memmap(self.path, dtype=np.uint8, mode="c", offset=start, shape=(size,))
        except (OSError, ValueError) as error:  # the file has changed meanwhile
            raise self._bad(name, f"cannot be read: {error}") from error
        tensor = unpacked(np.asarray(data), kind, shape)
        check_finite(name, tensor, where=self.where)
        return tensor
