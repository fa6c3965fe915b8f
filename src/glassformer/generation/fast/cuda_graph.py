"""A whole step recorded as a CUDA graph: one launch a token, whatever the number of kernels.

What a graph reads and writes is fixed when it is recorded, so each has its own tokens, counters
and masks, into which a decoding's are copied when it takes the graph up; keys and values stay
where they are. The counters are moved by the graph itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# B batch, S positions, V vocab


@dataclass(slots=True)
class Recorded:
    """A graph and its operands; `logits_BV` is overwritten by the next replay."""

    graph: torch.cuda.CUDAGraph
    tokens_B: Tensor
    end_1: Tensor
    positions_B: Tensor
    mask_B11S: Tensor | None
    crosses: list[tuple[Tensor, Tensor]]
    cross_mask_B11S: Tensor | None
    logits_BV: Tensor

    def take_up(
        self,
        end: int,
        *,
        positions_B: Tensor,
        mask_B11S: Tensor | None,
        crosses: list[tuple[Tensor, Tensor]],
        cross_mask_B11S: Tensor | None,
    ) -> None:
        """Begin with another decoding's state; `end` is after the next token."""
        self.end_1.fill_(end)
        self.positions_B.copy_(positions_B)
        if self.mask_B11S is not None and mask_B11S is not None:
            self.mask_B11S.copy_(mask_B11S)
        if self.cross_mask_B11S is not None and cross_mask_B11S is not None:
            self.cross_mask_B11S.copy_(cross_mask_B11S)
        for own, given in zip(self.crosses, crosses, strict=True):
            own[0].copy_(given[0])
            own[1].copy_(given[1])

    def step(self, tokens_B: Tensor, lines_B: Tensor | None) -> Tensor:
        """Logits of the living lines; those of all lines are the graph's own memory."""
        if lines_B is None:
            self.tokens_B.copy_(tokens_B)
            self.graph.replay()
            return self.logits_BV
        self.tokens_B.index_copy_(0, lines_B, tokens_B)
        self.graph.replay()
        return self.logits_BV.index_select(0, lines_B)


def record(
    step: Callable[..., Tensor],
    kvs: list[Tensor],
    end: int,
    *,
    positions_B: Tensor,
    mask_B11S: Tensor | None,
    crosses: list[tuple[Tensor, Tensor]],
    cross_mask_B11S: Tensor | None,
) -> Recorded:
    """Record `step` over this memory; nothing of it changes but column end - 1, which is next."""
    tokens_B = torch.zeros(len(positions_B), dtype=torch.long, device=positions_B.device)
    end_1 = torch.tensor([end], device=positions_B.device)
    own_places_B = positions_B.clone()
    operands = {
        "positions_B": own_places_B,
        "mask_B11S": None if mask_B11S is None else mask_B11S.clone(),
        "crosses": [(k.clone(), v.clone()) for k, v in crosses],
        "cross_mask_B11S": None if cross_mask_B11S is None else cross_mask_B11S.clone(),
    }
    # Kernels are compiled and libraries set up before anything is recorded, on a stream beside.
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            step(tokens_B, kvs, end_1, **operands)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits_BV = step(tokens_B, kvs, end_1, **operands)
        end_1.add_(1)
        own_places_B.add_(1)
    return Recorded(graph, tokens_B, end_1, logits_BV=logits_BV, **operands)
