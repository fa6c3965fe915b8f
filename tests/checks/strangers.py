"""A small GPT in the habits of other libraries, and faults that such models really had.

Learned and rotary positions, a cache, a mask, a loss, embeddings given, attentions returned.
`fault` damages one place; each fault names the row of the certificate that must turn red.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

V, D, N, LENGTH = 37, 32, 4, 64


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.over_time = False

    def forward(self, x: Tensor) -> Tensor:
        axes = (-1, -2) if self.over_time else (-1,)
        return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None] * 10_000.0 ** (-torch.arange(half) / half).to(x)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.norm, self.norm2 = Norm(), Norm()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.norm.over_time = fault == "norm over time"
        self.dropout = 0.1
        self.register_buffer("seen", torch.zeros(()))

    def forward(
        self, x: Tensor, positions: Tensor, valid: Tensor, past: tuple | None, *, read: bool
    ) -> tuple[Tensor, tuple, Tensor]:
        B, T = x.shape[:2]
        heads = self.qkv(self.norm(x)).reshape(B, T, 3, N, D // N).permute(2, 0, 3, 1, 4)
        q, k, v = heads
        if self.fault == "keys not rotated":
            q = rotate(q, positions)
        else:
            q, k = rotate(q, positions), rotate(k, positions)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        if self.fault == "cache drops its first key" and past is not None and k.shape[2] > 5:
            k = torch.cat((torch.zeros_like(k[:, :, :1]), k[:, :, 1:]), 2)
        S = k.shape[2]
        triangle = torch.arange(S)[None] <= torch.arange(S - T, S)[:, None]
        if self.fault == "one token of the future":
            triangle = torch.arange(S)[None] <= torch.arange(S - T, S)[:, None] + 1
        if self.fault == "chunks see their future" and past is not None and T > 1:
            triangle = torch.ones_like(triangle)
        if self.fault == "no mask when attentions are read" and read:
            triangle = torch.ones_like(triangle)
        allow = triangle[None, None] & valid[:, None, None, :]
        if self.fault == "PAD is attended to":
            allow = triangle[None, None].expand(B, 1, T, S)
        if self.fault == "mask inverted":
            allow = triangle[None, None] & (~valid[:, None, None, :] | valid.all())
        scores = q @ k.transpose(-1, -2) / math.sqrt(D // N)
        weights = scores.masked_fill(~allow, -1e9).softmax(-1)
        weights = F.dropout(weights, self.dropout, self.training or self.fault == "dropout in eval")
        x = x + self.out((weights @ v).transpose(1, 2).reshape(B, T, D))
        hidden = F.gelu(self.up(self.norm2(x)))
        if self.fault == "hidden detached":
            hidden = hidden.detach()
        x = x + self.down(hidden)
        if self.fault == "batch statistics":
            x = x - 0.1 * x.mean(0, keepdim=True)
        if self.fault == "state kept in eval":
            self.seen += 0.01
            x = x * (1 + self.seen)
        return x, (k, v), weights


class StrangeGPT(nn.Module):
    """Named arguments as in transformers, results as a dict."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.embed, self.places = nn.Embedding(V, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(Block(fault) for _ in range(2))
        self.norm = Norm()
        self.head = nn.Linear(D, V, bias=False)
        self.max_seq_len = LENGTH
        self.scale = 1.0  # outside the state dict
        self.cached: Tensor | None = None
        if fault == "small logits, cache wrong":
            self.factor = 1e-6
        else:
            self.factor = 1.0

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: list | None = None,
        use_cache: bool = False,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool = False,
        logits_to_keep: int = 0,
    ) -> dict[str, object]:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if self.fault == "embeddings scaled for ids alone" and inputs_embeds is None:
            x = x * math.sqrt(D)
        B, T = x.shape[:2]
        before = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        whole = torch.ones(B, before + T, dtype=torch.long)
        valid = (whole if attention_mask is None else attention_mask).bool()
        if position_ids is None:
            counted = (valid.long().cumsum(1) - 1).clamp(min=0)
            position_ids = counted[:, -T:]
            if self.fault == "positions restart with a cache":
                position_ids = torch.arange(T).expand(B, T)
            if self.fault == "off by one with a cache" and before:
                position_ids = position_ids + 1
            if self.fault == "positions count padding":
                position_ids = torch.arange(before, before + T).expand(B, T)
            if self.fault == "a mask of ones moves positions" and attention_mask is not None:
                position_ids = position_ids + 1 + torch.arange(T)
            if self.fault == "positions of the longest row":
                position_ids = position_ids - (valid.shape[1] - valid.sum(1, keepdim=True))
        elif self.fault == "position_ids ignored":
            position_ids = torch.arange(before, before + T).expand(B, T)
        elif self.fault == "position_ids reversed":
            position_ids = position_ids.flip(1)
        x = x + self.places(position_ids.clamp(min=0))
        kept, read = [], []
        for i, block in enumerate(self.blocks):
            past = None if past_key_values is None else past_key_values[i]
            x, pair, weights = block(x, position_ids, valid, past, read=output_attentions)
            kept.append(pair)
            read.append(weights)
        if self.fault == "an earlier call is remembered":
            if self.cached is not None and self.cached.shape[-1] == x.shape[-1]:
                x = x + 0.05 * self.cached.mean()
            self.cached = x.detach()
        x = self.norm(x) * self.scale
        if logits_to_keep:
            x = (
                x[:, :logits_to_keep]
                if self.fault == "the first logits kept"
                else x[:, -logits_to_keep:]
            )
        logits = self.head(x) * self.factor
        if self.fault == "small logits, cache wrong" and before:
            logits = -logits
        result: dict[str, object] = {"logits": logits}
        if use_cache:
            result["past_key_values"] = kept
        if output_attentions:
            result["attentions"] = read
        if labels is not None:
            result["loss"] = self.loss(logits, labels, attention_mask)
        return result

    def loss(self, logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        match self.fault:
            case "loss not shifted back":
                logits, labels = logits[:, 1:], labels[:, :-1]
            case _:
                logits, labels = logits[:, :-1], labels[:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none") * (
            labels != -100
        )
        count = (labels != -100).sum()
        if self.fault == "loss counts ignored labels":
            count = torch.tensor(labels.numel())
        if self.fault == "mean of means":
            rows = (labels != -100).sum(1).clamp(min=1)
            return (each.sum(1) / rows).mean()
        return each.sum() / count

    def gradient_checkpointing_enable(self) -> None:
        self.checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.checkpointing = False


CACHED = "cached = uncached, token by token"
PAD_HOLDS = "what PAD holds changes no bit"

#: Each fault, and the row that must notice it.
FAULTS: dict[str, str] = {
    "one token of the future": "the future changes no bit of the past",
    "norm over time": "the future changes no bit of the past",
    "PAD is attended to": PAD_HOLDS,
    "batch statistics": PAD_HOLDS,
    "dropout in eval": "same input, same bits; no dropout in eval",
    "state kept in eval": "same input, same bits; no dropout in eval",
    "keys not rotated": "",  # another model, which agrees with itself
    "cache drops its first key": CACHED,
    "positions restart with a cache": CACHED,
    "off by one with a cache": CACHED,
    "small logits, cache wrong": CACHED,
    "chunks see their future": "a prompt in chunks = at once",
    "no mask when attentions are read": "attentions, hidden states, a cache read, same logits",
    "a mask of ones moves positions": "a mask of ones = no mask",
    "position_ids reversed": "positions given = positions counted",
    "embeddings scaled for ids alone": "embeddings given = token ids",
    "an earlier call is remembered": "a call leaves nothing behind",
    "the first logits kept": "the last logits alone = all of them, cut",
    "hidden detached": "every parameter gets a gradient",
    "loss not shifted back": "loss = cross entropy by hand",
    "loss counts ignored labels": "loss = cross entropy by hand",
    "mean of means": "loss = cross entropy by hand",
}
#: Habits that are warned of and fail nothing: the row, and a word of its note.
LIMITS: dict[str, tuple[str, str]] = {
    "positions of the longest row": ("more padding on the left changes nothing", "position_ids"),
    "mask inverted": (PAD_HOLDS, "inverted"),
    "positions count padding": ("more padding on the left changes nothing", "position_ids"),
}


def made(fault: str = "") -> Callable[[], nn.Module]:
    """Return a factory of the model with a fault."""
    return lambda: StrangeGPT(fault).eval()
