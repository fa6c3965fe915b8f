"""Executes a program by plain torch operations, one by one: what each kind means, and nothing else.

The modules of `nn` are held to it, values and gradients. Rows are (batch, length, width); a row
that may attend to nothing gives zeros.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch import Tensor

from glassformer.kernels import tables
from glassformer.spec import program as kinds
from glassformer.spec.model import ALiBi, RelativeBias
from glassformer.spec.own import OwnPosition
from glassformer.spec.position import alibi_slopes, relative_buckets
from glassformer.spec.program import Op, Program

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass
class Given:
    """A batch: ids, which are real, the segments of packed rows, token types, and the source."""

    tokens: Tensor
    valid: Tensor | None = None
    segments: Tensor | None = None
    types: Tensor | None = None
    source: Tensor | None = None
    source_valid: Tensor | None = None


@dataclass
class Side:
    """What is known of the rows of one side: which are real, their positions and segments."""

    valid: Tensor
    segments: Tensor
    places: Tensor = field(init=False)

    def __post_init__(self) -> None:
        same = self.segments[:, :, None] == self.segments[:, None, :]
        real = self.valid[:, None, :].long()
        upto = torch.ones_like(real[0]).expand(len(real[0, 0]), -1).tril()
        self.places = (((same & (real > 0)).long() * upto).sum(-1) - 1).clamp(min=0)


@dataclass
class Run:
    """One execution: values, taps, memories."""

    program: Program
    weights: Mapping[str, Tensor]
    given: Given
    length: int
    d_model: int
    values: dict[str, Tensor] = field(default_factory=dict)
    taps: dict[str, Tensor] = field(default_factory=dict)
    memories: dict[str, tuple[Tensor, Tensor, str]] = field(default_factory=dict)
    own_rows: Callable[[OwnPosition, Tensor], Tensor] | None = None

    def sides(self) -> dict[str, Side]:
        """Return what is known of the target's and the source's rows."""
        given = self.given
        made = {}
        for name, ids, valid in (
            ("target", given.tokens, given.valid),
            ("source", given.source, given.source_valid),
        ):
            if ids is not None:
                segments = given.segments if name == "target" else None
                made[name] = Side(
                    torch.ones_like(ids, dtype=torch.bool) if valid is None else valid,
                    torch.zeros_like(ids) if segments is None else segments,
                )
        return made

    def all(self) -> dict[str, Tensor]:
        """Execute every operation and return each head's output."""
        self.side = self.sides()
        given = self.given
        for name, ids in (("tokens", given.tokens), ("source", given.source)):
            if ids is not None:
                self.values[name] = ids
        zeros = torch.zeros_like(given.tokens)
        self.values["types"] = zeros if given.types is None else given.types
        for op in self.program.ops:
            self.step(op)
        return {head: self.values[name] for head, name in self.program.outputs.items()}

    def step(self, op: Op) -> None:
        """Execute one operation."""
        read = [self.values[name] for name in op.reads]
        weights = [self.weights[name] for name in op.weights]
        match op.kind:
            case kinds.Embed(scale=scale):
                y = weights[0][read[0]] * scale
            case kinds.AddRows() as kind:
                y = read[0] + self.rows(kind, op, weights, read[1:])
            case kinds.Norm() as kind:
                y = norm(kind, read[0], *weights)
            case kinds.Linear(transposed=transposed):
                y = read[0] @ (weights[0] if transposed else weights[0].T)
                y = y + weights[1] if len(weights) > 1 else y
            case kinds.Rotate() as kind:
                y = self.turned(kind, op, read[0])
            case kinds.Bias() as kind:
                y = self.bias(kind, op, weights)
            case kinds.Remember(heads=heads):
                k, v = (split(x, heads) for x in read)
                rows = self.program.values[op.reads[0]].rows
                assert op.memory is not None
                self.memories[op.memory] = (k, v, rows)
                for name, x in zip(op.taps, (k, v), strict=True):
                    self.taps[name] = x
                return
            case kinds.Attend() as kind:
                y = self.attend(kind, op, read, weights)
            case kinds.Activate(function=function):
                y = FUNCTIONS[function](read[0])
            case kinds.Gate(function=function, limit=None):
                y = FUNCTIONS[function](read[0]) * read[1]
            case kinds.Gate(limit=limit, slope=slope):
                g, u = read[0].clamp(max=limit), read[1].clamp(-limit, limit)
                y = g * torch.sigmoid(slope * g) * (u + 1)
            case kinds.Adjust(scale=scale, softcap=cap):
                y = read[0] * scale
                y = y if cap is None else cap * torch.tanh(y / cap)
            case kinds.Route(chosen=chosen, normalize=normalize):
                y = route(read[0], chosen, normalize=normalize)
            case kinds.Gather():
                # Every row: what another expert's weight of 0 would have left out adds nothing.
                y = read[0]
            case kinds.Scatter():
                y = sum(read[0][..., e, None] * out for e, out in enumerate(read[1:]))
            case kinds.Drop():
                y = read[0]
            case kinds.Add(scale=scale):
                y = read[0] + scale * read[1]
            case kinds.ReadOut(place=place):
                y = self.read_out(place, read[0])
            case _ as unreachable:
                assert_never(unreachable)
        assert op.writes is not None
        if not isinstance(op.kind, kinds.Bias):
            assert y.shape[-1] == self.program.values[op.writes].width, op
        self.values[op.writes] = y
        for name in op.taps:
            if name not in self.taps:
                heads = isinstance(op.kind, kinds.Attend) or name.endswith((".q", ".heads"))
                self.taps[name] = split(y, self.heads_of(op)) if heads else y

    def heads_of(self, op: Op) -> int:
        """Return the number of heads that a tap of queries shows."""
        at = op.part
        kind = next(o.kind for o in self.program.ops if o.memory == at and o.writes)
        assert isinstance(kind, kinds.Attend)
        return kind.heads

    def rows(
        self, kind: kinds.AddRows, op: Op, weights: list[Tensor], types: list[Tensor]
    ) -> Tensor:
        """Return the rows to add."""
        if kind.by == "type":
            return weights[0][types[0]]
        places = self.side[self.rows_of(op)].places
        if isinstance(kind.table, OwnPosition):
            assert self.own_rows is not None
            return self.own_rows(kind.table, places)
        if kind.table is None:
            return weights[0][places + kind.offset]
        table = tables.sinusoids(self.length, self.d_model, kind=kind.table)
        return torch.from_numpy(table).double()[places]

    def rows_of(self, op: Op) -> str:
        """Return the side of an operation: target or source."""
        return "source" if op.part.startswith("encoder.") else "target"

    def turned(self, kind: kinds.Rotate, op: Op, x: Tensor) -> Tensor:
        """Rotate pairs (i, i + half) of each head."""
        heads = split(x, kind.heads)
        d_head = heads.shape[-1]
        table = torch.from_numpy(
            tables.rotations(kind.rotary(), self.length, d_head, dtype="float64")
        )
        cos, sin = table[:, self.side[self.rows_of(op)].places][:, :, None]
        half = cos.shape[-1]
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return join(torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1))

    def bias(self, kind: kinds.Bias, op: Op, weights: list[Tensor]) -> Tensor:
        """Return what is added to scores, (B, heads, T, S)."""
        places = self.side[self.rows_of(op)].places
        apart = places[:, None, :] - places[:, :, None]
        match kind.form:
            case ALiBi() as alibi:
                slopes = torch.tensor(
                    alibi_slopes(alibi, kind.heads, kind.d_head), dtype=torch.float64
                )
                return -slopes[:, None, None] * apart.abs()[:, None]
            case RelativeBias(max_distance=most) as relative:
                buckets = torch.tensor(relative_buckets(relative, causal=kind.causal))
                found = buckets[apart.clamp(-most, most) + most]
                return weights[0][found].movedim(-1, 1)
            case _ as unreachable:
                assert_never(unreachable)

    def attend(
        self, kind: kinds.Attend, op: Op, read: list[Tensor], weights: list[Tensor]
    ) -> Tensor:
        """Softmax over what a query may see, and the values' weighted sum."""
        assert op.memory is not None
        k, v, rows = self.memories[op.memory]
        group = kind.heads // kind.kv_heads
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = split(read[0], kind.heads) @ k.mT * kind.scale
        if kind.softcap is not None:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        if len(read) > 1:
            scores = scores + read[1]
        allow = self.allowed(kind, self.side[self.rows_of(op)], self.side[rows])[:, None]
        self.taps[op.taps[0]] = scores
        high = scores.masked_fill(~allow, -math.inf).amax(-1, keepdim=True).clamp(min=-1e300)
        sinks = weights[0][:, None, None].expand(*scores.shape[:3], 1) if weights else None
        high = high if sinks is None else torch.maximum(high, sinks)
        exp = torch.where(allow, torch.exp((scores - high.detach()).clamp(max=700)), 0.0)
        total = exp.sum(-1, keepdim=True)
        total = total if sinks is None else total + torch.exp(sinks - high.detach())
        w = exp / torch.where(total == 0, 1.0, total)
        w = torch.where(allow.any(-1, keepdim=True), w, 0.0)
        self.taps[op.taps[1]] = w
        return join(w @ v)

    def allowed(self, kind: kinds.Attend, q: Side, k: Side) -> Tensor:
        """Return (B, T, S): which keys a query may see. A window counts real tokens."""
        allow = q.valid[:, :, None] & k.valid[:, None, :]
        if q is not k:
            return allow
        allow = allow & (q.segments[:, :, None] == k.segments[:, None, :])
        rank = k.valid.long().cumsum(1)
        apart = rank[:, :, None] - rank[:, None, :]  # how many real tokens the query is later
        order = torch.arange(q.valid.shape[1])
        later = order[:, None] - order[None, :]
        if kind.before is not None:
            allow = allow & (apart <= kind.before)
        if kind.after is not None:
            allow = allow & (apart >= -kind.after) & ((later >= 0) | (kind.after > 0))
        return allow

    def read_out(self, place: str, x: Tensor) -> Tensor:
        """Return one row of each sequence."""
        valid = self.side["target"].valid
        if place == "mean":
            share = valid.double() / valid.sum(1, keepdim=True)
            return (x * share[..., None]).sum(1)
        order = torch.arange(valid.shape[1]).expand(valid.shape)
        if place == "last":
            return x[torch.arange(len(x)), order.masked_fill(~valid, -1).amax(1)]
        return x[torch.arange(len(x)), order.masked_fill(~valid, 10**6).amin(1)]


def norm(kind: kinds.Norm, x: Tensor, gain: Tensor, bias: Tensor | None = None) -> Tensor:
    """Normalise each run of `over` numbers."""
    runs = x.unflatten(-1, (-1, kind.over))
    if kind.form == "layer":
        runs = runs - runs.mean(-1, keepdim=True)
    runs = runs / torch.sqrt((runs**2).mean(-1, keepdim=True) + kind.eps)
    runs = runs * (1 + gain if kind.offset else gain)
    return (runs if bias is None else runs + bias).flatten(-2)


def route(logits: Tensor, chosen: int, *, normalize: bool) -> Tensor:
    """Softmax, kept at the largest logits; of equal ones at the lowest index."""
    order = logits.detach().sort(dim=-1, descending=True, stable=True).indices[..., :chosen]
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, value=True)
    p = torch.where(keep, torch.softmax(logits, -1), 0.0)
    return p / p.sum(-1, keepdim=True) if normalize else p


def split(x: Tensor, heads: int) -> Tensor:
    """(B, T, N * H) -> (B, N, T, H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    """(B, N, T, H) -> (B, T, N * H)."""
    return x.transpose(1, 2).flatten(-2)


def run(
    program: Program,
    weights: Mapping[str, Tensor],
    given: Given,
    *,
    length: int,
    d_model: int,
    own_rows: Callable[[OwnPosition, Tensor], Tensor] | None = None,
) -> Run:
    """Execute a program on a batch; `length` is that of tables of positions."""
    made = Run(program, weights, given, length, d_model, own_rows=own_rows)
    made.all()
    return made
