"""Low-rank corrections: the equation, what trains, merging, and what is refused."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from glassformer.gpu.operations import joined_product
from glassformer.models.model import build
from glassformer.models.weights import load_weights, weights_hash, weights_of
from glassformer.nn.linear import Linear
from glassformer.nn.lora import (
    LoRALinear,
    apply_lora,
    corrected_layers,
    lora_parameters,
    merge,
    unmerge,
)
from glassformer.spec import presets
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import stored
from glassformer.spec.model import NextHead
from glassformer.spec.serialize import from_dict, to_dict
from glassformer.spec.train import LoRA, Tuning, lora_manifest, lora_targets
from tests.compare import assert_matches
from tests.planting import Call, Constant, catches
from tests.tiny import built, filled, noise, tiny, token_ids

QWEN = presets.qwen(
    vocab_size=19, d_model=12, n_heads=3, n_kv_heads=1, d_head=4, d_ff=17, n_layers=2
)
EVERY = ("attention", "cross_attention", "ffn", "head")
#: Merged against unmerged, relative to the largest logit. Worst seen 1.9e-15 and 4.6e-7.
MERGED = {torch.float64: 1e-12, torch.float32: 1e-5}


def corrected(spec=QWEN, lora=LoRA(rank=3, alpha=5.0), *, seed: int = 1):  # noqa: B008  frozen
    """A float64 model whose corrections are far from zero, and its logits without them."""
    model = built(spec, seed=seed)
    apply_lora(model, lora)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for factor in lora_parameters(model).values():
            factor.normal_(0.0, 0.3, generator=generator)
    return model


def inputs(spec):
    tokens = token_ids(3, 7, vocab=spec.vocab_size)
    if spec.encoder is None:
        return tokens
    from glassformer.models.inputs import Inputs

    return Inputs(tokens, source_BS=token_ids(3, 5, seed=2, vocab=spec.source_vocab))


# --- the equation ---------------------------------------------------------------------------------


class Reference(nn.Module):
    """The formula in one product with a weight of its own."""

    def __init__(self, d_in: int, d_out: int, rank: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d_out, d_in, dtype=torch.float64))
        self.a = nn.Parameter(torch.zeros(rank, d_in, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(d_out, rank, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(d_out, dtype=torch.float64))


@catches("alpha / rank dropped", "nn.lora:LoRALinear.forward", Call("corrected"), arg=5, to="1.0")
def test_a_corrected_layer_is_its_formula() -> None:
    layer = filled(Linear(11, 7, bias=True))
    ours = filled(LoRALinear(layer, LoRA(rank=3, alpha=5.0)), seed=4)
    theirs = Reference(11, 7, 3)
    assert_matches(
        ours,
        lambda x: x @ (theirs.w + 5.0 / 3.0 * theirs.b @ theirs.a).T + theirs.bias,
        [noise(2, 5, 11)],
        parameters={
            "weight": (ours.weight, theirs.w),
            "A": (ours.lora_A.weight, theirs.a),
            "B": (ours.lora_B.weight, theirs.b),
            "bias": (ours.bias, theirs.bias),
        },
    )


def test_dropout_acts_on_what_a_reads_and_only_in_training() -> None:
    layer = LoRALinear(filled(Linear(11, 7, bias=False)), LoRA(rank=3, dropout=0.5))
    filled(layer, seed=4)
    x = noise(2, 5, 11)
    torch.manual_seed(5)
    got = layer.train()(x)
    torch.manual_seed(5)
    kept = nn.functional.dropout(x, 0.5)
    low = kept @ layer.lora_A.weight.T @ layer.lora_B.weight.T
    want = x @ layer.weight.T + low * 2.0 / 3.0 * 8.0  # alpha 16, rank 3
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert torch.equal(layer.eval()(x), layer(x))
    assert not torch.equal(layer(x), got)


# --- on a model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [QWEN, tiny(), tiny(encoder=True)], ids=["qwen", "own", "seq2seq"])
def test_a_fresh_correction_changes_nothing_and_is_drawn_from_the_generator(spec):
    model = built(spec)
    before = model(inputs(spec))["next"]
    layers = apply_lora(model, LoRA(rank=3), generator=torch.Generator().manual_seed(3))
    assert torch.equal(model(inputs(spec))["next"], before)
    other = built(spec)
    apply_lora(other, LoRA(rank=3), generator=torch.Generator().manual_seed(3))
    for name, factor in lora_parameters(other).items():
        assert torch.equal(factor, lora_parameters(model)[name])
    for layer in layers.values():
        a, bound = layer.lora_A.weight.detach(), 1 / math.sqrt(layer.d_in)
        assert float(a.abs().max()) <= bound
        assert not bool(layer.lora_B.weight.any())
    drawn = [layer.lora_A.weight.detach() * layer.d_in**0.5 for layer in layers.values()]
    spread = torch.cat([a.flatten() for a in drawn])
    assert float(spread.abs().max()) > 0.9
    assert abs(float(spread.std()) - 1 / math.sqrt(3)) < 0.05


@catches("base not frozen", "nn.lora:apply_lora", Constant(False), drop=True)
def test_only_the_factors_train() -> None:
    model = corrected()
    frozen = {
        name: p.detach().clone() for name, p in model.named_parameters() if "lora" not in name
    }
    factors = lora_parameters(model)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(factors)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(inputs(QWEN))["next"].square().mean().backward()
    assert all(bool(factor.grad.any()) for factor in factors.values())
    optimizer.step()
    for name, p in model.named_parameters():
        if name in frozen:
            assert p.grad is None
            assert torch.equal(p, frozen[name]), name


@pytest.mark.parametrize("spec", [QWEN, tiny(), tiny(encoder=True)], ids=["qwen", "own", "seq2seq"])
def test_the_models_factors_are_the_manifests(spec):
    lora = LoRA(rank=2, targets=EVERY if spec.encoder else ("attention", "ffn"))
    model = built(spec)
    apply_lora(model, lora)
    rules = lora_manifest(spec, lora)
    assert {name: tuple(p.shape) for name, p in lora_parameters(model).items()} == {
        name: rule.shape for name, rule in rules.items()
    }
    assert all(rule.size == math.prod(rule.shape) and rule.decay for rule in rules.values())


# --- merging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", MERGED, ids=str)
@pytest.mark.parametrize("spec", [QWEN, tiny(), tiny(encoder=True)], ids=["qwen", "own", "seq2seq"])
def test_merged_is_unmerged(spec, dtype) -> None:
    targets = EVERY if spec.encoder else ("attention", "ffn")
    model = corrected(spec, LoRA(rank=3, alpha=5.0, targets=targets)).to(dtype)
    want = model(inputs(spec))["next"].detach()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    taken = merge(model)
    assert not corrected_layers(model)
    assert all(type(part) is not LoRALinear for part in model.modules())
    got = model(inputs(spec))["next"].detach()
    scale = max(1.0, float(want.abs().max()))
    assert float((got - want).abs().max()) / scale <= MERGED[dtype]
    assert set(weights_of(model)) == set(stored(spec))
    unmerge(model, taken)
    assert torch.equal(model(inputs(spec))["next"], want)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name


@torch.no_grad()
def test_merging_half_precision_rounds_once():
    layer = filled(Linear(11, 7, bias=False)).to(torch.bfloat16)
    ours = filled(LoRALinear(layer, LoRA(rank=3)), seed=4).to(torch.bfloat16)
    product = ours.lora_B.weight.double() @ ours.lora_A.weight.double()
    nearest = (ours.weight.double() + ours.scale * product).to(torch.bfloat16)
    merged = ours.merged().weight
    assert merged.dtype == torch.bfloat16
    assert float((merged == nearest).double().mean()) > 0.95  # ties of float32 and float64 differ


def test_the_weights_of_a_corrected_model_are_not_the_model():
    model = corrected()
    with pytest.raises(InputError, match="merge LoRA"):
        weights_of(model)
    rules = lora_manifest(QWEN, LoRA(rank=3))
    arrays = weights_of(model, rules=rules)
    assert set(arrays) == set(rules)
    other = built(QWEN)
    apply_lora(other, LoRA(rank=3, alpha=5.0))
    load_weights(other, arrays, rules=rules)
    assert torch.equal(other(inputs(QWEN))["next"], model(inputs(QWEN))["next"])
    with pytest.raises(InputError, match="missing"):
        load_weights(other, dict(list(arrays.items())[1:]), rules=rules)


def test_the_hash_is_of_the_weights_and_of_their_names():
    model, other = built(QWEN), built(QWEN)
    assert weights_hash(model) == weights_hash(other)
    with torch.no_grad():
        other.blocks[1].ffn.up_proj.weight[3, 2] += 1e-9
    assert weights_hash(model) != weights_hash(other)
    assert weights_hash(built(QWEN).float()) != weights_hash(model)


# --- targets --------------------------------------------------------------------------------------


def test_targets_are_names_roles_or_one_projection():
    def found(*targets: str) -> list[str]:
        return list(lora_targets(QWEN, LoRA(rank=1, targets=targets)))

    assert found("q_proj") == ["blocks.0.attn.q_proj", "blocks.1.attn.q_proj"]
    assert len(found("attention")) == 8
    assert len(found("ffn")) == 6
    assert len(found("attention", "ffn")) == 14
    assert found("blocks.1.ffn.up_proj") == ["blocks.1.ffn.up_proj"]
    assert found("q_proj", "attention") == found("attention")
    untied = dataclasses.replace(QWEN, heads=(NextHead(tied=False),))
    assert list(lora_targets(untied, LoRA(rank=1, targets=("head",)))) == ["heads.next"]


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 0}, "rank 0 is below 1"),
        ({"alpha": 0.0}, "alpha 0.0"),
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"targets": ()}, "at least one"),
        ({"targets": ("q_proj", "q_proj")}, "once each"),
        ({"targets": ("q_prj",)}, "'q_prj' is in no layer"),
        ({"targets": ("head",)}, "'head' is in no layer"),  # tied: it has no matrix of its own
        ({"targets": ("norm",)}, "'norm' is in no layer"),
        ({"rank": 5}, "rank 5 is above 4"),
    ],
)
def test_what_cannot_be_is_refused_by_name(lora, words):
    with pytest.raises(InputError, match=words):
        lora_targets(QWEN, LoRA(**lora))


def test_a_second_correction_is_refused_and_so_is_merging_none():
    model = corrected()
    with pytest.raises(InputError, match="already"):
        apply_lora(model, LoRA(rank=1))
    merge(model)
    with pytest.raises(InputError, match="no LoRA"):
        merge(model)


def test_the_spec_is_data():
    tuning = Tuning(base="runs/a", sha256="0", lora=LoRA(rank=4, targets=("q_proj",)))
    assert from_dict(Tuning, to_dict(tuning)) == tuning
    with pytest.raises(InputError, match="no base"):
        Tuning(base="", sha256="")


def test_on_no_device_nothing_is_drawn():
    model = build(QWEN, device="meta")
    layers = apply_lora(model, LoRA(rank=2))
    assert all(layer.lora_A.weight.is_meta for layer in layers.values())


@pytest.mark.parametrize("bias", [False, True])
def test_a_corrected_product_is_the_sum_of_two(bias):
    """The product of compiled GPU code and its gradients: none for what is frozen."""
    weight, factor, x, low = noise(7, 5), noise(7, 3), noise(2, 4, 5), noise(2, 4, 3)
    shift = noise(7) if bias else None
    trained = [part.requires_grad_() for part in (x, low, factor)]
    one = joined_product(x, low, weight, factor, shift)
    two = torch.nn.functional.linear(x, weight, shift) + low @ factor.T
    assert torch.allclose(one, two, rtol=0, atol=1e-12)
    grad = noise(2, 4, 7)
    for ours, theirs in zip(
        torch.autograd.grad(one, trained, grad),
        torch.autograd.grad(two, trained, grad),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    weight.requires_grad_()
    assert torch.autograd.grad(
        joined_product(x, low, weight, factor, shift), weight, grad, allow_unused=True
    ) == (None,)
