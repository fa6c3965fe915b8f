"""Norms, feed-forward, embedding, initialisation and positions against PyTorch and formulas.

Each check takes a dtype and gives a `Measure`: results and every gradient. Sizes are distinct
primes where the claim allows, so that no transposition passes by luck. Positions are compared with
closed forms: complex numbers for rotary, the formula for sinusoidal ones.

Mixtures of experts against their definition: routing, grouped experts, the balance loss.
"""

import cmath
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from glasscheck.measure import (
    TOLERANCE,
    Measure,
    NotOffered,
    Pair,
    draw,
    gap,
    parity,
    seeded,
)
from glasscheck.rows.invariants import LENGTH, tokens_of
from glasscheck.subject import Subject
from glassformer.checks.preset_subjects import perturb
from glassformer.checks.subject import with_source
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.embedding import FactorizedTokenEmbedding
from glassformer.nn.experts import BalanceAt, BalanceLosses, MixtureOfExperts
from glassformer.nn.ffn import MLP, SwiGLU, build_ffn
from glassformer.nn.initialise import initialise
from glassformer.nn.norm import LayerNorm, build_norm
from glassformer.nn.operations import rotate
from glassformer.nn.position import ALiBiPosition, SinusoidalPosition, rotations
from glassformer.nn.taps import Taps
from glassformer.spec import model as spec
from glassformer.spec.init import Constant, Gaussian, HeInit, XavierInit
from glassformer.spec.manifest import attention_parameters, ffn_parameters

# B batch, T length, D d_model, F d_ff, V vocab, R rank


def layer_norm(dtype: torch.dtype) -> Measure:
    """Against nn.LayerNorm, at an input small enough to show eps."""
    B, T, D = 2, 5, 11
    ours = perturb(build_norm(spec.LayerNorm(eps=1e-5), D), dtype=dtype, seed=23)
    assert isinstance(ours, LayerNorm) and ours.bias is not None
    reference = nn.LayerNorm(D, eps=1e-5, dtype=dtype)
    pairs = [
        Pair("weight", ours.weight, reference.weight),
        Pair("bias", ours.bias, reference.bias),
    ]
    return parity(
        lambda x: ours(x * 3e-3),
        lambda x: reference(x * 3e-3),
        inputs=[draw(B, T, D, dtype=dtype, seed=24)],
        pairs=pairs,
        size=f"B{B} T{T} D{D}",
    )


def rms_norm(dtype: torch.dtype) -> Measure:
    """Against nn.RMSNorm, at an input small enough to show eps."""
    B, T, D = 2, 5, 11
    ours = perturb(build_norm(spec.RMSNorm(eps=1e-6), D), dtype=dtype, seed=25)
    reference = nn.RMSNorm(D, eps=1e-6, dtype=dtype)
    return parity(
        lambda x: ours(x * 1e-3),
        lambda x: reference(x * 1e-3),
        inputs=[draw(B, T, D, dtype=dtype, seed=26)],
        pairs=[Pair("weight", ours.weight, reference.weight)],
        size=f"B{B} T{T} D{D}",
    )


def feed_forward(dtype: torch.dtype) -> Measure:
    """ReLU, both GELUs and SwiGLU, plain and clamped, against formulas written out."""
    B, T, D, d_ff = 2, 5, 7, 13
    formulas: dict[spec.Activation, Callable[[Tensor], Tensor]] = {
        "relu": lambda x: x.clamp(min=0),
        "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda x: (
            x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        ),
    }
    measures = []
    for activation, formula in formulas.items():
        ours = perturb(MLP(spec.MLP(d_ff=d_ff, activation=activation), D), dtype=dtype, seed=27)

        def theirs(
            x: Tensor, ours: MLP = ours, formula: Callable[[Tensor], Tensor] = formula
        ) -> Tensor:
            up, down = ours.up_proj, ours.down_proj
            assert up.bias is not None and down.bias is not None
            return formula(x @ up.weight.T + up.bias) @ down.weight.T + down.bias

        inputs = [draw(B, T, D, dtype=dtype, seed=28)]
        measures.append(parity(ours, theirs, inputs=inputs, size=f"B{B} T{T} D{D} F{d_ff}"))
    glu = perturb(SwiGLU(spec.SwiGLU(d_ff=d_ff), D), dtype=dtype, seed=29)

    def swiglu(x: Tensor) -> Tensor:
        gate, up = x @ glu.gate_proj.weight.T, x @ glu.up_proj.weight.T
        return (gate / (1 + torch.exp(-gate)) * up) @ glu.down_proj.weight.T

    inputs = [draw(B, T, D, dtype=dtype, seed=30)]
    measures.append(parity(glu, swiglu, inputs=inputs, size=f"B{B} T{T} D{D} F{d_ff}"))
    limited = spec.SwiGLU(d_ff=d_ff, clamp=spec.Clamp(limit=0.7, slope=1.3))
    held = perturb(SwiGLU(limited, D), dtype=dtype, seed=31)

    def clamped(x: Tensor) -> Tensor:
        gate, up = x @ held.gate_proj.weight.T, x @ held.up_proj.weight.T
        gate = torch.where(gate > 0.7, gate.new_tensor(0.7), gate)
        up = torch.where(up.abs() > 0.7, 0.7 * up.sign(), up)
        return (gate / (1 + torch.exp(-1.3 * gate)) * (1 + up)) @ held.down_proj.weight.T

    inputs = [draw(B, T, D, dtype=dtype, seed=32)]
    measures.append(parity(held, clamped, inputs=inputs, size=f"B{B} T{T} D{D} F{d_ff}"))
    return max(measures, key=lambda measure: measure.worst)


def alibi_is_relative(dtype: torch.dtype) -> Measure:
    """The bias depends on the distance alone: 0 at 0, and one slope less for each token."""
    n_heads, T = 7, 13
    part = ALiBiPosition(spec.ALiBi(), n_heads, 5).to(dtype)
    here = part.bias(torch.arange(T), T)
    far = part.bias(torch.arange(T) + 1000, T)
    steps = here[0, :, 1:, 0] - here[0, :, :-1, 0]
    worst = max(
        gap(here, far),
        gap(here, here.mT),
        gap(here.diagonal(dim1=-2, dim2=-1), torch.zeros(1, n_heads, T, dtype=dtype)),
        gap(steps, -part.table[:, None].expand(-1, T - 1)),
    )
    return Measure(worst, TOLERANCE[dtype], f"N{n_heads} T{T}")


def factorized_embedding(dtype: torch.dtype) -> Measure:
    """U[token] @ V and its use as an output layer, against the dense product U @ V."""
    vocab, D, rank = 11, 7, 3
    part = FactorizedTokenEmbedding(vocab, D, rank=rank, l1=0.5)
    perturb(part, dtype=dtype, seed=31)
    tokens = torch.randint(0, vocab, (2, 5), generator=seeded(32))
    dense = part.u @ part.v
    x = draw(2, 5, D, dtype=dtype, seed=33)
    worst = max(
        gap(part(tokens), dense[tokens]),
        gap(part.as_linear(x), x @ dense.T),
        gap(part.penalty(), 0.5 * part.u.detach().flatten().norm(p=1)),
    )
    return Measure(worst, TOLERANCE[dtype], f"V{vocab} D{D} R{rank}")


def initialisation(dtype: torch.dtype) -> Measure:
    """Draws follow the manifest's rule: mean and spread of large tensors."""
    D = 64
    policy, worst = XavierInit(), 0.0
    rules = [
        *attention_parameters(spec.Attention(n_heads=4, bias="all"), "", D, init=policy),
    ]
    attention = MultiHeadAttention(spec.Attention(n_heads=4, bias="all"), D)
    ffn = build_ffn(spec.MLP(d_ff=4 * D, activation="relu"), D)
    ffn_rules = tuple(ffn_parameters(spec.MLP(d_ff=4 * D, activation="relu"), "", D, init=HeInit()))
    for module, wanted in ((attention, tuple(rules)), (ffn, ffn_rules)):
        initialise(module, wanted, generator=seeded(34))
        own = dict(module.named_parameters())
        for parameter in wanted:
            values = own[parameter.name].detach()
            if parameter.kind != "matrix":
                worst = max(worst, gap(values, torch.zeros_like(values)))
                continue
            rule = parameter.init
            assert not isinstance(rule, Constant)
            std = rule.std if isinstance(rule, Gaussian) else rule.bound / math.sqrt(3)
            error = std / math.sqrt(parameter.size)
            off_mean = abs(float(values.mean())) / error
            off_std = abs(float(values.std()) - std) / error
            worst = max(worst, off_mean / 10, off_std / 10)
    return Measure(worst, 1.0, f"D{D}", "10 standard errors")


# B batch, T length, N heads, H d_head, D d_model


def turn_by_hand(x_BTH: Tensor, H: int) -> Tensor:
    """Pair (i, i + H/2) as a complex number, turned by t / 10000^(2i/H), a float32 frequency."""
    T, half = x_BTH.shape[1], H // 2
    exponents = torch.tensor([2 * i / H for i in range(half)], dtype=torch.float32).double()
    frequencies = (1.0 / (10_000.0**exponents).float()).tolist()
    turns = [[cmath.exp(1j * t * frequency) for frequency in frequencies] for t in range(T)]
    kind = torch.complex128 if x_BTH.dtype == torch.float64 else torch.complex64
    turned = torch.complex(x_BTH[..., :half], x_BTH[..., half:]) * torch.tensor(turns, dtype=kind)
    return torch.cat((turned.real, turned.imag), -1)


def rotary_closed_form(dtype: torch.dtype) -> Measure:
    """`rotate` against complex multiplication."""
    B, N, T, H = 2, 3, 23, 10
    cos, sin = rotations(spec.Rotary(), T, H, dtype=dtype)
    return parity(
        lambda x: rotate(x, cos, sin),
        lambda x: torch.stack([turn_by_hand(x[:, n], H) for n in range(N)], 1),
        inputs=[draw(B, N, T, H, dtype=dtype, seed=20)],
        size=f"B{B} N{N} T{T} H{H}",
    )


def rotary_is_relative(dtype: torch.dtype) -> Measure:
    """A score depends on the distance of two positions only: shifting both changes nothing."""
    T, H, shift = 17, 6, 5
    table = rotations(spec.Rotary(), T + shift, H, dtype=dtype)
    q, k = draw(1, 1, 1, H, dtype=dtype, seed=21), draw(1, 1, 1, H, dtype=dtype, seed=22)

    def score(i: int, j: int) -> Tensor:
        return (rotate(q, *table[:, i : i + 1]) * rotate(k, *table[:, j : j + 1])).sum()

    worst = max(gap(score(i, 3), score(i + shift, 3 + shift)) for i in range(T))
    return Measure(worst, TOLERANCE[dtype], f"T{T} H{H}")


def sinusoidal_closed_form(dtype: torch.dtype) -> Measure:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos, number by number; odd d too."""
    worst = 0.0
    for length, d_model in ((13, 10), (7, 5)):
        part = SinusoidalPosition(length, d_model, kind=spec.Sinusoidal()).to(dtype)
        expected = torch.empty(length, d_model, dtype=dtype)
        for pos in range(length):
            for column in range(d_model):
                angle = pos / 10_000 ** ((column - column % 2) / d_model)
                expected[pos, column] = math.cos(angle) if column % 2 else math.sin(angle)
        shown = part(torch.zeros(2, length, d_model, dtype=dtype), slice(0, length))
        worst = max(worst, gap(shown, expected.expand(2, -1, -1)))
        if list(part.parameters()) or part.state_dict():
            worst = math.inf
    return Measure(worst, TOLERANCE[dtype], "T13 D10, T7 D5")


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
