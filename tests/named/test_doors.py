"""The documents' own models go through every function of the package, as any model does."""

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.adapters.native import CustomTransformerAdapter
from glassformer.named import budget_lm, by_hand, core, fsm_probe, seq2seq
from glassformer.quant.contents import is_model_quantized, quantization_report
from glassformer.quant.convert import (
    dequantize_model,
    prepare_model_for_quantization,
    quantize_in_turn,
    quantize_model,
)
from glassformer.spec.presets import budget_lm as budget_spec
from glassformer.spec.quantization import QuantSpec

TOKENS = torch.randint(0, 19, (3, 7), generator=torch.Generator().manual_seed(1))
SOURCE = torch.randint(0, 17, (3, 5), generator=torch.Generator().manual_seed(2))


def _language_model():
    sizes = {"vocab_size": 19, "d_model": 16, "d_ff": 32, "n_layers": 2, "n_heads": 2}
    return budget_lm.LanguageModel(budget_spec(**sizes, max_seq_len=32))


def _probe():
    config = fsm_probe.ModelConfig(
        vocab_size=19, num_classes=3, num_states=5, d_model=16, n_heads=2, d_mlp=32, max_seq_len=32
    )
    return fsm_probe.SingleLayerTransformer(config)


def _core():
    return core.Transformer(19, 16, 2, 32, 2, max_seq_len=32)


def _seq2seq():
    return seq2seq.Transformer(17, 19, d_model=16, N=2, heads=2, d_ff=32, max_seq_len=32)


#: By document: a model, and its call, which gives the logits of the next token.
MODELS = {
    "000": (_probe, lambda model: model(TOKENS)["next_logits"]),
    "001": (_language_model, lambda model: model(TOKENS)[0]),
    "002": (_core, lambda model: model(TOKENS)),
    "004": (_seq2seq, lambda model: model(SOURCE, TOKENS)),
}


@pytest.fixture(params=MODELS)
def case(request):
    torch.manual_seed(3)
    make, call = MODELS[request.param]
    return make(), call


def tap_of(model):
    return "decoder.blocks.1.cross.weights" if model.spec.encoder else "blocks.0.attn.weights"


def test_a_fresh_one_trains_as_any_module_of_torch(case):
    model, call = case
    assert model.training
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    call(model).square().mean().backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert set(model.state_dict()) == set(model.model.state_dict())


def test_verify(case):
    model, _ = case
    report = gf.verify(model, only="names")
    assert report.passed and not report.failed
    assert gf.verify(model, only="cache").passed
    assert model.training


def test_trace(case):
    model, call = case
    with gf.trace(model, read=tap_of(model)) as seen:
        call(model)
    assert seen[tap_of(model)].shape[:2] == (3, 2)


def test_inspect(case):
    model, _ = case
    source = SOURCE[:1] if model.spec.encoder else None
    seen = gf.inspect(model, gf.Inputs(TOKENS[:1], source_BS=source))
    assert seen.attention[0, 0].tensor.shape == (7, 7)


def test_quantize_makes_a_copy_of_the_same_kind(case):
    model, call = case
    model.eval()
    small = gf.quantize(model, bits=8)
    assert type(small) is type(model)
    assert is_model_quantized(small) is True and is_model_quantized(model) is False
    assert (call(small) - call(model)).abs().max() < 0.1
    assert quantization_report(small).bits == 8
    assert repr(quantization_report(small)).startswith("<QuantizationReport: ")
    assert len(repr(quantization_report(small))) < 120


def test_prepare_quantize_dequantize(case):
    model, call = case
    full = call(model.eval())
    assert prepare_model_for_quantization(model) is model
    assert torch.equal(call(model), full)
    assert quantize_model(model) is model
    assert is_model_quantized(model) is True
    rounded = call(model)
    assert call(dequantize_model(model)).shape == rounded.shape
    assert is_model_quantized(model) is False
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_training_with_rounded_weights(case):
    model, call = case
    prepare_model_for_quantization(model, mode="qat")
    call(model).square().mean().backward()
    quantize_model(model)
    assert quantization_report(model).mode == "qat"


def test_untying_is_seen_in_the_spec():
    model = _language_model()
    quantize_model(model, QuantSpec(tied="untie"))
    assert model.spec is model.model.spec
    assert not model.spec.heads[0].tied
    assert model(TOKENS)[0].shape == (3, 7, 19)


def test_gptq_takes_one_too():
    model = _core()
    quantize_in_turn(model, [TOKENS], backend="reference")
    assert {layer.method for layer in quantization_report(model).layers.values()} == {"gptq"}


def test_save_and_load(case, tmp_path):
    model, call = case
    expected = call(model.eval())
    gf.save(model, tmp_path / "saved")
    loaded = gf.load(tmp_path / "saved")
    inputs = gf.Inputs(TOKENS, source_BS=SOURCE if model.spec.encoder else None)
    assert torch.equal(loaded(inputs), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_checkpoint(tmp_path / "saved")
    assert torch.equal(call(model), expected)


def test_export(case, tmp_path):
    model, _ = case
    gf.export(model, tmp_path / "native", to="native")
    assert gf.load(tmp_path / "native").spec == model.spec
    if isinstance(model, core.Transformer):
        assert gf.export(model, tmp_path / "hf").model_type == "gpt2"
        assert torch.allclose(gf.load(tmp_path / "hf")(TOKENS), model(TOKENS), atol=1e-6)
        return
    with pytest.raises(gf.GlassError, match="no Hugging Face architecture computes this model"):
        gf.export(model, tmp_path / "hf")


def test_generate_and_beams(case):
    model, _ = case
    source = {"source": SOURCE[0]} if model.spec.encoder else {}
    made = gf.generate(model, [1, 2], max_new_tokens=4, **source)
    assert len(made.tokens) == 4
    assert gf.beam_search(model, [1, 2], max_new_tokens=4, **source)[0].tokens
    rows = {"source": SOURCE[:2].tolist()} if source else {}
    assert np.shape(model.generate([[1, 2], [3, 4]], max_new_tokens=4, **rows)) == (2, 4)
    assert model.training


def test_the_adapter_wraps_it(case):
    model, call = case
    adapter = CustomTransformerAdapter(model.eval())
    assert adapter.get_architecture_type() == "custom-transformer"
    inputs = gf.Inputs(TOKENS, source_BS=SOURCE if model.spec.encoder else None)
    assert torch.equal(adapter(inputs), call(model))
    assert adapter.get_num_parameters() == sum(p.numel() for p in model.parameters())


def test_an_encoder_decoder_says_how_to_give_its_source():
    with pytest.raises(gf.GlassError, match=r"source=ids"):
        gf.generate(_seq2seq(), [1])
    with pytest.raises(gf.GlassError, match="without an encoder"):
        gf.generate(_core(), [1], source=[1, 2])
    with pytest.raises(gf.GlassError, match="`source` goes with token ids"):
        gf.generate(_seq2seq(), "text", source=[1, 2])


# --- by hand: copied to torch, weight for weight --------------------------------------------------


@pytest.fixture
def hand():
    return by_hand.Transformer(20, 16, 2, 32, 2, max_seq_len=12, rng=np.random.default_rng(3))


def test_a_hand_model_is_verified_against_itself(hand):
    report = gf.verify(hand, only="reference")
    assert report.passed == 1 and not report.failed
    assert gf.verify(hand.model, only="by hand").passed == 4
    hand.params["blocks.0.attn.q_proj.weight"][0, 0] += 1  # the copy follows: it is made anew
    assert not gf.verify(hand, only="reference").failed


def test_a_hand_model_that_computes_something_else_is_found(hand, monkeypatch):
    forward = hand.model.forward
    monkeypatch.setattr(
        hand.model, "forward", lambda *a, **k: {n: x * 1.01 for n, x in forward(*a, **k).items()}
    )
    assert gf.verify(hand, only="reference").failed == 1


def test_a_hand_model_is_inspected_saved_quantized_evaluated(hand, tmp_path):
    ids = by_hand.tokenize("SECOND 7 3 9 SEP")
    seen = gf.inspect(hand, ids)
    layer = hand.model.forward(np.array([ids]), taps=(taps := {}))
    np.testing.assert_allclose(
        seen.attention[1, 0].tensor.numpy(), taps["blocks.1.attn.weights"][0, 0], atol=1e-12
    )
    gf.save(hand, tmp_path / "saved")
    loaded = gf.load(tmp_path / "saved")
    np.testing.assert_allclose(
        loaded(torch.tensor([ids])).detach().numpy(), layer["answer"], atol=1e-12
    )
    assert is_model_quantized(gf.quantize(hand, bits=8)) is True
    examples = by_hand.generate_dataset(50, np.random.default_rng(0))
    assert gf.evaluate(hand, "digits").accuracy >= 0
    assert 0 <= by_hand.evaluate(hand, by_hand.create_batches(examples)) <= 1


def test_what_a_hand_model_cannot_do_is_said(hand, tmp_path):
    with pytest.raises(gf.GlassError, match="cannot generate with a Transformer"):
        gf.generate(hand, [1])
    with pytest.raises(gf.GlassError, match="a Transformer has no taps of ours"), gf.trace(hand):
        pass
    with pytest.raises(gf.GlassError, match="no Hugging Face architecture"):
        gf.export(hand, tmp_path / "hf")
