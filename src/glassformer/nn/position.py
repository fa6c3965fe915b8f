"""Positions: sinusoids, a learned table, rotations of queries and keys, biases by distance.

Tables are non-persistent buffers: not parameters, not in a checkpoint. They stay in float32 when a
model is cast to half precision (a bfloat16 angle is off by radians at position 8,000), and follow
it to float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.data.own_code import open_part, running
from glassformer.kernels import tables
from glassformer.spec.errors import InputError
from glassformer.spec.model import (
    ALiBi,
    Learned,
    ModelSpec,
    NoPosition,
    RelativeBias,
    Rotary,
    Sinusoidal,
    Stack,
)
from glassformer.spec.own import OwnParameter, OwnPosition
from glassformer.spec.position import alibi_slopes, relative_buckets

# B batch, T query length, S key length, D d_model, N heads, H d_head


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for a float64 model, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sinusoids(length: int, d_model: int, *, kind: Sinusoidal | None = None) -> Tensor:
    """Return `tables.sinusoids` as a tensor."""
    return torch.from_numpy(tables.sinusoids(length, d_model, kind=kind))


def rotations(rotary: Rotary, length: int, d_head: int, *, dtype: torch.dtype) -> Tensor:
    """Return `tables.rotations` as a tensor."""
    wide = "float64" if dtype == torch.float64 else "float32"
    return torch.from_numpy(tables.rotations(rotary, length, d_head, dtype=wide)).to(dtype)


class ComputedTable(nn.Module, ABC):
    """A part whose table is computed and not learned; casting keeps the table's precision."""

    table: Tensor
    table_shape: tuple[int, ...]

    @abstractmethod
    def make(self, dtype: torch.dtype) -> Tensor:
        """The table at the precision that a model of this dtype needs, on the CPU."""

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The table, computed on the CPU so that every device has the same; on meta its shape."""
        if device.type == "meta":
            return torch.empty(self.table_shape, dtype=table_dtype(dtype), device=device)
        return self.make(dtype).to(device)

    def first(self) -> Tensor:
        """The table on torch's present device, in its present precision."""
        return self.on(torch.empty(0).device, torch.get_default_dtype())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let torch move and cast the module, then put the table back at full precision.

        The buffer says on which device, and whether the cast was to float64; its values may be
        rounded.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.table = self.on(self.table.device, self.table.dtype)
        return self


class SinusoidalPosition(ComputedTable):
    """x + PE(position). Nothing is learned."""

    def __init__(self, max_seq_len: int, d_model: int, *, kind: Sinusoidal) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.d_model = d_model
        self.kind = kind
        self.table_shape = (max_seq_len, d_model)
        self.register_buffer("table", self.first(), persistent=False)

    def make(self, dtype: torch.dtype) -> Tensor:
        """The table at the precision that a model of this dtype needs."""
        table = sinusoids(self.max_seq_len, self.d_model, kind=self.kind)
        return table.to(table_dtype(dtype))

    def forward(self, x_BTD: Tensor, positions: Tensor | slice) -> Tensor:
        return x_BTD + self.table[positions].to(x_BTD.dtype)


class LearnedPosition(nn.Module):
    """x + a learned row for each position; the first `offset` rows belong to none."""

    def __init__(self, max_seq_len: int, d_model: int, *, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(max_seq_len + offset, d_model))

    def forward(self, x_BTD: Tensor, positions: Tensor | slice) -> Tensor:
        return x_BTD + self.weight[self.rows_of(positions)]

    def rows_of(self, positions: Tensor | slice) -> Tensor | slice:
        """Return the rows of some positions."""
        if not self.offset:
            return positions
        if isinstance(positions, slice):
            return slice(positions.start + self.offset, positions.stop + self.offset)
        return positions + self.offset


class AddedPosition(nn.Module, ABC):
    """x + rows(position): the contract of a position that a user defines.

    Its constructor takes `max_seq_len`, `d_model` and the options of the spec, all by name.
    Parameters are registered under the names that `parameters_of` declares; the model draws their
    first values. There are no buffers: what is not learned is computed from the position.
    """

    @classmethod
    def parameters_of(
        cls, *, max_seq_len: int, d_model: int, **options: Any
    ) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the learned tensors."""
        return {}

    @abstractmethod
    def rows(self, positions: Tensor) -> Tensor:
        """The vectors (..., D) to add at these positions (...), which count from 0."""

    def forward(self, x_BTD: Tensor, positions: Tensor | slice) -> Tensor:
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=x_BTD.device)
        return x_BTD + self.rows(positions).to(x_BTD.dtype)

    @torch.no_grad()
    def table(self, length: int, dtype: torch.dtype) -> Tensor:
        """Every row, for a decoding step that looks them up."""
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        return self.rows(torch.arange(length, device=device)).to(dtype)


Added = SinusoidalPosition | LearnedPosition | AddedPosition


def build_position(model: ModelSpec) -> Added | None:
    """Build what is added to the embedding for its position; None where nothing is."""
    match model.position:
        case Sinusoidal() as kind:
            return SinusoidalPosition(model.max_seq_len, model.d_model, kind=kind)
        case Learned(offset=offset):
            return LearnedPosition(model.max_seq_len, model.d_model, offset=offset)
        case OwnPosition() as own:
            return build_own_position(own, model.max_seq_len, model.d_model)
        case NoPosition() | Rotary() | ALiBi() | RelativeBias():
            return None
        case _ as unreachable:
            assert_never(unreachable)


def added_rows(part: Added | None, length: int, dtype: torch.dtype) -> Tensor | None:
    """Return the rows that are added by position, however they are made; None without any."""
    match part:
        case SinusoidalPosition():
            return part.table.to(dtype)
        case LearnedPosition():
            return part.weight.detach()[part.offset :].to(dtype)
        case AddedPosition():
            return part.table(length, dtype)
        case None:
            return None
        case _ as unreachable:
            assert_never(unreachable)


def build_own_position(own: OwnPosition, max_seq_len: int, d_model: int) -> AddedPosition:
    """The module of a user's position, with the parameters that its spec declares."""
    kind = _own_class(own)
    with running(own):
        made = kind(max_seq_len=max_seq_len, d_model=d_model, **own.options)
    declared = {parameter.name: parameter.shape for parameter in own.parameters}
    found = {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}
    if declared != found:
        raise InputError(
            f"{own.source} has the parameters {found}, its spec declares {declared}",
            hint="parameters_of() must name what __init__ registers",
        )
    if any(True for _ in made.buffers()):
        raise InputError(
            f"{own.source} keeps a buffer, which no checkpoint stores",
            hint="compute it in rows(), or learn it",
        )
    return made


def declared_parameters(
    own: OwnPosition, *, max_seq_len: int, d_model: int
) -> tuple[OwnParameter, ...]:
    """What a user's position learns in a model of this size, as its spec records it."""
    kind = _own_class(own)
    with running(own):
        shapes = kind.parameters_of(max_seq_len=max_seq_len, d_model=d_model, **own.options)
        return tuple(
            OwnParameter(name=name, shape=tuple(map(int, shape))) for name, shape in shapes.items()
        )


def _own_class(own: OwnPosition) -> type[AddedPosition]:
    kind = open_part(own)
    if not issubclass(kind, AddedPosition):
        raise InputError(
            f"{own.source} is no position", hint="subclass glassformer.nn.position.AddedPosition"
        )
    return kind


class RotaryPosition(ComputedTable):
    """A table of cos and sin; `at` returns the rows of some positions, `rotate` applies them."""

    def __init__(self, rotary: Rotary, max_seq_len: int, d_head: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.max_seq_len = max_seq_len
        self.d_head = d_head
        self.table_shape = (2, max_seq_len, rotary.width(d_head) // 2)
        self.register_buffer("table", self.first(), persistent=False)

    def make(self, dtype: torch.dtype) -> Tensor:
        """The table at the precision that a model of this dtype needs."""
        return rotations(self.rotary, self.max_seq_len, self.d_head, dtype=table_dtype(dtype))

    def at(self, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (T, H/2), or (B, 1, T, H/2) where positions differ by row."""
        cos, sin = self.table[:, positions]
        return (cos, sin) if cos.ndim == 2 else (cos[:, None], sin[:, None])


def heads_key(n_heads: int, d_head: int) -> str:
    """The name of the slopes that layers with these heads share."""
    return f"{n_heads}x{d_head}"


class ALiBiPosition(ComputedTable):
    """The slope of each head; `bias` is -slope * |distance| between queries and keys."""

    def __init__(self, alibi: ALiBi, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.alibi = alibi
        self.n_heads = n_heads
        self.d_head = d_head
        self.table_shape = (n_heads,)
        self.register_buffer("table", self.first(), persistent=False)

    def make(self, dtype: torch.dtype) -> Tensor:
        """The slopes at the precision that a model of this dtype needs."""
        slopes = alibi_slopes(self.alibi, self.n_heads, self.d_head)
        return torch.tensor(slopes, dtype=table_dtype(dtype), device="cpu")

    def bias(self, positions_S: Tensor, queries: int) -> Tensor:
        """(1, N, T, S), or (B, N, T, S) of positions (B, S); the queries are the last positions."""
        apart_TS = positions_S[..., -queries:, None] - positions_S[..., None, :]
        distance_1TS = apart_TS.abs().to(self.table.dtype).unsqueeze(-3)
        bias_NTS = -self.table[:, None, None] * distance_1TS
        return bias_NTS if bias_NTS.ndim == 4 else bias_NTS[None]


class RelativePosition(ComputedTable):
    """A learned bias for each bucket of distances and head; the table has each distance's bucket.

    Its numbers are whole, and exact in the precision of the other tables.
    """

    def __init__(self, relative: RelativeBias, n_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.relative = relative
        self.causal = causal
        self.table_shape = (2 * relative.max_distance + 1,)
        self.weight = nn.Parameter(torch.empty(relative.buckets, n_heads))
        self.register_buffer("table", self.first(), persistent=False)

    def make(self, dtype: torch.dtype) -> Tensor:
        """The buckets of distances from -max_distance to max_distance."""
        buckets = relative_buckets(self.relative, causal=self.causal)
        return torch.tensor(buckets, dtype=table_dtype(dtype), device="cpu")

    def bias(self, positions_S: Tensor, queries: int) -> Tensor:
        """(1, N, T, S), or (B, N, T, S) of positions (B, S); the queries are the last positions."""
        most = self.relative.max_distance
        apart_TS = positions_S[..., None, :] - positions_S[..., -queries:, None]
        buckets_TS = self.table[apart_TS.clamp(-most, most) + most].long()
        bias_NTS = F.embedding(buckets_TS, self.weight).movedim(-1, -3)
        return bias_NTS if bias_NTS.ndim == 4 else bias_NTS[None]


def build_biases(
    model: ModelSpec, stack: Stack
) -> tuple[dict[str, ALiBiPosition], RelativePosition | None]:
    """Build what is added to the scores of a stack: slopes for each shape of heads, or a table."""
    slopes: dict[str, ALiBiPosition] = {}
    for attention in stack.attentions().values():
        match model.position:
            case ALiBi() as alibi:
                heads, width = attention.n_heads, attention.head_width(model.d_model)
                slopes[heads_key(heads, width)] = ALiBiPosition(alibi, heads, width)
            case RelativeBias() as relative:  # the spec has checked that layers share it
                return {}, RelativePosition(relative, attention.n_heads, causal=attention.causal)
            case NoPosition() | Sinusoidal() | Learned() | Rotary() | OwnPosition():
                return {}, None
            case _ as unreachable:
                assert_never(unreachable)
    return slopes, None


def make_tables(module: nn.Module, device: torch.device | str) -> None:
    """Compute every table of a module that was built on meta, on this device."""
    for part in module.modules():
        if isinstance(part, ComputedTable):
            part.table = part.on(torch.device(device), part.table.dtype)


def positions_of(
    past: int, length: int, valid_BS: Tensor | None, segments_BT: Tensor | None
) -> Tensor | slice:
    """Return the position of each new token, counting real tokens only, from 0 in every segment."""
    if valid_BS is None and segments_BT is None:
        return slice(past, past + length)
    if valid_BS is None:
        assert segments_BT is not None
        valid_BS = torch.ones_like(segments_BT, dtype=torch.bool)
    count_BS = valid_BS.cumsum(1) - 1
    if segments_BT is not None:
        begins_BS = torch.ones_like(valid_BS)
        begins_BS[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
        before_BS = valid_BS.cumsum(1) - valid_BS.long()
        count_BS = count_BS - (before_BS * begins_BS).cummax(1).values
    return count_BS.clamp(min=0)[:, past:]
