"""Mixtures of experts against their definition: routing, grouped experts, the balance loss."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from glassformer.checks.measure import TOLERANCE, Measure, NotOffered, draw, gap, parity
from glassformer.checks.preset_subjects import perturb
from glassformer.checks.rows.invariants import LENGTH, tokens_of
from glassformer.checks.subject import Subject, with_source
from glassformer.nn.ffn import BalanceAt, BalanceLosses, MixtureOfExperts
from glassformer.nn.taps import Taps
from glassformer.spec import model as spec

# B batch, T length, D d_model, F d_ff, E experts

NORMALIZED = spec.MoE(n_experts=5, experts_per_token=2, expert=spec.SwiGLU(d_ff=13))
SHARED = replace(NORMALIZED, normalize=False, shared=spec.SwiGLU(d_ff=11), shared_gate=True)


def grouped_experts(dtype: torch.dtype) -> Measure:
    """Experts over groups of tokens against one token at a time: results and every gradient."""
    B, T, D = 3, 7, 17
    measures = []
    for ffn in (NORMALIZED, SHARED):
        part = MixtureOfExperts(ffn, D)
        perturb(part, dtype=dtype, seed=51)
        inputs = [draw(B, T, D, dtype=dtype, seed=52)]

        def alone(x: Tensor, part: MixtureOfExperts = part, ffn: spec.MoE = ffn) -> Tensor:
            rows = [[_one_token(part, ffn, token) for token in row] for row in x]
            return torch.stack([torch.stack(row) for row in rows])

        measures.append(parity(part, alone, inputs=inputs, size=f"B{B} T{T} D{D} E{ffn.n_experts}"))
    return max(measures, key=lambda measure: measure.worst)


def _one_token(part: MixtureOfExperts, ffn: spec.MoE, x_D: Tensor) -> Tensor:
    """The definition, for a single vector."""
    p = torch.exp(part.gate.weight @ x_D)
    p = p / p.sum()
    chosen = _by_probability(p.detach().tolist())[: ffn.experts_per_token]
    weights = [p[e] for e in chosen]
    if ffn.normalize:
        total = torch.stack(weights).sum()
        weights = [weight / total for weight in weights]
    terms = [w * _swiglu(part.experts[e], x_D) for w, e in zip(weights, chosen, strict=True)]
    if part.shared_expert is not None and part.shared_expert_gate is not None:
        gate = 1 / (1 + torch.exp(-(part.shared_expert_gate.get_parameter("weight") @ x_D)))
        terms.append(gate * _swiglu(part.shared_expert, x_D))
    return torch.stack(terms).sum(0)


def _swiglu(expert: nn.Module, x_D: Tensor) -> Tensor:
    gate_FD, up_FD, down_DF = (
        expert.get_parameter(f"{name}_proj.weight") for name in ("gate", "up", "down")
    )
    gate = gate_FD @ x_D
    return down_DF @ (gate / (1 + torch.exp(-gate)) * (up_FD @ x_D))


def _by_probability(p: Sequence[float]) -> list[int]:
    """Return expert numbers, likeliest first, the lower number first among equals."""
    return sorted(range(len(p)), key=lambda e: (-p[e], e))


def balance_by_counting(dtype: torch.dtype) -> Measure:
    """The load-balancing loss against counts and means, token by token; PAD does not count.

    An even load costs as much as a token has experts.
    """
    B, T, D = 2, 6, 17
    part = MixtureOfExperts(NORMALIZED, D)
    perturb(part, dtype=dtype, seed=53)
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, 4:] = False
    valid[1, :1] = False
    x = draw(B, T, D, dtype=dtype, seed=54).detach()
    other = torch.where(valid[..., None], x, draw(B, T, D, dtype=dtype, seed=55).detach())
    found = [_balance(part, each, valid) for each in (x, other)]
    E, tokens = NORMALIZED.n_experts, [t for row, ok in zip(x, valid, strict=True) for t in row[ok]]
    p = [torch.softmax(part.gate.weight.detach() @ token, 0).tolist() for token in tokens]
    picks = [_by_probability(row)[:2] for row in p]
    expected = E * sum(
        sum(e in pick for pick in picks) / len(tokens) * sum(row[e] for row in p) / len(tokens)
        for e in range(E)
    )
    worst = max(abs(loss - expected) for loss in found)
    if found[0] != found[1]:
        worst = math.inf
    return Measure(worst, TOLERANCE[dtype], f"B{B} T{T} E{E}")


@torch.no_grad()
def _balance(part: MixtureOfExperts, x_BTD: Tensor, valid_BT: Tensor) -> float:
    losses = BalanceLosses()
    part(x_BTD, balance=BalanceAt(losses, "blocks.0", valid_BT))
    return float(losses.losses["blocks.0"])


def nobody_is_dropped(dtype: torch.dtype) -> Measure:
    """Every token gets its result, however many choose the same expert."""
    B, T, D = 4, 9, 17
    part = MixtureOfExperts(NORMALIZED, D)
    perturb(part, dtype=dtype, seed=56)
    x = draw(B, T, D, dtype=dtype, seed=57).detach().abs()
    with torch.no_grad():
        part.gate.weight.zero_()
        part.gate.weight[3] = 1.0
        part.gate.weight[1] = 0.5
        rows = [[_one_token(part, NORMALIZED, token) for token in row] for row in x]
        expected = torch.stack([torch.stack(row) for row in rows])
        worst = gap(part(x), expected)
    return Measure(worst, TOLERANCE[dtype], f"B{B} T{T}, all to 2 experts")


@torch.no_grad()
def routing_follows_logits(subject: Subject) -> Measure:
    """Every token goes to its likeliest experts, as many as the spec says, with weights of the
    softmax; none of them is chosen twice.
    """
    model = subject.ours()
    mixtures = model.spec.mixtures()
    if not mixtures:
        raise NotOffered("no mixture of experts")
    taps = Taps(read=["*.ffn.router", "*.ffn.routing"])
    model(with_source(model.spec, tokens_of(subject, 2, LENGTH, seed=58), None), taps=taps)
    worst, bar = 0.0, 0.0
    for layer, ffn in mixtures.items():
        logits, routing = (taps.seen[f"{layer}.ffn.{leaf}"] for leaf in ("router", "routing"))
        p = torch.softmax(logits.double(), -1)
        bar = TOLERANCE[torch.float64 if logits.dtype == torch.float64 else torch.float32]
        for row_p, row_w in zip(p.flatten(0, 1).tolist(), routing.flatten(0, 1), strict=True):
            chosen = _by_probability(row_p)[: ffn.experts_per_token]
            total = sum(row_p[e] for e in chosen) if ffn.normalize else 1.0
            expected = [row_p[e] / total if e in chosen else 0.0 for e in range(ffn.n_experts)]
            worst = max(worst, gap(row_w.double(), torch.tensor(expected, dtype=torch.float64)))
    return Measure(worst, bar, f"{subject.size}, {len(mixtures)} mixtures", "", "")
