"""A mixture of experts: shape, numbers token by token and Hugging Face's, routing, gradient."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from glassformer.models.model import build
from glassformer.nn.experts import (
    BalanceAt,
    BalanceLosses,
    MixtureOfExperts,
    balance_loss,
    build_feed_forward,
    route,
)
from glassformer.nn.lora import apply_lora
from glassformer.nn.operations import activate
from glassformer.nn.taps import Taps, TapsAt
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import count_active_parameters, count_parameters, ffn_parameters
from glassformer.spec.model import MLP, MoE, NormalInit, SwiGLU
from glassformer.spec.presets import moe
from glassformer.spec.train import LoRA
from tests.compare import assert_matches
from tests.tiny import built, filled, noise, tiny, token_ids

D, F_, S_, E, A = 13, 17, 19, 6, 2
MIXTRAL = MoE(n_experts=E, experts_per_token=A, expert=SwiGLU(d_ff=F_))
QWEN2 = replace(MIXTRAL, normalize=False, shared=SwiGLU(d_ff=S_), shared_gate=True)
ALL = {
    "Mixtral": MIXTRAL,
    "OLMoE": replace(MIXTRAL, normalize=False),
    "Qwen2-MoE": QWEN2,
    "DeepSeek": replace(MIXTRAL, shared=SwiGLU(d_ff=S_)),
    "Switch": MoE(
        n_experts=E, experts_per_token=1, normalize=False, expert=MLP(d_ff=F_, activation="relu")
    ),
    "GELU, three of six": MoE(n_experts=E, experts_per_token=3, expert=MLP(d_ff=F_)),
    "all": MoE(n_experts=3, experts_per_token=3, expert=SwiGLU(d_ff=F_, bias=True)),
}
every_mixture = pytest.mark.parametrize("ffn", ALL.values(), ids=ALL.keys())


def part_of(ffn: MoE, *, seed: int = 1) -> MixtureOfExperts:
    part = filled(build_feed_forward(ffn, D), seed=seed)
    assert isinstance(part, MixtureOfExperts)
    return part


def one_by_one(part: MixtureOfExperts, ffn: MoE):
    """The definition: each token asks its router, then each of its experts, alone."""

    def dense(kind, module, x):
        def line(name, x):
            layer = getattr(module, name)
            out = layer.weight @ x
            return out if layer.bias is None else out + layer.bias

        if isinstance(kind, SwiGLU):
            gate = line("gate_proj", x)
            return line("down_proj", gate * torch.sigmoid(gate) * line("up_proj", x))
        return line("down_proj", activate(line("up_proj", x), kind.activation))

    def token(x):
        p = torch.exp(part.gate.weight @ x)
        p = p / p.sum()
        ranked = sorted(range(ffn.n_experts), key=lambda e: (-float(p[e].detach()), e))
        chosen = ranked[: ffn.experts_per_token]
        total = sum(p[e] for e in chosen) if ffn.normalize else 1.0
        out = sum(p[e] / total * dense(ffn.expert, part.experts[e], x) for e in chosen)
        if ffn.shared is not None:
            shared = dense(ffn.shared, part.shared_expert, x)
            gate = 1.0
            if ffn.shared_gate:
                gate = 1 / (1 + torch.exp(-(part.shared_expert_gate.weight @ x)))
            out = out + gate * shared
        return out

    return lambda x: torch.stack([torch.stack([token(t) for t in row]) for row in x])


@every_mixture
def test_shape_and_names(ffn):
    part = part_of(ffn)
    assert part(noise(2, 3, D)).shape == (2, 3, D)
    wanted = {p.name: p.shape for p in ffn_parameters(ffn, "", D, init=NormalInit())}
    assert {name: tuple(p.shape) for name, p in part.named_parameters()} == wanted


@every_mixture
def test_groups_of_tokens_are_one_token_at_a_time(ffn):
    part = part_of(ffn)
    reference = one_by_one(part, ffn)
    twin = part_of(ffn)
    pairs = {
        name: (mine, theirs)
        for (name, mine), theirs in zip(part.named_parameters(), twin.parameters(), strict=True)
    }
    assert_matches(part, one_by_one(twin, ffn), [noise(3, 5, D)], parameters=pairs)
    torch.testing.assert_close(part(noise(1, 1, D)), reference(noise(1, 1, D)), rtol=0, atol=1e-13)


@every_mixture
def test_gradient(ffn):
    assert gradcheck(part_of(ffn), [noise(3, D).requires_grad_()])


@every_mixture
def test_the_future_changes_no_bit_of_the_past(ffn):
    """Although it changes how many tokens share an expert, and in which row of its group one is."""
    width = 24  # products of fewer than a dozen inputs round by the row in which they stand
    part = filled(build_feed_forward(ffn, width)).float()
    x = noise(3, 11, width, dtype=torch.float32)
    with torch.no_grad():
        before = part(x)
        for t in range(1, 11):
            future = noise(3, 11 - t, width, seed=t, dtype=x.dtype)
            assert torch.equal(part(torch.cat((x[:, :t], future), 1))[:, :t], before[:, :t]), t


def test_equal_logits_go_to_the_lowest_index():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]])
    weights, chosen, p = route(logits, chosen=3, normalize=False)
    assert chosen.tolist() == [[1, 2, 3]]
    torch.testing.assert_close(weights, p[:, 1:4])
    part = part_of(MIXTRAL)
    with torch.no_grad():
        part.gate.weight.zero_()
    taps = Taps(read="*")
    part(noise(2, 3, D), taps=TapsAt(taps, ""))
    assert (taps.seen["routing"] != 0).float().mean((0, 1)).tolist() == [1, 1, 0, 0, 0, 0]
    assert taps.seen["routing"].sum(-1).allclose(torch.ones(2, 3, dtype=torch.float64))


def test_no_token_is_dropped_when_all_choose_the_same():
    part, x = part_of(MIXTRAL), noise(4, 9, D).abs()
    with torch.no_grad():
        part.gate.weight.zero_()
        part.gate.weight[2], part.gate.weight[4] = 5.0, 3.0
    torch.testing.assert_close(part(x), one_by_one(part, MIXTRAL)(x), rtol=0, atol=1e-12)


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero():
    part, x = part_of(MIXTRAL), noise(2, 3, D).abs()
    with torch.no_grad():
        part.gate.weight[3] = -9.0
    part(x).sum().backward()
    idle = part.experts[3]
    assert all(p.grad is not None and not p.grad.any() for p in idle.parameters())


def test_an_edit_of_the_routing_moves_tokens():
    part, x = part_of(MIXTRAL), noise(2, 3, D)
    alone = {"routing": F.one_hot(torch.full((2, 3), 4), E).double()}
    moved = part(x, taps=TapsAt(Taps(edit=alone), ""))
    torch.testing.assert_close(moved, part.experts[4](x), rtol=0, atol=1e-13)
    none = {"routing": torch.zeros(2, 3, E)}
    assert not part(x, taps=TapsAt(Taps(edit=none), "")).any()


# --- the balance loss -----------------------------------------------------------------------------


def test_balance_loss_is_hugging_faces():
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = noise(3, 5, E)
    valid = torch.ones(3, 5, dtype=torch.bool)
    valid[1, 3:] = False
    valid[2, :2] = False
    _, chosen, p = route(logits, chosen=A, normalize=True)
    for mask in (None, valid):
        theirs = modeling.load_balancing_loss_func(
            (logits.flatten(0, 1),), E, A, None if mask is None else mask.long()
        )
        torch.testing.assert_close(balance_loss(p, chosen, valid_BT=mask), theirs.double())


def test_balance_loss_by_counting():
    p = torch.softmax(noise(2, 4, 3), -1)
    chosen = torch.tensor([[[0, 1], [1, 2], [1, 0], [2, 1]], [[1, 0], [0, 2], [0, 1], [1, 2]]])
    valid = torch.tensor([[True, True, True, False], [False, True, True, True]])
    loss = 0.0
    for e in range(3):
        picks = [e in chosen[b, t] for b in range(2) for t in range(4) if valid[b, t]]
        means = [float(p[b, t, e]) for b in range(2) for t in range(4) if valid[b, t]]
        loss += 3 * sum(picks) / 6 * sum(means) / 6
    assert float(balance_loss(p, chosen, valid_BT=valid)) == pytest.approx(loss, abs=1e-14)


def test_an_even_load_costs_the_number_of_experts_of_a_token():
    p = torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)
    chosen = torch.tensor([[[0, 1], [1, 2], [2, 0]]])
    assert float(balance_loss(p, chosen, valid_BT=None)) == pytest.approx(2.0)


def test_padding_counts_for_nothing():
    part, x = part_of(MIXTRAL), noise(2, 5, D)
    valid = torch.tensor([[True] * 5, [True, True, False, False, False]])
    losses = []
    for filler in (x, torch.where(valid[..., None], x, noise(2, 5, D, seed=9))):
        found = BalanceLosses()
        part(filler, balance=BalanceAt(found, "blocks.0", valid))
        losses.append(float(found.losses["blocks.0"].detach()))
    assert losses[0] == losses[1]
    empty = BalanceLosses()
    part(x, balance=BalanceAt(empty, "blocks.0", torch.zeros_like(valid)))
    assert float(empty.losses["blocks.0"].detach()) == 0.0


def test_a_model_collects_one_loss_a_layer_also_when_it_recomputes():
    model = built(tiny(ffn=MIXTRAL, layers=3))
    tokens = token_ids(2, 7)
    losses, gradients = [], []
    for recompute in (False, True):
        model.zero_grad()
        found = BalanceLosses()
        hidden = model.hidden(model.inputs(tokens), balance=found, recompute=recompute)
        assert list(found.losses) == ["blocks.0", "blocks.1", "blocks.2"]
        plain, term = found.weighted()
        assert float(term.detach()) == pytest.approx(0.01 * float(plain.detach()))
        (hidden.square().sum() + term).backward()
        losses.append(plain.detach())
        gradients.append([p.grad for p in model.blocks.parameters()])
    assert torch.equal(*losses)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


# --- against Hugging Face's modules ---------------------------------------------------------------


def test_qwen2_moe_block_is_hugging_faces():
    configuration = pytest.importorskip("transformers.models.qwen2_moe.configuration_qwen2_moe")
    modeling = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    config = configuration.Qwen2MoeConfig(
        hidden_size=D,
        num_experts=E,
        num_experts_per_tok=A,
        moe_intermediate_size=F_,
        shared_expert_intermediate_size=S_,
        norm_topk_prob=False,
    )
    theirs = modeling.Qwen2MoeSparseMoeBlock(config).double()
    ours = part_of(QWEN2)
    own = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name in own:
                parameter.copy_(own[name])
            elif name == "experts.gate_up_proj":  # 5.x stacks the experts
                parts = [(e.gate_proj.weight, e.up_proj.weight) for e in ours.experts]
                parameter.copy_(torch.stack([torch.cat(pair) for pair in parts]))
            else:
                assert name == "experts.down_proj"
                parameter.copy_(torch.stack([e.down_proj.weight for e in ours.experts]))
    x = noise(3, 5, D)
    found = theirs(x)
    found = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(ours(x), found, rtol=0, atol=1e-5)  # theirs rounds to float32


# --- counts, and what cannot be ------------------------------------------------------------------


def test_active_parameters_are_those_that_a_token_touches():
    spec = moe(vocab_size=29, d_model=12, n_heads=3, n_kv_heads=1, d_ff=7, shared_d_ff=5)
    model = build(spec).double()
    model(torch.tensor([[3]]))["next"].sum().backward()
    touched = sum(
        p.numel()
        for name, p in model.named_parameters()
        if ".experts." not in name or bool(p.grad.any())
    )
    assert count_active_parameters(spec) == touched < count_parameters(spec)
    dense = tiny()
    assert count_active_parameters(dense) == count_parameters(dense)


def test_lora_corrects_the_experts_and_not_the_router():
    model = built(tiny(ffn=QWEN2))
    layers = apply_lora(model, LoRA(rank=2, targets=("ffn",)))
    assert len(layers) == 2 * (3 * E + 3)
    assert not any(name.endswith("gate") for name in layers)
    assert model(token_ids(2, 5))["next"].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts_per_token": 7}, "nearest valid experts_per_token is 6"),
        ({"experts_per_token": 1}, "normalize=false"),
        ({"n_experts": 1}, "nearest valid n_experts is 2"),
        ({"shared_gate": True}, "give `shared`"),
        ({"balance": -1.0}, "0 turns the balance loss off"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(InputError) as caught:
        replace(MIXTRAL, **changes)
    assert words in (caught.value.hint or "")
