"""A mixture of experts: a router chooses a few feed-forwards for each token, and weights them.

Tokens are grouped by expert, so that each expert is one product over its tokens; no token is
dropped. `BalanceLosses` is passed into a forward like a cache, and collects the routers' losses.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor, nn

from glassformer.nn.ffn import MLP, SwiGLU, build_ffn
from glassformer.nn.linear import Linear
from glassformer.nn.taps import TapsAt, tap
from glassformer.spec import model as spec
from glassformer.spec.execution import GROUP_ROWS

# B batch, T length, D d_model, E experts, A experts of a token, M rows (batch x length)


class BalanceLosses:
    """The load-balancing loss of every mixture in one forward, by the name of its layer.

    `coefficients` are the factors that the spec has for them. A layer that is run again for its
    backward writes the same entry again. `everywhere` sums a tensor over all processes, where
    several share a batch: each one's losses are then its addend of the complete batch's.
    Not a dataclass: FSDP2 gives a block copies of those that hold tensors, and what it recorded
    in a copy would be lost.
    """

    def __init__(self, everywhere: Callable[[Tensor], Tensor] | None = None) -> None:
        self.everywhere = everywhere
        self.losses: dict[str, Tensor] = {}
        self.coefficients: dict[str, float] = {}

    def add(self, layer: str, loss: Tensor, coefficient: float) -> None:
        """Record one layer's loss."""
        self.losses[layer] = loss
        self.coefficients[layer] = coefficient

    def weighted(self, shares: Mapping[str, float] | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean loss over layers, and the mean of coefficient * loss, for the objective.

        `shares` are this batch's shares of the tokens of a step, by layer.
        """
        plain = [
            loss * (1.0 if shares is None else shares[layer]) for layer, loss in self.losses.items()
        ]
        terms = [
            self.coefficients[layer] * loss for layer, loss in zip(self.losses, plain, strict=True)
        ]
        return torch.stack(plain).mean(), torch.stack(terms).mean()


@dataclass(frozen=True, slots=True)
class BalanceAt:
    """The recorder of one layer's loss, and which of its tokens are real (None: all)."""

    losses: BalanceLosses
    layer: str
    valid_BT: Tensor | None


class MixtureOfExperts(nn.Module):
    """sum_e w_e expert_e(x) + g shared_expert(x); w from the router, g a sigmoid gate or 1."""

    def __init__(self, ffn: spec.MoE, d_model: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        _end_graphs_at_the_experts()
        self.n_experts = ffn.n_experts
        self.experts_per_token = ffn.experts_per_token
        self.normalize = ffn.normalize
        self.balance = ffn.balance
        self.gate = Linear(d_model, ffn.n_experts, bias=ffn.router_bias)
        self.experts = nn.ModuleList(
            build_ffn(ffn.expert, d_model, dropout=dropout) for _ in range(ffn.n_experts)
        )
        self.shared_expert: MLP | SwiGLU | None = None
        self.shared_expert_gate: nn.Module | None = None
        if ffn.shared is not None:
            self.shared_expert = build_ffn(ffn.shared, d_model, dropout=dropout)
        if ffn.shared_gate:
            self.shared_expert_gate = Linear(d_model, 1, bias=False)

    def forward(
        self, x_BTD: Tensor, *, taps: TapsAt | None = None, balance: BalanceAt | None = None
    ) -> Tensor:
        logits_BTE: Tensor = tap(taps, "router", self.gate(x_BTD))
        weights_BTA, chosen_BTA, p_BTE = route(
            logits_BTE, chosen=self.experts_per_token, normalize=self.normalize
        )
        if balance is not None:
            loss = self.balance_loss(p_BTE, chosen_BTA, at=balance)
            balance.losses.add(balance.layer, loss, self.balance)
        if taps is not None:
            weights_BTA, chosen_BTA = self._tapped(taps, weights_BTA, chosen_BTA)
        rows_MD, A = x_BTD.reshape(-1, x_BTD.shape[-1]), chosen_BTA.shape[-1]
        out_MAD = self._experts_of(rows_MD, chosen_BTA.reshape(-1, A))
        weights_MA1 = weights_BTA.reshape(-1, A, 1).to(out_MAD.dtype)
        out_BTD = (weights_MA1 * out_MAD).sum(1).view(*x_BTD.shape[:-1], -1)
        shared_BTD = self.shared(x_BTD)
        if shared_BTD is not None:
            out_BTD = out_BTD + tap(taps, "shared", shared_BTD)
        return tap(taps, "out", out_BTD)

    def balance_loss(self, p_BTE: Tensor, chosen_BTA: Tensor, *, at: BalanceAt) -> Tensor:
        """Return the load-balancing loss of this layer's tokens."""
        everywhere = at.losses.everywhere
        return balance_loss(p_BTE, chosen_BTA, valid_BT=at.valid_BT, everywhere=everywhere)

    def shared(self, x_BTD: Tensor) -> Tensor | None:
        """Return the gated output of the shared expert; None without one."""
        if self.shared_expert is None:
            return None
        out_BTD: Tensor = self.shared_expert(x_BTD)
        if self.shared_expert_gate is None:
            return out_BTD
        gate = self.shared_expert_gate
        if type(gate) is not Linear:  # one that carries a correction
            return torch.sigmoid(gate(x_BTD)) * out_BTD
        # Not a product of matrices: with one output its rounding depends on where the weight lies
        # in memory, and a model that was saved and loaded would give other bits.
        return torch.sigmoid((x_BTD * gate.weight).sum(-1, keepdim=True)) * out_BTD

    def _tapped(
        self, taps: TapsAt, weights_BTA: Tensor, chosen_BTA: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tap the weights of all experts; an edit of them also changes which are chosen."""
        shape = (*chosen_BTA.shape[:-1], self.n_experts)
        plain_BTE = weights_BTA.new_zeros(shape).scatter(-1, chosen_BTA, weights_BTA)
        routing_BTE = taps.visit("routing", plain_BTE)
        if routing_BTE is not plain_BTE:
            used_BTE = routing_BTE != 0
            most = max(1, int(used_BTE.sum(-1).max()))
            chosen_BTA = used_BTE.sort(dim=-1, descending=True, stable=True).indices[..., :most]
        return routing_BTE.gather(-1, chosen_BTA), chosen_BTA

    def _experts_of(self, rows_MD: Tensor, chosen_MA: Tensor) -> Tensor:
        """Return each row's expert outputs (M, A, D): one product for the rows of an expert."""
        (M, A), E = chosen_MA.shape, self.n_experts
        experts_J = chosen_MA.flatten()  # J = M * A pairs of a row and an expert
        order_J = experts_J.argsort(stable=True)
        counts_E = torch.bincount(experts_J, minlength=E)
        filled_E = (counts_E + GROUP_ROWS - 1) // GROUP_ROWS * GROUP_ROWS
        # Pair i in the order of experts moves back by the rows that were filled up before it.
        shift_E = (filled_E.cumsum(0) - filled_E) - (counts_E.cumsum(0) - counts_E)
        place_J = torch.empty_like(order_J)
        sorted_J = torch.arange(M * A, device=rows_MD.device)
        place_J[order_J] = sorted_J + shift_E[experts_J[order_J]]
        sizes = filled_E.tolist()
        row_P = place_J.new_zeros(sum(sizes))  # padding is row 0, its result is never read
        row_P[place_J] = sorted_J // A
        groups = torch.split(rows_MD[row_P], sizes)
        out_PD = torch.cat([expert(x) for expert, x in zip(self.experts, groups, strict=True)])
        return out_PD[place_J].view(M, A, -1)


@functools.cache
def _end_graphs_at_the_experts() -> None:
    """Let compiled graphs end at `_experts_of`: the sizes of its groups are data.

    When the first mixture is built, not when this file is imported: `disable` loads torch's
    compiler, which takes longer than torch itself, and every command would wait for it.
    """
    graph_end = torch.compiler.disable(MixtureOfExperts._experts_of)
    MixtureOfExperts._experts_of = graph_end  # type: ignore[method-assign]


def build_feed_forward(
    ffn: spec.FeedForward, d_model: int, *, dropout: float = 0.0
) -> MLP | SwiGLU | MixtureOfExperts:
    """Build the module that a feed-forward's spec describes."""
    match ffn:
        case spec.MLP() | spec.SwiGLU():
            return build_ffn(ffn, d_model, dropout=dropout)
        case spec.MoE():
            return MixtureOfExperts(ffn, d_model, dropout=dropout)
        case _ as unreachable:
            assert_never(unreachable)


def route(logits_E: Tensor, *, chosen: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights and indices of the chosen experts, largest first, and all probabilities.

    Of equal logits the lowest index wins. Probabilities are float32 or better.
    """
    wide = torch.promote_types(logits_E.dtype, torch.float32)
    p_E = torch.softmax(logits_E.to(wide), dim=-1)
    # A stable sort, not topk, which may take any of equals; by logits, which softmax may round
    # to equal probabilities.
    order_E = logits_E.detach().sort(dim=-1, descending=True, stable=True).indices
    chosen_A = order_E[..., :chosen].contiguous()
    weights_A = p_E.gather(-1, chosen_A)
    if normalize:
        weights_A = weights_A / weights_A.sum(-1, keepdim=True)
    return weights_A, chosen_A, p_E


def balance_loss(
    p_BTE: Tensor,
    chosen_BTA: Tensor,
    *,
    valid_BT: Tensor | None,
    everywhere: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """n_experts * sum_e f_e P_e: share of tokens that choose e, times the mean of p_e.

    Only real tokens count; without any it is 0. A product of two means is no mean of products:
    where processes share a batch, `everywhere` sums the counts that both means divide by.
    """
    E = p_BTE.shape[-1]
    if valid_BT is None:
        valid_BT = torch.ones(p_BTE.shape[:-1], dtype=torch.bool, device=p_BTE.device)
    real_BT1 = valid_BT[..., None].to(p_BTE.dtype)
    ones_BTA = real_BT1.expand(chosen_BTA.shape)
    picked_BTE = torch.zeros_like(p_BTE).scatter_add(-1, chosen_BTA, ones_BTA)
    picked_E, tokens = picked_BTE.flatten(0, -2).sum(0), real_BT1.sum()
    if everywhere is not None:
        counts = everywhere(torch.cat((picked_E, tokens[None])).detach())
        picked_E, tokens = counts[:-1], counts[-1]
    tokens = tokens.clamp(min=1.0)
    f_E = picked_E / tokens
    P_E = (p_BTE * real_BT1).flatten(0, -2).sum(0) / tokens
    return E * (f_E * P_E).sum()
