"""Whole models: selection, reports, refusals, training with rounded weights, decoding, copies."""

import copy

import pytest
import torch

import glassformer as gf
from glassformer.checks.catalogue import SUBJECT_CHECKS, run_subject_check
from glassformer.checks.preset_subjects import NARROW
from glassformer.checks.subject import subject_of_model
from glassformer.data.build_task import build_task
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.lab.quantize import LENGTH, keeping_float, of_manuals, of_text, time_layers
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.models.weights import weights_of
from glassformer.quant.backends import choose
from glassformer.quant.backends.choose import SlowQuantization
from glassformer.quant.contents import (
    is_model_quantized,
    quantization_report,
    quantized_numbers,
    resident_bytes,
)
from glassformer.quant.convert import (
    dequantize_model,
    prepare_model_for_quantization,
    quantize_model,
    quantized_layers,
    use_backend,
)
from glassformer.quant.schemes import (
    dequantize,
    quantize_tensor,
)
from glassformer.spec import presets
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import VectorHead
from glassformer.spec.quantization import QuantSpec, quant_spec
from glassformer.spec.schemes import Int4, Int8
from glassformer.spec.serialize import override
from glassformer.spec.tasks import SequenceTask
from glassformer.spec.train import TrainSpec
from glassformer.training.fit import fit
from glassformer.training.torch_engine import TorchEngine
from tests.quant.models import logits, model, tokens
from tests.tiny import tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore::glassformer.quant.backends.choose.SlowQuantization"
)


def test_every_linear_layer_and_the_head_are_quantized_with_their_parameters():
    for preset in ("qwen", "core"):
        full = model(preset)
        small = quantize_model(copy.deepcopy(full), QuantSpec(scheme=Int4()))
        report = quantization_report(small)
        assert report and report.bits == 4 and report.mode == "ptq" and report.backends
        for leaf in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "ffn.down_proj"):
            assert f"blocks.0.{leaf}" in report.layers
        head = report.layers.get("heads.next") or report.layers["embed"]
        assert head.bits == 8
        state = small.state_dict()
        assert {"blocks.0.attn.q_proj.qweight", "blocks.0.attn.q_proj.scale"} <= set(state)
        assert logits(small).shape == logits(full).shape
        assert logits(small).dtype == torch.float32
        assert not is_model_quantized(full)


@pytest.mark.parametrize("preset", sorted(presets.PRESETS))
def test_a_quantized_model_has_as_many_numbers_as_before(preset):
    full = model(NARROW.get(preset, preset))
    small = quantize_model(copy.deepcopy(full), QuantSpec(scheme=Int4(), indivisible="int8"))
    assert quantized_numbers(full) == 0 < quantized_numbers(small)
    floats = sum(p.numel() for p in small.parameters())
    assert floats + quantized_numbers(small) == count_parameters(full.spec)
    for _, layer in quantized_layers(small):
        layer.ready()  # the running form, which has no stored one beside it
    assert floats + quantized_numbers(small) == count_parameters(full.spec)


def test_memory_falls_as_promised():
    full = build(presets.qwen(vocab_size=512, d_model=256, d_head=32, d_ff=768))
    linears = 4 * sum(p.numel() for p in full.parameters() if p.ndim == 2)
    for spec, most in ((QuantSpec(), 0.27), (QuantSpec(scheme=Int4(), head=Int4()), 0.17)):
        small = quantize_model(copy.deepcopy(full), spec)
        logits(small)
        layers = quantization_report(small).layers.values()
        assert sum(layer.nbytes for layer in layers) <= most * linears
        assert resident_bytes(small) <= (most + 0.01) * resident_bytes(full)


def test_a_predicate_selects():
    small = quantize_model(model(), select=lambda path, module: "ffn" in path)
    assert all("ffn" in path for path in quantization_report(small).layers)
    with pytest.raises(InputError, match="no layer is left"):
        quantize_model(model(), select=lambda path, module: False)


def test_both_sides_of_an_encoder_decoder() -> None:
    spec = override(presets.seq2seq(vocab_size=67, d_model=64, n_heads=4, n_layers=1), ())
    full = build(spec, generator=torch.Generator().manual_seed(1))
    small = quantize_model(copy.deepcopy(full), QuantSpec())
    if spec.share_embedding:
        assert small.encoder.embed is small.decoder.embed
    assert is_model_quantized(small)


def test_ptq_watches_then_converts():
    prepared = prepare_model_for_quantization(model(), QuantSpec(scheme=Int4(), method="gptq"))
    with pytest.raises(InputError, match="prepared already"):
        prepare_model_for_quantization(prepared)
    prepared(tokens(prepared))
    assert prepared.blocks[0].attn.q_proj.watch.rows == 21
    small = quantize_model(prepared)
    assert {layer.method for layer in quantization_report(small).layers.values()} == {"gptq"}
    blind = prepare_model_for_quantization(model(), QuantSpec(scheme=Int4(), method="gptq"))
    with pytest.raises(InputError, match="has seen nothing"):
        quantize_model(blind)


def test_training_with_rounded_weights_learns_and_converts_exactly():
    task = build_task(SequenceTask(operation="copy", vocab_size=11, max_length=4, examples=200))
    spec = presets.seq2seq(
        vocab_size=task.tokenizer.vocab_size, d_model=32, n_heads=2, d_ff=64, n_layers=1,
        max_seq_len=16, dropout=0.0,
    )  # fmt: skip
    start = build(spec, generator=torch.Generator().manual_seed(0))
    rounded = prepare_model_for_quantization(start, QuantSpec(scheme=Int4()), mode="qat")
    train = TrainSpec(steps=30, batch_size=32, lr=3e-3)
    records = list(fit(TorchEngine(rounded, train), task, train))
    assert records[-1].loss < 0.8 * records[0].loss
    batch = task.batch("val", torch.arange(8).numpy())
    with torch.no_grad():
        before = rounded.eval()(batch)["next"]
        small = quantize_model(rounded, backend="float")
        assert torch.equal(small(batch)["next"], before)
    assert quantization_report(small).mode == "qat"


def test_decoding_is_the_same_lean_or_not():
    for spec in (QuantSpec(), QuantSpec(scheme=Int4()), QuantSpec(tied="untie")):
        small = quantize_model(model(), spec)
        prompts = Prompts.of([[5, 6, 7], [8]])
        greedy = DecodeSpec(max_new_tokens=8)
        found = [
            [list(one.tokens) for one in generate_batch(stepper, prompts, spec=greedy)]
            for stepper in (TorchStepper(small), RecordedStepper(small))
        ]
        assert found[0] == found[1]


def test_copies_and_precisions_keep_every_scale():
    small = quantize_model(model(), QuantSpec(scheme=Int4()))
    expected = logits(small)
    assert torch.equal(logits(copy.deepcopy(small)), expected)
    wide = copy.deepcopy(small).double()
    assert logits(wide).dtype == torch.float64
    assert torch.equal(logits(wide.float()), expected)
    again = copy.deepcopy(small).bfloat16().float()
    for (path, one), (_, other) in zip(
        quantization_report(small).layers.items(),
        quantization_report(again).layers.items(),
        strict=True,
    ):
        assert one == other, path
    scale = small.get_submodule("blocks.0.attn.q_proj").stored().scale
    assert torch.equal(again.get_submodule("blocks.0.attn.q_proj").stored().scale, scale)


def test_auto_times_each_shape_and_keeps_what_loses():
    timings = time_layers(model(), QuantSpec())
    assert {timing.path for timing in timings} == set(
        quantization_report(quantize_model(model())).layers
    )
    select = keeping_float(timings)
    for timing in timings:
        assert select(timing.path, None) == timing.wins


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 2, 3, 16])
def test_other_bits_are_refused(bits):
    with pytest.raises(InputError, match="not from 4 to 8"):
        quant_spec(bits=bits)


def test_groups_that_do_not_fit_are_refused_by_layer():
    with pytest.raises(InputError, match="group 48 is not one of"):
        quant_spec(bits=4, group=48)
    with pytest.raises(InputError, match="fp8 has no group"):
        quant_spec(scheme="fp8", group=32)
    narrow = build(presets.core(d_model=48, d_ff=64))
    for refused in (QuantSpec(scheme=Int4(), indivisible="refuse"), quant_spec(bits=4, group=32)):
        with pytest.raises(InputError, match="group 32 does not divide the 48 inputs") as error:
            quantize_model(narrow, refused)
        assert error.value.where == "blocks.0.attn.q_proj"
    for taken in (QuantSpec(scheme=Int4()), quant_spec(bits=4, group=32, indivisible="int8")):
        layers = quantization_report(quantize_model(copy.deepcopy(narrow), taken)).layers
        assert layers["blocks.0.attn.q_proj"].bits == 8
        assert layers["blocks.0.ffn.down_proj"].bits == 4
    kept = quantize_model(copy.deepcopy(narrow), QuantSpec(scheme=Int4(), indivisible="keep"))
    assert "blocks.0.attn.q_proj" not in quantization_report(kept).layers


def test_quantizing_twice_is_refused():
    small = quantize_model(model())
    for again in (quantize_model, prepare_model_for_quantization):
        with pytest.raises(InputError, match="quantized already"):
            again(small)
    with pytest.raises(InputError, match="not quantized"):
        dequantize_model(model())


def test_training_a_quantized_model_is_refused():
    small = quantize_model(model())
    with pytest.raises(InputError, match="cannot be trained"):
        small.train()
    with pytest.raises(InputError, match="no plain weights"):
        weights_of(small)


def test_methods_that_need_more_are_refused():
    for method in ("gptq", "qat"):
        with pytest.raises(InputError, match="needs a prepared model"):
            quantize_model(model(), QuantSpec(method=method))
    with pytest.raises(InputError, match="does not go with"):
        prepare_model_for_quantization(model(), QuantSpec(method="gptq"), mode="qat")
    with pytest.raises(InputError, match="no mode 'both'"):
        prepare_model_for_quantization(model(), mode="both")
    with pytest.raises(InputError, match="not finite"):
        quantize_tensor(torch.full((2, 64), torch.nan), Int8())
    with pytest.raises(InputError, match="too large"):
        quantize_tensor(torch.full((2, 64), 1e9), Int4(group=32, fine=False))
    assert torch.isfinite(dequantize(quantize_tensor(torch.full((2, 64), 1e9), Int4()))).all()
    with pytest.raises(InputError, match="too large"):
        quantize_tensor(torch.full((2, 64), 1e30), Int4())


def test_a_backend_that_is_not_here_is_refused_or_replaced_with_one_warning(monkeypatch):
    with pytest.raises(InputError, match="no backend 'cc'"):
        quantize_model(model(), backend="cc")
    with pytest.raises(MachineError, match=r"'aten' cannot run int4 g32 .* CUDA"):
        quantize_model(model(), QuantSpec(scheme=Int4(), head=Int4()), backend="aten")
    for backend in choose.BACKENDS.values():
        monkeypatch.setattr(type(backend), "lacks", lambda *a, **k: "is not here")
    choose._warn_once.cache_clear()
    small = quantize_model(model())
    with pytest.warns(SlowQuantization, match="right and small, not fast") as caught:
        found = logits(small)
    assert len(caught) == 1
    assert quantization_report(small).backends == ("reference",)
    assert torch.equal(found, logits(use_backend(small, "reference")))


def test_precisions_of_models_in_memory_are_compared(tmp_path):
    full = gf.build(gf.preset("digits", d_model=32, d_ff=64), seed=0)
    small = gf.quantize(full, bits=8)
    found = gf.compare_precision(full, small, task="digits")
    assert found.disk is None and found.material == "the task's own examples (val)"
    assert found.resident[1] < found.resident[0] and found.agreement.top1 > 0.8
    shown = str(found)
    assert "bytes resident" in shown and "perplexity" in shown and "bytes on disk" not in shown
    with pytest.raises(InputError, match="both a task and a text"):
        gf.compare_precision(full, small, task="digits", text=tmp_path / "text")
    with pytest.raises(InputError, match="no tokenizer"):
        gf.compare_precision(full, small, text=tmp_path / "text")


def test_a_text_is_read_in_windows_of_the_length_given(tmp_path):
    tokenizer = BytePairs.train(["the class of a class"], vocab_size=260)
    model = build(
        presets.modern_lm(vocab_size=tokenizer.vocab_size, d_model=16, n_heads=2, n_kv_heads=2)
    )
    assert model.spec.max_seq_len > 2 * LENGTH
    text = tmp_path / "a.txt"
    text.write_text("a class and another class\n" * 400)
    for given in (of_manuals(tokenizer, model), of_text(text, tokenizer, model)):
        assert {b.tokens.shape[1] for b in (*given.calibrating, *given.measuring)} == {LENGTH}
    given = of_manuals(tokenizer, model, length=61)
    assert {b.tokens.shape[1] for b in (*given.calibrating, *given.measuring)} == {61}


def test_a_pooler_stays_as_it_is():
    """It is no plain linear layer; what is quantized around it gives vectors as before."""
    spec = tiny(attention={"causal": False}, heads=(VectorHead(readout="first", pooler=True),))
    plain = build(spec, generator=torch.Generator().manual_seed(0))
    small = quantize_model(copy.deepcopy(plain), QuantSpec(scheme=Int8()))
    assert type(small.heads["vector"]) is type(plain.heads["vector"])
    ids = tokens(plain)
    assert torch.allclose(small(ids)["vector"], plain(ids)["vector"], atol=0.05)
    found = [
        run_subject_check(c, subject_of_model(plain, name="pooled"))
        for c in SUBJECT_CHECKS
        if c.group == "quantization"
    ]
    assert not [one for one in found if one.failed]
