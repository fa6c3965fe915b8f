"""`Row`: one prompt's own affairs while a batch is decoded. None depends on the other rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glassformer.generate.constraint import Bounded
from glassformer.generate.text import TextStream
from glassformer.spec.decoding import DecodeSpec

# B rows that go on, V vocab


@dataclass(slots=True)
class Row:
    """How long it may be, where its constraint stands, its text."""

    name: int
    limit: int
    spec: DecodeSpec
    bounded: Bounded | None
    stream: TextStream | None
    made: int = 0
    state: int = 0
    tail: str = ""
    finish: str | None = None

    def __post_init__(self) -> None:
        if self.bounded is not None:
            self.state = self.bounded.start

    def take(self, token: int) -> None:
        """One more token; sets `finish` if it was the last."""
        self.made += 1
        if token in self.spec.eos:
            self.finish = "eos"
            return
        if self.bounded is not None:
            self.state = self.bounded.advance(self.state, token)
            if self.made < self.limit and self.bounded.over(self.state, self.made):
                self.finish = "constraint"
        if self.stream is not None:
            text = self.tail + self.stream.push(token)
            if any(stop in text for stop in self.spec.stop):
                self.finish = "stop"
            self.tail = text[-max(map(len, self.spec.stop)) :]
        if self.made >= self.limit and self.finish is None:
            self.finish = "length"


def permission(rows: Sequence[Row], *, made: int, device: torch.device) -> Tensor | None:
    """What the rows' constraints allow after so many new tokens, (B, V); None without."""
    masks = []
    for row in rows:
        if row.bounded is None:
            return None
        masks.append(row.bounded.allow(row.state, made))
    return torch.from_numpy(np.stack(masks)).to(device)
