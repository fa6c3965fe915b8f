"""`WholeStepper`: decoding over nothing but `forward(ids, mask) -> logits`, for models not ours."""

from collections.abc import Callable

import torch
from torch import Tensor

from glassformer.generate.prompts import Prompts, padded
from glassformer.generate.stepper import Rows, check_decodes
from glassformer.spec.model import ModelSpec

# B batch, T length, V vocab

Forward = Callable[[Tensor, Tensor | None], Tensor]


class WholeStepper:
    """No cache: the whole sequence at every step, and the last column of its logits."""

    def __init__(self, forward: Forward, spec: ModelSpec, *, device: torch.device) -> None:
        check_decodes(spec)
        self.forward = forward
        self.device = device
        self.vocab_size = spec.vocab_size
        self.max_seq_len = spec.max_seq_len
        self.source_vocab: int | None = None
        self.encoder_calls = 0
        self.positions = 0

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, Rows]:
        """Read the prompts; nothing is reserved, whatever the room."""
        tokens_BT, valid_BT = padded(prompts.tokens)
        valid = None if valid_BT is None else torch.from_numpy(valid_BT).to(self.device)
        past = Rows(torch.from_numpy(tokens_BT).to(self.device), valid, None, None)
        return self._read(past), past

    def step(self, tokens_B: Tensor, *, past: Rows) -> Tensor:
        """One more token a row, and everything once more."""
        new_B1 = tokens_B.to(self.device)[:, None]
        past.tokens_BT = torch.cat((past.tokens_BT, new_B1), 1)
        if past.valid_BT is not None:
            past.valid_BT = torch.cat((past.valid_BT, torch.ones_like(new_B1, dtype=torch.bool)), 1)
        return self._read(past)

    @torch.no_grad()
    def _read(self, past: Rows) -> Tensor:
        self.positions += past.tokens_BT.shape[1]
        return self.forward(past.tokens_BT, past.valid_BT)[:, -1]
