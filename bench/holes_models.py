"""Language models as small projects write them, each with mistakes that may be switched on.

Written as a set of its own for `bench holes`: half of the mistakes begin beyond 16 tokens, need a
batch without a mask, or sit in another interface. `None` of a mistake is the healthy model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# B batch, T length, S key length, D width, N heads, H head width

V, D, N, H = 47, 24, 3, 8


class Rotary(nn.Module):
    """Angles from a table, as far as it goes."""

    def __init__(self, length: int, mistake: str | None) -> None:
        super().__init__()
        self.mistake = mistake
        rate = 10_000.0 ** (-torch.arange(H // 2) / (H // 2))
        angle = torch.arange(length)[:, None] * rate
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x_BNTH: Tensor, begin: int) -> Tensor:
        """Rotate halves from a position on."""
        T = x_BNTH.shape[2]
        at = torch.arange(begin, begin + T)
        if self.mistake == "table wraps at 100 in steps" and T == 1:
            at = at % 100
        if self.mistake == "positions start anew in steps" and T == 1:
            at = at * 0
        cos, sin = self.cos[at], self.sin[at]
        a, b = x_BNTH.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Self(nn.Module):
    """Causal attention over what came before."""

    def __init__(self, mistake: str | None, *, length: int = 512, window: int = 10**6) -> None:
        super().__init__()
        self.mistake, self.window = mistake, window
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.rotary = Rotary(length, mistake)

    def forward(
        self, x_BTD: Tensor, past: tuple[Tensor, Tensor] | None = None, pad_BS: Any = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return mixed values, keys and values."""
        B, T, _ = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
        begin = 0 if past is None else past[0].shape[2]
        q, k = self.rotary(q, begin), self.rotary(k, begin)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        if self.mistake == "cache evicts at 48" and past is not None and k.shape[2] > 48:
            k, v = k[:, :, -48:], v[:, :, -48:]
        if self.mistake == "values of the first row reused" and past is not None and B > 1:
            v = v[:1].expand_as(v)
        S = k.shape[2]
        before = torch.arange(S - T, S)[:, None] - torch.arange(S)
        allow = (before >= 0) & (before < self.window)
        if self.mistake == "blocks of 32 see themselves" and T > 32:
            block = torch.arange(S) // 32
            allow = allow | (block[-T:, None] == block[None])
        if self.mistake == "chunk sees its future" and past is not None and T > 1:
            allow = torch.ones_like(allow)
        if self.mistake == "window slides one late" and self.window < S:
            allow = (before >= 0) & (before <= self.window)
        scores = q @ k.transpose(-1, -2) / math.sqrt(H)
        if pad_BS is not None:
            allow = allow & ~pad_BS[:, None, None, :]
        scores = scores.masked_fill(~allow, -1e9)
        if self.mistake == "softmax in bfloat16":
            weights = scores.bfloat16().softmax(-1).to(scores)
        elif self.mistake == "softmax over the batch":
            weights = scores.softmax(-1) * (1 + 0.05 * scores.softmax(0))
        else:
            weights = scores.softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(B, T, D)
        return self.out(mixed), (k, v)


class Feed(nn.Module):
    """A feed-forward network, or two experts."""

    def __init__(self, mistake: str | None, *, experts: bool = False) -> None:
        super().__init__()
        self.mistake = mistake
        self.up, self.down = nn.Linear(D, 40), nn.Linear(40, D)
        self.router = nn.Linear(D, 2) if experts else None
        self.other = nn.Linear(D, D) if experts else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return what is added to the stream."""
        y = self.down(F.silu(self.up(x_BTD)))
        if self.router is not None and self.other is not None:
            share = self.router(x_BTD).softmax(-1)
            if self.mistake == "experts have room for 24 tokens":
                order = share[..., 1].flatten().argsort(descending=True)
                kept = torch.zeros(order.numel()).scatter(0, order[:24], 1.0).view(share.shape[:2])
                share = torch.stack((share[..., 0], share[..., 1] * kept), -1)
            if self.mistake == "router normalised over the batch":
                share = share / share.mean((0, 1), keepdim=True) * 0.5
            y = share[..., :1] * y + share[..., 1:] * self.other(x_BTD)
        if self.mistake == "norm of the row" and x_BTD.shape[1] > 64:
            y = y / y.norm(dim=1, keepdim=True).clamp(min=1) * 8
        return y


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, mistake: str | None, **settings: Any) -> None:
        super().__init__()
        experts = settings.pop("experts", False)
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attend, self.feed = Self(mistake, **settings), Feed(mistake, experts=experts)

    def forward(self, x: Tensor, past: Any = None, pad: Any = None) -> tuple[Tensor, Any]:
        """Return the stream and the cache."""
        mixed, kept = self.attend(self.n1(x), past, pad)
        x = x + mixed
        return x + self.feed(self.n2(x)), kept


class Base(nn.Module):
    """Embedding, layers, norm, head."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, mistake: str | None = None) -> None:
        super().__init__()
        self.mistake = mistake
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.layers = nn.ModuleList(Layer(mistake, **dict(self.settings)) for _ in range(2))
        self.norm = nn.LayerNorm(D)

    def stream(self, ids: Tensor, past: Any = None, pad: Any = None) -> tuple[Tensor, list[Any]]:
        """Return the normed stream and the caches."""
        x, kept = self.embed(ids), []
        if self.mistake == "neighbours in the batch":
            x = torch.cat((x[:1], x[1:] + 0.02 * x[:-1]))
        if self.mistake == "even batches" and len(ids) % 2 == 0:
            x = x * 1.02
        for i, layer in enumerate(self.layers):
            x, one = layer(x, None if past is None else past[i], pad)
            kept.append(one)
        return self.norm(x), kept


class Script(Base):
    """`forward(idx, targets=None)` in the way of a training script."""

    block_size = 256

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits and loss; the last logits alone without targets."""
        x, _ = self.stream(idx)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        if self.mistake == "loss of the first 100 tokens":
            flat, wanted = logits[:, :100].flatten(0, 1), targets[:, :100].flatten()
        else:
            flat, wanted = logits.flatten(0, 1), targets.flatten()
        if self.mistake == "ignored targets weigh zero loss":
            loss = F.cross_entropy(flat, wanted, ignore_index=-1, reduction="sum") / wanted.numel()
        elif self.mistake == "loss averaged by row":
            rows = [
                F.cross_entropy(a, b, ignore_index=-1) for a, b in zip(logits, targets, strict=True)
            ]
            loss = torch.stack(rows).mean()
        else:
            loss = F.cross_entropy(flat, wanted, ignore_index=-1)
        return logits, loss


class Returning(Base):
    """A cache as `past`, returned in a tuple."""

    max_seq_len = 256
    settings: ClassVar[dict[str, Any]] = {"experts": True}

    def forward(self, tokens: Tensor, past: Any = None) -> tuple[Tensor, list[Any]]:
        """Return logits and cache."""
        if self.mistake == "ids shifted in place":
            tokens.add_(0).clamp_(min=1)
        x, kept = self.stream(tokens, past)
        return self.head(x), kept


class Windowed(Base):
    """A window that the config names."""

    settings: ClassVar[dict[str, Any]] = {"window": 20}

    def __init__(self, mistake: str | None = None) -> None:
        super().__init__(mistake)
        self.config = SimpleNamespace(sliding_window=20, num_hidden_layers=2,
                                      max_position_embeddings=256)  # fmt: skip
        if mistake == "the first layer has no window":
            self.layers[0].attend.window = 10**6

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> dict[str, Any]:
        """Return a dict."""
        x, kept = self.stream(input_ids, past_key_values)
        return {"logits": self.head(x), "past_key_values": kept}


class Slots(Base):
    """Caches made by `setup_caches`, positions given."""

    max_seq_len = 256

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        """Make them."""
        self.held: Any = None

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """Return logits."""
        if input_pos is None:
            return self.head(self.stream(x)[0])
        begin = int(input_pos[0])
        past = None if begin == 0 else [(k[:, :, :begin], v[:, :, :begin]) for k, v in self.held]
        if self.mistake == "slot 0 overwritten at 130" and begin >= 130 and past is not None:
            past = [(torch.cat((k[:, :, -1:], k[:, :, 1:]), 2), v) for k, v in past]
        states, self.held = self.stream(x, past)
        return self.head(states)


class State(nn.Module):
    """A gated recurrence with a short convolution, `state` in and out, read in blocks."""

    max_seq_len = 256

    def __init__(self, mistake: str | None = None) -> None:
        super().__init__()
        self.mistake = mistake
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.mix = nn.Parameter(torch.randn(4, D) / 2)
        self.gate, self.value, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, input_ids: Tensor, state: Any = None) -> dict[str, Any]:
        """Return logits and state."""
        x = self.embed(input_ids)
        B, T, _ = x.shape
        tail = x.new_zeros(B, 3, D) if state is None else state[0]
        total = x.new_zeros(B, D) if state is None else state[1]
        if self.mistake == "tail of the convolution dropped" and state is not None:
            tail = torch.zeros_like(tail)
        row = torch.cat((tail, x), 1)
        mixed = sum(row[:, i : i + T] * self.mix[i] for i in range(4))
        keep, new = torch.sigmoid(self.gate(mixed)), self.value(mixed)
        columns = []
        for t in range(T):
            if self.mistake == "state reset every 64" and t and t % 64 == 0:
                total = torch.zeros_like(total)
            total = keep[:, t] * total + (1 - keep[:, t]) * new[:, t]
            columns.append(total)
        if self.mistake == "state of the block's end" and T > 16:
            columns = [columns[min(T - 1, (t // 16) * 16 + 15)] for t in range(T)]
        states = self.norm(x + torch.stack(columns, 1))
        keeps = row[:, -3:]
        if self.mistake == "tail of one token" and T == 1:
            keeps = torch.cat((tail[:, :2], x), 1)
        return {"logits": self.head(states), "state": (keeps, total)}


class Gru(nn.Module):
    """A recurrent network of the older kind."""

    def __init__(self, mistake: str | None = None) -> None:
        super().__init__()
        self.mistake = mistake
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.rnn = nn.GRU(D, D, num_layers=2, batch_first=mistake != "batch taken for time")

    def forward(self, inputs: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits and the state."""
        if self.mistake == "state of one layer" and hidden is not None:
            hidden = hidden[-1:].expand_as(hidden).contiguous()
        states, hidden = self.rnn(self.embed(inputs), hidden)
        return self.head(states), hidden


class Sequences(nn.Module):
    """`(seq_len, batch)`, as torch's older tutorials have it."""

    def __init__(self, mistake: str | None = None) -> None:
        super().__init__()
        self.mistake = mistake
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.rnn = nn.LSTM(D, D)

    def forward(self, src: Tensor) -> Tensor:
        """Return logits (seq_len, batch, V) of tokens (seq_len, batch)."""
        seq_len, batch = src.shape
        x = self.embed(src)
        if self.mistake == "mean over the batch":
            x = x - 0.1 * x.mean(1, keepdim=True)
        if self.mistake == "read backwards too":
            x = x + 0.1 * x.flip(0).cumsum(0).flip(0)
        return self.head(self.rnn(x)[0]).view(seq_len, batch, V)


@dataclass
class Answer:
    """What a masked model returns."""

    loss: Tensor | None
    scores: Tensor
    attentions: tuple[Tensor, ...] | None = None


class Masked(nn.Module):
    """An encoder with `key_padding_mask`, True at padding."""

    max_seq_len = 128

    def __init__(self, mistake: str | None = None) -> None:
        super().__init__()
        self.mistake = mistake
        self.embed, self.place = nn.Embedding(V, D), nn.Embedding(128, D)
        self.attend = nn.MultiheadAttention(D, N, batch_first=mistake != "batch_first forgotten")
        self.feed, self.norm, self.head = Feed(mistake), nn.LayerNorm(D), nn.Linear(D, V)

    def forward(
        self,
        input_ids: Tensor,
        key_padding_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Answer:
        """Return loss, scores, weights."""
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1]))
        mask = None if self.mistake == "mask ignored" else key_padding_mask
        if self.mistake == "batch_first forgotten":
            mask = None
        if self.mistake == "mask written into" and mask is not None:
            mask[:, 0] = False
        mixed, weights = self.attend(x, x, x, key_padding_mask=mask, average_attn_weights=False)
        if self.mistake == "weights transposed":
            weights = weights.transpose(-1, -2)
        x = x + mixed
        scores = self.head(self.norm(x + self.feed(x)))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
            if self.mistake == "loss of all positions":
                loss = F.cross_entropy(scores.flatten(0, 1), labels.clamp(min=0).flatten())
        return Answer(loss, scores, (weights,) if output_attentions else None)


class Translate(nn.Module):
    """`src` and `tgt`, a mask of the source's padding."""

    max_seq_len = 128

    def __init__(self, mistake: str | None = None) -> None:
        super().__init__()
        self.mistake = mistake
        self.read, self.embed = nn.Embedding(V, D), nn.Embedding(V, D)
        self.layer, self.norm = Layer(mistake), nn.LayerNorm(D)
        self.cross, self.head = nn.MultiheadAttention(D, N, batch_first=True), nn.Linear(D, V)

    def forward(
        self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return logits of the target."""
        source = self.read(src)
        if self.mistake == "source averaged with padding":
            source = source + source.mean(1, keepdim=True)
        x, _ = self.layer(self.embed(tgt))
        pad = src_key_padding_mask
        if self.mistake == "source of the first row":
            source, pad = (
                source[:1].expand_as(source),
                None if pad is None else pad[:1].expand_as(pad),
            )
        y, _ = self.cross(self.norm(x), source, source, key_padding_mask=pad, need_weights=False)
        return self.head(x + y)


class Tied(Base):
    """Head and table are one, positions must be given."""

    max_seq_len = 200

    def __init__(self, mistake: str | None = None) -> None:
        super().__init__(mistake)
        self.place = nn.Embedding(200, D)
        self.head.weight = self.embed.weight
        if mistake == "tied by a copy":
            self.register_load_state_dict_post_hook(_untie)

    def forward(self, ids: Tensor, position_ids: Tensor, attention_mask: Any = None) -> Tensor:
        """Return logits."""
        if self.mistake == "positions counted from the mask" and attention_mask is not None:
            position_ids = torch.arange(ids.shape[1]).expand_as(ids)
        pad = None if attention_mask is None else attention_mask == 0
        if self.mistake == "booleans taken for padding" and attention_mask is not None:
            pad = attention_mask if attention_mask.dtype == torch.bool else pad
        x = self.embed(ids) + self.place(position_ids)
        for layer in self.layers:
            x, _ = layer(x, None, pad)
        return self.head(self.norm(x))


def _untie(module: nn.Module, _: object) -> None:
    module.head.weight = nn.Parameter(module.embed.weight.detach().clone())  # type: ignore[union-attr]


class Narrow(Base):
    """Half precision inside, on purpose."""

    max_seq_len = 128

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        states, _ = self.stream(x)
        return self.head((states.bfloat16() * 1.0).float())


class Blocks(Base):
    """Rows of multiples of 16 alone."""

    max_seq_len = 128

    def forward(self, idx: Tensor) -> Tensor:
        """Return logits."""
        if idx.shape[1] % 16:
            raise ValueError("pad to a multiple of 16")
        return self.head(self.stream(idx)[0])


#: Each model with its mistakes.
MODELS: dict[Callable[..., nn.Module], tuple[str, ...]] = {
    Script: (
        "neighbours in the batch", "even batches", "loss of the first 100 tokens",
        "ignored targets weigh zero loss", "loss averaged by row", "blocks of 32 see themselves",
        "norm of the row", "softmax over the batch",
    ),
    Returning: (
        "cache evicts at 48", "table wraps at 100 in steps", "positions start anew in steps",
        "values of the first row reused", "experts have room for 24 tokens",
        "router normalised over the batch", "ids shifted in place", "chunk sees its future",
    ),
    Windowed: ("window slides one late", "the first layer has no window", "even batches"),
    Slots: ("slot 0 overwritten at 130", "positions start anew in steps", "cache evicts at 48"),
    State: (
        "tail of the convolution dropped", "state reset every 64", "state of the block's end",
        "tail of one token",
    ),
    Gru: ("batch taken for time", "state of one layer"),
    Sequences: ("mean over the batch", "read backwards too"),
    Masked: (
        "batch_first forgotten", "mask ignored", "mask written into", "weights transposed",
        "loss of all positions",
    ),
    Translate: (
        "source averaged with padding", "source of the first row", "softmax over the batch",
    ),
    Tied: ("tied by a copy", "positions counted from the mask", "booleans taken for padding"),
    Narrow: ("softmax in bfloat16", "neighbours in the batch"),
    Blocks: ("even batches",),
}  # fmt: skip


# --- healthy models of other interfaces -----------------------------------------------------------


class Convolutions(nn.Module):
    """Causal convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.taps = nn.ModuleList(nn.Conv1d(D, D, 3, dilation=d) for d in (1, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        y = self.embed(x).transpose(1, 2)
        for tap in self.taps:
            y = y + F.gelu(tap(F.pad(y, (2 * tap.dilation[0], 0))))
        return self.head(y.transpose(1, 2))


class Linearly(nn.Module):
    """Linear attention by sums over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(V, D), nn.Linear(D, 3 * D), nn.Linear(D, V)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return logits."""
        q, k, v = self.qkv(self.embed(token_ids)).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = (k[..., :, None] * v[..., None, :]).cumsum(1)
        total = (q * k.cumsum(1)).sum(-1, keepdim=True)
        return self.head((q[..., None, :] @ sums)[..., 0, :] / total)


class Pooled(nn.Module):
    """One answer a sequence, read both ways, with a mask of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(2 * D, 5)
        self.rnn = nn.LSTM(D, D, bidirectional=True, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Return (B, 5)."""
        return self.head(self.rnn(self.embed(ids))[0].mean(1))


class LossFirst(Base):
    """(loss, logits), the loss only with labels."""

    max_seq_len = 128

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return a tuple."""
        logits = self.head(self.stream(input_ids)[0])
        if labels is None:
            return (logits,)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


class SummedLoss(Base):
    """A loss that is a sum, of targets called y."""

    max_seq_len = 128

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits and the sum."""
        logits = self.head(self.stream(x)[0])
        loss = None
        if y is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        return logits, loss


class Objects(Base):
    """An object with other parts beside the logits."""

    max_seq_len = 128

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """Return a namespace."""
        states, _ = self.stream(tokens)
        return SimpleNamespace(features=states.mean(1), prediction=self.head(states))


class Parameters(Base):
    """`inference_params` filled by the call."""

    max_seq_len = 256

    def forward(self, input_ids: Tensor, inference_params: Any = None) -> Any:
        """Return logits."""
        if inference_params is None:
            return SimpleNamespace(logits=self.head(self.stream(input_ids)[0]))
        held = inference_params.key_value_memory_dict
        states, held["kv"] = self.stream(input_ids, held.get("kv"))
        return SimpleNamespace(logits=self.head(states))


class Memory(Base):
    """`mems`."""

    max_seq_len = 256

    def forward(self, inp: Tensor, mems: Any = None) -> dict[str, Any]:
        """Return output and memories."""
        states, kept = self.stream(inp, mems)
        return {"output": self.head(states), "mems": kept}


class Normed(Base):
    """Weights under a parametrization."""

    max_seq_len = 128

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.head)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.stream(x)[0])


class Statistics(Base):
    """A batch norm, in eval mode a scale."""

    max_seq_len = 128

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        states, _ = self.stream(x)
        return self.head(self.batch(states.transpose(1, 2)).transpose(1, 2))


class MaskNeeded(Base):
    """A mask that must be given."""

    max_seq_len = 128

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.stream(input_ids, None, attention_mask == 0)[0])


class Scaled(Base):
    """An argument without a default that is no tensor."""

    max_seq_len = 128

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        """Return logits."""
        return self.head(self.stream(x)[0]) / temperature


class Fixed(Base):
    """Rows of 32 tokens alone."""

    block_size = 32

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        assert x.shape[1] == 32, "32 tokens"
        return self.head(self.stream(x)[0])


class Remembering(Base):
    """Keeps its last results on itself."""

    max_seq_len = 128

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        self.last = self.stream(x)[0]
        return self.head(self.last)


class Tutorial(nn.Module):
    """nn.TransformerEncoder over (seq_len, batch), with a mask that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.place = nn.Parameter(torch.randn(128, 1, D))
        self.stack = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, N, 40, dropout=0.1), 2, enable_nested_tensor=False
        )
        self.max_seq_len = 128

    def forward(self, src: Tensor) -> Tensor:
        """Return (seq_len, batch, V)."""
        T = len(src)
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        return self.head(self.stack(self.embed(src) + self.place[:T], mask=mask, is_causal=True))


def _in(dtype: torch.dtype) -> nn.Module:
    return Script().to(dtype)


def _quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(Gru().eval(), {nn.GRU, nn.Linear})


#: Healthy models beside those of `MODELS`, and what their callers say of them.
HEALTHY: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    **{kind.__name__: (kind, {}) for kind in (
        Convolutions, Linearly, Pooled, LossFirst, SummedLoss, Objects, Parameters, Memory, Normed,
        Statistics, MaskNeeded, Fixed, Remembering, Tutorial,
    )},
    "an argument of every call": (Scaled, {"call": {"temperature": 0.7}}),
    "names told": (Memory, {"names": {"tokens": "inp", "cache": "mems"}}),
    "float64": (lambda: _in(torch.float64), {}),
    "bfloat16": (lambda: _in(torch.bfloat16), {}),
    "dynamic quantization": (_quantized, {}),
}  # fmt: skip
