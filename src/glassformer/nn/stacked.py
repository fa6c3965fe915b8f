"""Parts of many models at once: every parameter has a leading axis of models.

Activations keep their shapes: the models share the batch axis, model by model, so that attention,
masks, positions, blocks and heads run unchanged on a batch that is M times as large. Only a part
with parameters tells the models apart, and dropout, which gives each model its own random numbers.
`stack_parts` turns the parts of a model into these; the values of the parameters are the caller's.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.experts import BalanceAt, MixtureOfExperts, balance_loss
from glassformer.nn.heads import Pooler, TiedHead
from glassformer.nn.linear import Linear, missing_widths
from glassformer.nn.norm import LayerNorm, RMSNorm, as_float
from glassformer.nn.position import LearnedPosition

# M models, B batch of one model, T length, D d_model, V vocab, R rows of one model, O out, I in

#: A matrix product on a GPU: the side of a tile, blocks that keep an H200 busy, fewest rows of one.
TILE, BLOCKS, LEAST = 32, 512, 64


@dataclass(slots=True)
class Extent:
    """The size of one model's own batch, before it was filled up to the common shape."""

    rows: int
    target: int
    source: int = 0


@dataclass(slots=True)
class Fold:
    """What all parts of a stack share.

    `batch` counts the rows of one model in the common shape.
    `only` is the number of the one model that computes alone, on a batch of its own; None: all.
    Dropout is drawn from `generators`, one for each model, in the shapes of `extents`: the numbers
    that the model would draw alone. Where `seeds_M` is given it is a function of seed, site and
    index instead, which a compiled step computes where it needs it.
    """

    models: int
    batch: int = 1
    only: int | None = None
    generators: Sequence[torch.Generator] = ()
    extents: Sequence[Extent] = ()
    seeds_M: Tensor | None = None

    @contextlib.contextmanager
    def alone(self, model: int) -> Iterator[None]:
        """Within the block the stack is this model."""
        before, self.only = self.only, model
        try:
            yield
        finally:
            self.only = before

    def by_model(self, x: Tensor) -> Tensor:
        """(M * B, ..., D) -> (M, R, D); alone (R, D)."""
        return x.reshape(*self.leading, -1, x.shape[-1])

    @property
    def leading(self) -> tuple[int, ...]:
        """The axis of models; none where one computes alone."""
        return () if self.only is not None else (self.models,)

    def of(self, parameter: Tensor) -> Tensor:
        """Return a parameter of all models (M, ...), or of the one that computes alone."""
        return parameter if self.only is None else parameter[self.only]

    def rows(self, table_MVD: Tensor, index: Tensor) -> Tensor:
        """Return table[model, index] for indices (M * B, T): (M * B, T, D)."""
        if self.only is not None:
            return F.embedding(index, table_MVD[self.only])
        V, D = table_MVD.shape[1:]
        first_M1 = torch.arange(self.models, device=index.device)[:, None] * V
        flat = (index.reshape(self.models, -1) + first_M1).view(index.shape)
        return F.embedding(flat, table_MVD.reshape(-1, D))

    def product(self, x: Tensor, weight_MOI: Tensor, bias_MO: Tensor | None = None) -> Tensor:
        """Return x W^T + b with each model's own W and b."""
        weight, bias, rows = self.of(weight_MOI), bias_MO, self.by_model(x)
        d_out = weight.shape[-2]
        more_in, more_out = missing_widths(x, weight)
        if more_in or more_out:
            rows, weight = F.pad(rows, (0, more_in)), F.pad(weight, (0, more_in, 0, more_out))
            bias = None if bias is None else F.pad(bias, (0, more_out))
        pieces = 1 if self.only is not None else gradient_pieces(rows, weight)
        if self.only is not None:
            out = F.linear(rows, weight, None if bias is None else bias[self.only])
        elif pieces > 1:
            M, R, d_in = rows.shape
            spread = weight[:, None].expand(-1, pieces, -1, -1).flatten(0, 1)
            out = torch.bmm(rows.reshape(M * pieces, R // pieces, d_in), spread.mT).view(M, R, -1)
            out = out if bias is None else out + bias[:, None]
        elif bias is None:
            out = torch.bmm(rows, weight.mT)
        else:
            out = torch.baddbmm(bias[:, None], rows, weight.mT)
        return out[..., :d_out].reshape(*x.shape[:-1], d_out)

    def affine(self, x: Tensor, gain_MD: Tensor, bias_MD: Tensor | None = None) -> Tensor:
        """Return x * gain + bias with each model's own gain and bias."""
        out = self.by_model(x) * self.of(gain_MD).unsqueeze(-2)
        if bias_MD is not None:
            out = out + self.of(bias_MD).unsqueeze(-2)
        return out.view(x.shape)


def gradient_pieces(rows_MRI: Tensor, weight_MOI: Tensor) -> int:
    """Return the number of pieces into which rows are cut so that a GPU's gradient is not slow.

    The gradient of a small weight is a sum over all rows in a few tiles, each by one core of the
    GPU while the others wait; in pieces it is as many sums, added at the end.
    """
    if not (rows_MRI.is_cuda and torch.is_grad_enabled()):
        return 1
    M, R, d_in = rows_MRI.shape
    tiles = M * -(-weight_MOI.shape[1] // TILE) * -(-d_in // TILE)
    pieces = 1
    while 2 * pieces * tiles <= BLOCKS and R % (2 * pieces) == 0 and R // (2 * pieces) >= LEAST:
        pieces *= 2
    return pieces


class _Part(nn.Module):
    fold: Fold


class StackedLinear(Linear, _Part):
    """x W^T + b, weight (M, O, I)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fold.product(x, self.weight, self.bias)


class StackedPooler(Pooler, StackedLinear):
    """tanh(W x + b), weight (M, O, I)."""


class StackedLayerNorm(LayerNorm, _Part):
    """LayerNorm with weight and bias (M, D)."""

    def forward(self, x: Tensor) -> Tensor:
        plain = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return self.fold.affine(plain, self.weight, self.bias)


class StackedRMSNorm(RMSNorm, _Part):
    """RMSNorm with weight (M, D)."""

    def forward(self, x: Tensor) -> Tensor:
        wide = as_float(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        gain = self.weight + 1.0 if self.offset else self.weight
        return self.fold.affine(wide.to(x.dtype), gain)


class StackedTokenEmbedding(TokenEmbedding, _Part):
    """weight[model, token], weight (M, V, D)."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.fold.rows(self.weight, tokens_BT)
        return x_BTD if self.scale is None else x_BTD * self.scale

    def as_linear(self, x_BTD: Tensor) -> Tensor:
        """Return logits x @ weight^T of each model."""
        return self.fold.product(x_BTD, self.weight)


class StackedFactorizedEmbedding(FactorizedTokenEmbedding, _Part):
    """U[model, token] @ V[model]; `penalty` is (M,)."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.fold.product(self.fold.rows(self.u, tokens_BT), self.v.mT)

    def as_linear(self, x_BTD: Tensor) -> Tensor:
        """Return logits x @ V^T @ U^T of each model."""
        return self.fold.product(self.fold.product(x_BTD, self.v), self.u)

    def penalty(self) -> Tensor:
        return self.l1 * self.u.abs().sum((1, 2))


class StackedTiedHead(TiedHead, _Part):
    """embed.as_linear(x) + bias, bias (M, V)."""

    def forward(self, x_BTD: Tensor, embed: TokenEmbedding | FactorizedTokenEmbedding) -> Tensor:
        logits_BTV = embed.as_linear(x_BTD)
        if self.bias is None:
            return logits_BTV
        bias = self.fold.of(self.bias).unsqueeze(-2)
        return (self.fold.by_model(logits_BTV) + bias).view(logits_BTV.shape)


class StackedLearnedPosition(LearnedPosition, _Part):
    """x + weight[model, position], weight (M, L, D)."""

    def forward(self, x_BTD: Tensor, positions: Tensor | slice) -> Tensor:
        positions = self.rows_of(positions)
        if not isinstance(positions, slice):
            return x_BTD + self.fold.rows(self.weight, positions)
        added = self.fold.of(self.weight)[..., None, positions, :]
        x = x_BTD.view(*self.fold.leading, -1, *x_BTD.shape[1:])
        return (x + added).view(x_BTD.shape)


class StackedDropout(nn.Dropout, _Part):
    """Dropout at one site, with each model's own rate and random numbers.

    `p` is the largest rate. `axes` names what the axes after the batch are: the lengths, of which a
    model's own batch may have less than the common shape.
    """

    site: int
    rates: tuple[float, ...]
    axes: tuple[str | None, ...]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.fold.only is not None:
            return x * self._drawn(x, self.fold.only, x.shape)
        if self.fold.seeds_M is not None:
            return self._hashed(x, self.fold.seeds_M)
        M = self.fold.models
        common = (len(x) // M, *x.shape[1:])
        scales = []
        for model, extent in enumerate(self.fold.extents):
            own = [extent.rows, *common[1:]]
            for axis, name in enumerate(self.axes, start=1):
                if name is not None:
                    own[axis] = extent.target if name == "target" else extent.source
            missing = [c - o for c, o in zip(common, own, strict=True)]
            filling = [n for gap in reversed(missing) for n in (0, gap)]
            drawn = self._drawn(x, model, torch.Size(own))
            scales.append(F.pad(drawn, filling) if any(missing) else drawn)
        return x * torch.cat(scales)

    def _drawn(self, x: Tensor, model: int, shape: torch.Size) -> Tensor:
        """Return 0 or 1 / (1 - rate), by the numbers that torch's dropout would draw."""
        rate = self.rates[model]
        scale = torch.ones(shape, dtype=x.dtype, device=x.device)
        if rate == 0:
            return scale
        return scale.bernoulli_(1 - rate, generator=self.fold.generators[model]).div_(1 - rate)

    def _hashed(self, x: Tensor, seeds_M: Tensor) -> Tensor:
        rate_M1 = torch.tensor(self.rates, dtype=torch.float32, device=x.device)[:, None]
        x_MR = x.reshape(self.fold.models, -1)
        index_R = torch.arange(x_MR.shape[1], dtype=torch.int32, device=x.device)
        bits = mixed(mixed(seeds_M[:, None] + 0x3C6EF372 * (self.site + 1)) + index_R)
        uniform_MR = (bits & 0xFFFFFF).float() * (1 / (1 << 24))
        scale_MR = torch.where(uniform_MR >= rate_M1, 1 / (1 - rate_M1), 0.0)
        return (x_MR * scale_MR.to(x.dtype)).view(x.shape)


def mixed(x: Tensor) -> Tensor:
    """Return 32 bits of which each depends on every bit of x (int32): MurmurHash3's finalizer."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -2048144789  # 0x85EBCA6B
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -1028477387  # 0xC2B2AE35
    return x ^ ((x >> 16) & 0xFFFF)


class StackedMixture(MixtureOfExperts, _Part):
    """A mixture of experts for each model; the experts of a model run on its own tokens alone."""

    side: str

    def _experts_of(self, rows_MD: Tensor, chosen_MA: Tensor) -> Tensor:
        fold, out = self.fold, []
        if fold.only is not None:
            return super()._experts_of(rows_MD, chosen_MA)
        rows, chosen = fold.by_model(rows_MD), fold.by_model(chosen_MA)
        for model in range(fold.models):
            own_R = self._own_rows(model, rows.shape[1], rows.device)
            with fold.alone(model):
                part = super()._experts_of(rows[model, own_R], chosen[model, own_R])
            whole = part.new_zeros(rows.shape[1], *part.shape[1:])
            out.append(whole.index_copy(0, own_R, part))
        return torch.cat(out)

    def _own_rows(self, model: int, size: int, device: torch.device) -> Tensor:
        """Return the indices of a model's tokens, without what fills up the common shape."""
        every = torch.arange(size, device=device)
        if not self.fold.extents:
            return every
        extent = self.fold.extents[model]
        length = extent.target if self.side == "target" else extent.source
        return every.view(self.fold.batch, -1)[: extent.rows, :length].flatten()

    def balance_loss(self, p_BTE: Tensor, chosen_BTA: Tensor, *, at: BalanceAt) -> Tensor:
        """Return each model's load-balancing loss, (M,)."""
        by_model = (x.unflatten(0, (self.fold.models, -1)) for x in (p_BTE, chosen_BTA))
        valid = None if at.valid_BT is None else at.valid_BT.unflatten(0, (self.fold.models, -1))
        return torch.stack(
            [
                balance_loss(p, chosen, valid_BT=None if valid is None else valid[model])
                for model, (p, chosen) in enumerate(zip(*by_model, strict=True))
            ]
        )


STACKED: dict[type[nn.Module], type[_Part]] = {
    Linear: StackedLinear,
    LayerNorm: StackedLayerNorm,
    RMSNorm: StackedRMSNorm,
    TokenEmbedding: StackedTokenEmbedding,
    FactorizedTokenEmbedding: StackedFactorizedEmbedding,
    TiedHead: StackedTiedHead,
    Pooler: StackedPooler,
    LearnedPosition: StackedLearnedPosition,
    MixtureOfExperts: StackedMixture,
    nn.Dropout: StackedDropout,
}


def stack_parts(model: nn.Module, fold: Fold, rates: Sequence[Sequence[float]]) -> None:
    """Turn the parts of a model into stacked ones, with each model's dropout rates by site."""
    attention = {
        f"{name}.dropout": name
        for name, part in model.named_modules()
        if isinstance(part, MultiHeadAttention)
    }
    site = 0
    for name, part in model.named_modules():
        if type(part) not in STACKED:
            continue
        part.__class__ = STACKED[type(part)]
        assert isinstance(part, _Part)
        part.fold = fold
        side = "source" if name.startswith("encoder.") else "target"
        if isinstance(part, StackedMixture):
            part.side = side
        if isinstance(part, StackedDropout):
            part.site, part.rates = site, tuple(own[site] for own in rates)
            part.p, site = max(part.rates), site + 1
            keys = "source" if attention.get(name, "").endswith(".cross") else side
            part.axes = (None, side, keys) if name in attention else (side, None)


def dropout_rates(model: nn.Module) -> list[float]:
    """Return a model's dropout rates, site by site, in the order of `stack_parts`."""
    return [part.p for part in model.modules() if isinstance(part, nn.Dropout)]
