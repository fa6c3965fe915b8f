"""A complete step recorded as a CUDA graph: one launch per token, whatever the number of kernels.

The addresses that a graph reads and writes are fixed when it is recorded, so each graph has its own
tokens, counters and masks, and those of a decoding are copied into them when it starts to use the
graph; keys and values stay where they are. The graph itself advances the counters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

# B batch, S positions, V vocab


class StepState(TypedDict):
    """The operands of a step that belong to one decoding, by the names of its arguments."""

    positions_B: Tensor
    mask_B11S: Tensor | None
    crosses: list[tuple[Tensor, Tensor]]
    cross_mask_B11S: Tensor | None


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
        """Copy another decoding's state in; `end` is the length after the next token."""
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
        """Return the logits of the rows that go on; without `lines_B` in the graph's own memory."""
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
    """Record `step` over this memory; only column end - 1, the next one, is overwritten."""
    tokens_B = torch.zeros(len(positions_B), dtype=torch.long, device=positions_B.device)
    end_1 = torch.tensor([end], device=positions_B.device)
    own_positions_B = positions_B.clone()
    operands: StepState = {
        "positions_B": own_positions_B,
        "mask_B11S": None if mask_B11S is None else mask_B11S.clone(),
        "crosses": [(k.clone(), v.clone()) for k, v in crosses],
        "cross_mask_B11S": None if cross_mask_B11S is None else cross_mask_B11S.clone(),
    }
    # Kernels are compiled and libraries set up on another stream before anything is recorded.
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(2):
            step(tokens_B, kvs, end_1, **operands)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits_BV = step(tokens_B, kvs, end_1, **operands)
        end_1.add_(1)
        own_positions_B.add_(1)
    return Recorded(graph, tokens_B, end_1, logits_BV=logits_BV, **operands)
