"""A small model with norms of queries and keys, as a port writes it, and one mistake in it."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

V, D, N, K, H, FF = 53, 24, 6, 2, 8, 40


class RMS(nn.Module):
    def __init__(self, width: int, wrong: str) -> None:
        super().__init__()
        self.weight, self.eps, self.wrong = nn.Parameter(torch.ones(width)), 1e-3, wrong

    def forward(self, x: Tensor) -> Tensor:
        if self.wrong == "epsilon outside":
            return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight
        if self.wrong == "layer norm":
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def turned(x_BNTH: Tensor) -> Tensor:
    angle = torch.arange(x_BNTH.shape[2])[:, None] * 10_000.0 ** (-torch.arange(0, H, 2) / H)
    one, two = x_BNTH.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


class Block(nn.Module):
    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.n1, self.n2 = RMS(D, wrong), RMS(D, wrong)
        self.wq, self.wk, self.wv = (nn.Linear(D, n * H, bias=False) for n in (N, K, K))
        self.wo, self.qn, self.kn = nn.Linear(N * H, D, bias=False), RMS(H, ""), RMS(H, "")
        self.gate, self.up = nn.Linear(D, FF, bias=False), nn.Linear(D, FF, bias=False)
        self.down = nn.Linear(FF, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        h, wrong = self.n1(x), self.wrong
        q, k, v = (w(h).view(B, T, -1, H).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if wrong == "rotation before the norm":
            q, k = self.qn(turned(q)), self.kn(turned(k))
        else:
            q, k = turned(self.qn(q)), turned(self.kn(k))
        if wrong == "values turned":
            v = turned(v)
        k, v = (x.repeat_interleave(N // K, 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D if wrong == "scale of d_model" else H)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -1e9)
        out = scores.softmax(-2 if wrong == "softmax over queries" else -1) @ v
        out = out if wrong == "heads not joined" else out.transpose(1, 2)
        x = x + self.wo(out.reshape(B, T, -1))
        f = self.n2(x)
        return x + self.down(F.silu(self.gate(f)) * self.up(f))


class Port(nn.Module):
    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wrong = wrong
        self.embed, self.norm = nn.Embedding(V, D), RMS(D, wrong)
        self.blocks = nn.ModuleList(Block(wrong) for _ in range(2))
        self.head = nn.Linear(D, V, bias=False)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn(p.shape) * (0.1 if p.ndim == 1 else 0.2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks[: 1 if self.wrong == "a layer missing" else 2]:
            x = block(x)
        return self.head(x if self.wrong == "no final norm" else self.norm(x))
