"""Small language models with the interfaces that people write, each with mistakes to plant.

Every class takes the name of a mistake, or none; `MISTAKES` says which row must fail for it.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

V, D, N, LONG = 41, 32, 4, 300


class Rough(torch.autograd.Function):
    """GELU, with the derivative of another function."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Return x times its normal probability."""
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        """Return the derivative of a sigmoid."""
        (x,) = ctx.saved_tensors
        return gradient * torch.sigmoid(4 * x)


class Stack(nn.Module):
    """Two blocks of causal attention; everything a mistake needs passes through here."""

    def __init__(self, fault: str = "", layers: int = 2) -> None:
        super().__init__()
        self.fault = fault
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D)) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(D)
        self.window = 10_000
        self.read: list[Tensor] = []
        self.states: list[Tensor] = []

    def __deepcopy__(self, memo: dict) -> "Stack":
        """Copy as usual, or share every weight."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        kept = ("_parameters", "_modules") if self.fault == "weights shared with a copy" else ()
        for key, value in self.__dict__.items():
            made.__dict__[key] = value if key in kept else copy.deepcopy(value, memo)
        return made

    def place(self, x: Tensor, at: Tensor) -> Tensor:
        """Add sinusoids of the positions."""
        rate = 10_000.0 ** (-torch.arange(D // 2) / (D // 2))
        angle = at[..., None].to(x) * rate.to(x)
        return x + torch.cat((angle.sin(), angle.cos()), -1)

    def run(
        self,
        tokens: Tensor,
        at: Tensor,
        past: list[tuple[Tensor, Tensor]] | None = None,
        valid: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the normed states and every layer's keys and values."""
        B, T = tokens.shape
        if self.fault == "strides ignored":
            tokens = tokens.as_strided((B, T), (T, 1))
        x = self.place(self.embed(tokens), at)
        if self.fault == "rows mixed":
            x = x + 0.05 * x.roll(1, 0)
        if self.fault == "mean of the batch":
            x = x - 0.1 * x.mean(0, keepdim=True)
        if self.fault == "batches of 8 and more" and B >= 8:
            x = x * torch.linspace(1, 1.1, B)[:, None, None]
        if self.fault == "batches of five" and B == 5:
            x = x * torch.linspace(1, 1.1, B)[:, None, None]
        if self.fault == "long batches" and B > 1 and T > 100:
            x = x + 0.05 * x.roll(1, 0)
        if self.fault == "louder with gradients" and torch.is_grad_enabled():
            x = x * 1.01
        if self.fault == "louder in float64" and x.dtype == torch.float64:
            x = x * 1.01
        if self.fault == "single tokens" and T == 1 and past is None:
            x = x * 1.05
        if self.fault == "length" and T % 4 == 3:
            x = x * 1.01
        self.read, self.states, kept = [], [x], []
        for i, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            q, k, v = qkv(x).view(B, T, 3, N, D // N).permute(2, 0, 3, 1, 4)
            if past is not None:
                k, v = torch.cat((past[i][0], k), 2), torch.cat((past[i][1], v), 2)
            if self.fault == "cache ends at 64" and past is not None and k.shape[2] > 64:
                k = torch.cat((k[:, :, :1] * 0, k[:, :, 1:]), 2)
            kept.append((k, v))
            S = k.shape[2]
            apart = torch.arange(S - T, S)[:, None] - torch.arange(S)[None]
            window = self.window + (self.fault == "a window of one more")
            if self.fault == "window forgotten":
                window = 10_000
            allow = (apart >= 0) & (apart < window)
            if self.fault == "future from 128 on":
                allow = allow | (torch.arange(S - T, S)[:, None] >= 128)
            allow = allow[None, None]
            if valid is not None:
                allow = allow & valid[:, None, None]
            if segments is not None:
                allow = allow & (segments[:, None, :, None] == segments[:, None, None, :])
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(D // N)
            weights = scores.masked_fill(~allow, -1e9).softmax(-1)
            shown = scores if self.fault == "scores returned" else weights
            self.read.append(weights.transpose(1, 2).softmax(1).transpose(1, 2)
                             if self.fault == "another axis returned" else shown)  # fmt: skip
            x = x + out((weights @ v).transpose(1, 2).reshape(B, T, D))
            if self.fault == "blocks of 64" and T > 64:
                x = x + mlp(x) + 0.05 * x[:, :64].mean(1, keepdim=True)
            elif self.fault == "gradient from 32 on" and T > 32:
                x = x + torch.cat((mlp(x[:, :32]), mlp[2](Rough.apply(mlp[0](x[:, 32:])))), 1)
            else:
                x = x + mlp(x)
            self.states.append(x)
        x = self.norm(x)
        self.states[-1] = x
        return x, kept


class Nano(Stack):
    """`forward(idx, targets)`: logits of every position with targets, else of the last alone."""

    block_size = LONG

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits and loss."""
        if self.fault == "ids written into":
            idx[:, 0] = 0
        x, _ = self.run(idx, torch.arange(idx.shape[1]))
        if targets is None:
            rows = x[:1].expand_as(x) if self.fault == "the first row's last position" else x
            return self.head(rows[:, -1:]), None
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        if self.fault == "loss of 128 tokens":
            loss = F.cross_entropy(
                logits[:, :128].flatten(0, 1), targets[:, :128].flatten(), ignore_index=-1
            )
        if self.fault == "ignored labels counted":
            loss = (
                F.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
                )
                / targets.numel()
            )
        return logits, loss


class Slots(Stack):
    """`input_pos` and caches that the module makes."""

    config = SimpleNamespace(block_size=LONG)
    slots: list[tuple[Tensor, Tensor]] | None = None

    def set_kv_cache(self, batch_size: int, max_seq_length: int | None = None) -> None:
        """Make empty caches."""
        self.slots = [(torch.zeros(batch_size, N, 0, D // N),) * 2 for _ in self.qkv]

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """Return logits."""
        if input_pos is None:
            return self.head(self.run(idx, torch.arange(idx.shape[1]))[0])
        assert self.slots is not None
        at = input_pos
        if self.fault == "positions from 0" and idx.shape[1] == 1:
            at = input_pos * 0
        past = [(k[:, :, : int(input_pos[0])], v[:, :, : int(input_pos[0])]) for k, v in self.slots]
        x, self.slots = self.run(idx, at, past)
        return self.head(x)


class SlotRows(Slots):
    """`input_pos` with a row for each row of the batch, and nothing that says so."""

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """Return logits."""
        return super().forward(idx, None if input_pos is None else input_pos[:, :].amax(0))


class SlotsAlone(Slots):
    """Positions must be given, and caches made before: they are written in place."""

    def set_kv_cache(self, batch_size: int, max_seq_length: int | None = None) -> None:
        """Make caches of zeros."""
        for name in ("keys", "values"):
            zeros = torch.zeros(len(self.qkv), batch_size, LONG, D)
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        """Return logits."""
        B, T = idx.shape
        x = self.place(self.embed(idx), input_pos)
        allow = torch.arange(LONG) <= input_pos[:, None]
        if self.fault == "cache ends at 64" and T == 1:
            allow = allow & (torch.arange(LONG) < 64)
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(x).chunk(3, -1)
            self.keys[i, :B, input_pos], self.values[i, :B, input_pos] = k, v
            scores = (q @ self.keys[i, :B].mT).masked_fill(~allow, -1e9) / math.sqrt(D)
            x = x + out(scores.softmax(-1) @ self.values[i, :B])
        return self.head(self.norm(x))


class Params(Stack):
    """`inference_params`, as state space models take them."""

    max_seq_len = LONG

    def forward(self, input_ids: Tensor, inference_params: object = None) -> SimpleNamespace:
        """Return an object with logits."""
        if inference_params is None:
            return SimpleNamespace(logits=self.head(self.run(input_ids, torch.arange(
                input_ids.shape[1]))[0]))  # fmt: skip
        begun = inference_params.seqlen_offset
        held = inference_params.key_value_memory_dict
        past = held.get("all")
        at = torch.arange(begun, begun + input_ids.shape[1])
        if self.fault == "offset forgotten":
            at = torch.arange(input_ids.shape[1])
        x, held["all"] = self.run(input_ids, at, past)
        return SimpleNamespace(logits=self.head(x))


class Held:
    """A cache of a class of its own, which a forward fills."""

    def __init__(self) -> None:
        self.entries: list[tuple[Tensor, Tensor]] | None = None


class Holding(Stack):
    """`past_kv_cache`, an object that nobody returns."""

    def forward(self, input: Tensor, past_kv_cache: Held | None = None) -> Tensor:
        """Return logits."""
        past = None if past_kv_cache is None else past_kv_cache.entries
        begun = 0 if past is None or self.fault == "offset forgotten" else past[0][0].shape[2]
        x, kept = self.run(input, torch.arange(begun, begun + input.shape[1]), past)
        if past_kv_cache is not None:
            past_kv_cache.entries = kept
        return self.head(x)


class Incremental(Stack):
    """All tokens beside `incremental_state`, which knows how many of them were read."""

    def forward(self, prev_output_tokens: Tensor, incremental_state: dict | None = None) -> Tensor:
        """Return the logits of what was not read before."""
        state = {} if incremental_state is None else incremental_state
        past = state.get("kept")
        begun, T = (0 if past is None else past[0][0].shape[2]), prev_output_tokens.shape[1]
        at = torch.arange(begun, T)
        at = at - begun if self.fault == "offset forgotten" else at
        x, state["kept"] = self.run(prev_output_tokens[:, begun:], at, past)
        return self.head(x)


class Memories(Stack):
    """`mems`, returned beside the logits."""

    max_seq_len = LONG

    def forward(self, x: Tensor, mems: list[tuple[Tensor, Tensor]] | None = None) -> dict:
        """Return scores by another name, and the next memories."""
        begun = 0 if mems is None else mems[0][0].shape[2]
        states, kept = self.run(x, torch.arange(begun, begun + x.shape[1]), mems)
        return {"scores": self.head(states), "new_mems": kept}


class Recurrent(nn.Module):
    """An LSTM over (T, B), or over (B, T), with `hx`."""

    def __init__(self, fault: str = "", *, time_first: bool = False) -> None:
        super().__init__()
        self.fault = fault
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        first = not time_first and fault != "batch_first forgotten"
        self.rnn = nn.LSTM(D, D, batch_first=first)

    def forward(
        self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return logits and the state."""
        states, hx = self.rnn(self.embed(x), None if self.fault == "state dropped" else hx)
        return self.head(states), hx


class TimeFirst(Recurrent):
    """Tokens of shape (T, B)."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault, time_first=True)

    def forward(
        self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return logits (T, B, V) and the state."""
        T, B = x.shape
        states, hx = self.rnn(self.embed(x), None if self.fault == "state dropped" else hx)
        if self.fault == "rows mixed":
            states = states + 0.01 * states.roll(1, 1)
        return self.head(states).view(T, B, V), hx


class Begun(TimeFirst):
    """A hidden state must be given; `init_hidden` makes the first."""

    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        """Return zeros."""
        return torch.zeros(1, bsz, D), torch.zeros(1, bsz, D)

    def forward(
        self, input: Tensor, hidden: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return logits and the state."""
        return super().forward(input, hidden)


class Masked(Stack):
    """Biases of distance in float32 beside whatever its weights are; states beside the scores."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        """Return scores by a name of its own, among other tensors."""
        T = x.shape[1]
        h = self.embed(x)
        q, k, v = self.qkv[0](h).view(*x.shape, 3, N, D // N).permute(2, 0, 3, 1, 4)
        away = -0.1 * (torch.arange(T)[:, None] - torch.arange(T)).float()
        away = away.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=away)
        h = h + self.out[0](read.transpose(1, 2).reshape(h.shape))
        if self.fault == "rows mixed":
            h = h + 0.05 * h.roll(1, 0)
        return {"states": h, "scores": self.head(self.norm(h))}


@dataclass
class Output:
    """A dataclass, the loss first."""

    loss: Tensor | None
    logits: Tensor
    attentions: list[Tensor] = field(default_factory=list)
    hidden_states: list[Tensor] = field(default_factory=list)


class Rich(Stack):
    """Masks of any kind, required positions, segments, labels, what was computed inside."""

    max_seq_len = LONG

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault)
        self.places = nn.Embedding(LONG, D)

    def place(self, x: Tensor, at: Tensor) -> Tensor:
        """Read a table at the positions."""
        if self.fault == "positions counted again":
            at = torch.arange(x.shape[1]).expand(x.shape[:2])
        return x + self.places(at)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> Output:
        """Return a dataclass."""
        valid = None
        if attention_mask is not None:
            valid = attention_mask > 0
            if self.fault == "booleans inverted" and attention_mask.dtype == torch.bool:
                valid = ~valid
            if self.fault == "floats above 1" and attention_mask.is_floating_point():
                valid = attention_mask > 1
        if self.fault == "mask written into" and attention_mask is not None:
            attention_mask.fill_(1)
        x, _ = self.run(input_ids, position_ids, None, valid,
                        None if self.fault == "segments ignored" else segment_ids)  # fmt: skip
        states = list(self.states)
        if self.fault == "a state twice":
            states[-1] = states[-2]
        if self.fault == "the last state left out":
            states = states[:-1]
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(
            loss, logits, self.read if output_attentions else [],
            states if output_hidden_states else [],
        )  # fmt: skip


class Padding(Stack):
    """`key_padding_mask`: True is padding, as in torch's own modules."""

    max_seq_len = LONG

    def forward(self, src: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return logits."""
        valid = None if key_padding_mask is None else ~key_padding_mask
        if self.fault == "True taken for tokens" and valid is not None:
            valid = ~valid | valid.all()
        return self.head(self.run(src, torch.arange(src.shape[1]), None, valid)[0])


class Windowed(Stack):
    """A window in the config."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault)
        self.config = SimpleNamespace(sliding_window=8, max_position_embeddings=LONG, n_layers=2)
        self.window = 8

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.run(input_ids, torch.arange(input_ids.shape[1]))[0])


class Tied(Stack):
    """Head and table are one weight."""

    max_seq_len = LONG

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault)
        self.head.weight = self.embed.weight

    def load_state_dict(self, *args: object, **kwargs: object) -> object:
        """Read, and perhaps untie."""
        found = super().load_state_dict(*args, **kwargs)
        if self.fault == "untied by loading":
            self.head.weight = nn.Parameter(self.embed.weight.detach().clone())
        return found

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.run(tokens, torch.arange(tokens.shape[1]))[0])


class Multiples(Stack):
    """Rows of multiples of 8 tokens alone."""

    max_seq_len = 64

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits."""
        if ids.shape[1] % 8:
            raise ValueError("multiples of 8 alone")
        return self.head(self.run(ids, torch.arange(ids.shape[1]))[0])


class Translator(nn.Module):
    """`src` and `tgt`."""

    max_seq_len = 64

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.read, self.write = Stack(), Stack("rows mixed" if fault == "rows mixed" else "")
        self.cross = nn.MultiheadAttention(D, N, batch_first=True)

    def forward(
        self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return logits of the target."""
        source = self.read.embed(src)
        mask = None if self.fault == "source padding read" else src_key_padding_mask
        x, _ = self.write.run(tgt, torch.arange(tgt.shape[1]))
        mixed, _ = self.cross(x, source, source, key_padding_mask=mask, need_weights=False)
        if self.fault == "source ignored":
            mixed = mixed * 0
        return self.write.head(x + mixed)


ALONE = "rows of one length, no mask = each alone"
PREFIX = "logits of every prefix = prefix of the logits"
LONG_PREFIX = "a long row: its prefixes = its beginning"
STEPS = "cached = uncached, token by token"
LONG_CACHE = "a long row through the cache = at once"
SUMS = "attentions sum to 1, none to PAD or the future"
STATES = "hidden states end in the logits"
MASKS = "a mask of booleans = of numbers"
ARGUMENTS = "a call leaves its arguments as they were"
LONG_LOSS = "loss of a long row = cross entropy by hand"
WINDOW = "the config's window is the window in effect"

#: Each model, how many checks run on it at least, and each mistake with the row that must fail.
MODELS: dict[Callable[..., nn.Module], tuple[int, dict[str, str]]] = {
    Nano: (22, {
        "rows mixed": ALONE, "mean of the batch": ALONE, "batches of 8 and more": ALONE,
        "single tokens": PREFIX, "length": PREFIX, "future from 128 on": LONG_PREFIX,
        "blocks of 64": LONG_PREFIX, "loss of 128 tokens": LONG_LOSS,
        "the first row's last position": ALONE,
        "ignored labels counted": "loss = cross entropy by hand", "ids written into": ARGUMENTS,
        "gradient from 32 on": "gradients of a long row = central differences",
    }),
    Slots: (20, {"positions from 0": STEPS, "cache ends at 64": LONG_CACHE}),
    SlotRows: (20, {"positions from 0": STEPS, "cache ends at 64": LONG_CACHE}),
    SlotsAlone: (16, {"cache ends at 64": LONG_CACHE}),
    Begun: (18, {"state dropped": ALONE}),
    Masked: (15, {"rows mixed": ALONE}),
    Params: (20, {"offset forgotten": STEPS, "cache ends at 64": LONG_CACHE}),
    Holding: (20, {"offset forgotten": STEPS, "cache ends at 64": LONG_CACHE}),
    Incremental: (18, {"offset forgotten": STEPS, "cache ends at 64": LONG_CACHE}),
    Memories: (20, {"cache ends at 64": LONG_CACHE, "rows mixed": ALONE}),
    Recurrent: (18, {"state dropped": STEPS, "batch_first forgotten": ALONE}),
    TimeFirst: (18, {"state dropped": STEPS, "rows mixed": ALONE}),
    Rich: (28, {
        "positions counted again": "positions with a gap change the logits",
        "segments ignored": "segments do not leak",
        "booleans inverted": MASKS, "floats above 1": MASKS, "mask written into": ARGUMENTS,
        "scores returned": SUMS, "another axis returned": SUMS, "a state twice": STATES,
        "the last state left out": STATES,
    }),
    Padding: (20, {"True taken for tokens": "what PAD holds changes no bit"}),
    Windowed: (18, {"a window of one more": WINDOW, "window forgotten": WINDOW}),
    Tied: (18, {"untied by loading": "tied weights are one tensor after reloading",
        "batches of five": "a batch permuted = its logits permuted",
        "long batches": "a long row in a batch = alone",
        "louder with gradients": "gradients on = off",
        "louder in float64": "float64 = float32, within its bits",
        "strides ignored": "ids cut out of a table = the same ids",
        "weights shared with a copy": "a deep copy = the model",
    }),
    Multiples: (16, {"rows mixed": ALONE}),
    Translator: (18, {"rows mixed": ALONE, "source padding read": "source PAD changes nothing",
                      "source ignored": "every position reads the source"}),
}  # fmt: skip

#: Mistakes of transformers' `generate`, in `test_interfaces.py`.
OF_GENERATE = {
    "goes on after its end": "generate: where a row has ended, the others go on",
    "penalty forgotten": "generate: every penalty at once = its formula",
}
