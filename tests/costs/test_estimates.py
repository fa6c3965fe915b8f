"""Predicted FLOPs, bytes and step time, against torch's own counters and hooks."""

import re
from dataclasses import replace

import numpy as np
import pytest
from bench import footprint
from hypothesis import given, settings
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from glassformer.costs.activations import activations
from glassformer.costs.estimates import (
    flops,
    optimizer_bytes,
    training_memory,
    weight_bytes,
)
from glassformer.costs.parameter_table import format_allocation
from glassformer.costs.timing import Rates, rate_at, step_time
from glassformer.data.batch import Batch
from glassformer.lab.budget_report import design
from glassformer.models.model import build
from glassformer.spec.errors import InputError
from glassformer.spec.execution import PIECE
from glassformer.spec.manifest import stored
from glassformer.spec.model import (
    ALiBi,
    ClassHead,
    Dropout,
    LayerNorm,
    Layers,
    NextHead,
    NoPosition,
    RelativeBias,
    RMSNorm,
    Rotary,
)
from glassformer.spec.presets import PRESETS, budget_lm, fsm_probe, preset, qwen, seq2seq
from glassformer.spec.train import SGD, AdamW, Muon, TrainSpec
from glassformer.training.torch_engine import TorchEngine
from tests.planting import Binary, Constant, catches
from tests.strategies import model_specs

B, T, S = 3, 5, 4  # no longer than the shortest context of the random specs


def dropping(spec, change):
    """The same model with other dropout in each stack."""
    spec = replace(spec, decoder=replace(spec.decoder, dropout=change(spec.decoder.dropout)))
    if spec.encoder is None:
        return spec
    return replace(spec, encoder=replace(spec.encoder, dropout=change(spec.encoder.dropout)))


def calm(spec):
    return dropping(spec, lambda _: Dropout())


def fused(spec):
    return dropping(spec, lambda rates: replace(rates, attention=0.0))


def batch(spec, B=B, T=T, S=S):
    generator = np.random.default_rng(0)
    targets = {
        name: generator.integers(0, spec.head_size(name), (B,) if name == "answer" else (B, T))
        for name in spec.head_names()
    }
    source = None
    if spec.encoder is not None:
        tokens = generator.integers(0, spec.source_vocab, (B, S))
        source = Batch(tokens=tokens, valid=np.ones((B, S), dtype=bool), targets={})
    tokens = generator.integers(0, spec.vocab_size, (B, T))
    return Batch(tokens=tokens, valid=np.ones((B, T), dtype=bool), targets=targets, source=source)


def counted(spec, *, backward):
    model = build(spec).train()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        answers = model(batch(spec))
        if backward:
            sum(logits.sum() for logits in answers.values()).backward()
    return counter.get_total_flops()


@given(model_specs())
@settings(max_examples=25)
def test_flops_are_torchs_count(spec):
    spec = calm(spec)
    assert B * flops(spec, length=T, source_length=S).forward == counted(spec, backward=False)


@catches("attention over half the keys", "costs.estimates:flops", Constant(4), to="2")
@pytest.mark.parametrize("name", ["budget-lm", "qwen", "digits", "fsm-factorized"])
def test_training_is_three_forwards(name):
    spec = calm(preset(name))
    assert B * flops(spec, length=T).training == counted(spec, backward=True)


# --- memory -------------------------------------------------------------------------------------


def measured(spec, **sizes):
    engine = TorchEngine.fresh(spec, TrainSpec())
    return footprint.saved_bytes(engine, batch(spec, **sizes))


@given(model_specs())
@settings(max_examples=30)
def test_activations_are_what_autograd_keeps_whatever_the_parts(spec):
    """Layers of both placements, answers read as a mean, single heads: 0.6 % at most in 300."""
    spec = fused(spec)
    said = activations(spec, batch=B, length=T, source_length=S).kept
    assert said == pytest.approx(measured(spec), rel=0.02)


SMALLER = {
    "seq2seq": seq2seq(d_model=64, n_heads=4, n_layers=2),
    "seq2seq-pre": seq2seq(d_model=64, n_heads=4, n_layers=2, pre_norm=True),
}


@pytest.mark.parametrize("name", PRESETS)
def test_activations_of_the_presets(name):
    spec = calm(SMALLER.get(name) or preset(name))
    said = activations(spec, batch=4, length=32, source_length=24).kept
    # How far an expert's group of tokens is filled up depends on the tokens: 0.2 % seen.
    within = 1e-2 if spec.mixtures() else 2e-4
    assert said == pytest.approx(measured(spec, B=4, T=32, S=24), rel=within)


@pytest.mark.parametrize("position", [NoPosition(), Rotary(), ALiBi(), RelativeBias()])
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"window": 8},
        {"qk_norm": RMSNorm()},
        {"qk_norm": RMSNorm(offset=True), "qk_norm_last": True},
        {"qk_norm": LayerNorm(), "qk_norm_over": "all"},
        {"softcap": 20.0},
        {"sinks": True, "n_kv_heads": None},
    ],
)
def test_activations_of_each_kind_of_attention(position, parts):
    """By our kernel, by torch's where scores have a bias, or one by one."""
    spec = preset("qwen")
    block = next(spec.decoder.blocks())
    block = replace(block, attention=replace(block.attention, **parts))
    decoder = replace(spec.decoder, layers=(Layers(count=2, block=block),))
    spec = calm(replace(spec, position=position, decoder=decoder))
    said = activations(spec, batch=4, length=32).kept
    assert said == pytest.approx(measured(spec, B=4, T=32), rel=1e-4)


@pytest.mark.parametrize(
    "heads",
    [
        (NextHead(bias=True),),
        (NextHead(tied=False), ClassHead(num_classes=70)),
        (NextHead(softcap=5.0),),
    ],
)
@pytest.mark.parametrize("rows", [32, 1024, 5120])
def test_activations_of_losses(heads, rows):
    """In one piece, and more logits than are kept of any head."""
    sizes = {"d_model": 16, "d_ff": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 64}
    spec = replace(budget_lm(vocab_size=7000, **sizes), heads=heads)
    assert 1024 * 7000 < PIECE < 5120 * 7000
    said = activations(spec, batch=rows // 32, length=32).kept
    assert said == pytest.approx(measured(spec, B=rows // 32, T=32), rel=1e-4)


@pytest.mark.parametrize(
    ("params", "vocab", "length"), [("60k", 300, 24), ("300k", 2000, 64), ("1M", 4000, 96)]
)
def test_training_memory_is_weights_state_and_activations(params, vocab, length):
    spec = design(params, vocab, length=length, heads=4).spec
    said = training_memory(spec, batch=4, length=length)
    engine = TorchEngine.fresh(spec, TrainSpec())
    kept = footprint.saved_bytes(engine, batch(spec, B=4, T=length))
    weights = sum(p.untyped_storage().nbytes() for p in engine.model.parameters())
    assert said.weights == said.gradients == weights
    assert said.optimizer == footprint.optimizer_bytes(engine)
    assert said.resident == pytest.approx(weights + said.optimizer + kept, rel=1e-4)
    assert said.peak == max(
        said.resident + said.passing, said.weights + said.optimizer + said.gradients
    )


@catches(
    "Adam with one moment",
    "spec.train:AdamW.state_size",
    Binary("+"),
    to="parameter.size + 1",
    case="optimizer2",
)
@pytest.mark.parametrize("optimizer", [SGD(), SGD(momentum=0.9), AdamW(), Muon()])
def test_optimizer_state_is_what_torch_holds(optimizer):
    spec = preset("qwen")
    engine = TorchEngine.fresh(spec, TrainSpec(optimizer=optimizer))
    engine.step([batch(spec)], lr=1e-3, seed=0)
    assert optimizer_bytes(spec, optimizer) == footprint.optimizer_bytes(engine)


def test_large_logits_are_kept_in_pieces():
    """Their place is taken by the gradient of the head's weight."""
    spec = budget_lm(vocab_size=50_000, d_model=16, d_ff=16, n_layers=1, n_heads=2)
    few = activations(spec, batch=1, length=512, device="cuda")
    many = activations(spec, batch=8, length=512, device="cuda")
    assert few.heads > 512 * 50_000 * 4
    assert many.heads - 50_000 * 16 * 4 < 8 * 512 * 100
    assert many.passing == 8 * PIECE


def test_dropout_on_attention_is_refused_not_guessed():
    with pytest.raises(InputError, match="leaves the fused attention"):
        activations(fsm_probe(dropout=0.1), batch=2, length=8)


def test_on_a_gpu_heads_are_padded_and_keys_repeated():
    """Seven numbers are kept as eight, and what comes out is laid out anew; eight stay eight."""
    sizes = {"vocab_size": 50, "d_ff": 40, "n_layers": 3, "n_heads": 4, "max_seq_len": 16}
    odd, even = budget_lm(d_model=28, **sizes), budget_lm(d_model=32, **sizes)
    rows, heads = 2 * 16, 4
    kept = {
        device: activations(odd, batch=2, length=16, device=device).kept
        for device in ("cpu", "cuda")
    }
    assert kept["cuda"] - kept["cpu"] == 3 * 4 * rows * heads * (4 * 1 + 7)
    kept = {
        device: activations(even, batch=2, length=16, device=device).kept
        for device in ("cpu", "cuda")
    }
    assert kept["cuda"] == kept["cpu"]


def test_weights_in_four_forms():
    forms = weight_bytes(qwen(d_model=128, d_ff=384))
    numbers = sum(p.size for p in stored(qwen(d_model=128, d_ff=384)).values())
    assert forms["float32"] == 4 * numbers
    assert forms["bf16"] == 2 * numbers
    assert numbers < forms["int8"] < 1.1 * numbers
    assert numbers / 2 < forms["int4"] < 0.66 * numbers  # 4.5 bits in layers, 8 in the table
    assert "int4" not in weight_bytes(budget_lm(d_model=216, d_ff=607))  # 32 divides neither
    mixed = weight_bytes(budget_lm(d_model=192, d_ff=607))  # 192, and not 607
    assert mixed["int4 and int8"] < mixed["int8"]
    assert "int4" not in mixed


# --- time ---------------------------------------------------------------------------------------

RATES = Rates(
    device="cpu",
    threads=1,
    products=((64, 1e9), (256, 4e9)),
    attention=((32, 1e9), (512, 1e9)),
    heads=((8, 1e9), (32, 2e9)),
    passes=((1000, 1e9),),
    logits=((1000, 1e8),),
    updates=1e9,
    dispatch=1e-6,
)


def test_a_curve_is_level_beyond_its_ends_and_smooth_between():
    curve = ((10, 1.0), (1000, 100.0))
    assert rate_at(curve, 1) == 1.0
    assert rate_at(curve, 5000) == 100.0
    assert rate_at(curve, 100) == pytest.approx(10.0)


def test_step_time_is_work_over_rates():
    spec = budget_lm(vocab_size=100, d_model=64, d_ff=64, n_layers=2, n_heads=2, max_seq_len=32)
    time = step_time(spec, RATES, batch=4, length=32)
    work = flops(spec, length=32)
    assert time.products == pytest.approx(3 * 4 * work.products / 1e9)
    assert time.attention == pytest.approx(3 * 4 * work.attention / 1e9)
    assert time.loss == pytest.approx(4 * 32 * 100 / 1e8)
    parts = (time.products, time.attention, time.elementwise, time.loss, time.optimizer)
    assert time.total == pytest.approx(sum(parts) + time.dispatch)
    twice = step_time(spec, RATES, batch=8, length=32)
    assert twice.products == pytest.approx(2 * time.products)
    narrow = replace(spec, decoder=budget_lm(d_model=64, n_heads=8, d_ff=64, n_layers=2).decoder)
    slower = step_time(narrow, RATES, batch=4, length=32)
    assert slower.attention == pytest.approx(2 * time.attention)


def test_where_host_and_device_overlap_the_longer_counts():
    spec = budget_lm(vocab_size=100, d_model=64, d_ff=64, n_layers=2, n_heads=2, max_seq_len=32)
    busy = step_time(spec, replace(RATES, device="cuda"), batch=4, length=32)
    alone = step_time(spec, RATES, batch=4, length=32)
    assert busy.total == alone.total - alone.dispatch
    called = step_time(spec, replace(RATES, device="cuda", dispatch=1.0), batch=4, length=32)
    assert called.total == called.dispatch > busy.total


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_time(name):
    assert 0 < step_time(preset(name), RATES, batch=2, length=16).total < 1e4


def test_counts_by_component_add_up() -> None:
    spec = budget_lm(vocab_size=97, d_model=24, d_ff=31, n_layers=5, n_heads=3, max_seq_len=41)
    rows = re.findall(r"^( *\S[^\d\n]*?) +([\d,]+) +([\d.]+)%", format_allocation(spec), re.M)
    counts = {name: int(count.replace(",", "")) for name, count, _ in rows}
    total = counts.pop("total")
    inside = [count for name, count in counts.items() if name.startswith(" ")]
    assert sum(inside) == counts["layers"]
    assert sum(counts.values()) - sum(inside) == total
    for name, _, share in rows[:-1]:
        assert float(share) == pytest.approx(100 * counts[name] / total, abs=0.006)
