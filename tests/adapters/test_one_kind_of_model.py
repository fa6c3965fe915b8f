"""What `gf.build` and `gf.load` return has one contract: tensors in, logits out."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.adapters.base import BaseAdapter
from glassformer.data.tasks.digits import VOCAB
from glassformer.data.tokenizers.vocab import Bytes
from glassformer.generation.streaming import Generated
from glassformer.models.model import build
from glassformer.nn.cache import FixedCache
from glassformer.quant.contents import quantization_report
from glassformer.spec.errors import InputError
from glassformer.spec.presets import PRESETS
from tests.adapters.checkpoints import folder_of
from tests.adapters.checkpoints import tokens as their_tokens

SMALL = {"d_model": 24, "n_heads": 2, "d_ff": 29, "n_layers": 1, "vocab_size": 31}
SIZES = {name: SMALL | ({"n_heads": 4} if name == "modern-lm" else {}) for name in PRESETS}
TOKENS = torch.tensor([[5, 6, 7, 8, 9], [3, 1, 4, 1, 5]])


def small(name: str = "core", **more: object) -> gf.ModelSpec:
    return gf.preset(name, **{**SIZES[name], **more})


def text_model() -> BaseAdapter:
    return gf.build(small(vocab_size=256), seed=0, tokenizer=Bytes())


@pytest.fixture(params=["built", "loaded", "imported", "wrapped", "quantized"])
def model(request, tmp_path):
    match request.param:
        case "built":
            return gf.build(small(), seed=0)
        case "loaded":
            return gf.load(gf.build(small(), seed=0).save(tmp_path / "saved"))
        case "imported":
            return gf.load(folder_of("llama", tmp_path))
        case "wrapped":
            return gf.load(folder_of("llama", tmp_path), backend="transformers")
        case _:
            return gf.quantize(gf.build(small("qwen"), seed=0), bits=8)


@pytest.mark.filterwarnings("ignore")  # transformers' own
@torch.no_grad()
def test_tensors_in_logits_out(model):
    """One contract, whoever made the model."""
    assert isinstance(model, BaseAdapter)
    logits = model(TOKENS)
    assert logits.shape == (2, 5, model.spec.vocab_size)
    valid = torch.ones_like(TOKENS, dtype=torch.bool)
    valid[1, 3:] = False
    masked = model(TOKENS, valid=valid)
    for again in (
        model(TOKENS, valid),
        model(TOKENS, attention_mask=valid.long()),
        model(input_ids=TOKENS, attention_mask=valid.float()),
    ):
        assert torch.equal(again, masked)
    assert torch.allclose(masked[1, :3], model(TOKENS[1:, :3])[0], atol=1e-5)
    with pytest.raises(InputError, match="both `valid` and `attention_mask`"):
        model(TOKENS, valid, valid=valid)
    with pytest.raises(InputError, match="head"):
        model(TOKENS, head="nxet")
    new = model.generate([5, 6, 7], max_new_tokens=4)
    assert len(new) == 4
    assert model.generate(TOKENS[:1, :3], max_new_tokens=4) == [new]
    for t, token in enumerate(new):
        assert int(model(torch.tensor([[5, 6, 7, *new[:t]]]))[0, -1].argmax()) == token
    assert not model.training
    assert model.device == torch.device("cpu")
    assert f"{model.get_num_parameters():,} parameters" in repr(model)


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_every_preset_builds_in_every_size(name):
    model = gf.build(small(name), seed=3)
    bare = build(model.spec, generator=torch.Generator().manual_seed(3))
    inputs = gf.Inputs(TOKENS)
    if model.spec.encoder is not None:
        with pytest.raises(InputError, match="needs a source"):
            model(TOKENS)
        inputs = gf.Inputs(TOKENS, source_BS=TOKENS)
    heads = bare(inputs)
    for head, logits in model.forward_heads(inputs).items():
        assert torch.equal(logits, heads[head])
        assert torch.equal(model(inputs, head=head), heads[head])
    first = "next" if "next" in heads else next(iter(heads))
    assert torch.equal(model(inputs), heads[first])
    assert model.spec.d_model == 24
    assert gf.count_parameters(model) == gf.count_parameters(model.spec)
    assert gf.count_parameters(bare) == sum(p.numel() for p in bare.parameters())


@torch.no_grad()
def test_caches_and_taps_are_passed_through():
    model = gf.build(small(), seed=0)
    cache = FixedCache(8)
    model(TOKENS[:, :3], cache=cache)
    step = model(TOKENS[:, 3:], cache=cache)
    torch.testing.assert_close(step, model(TOKENS)[:, 3:])
    taps = gf.Taps(read="blocks.0.attn.weights")
    model(TOKENS, taps=taps)
    with gf.trace(model, read="blocks.0.attn.weights") as seen:
        model(TOKENS)
    assert torch.equal(seen["blocks.0.attn.weights"], taps.seen["blocks.0.attn.weights"])


# --- a torch module -----------------------------------------------------------------------------


def test_names_and_state_are_those_of_the_manifest():
    model = gf.build(small(), seed=0)
    names = [parameter.name for parameter in gf.manifest(model.spec) if parameter.tied_to is None]
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names)
    assert model.state_dict().keys() == model.model.state_dict().keys()
    other = gf.build(small(), seed=1)
    assert not torch.equal(other(TOKENS), model(TOKENS))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(TOKENS), model(TOKENS))
    outer, twin = torch.nn.Sequential(model), torch.nn.Sequential(gf.build(small(), seed=1))
    twin.load_state_dict(outer.state_dict())
    assert [name for name, _ in outer.named_parameters()] == [f"0.{n}" for n in other.state_dict()]
    assert torch.equal(twin(TOKENS), model(TOKENS))


def test_mode_device_and_precision_are_those_of_the_model_inside():
    model = gf.build(small(dropout=0.5), seed=0)
    assert not model.training
    model.train()
    assert model.model.training
    assert model.training
    assert not torch.equal(model(TOKENS), model(TOKENS))
    model.model.eval()
    assert not model.training
    assert torch.equal(model(TOKENS), model(TOKENS))
    model.to(torch.float64)
    assert model.dtype == model(TOKENS).dtype == torch.float64
    assert gf.build(small(), device="meta").device.type == "meta"


def test_copies_are_copies_and_pickles_come_back():
    model = gf.build(small(), seed=0)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stored, weights_only=False),
    ):
        assert torch.equal(twin(TOKENS), model(TOKENS))
        with torch.no_grad():
            twin.model.get_parameter("embed.weight").zero_()
        assert not twin.embed.weight.any()
        assert not torch.equal(twin(TOKENS), model(TOKENS))


def test_gradients_reach_the_parameters():
    model = gf.build(small(), seed=0)
    model(TOKENS).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.blocks[0].attn.q_proj.weight.grad is not None


def test_a_new_model_inside_replaces_the_old_one():
    model = gf.build(small(), seed=0)
    other = gf.build(small(), seed=1)
    model.model = other.model
    assert torch.equal(model(TOKENS), other(TOKENS))
    assert next(model.parameters()) is next(other.parameters())


def test_seeds_and_generators():
    one, same, other = (gf.build(small(), seed=seed) for seed in (4, 4, 5))
    drawn = gf.build(small(), generator=torch.Generator().manual_seed(4))
    assert torch.equal(one(TOKENS), same(TOKENS))
    assert torch.equal(one(TOKENS), drawn(TOKENS))
    assert not torch.equal(one(TOKENS), other(TOKENS))
    with pytest.raises(InputError, match="both a seed and a generator"):
        gf.build(small(), seed=1, generator=torch.Generator())


# --- text, with and without a tokenizer ---------------------------------------------------------


def test_without_a_tokenizer_the_error_says_how_to_get_one():
    model = gf.build(small(vocab_size=256), seed=0)
    assert model.get_tokenizer() is None
    for use in (
        lambda: model.tokenizer,
        lambda: model.generate("ab"),
        lambda: model.inspect("ab"),
        lambda: gf.generate(model, "ab"),
        lambda: gf.inspect(model.model, "ab"),
    ):
        with pytest.raises(InputError, match="no tokenizer") as error:
            use()
        assert "model.with_tokenizer(tokenizer)" in error.value.hint
    named = model.with_tokenizer(Bytes())
    assert named.tokenizer.encode("ab") == [97, 98]
    assert next(named.parameters()) is next(model.parameters())
    assert model.get_tokenizer() is None
    assert named.generate("ab", max_new_tokens=3) == text_model().generate("ab", max_new_tokens=3)
    with pytest.raises(InputError, match="vocabulary of 31"):
        gf.build(small()).with_tokenizer(Bytes())


def test_a_tokenizer_is_saved_with_the_model(tmp_path):
    model = gf.load(text_model().save(tmp_path / "model"))
    assert model.generate("ab", max_new_tokens=3) == text_model().generate("ab", max_new_tokens=3)


def test_options_are_those_of_the_command():
    model = text_model()
    assert set(model.generate("ab", max_new_tokens=6, regex="[01]*")) <= {"0", "1"}
    cached, plain = (model.generate("ab", max_new_tokens=9, cached=way) for way in (True, False))
    assert cached == plain
    best = gf.beam_search(model, "ab", width=3, max_new_tokens=4)[0]
    assert model.generate("ab", width=3, max_new_tokens=4) == best.text
    assert model.generate([[97, 98]] * 2, width=3, max_new_tokens=4) == [list(best.tokens)] * 2
    with pytest.raises(InputError, match="several hypotheses"):
        model.generate("ab", width=3, n_best=2)


def test_generate_takes_text_or_ids_and_every_option():
    model = text_model()
    text = model.generate("ab", max_new_tokens=5, temperature=0.9, top_p=0.8, min_p=0.01, seed=3)
    full = gf.generate(
        model, "ab", max_new_tokens=5, temperature=0.9, top_p=0.8, min_p=0.01, seed=3
    )
    assert isinstance(full, Generated)
    assert full.text == text
    assert len(full.tokens) == len(full.logprobs) == 5
    assert full.finish == "length"
    plain = gf.generate(model.model, [97, 98], max_new_tokens=4)
    for ids in ([97, 98], (97, 98), torch.tensor([97, 98]), np.array([97, 98])):
        assert model.generate(ids, max_new_tokens=4) == list(plain.tokens)
        assert model.generate([ids, ids], max_new_tokens=4) == [list(plain.tokens)] * 2
    rows = model.generated([[97, 98], [99]], max_new_tokens=4)
    assert [len(row.tokens) for row in rows] == [4, 4]
    assert rows[0].tokens == plain.tokens
    assert rows[0].logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    first = chr(plain.tokens[0]) if plain.tokens[0] < 128 else None
    if first is not None:
        assert model.generate("ab", max_new_tokens=4, stop=first) == ""
    with pytest.raises(InputError, match="no decoding option 'temprature'") as error:
        model.generate("ab", temprature=1.0)
    assert "did you mean 'temperature'" in error.value.hint


def test_a_quantized_model_says_so(tmp_path):
    model = gf.load(text_model().save(tmp_path / "float"))
    assert f"float32 on cpu, from {tmp_path / 'float'}" in repr(model)
    for bits in (8, 4):  # a width of 24 is no multiple of a group: such layers get 8 bits
        small = gf.quantize(model, bits=bits)
        for scheme in quantization_report(small).schemes():
            assert f"{scheme} in " in repr(small), repr(small)
        assert f", quantized from {tmp_path / 'float'}" in repr(small)
        again = repr(gf.load(small.save(tmp_path / f"int{bits}")))
        assert "else float32 on cpu" in again and f", from {tmp_path / f'int{bits}'}" in again


def test_beams_start_from_text_or_ids():
    model = text_model()
    beams = gf.beam_search(model, "ab", width=3, max_new_tokens=4)
    assert len(beams) == 3
    bare = gf.beam_search(model.model, [97, 98], width=3, max_new_tokens=4)
    assert [one.tokens for one in bare] == [one.tokens for one in beams]
    greedy = gf.beam_search(model, "ab", width=1, max_new_tokens=4)[0]
    assert list(greedy.tokens) == model.generate([97, 98], max_new_tokens=4)
    assert greedy.text == model.generate("ab", max_new_tokens=4)
    with pytest.raises(InputError, match="no decoding option 'widht'"):
        gf.beam_search(model, "ab", widht=3)


def test_a_model_with_an_answer_head_answers_text_and_ids():
    model = gf.build(gf.preset("digits"), seed=0, tokenizer=VOCAB)
    ids = [*VOCAB.encode("SECOND 7 3 9 SEP")]
    answer = model.generate("SECOND 7 3 9")
    assert model.generate(ids) == VOCAB.encode(answer)
    assert model.generate([ids, ids]) == [VOCAB.encode(answer)] * 2
    assert int(model(torch.tensor([ids])).argmax()) == VOCAB.encode(answer)[0]


def test_inspect_takes_text_or_ids():
    model = text_model()
    by_text, by_ids = model.inspect("abc"), gf.inspect(model, [97, 98, 99])
    assert by_text.words == by_ids.words == ("a", "b", "c")
    assert torch.equal(by_text.hidden_TD, by_ids.hidden_TD)
    assert torch.equal(by_text.hidden_TD, gf.inspect(model.model, [97, 98, 99]).hidden_TD)
    with pytest.raises(InputError, match="`targets` goes with token ids"):
        model.inspect("abc", targets=[1, 2, 3])
    with pytest.raises(InputError, match="a target text for token ids"):
        model.inspect([97, 98], target="c")


def test_patching_takes_text_or_ids():
    model = text_model()
    made = gf.patch_activations(model, "abc", "abd", answers=(101, 102))
    again = gf.patch_activations(model.model, [97, 98, 99], [97, 98, 100], answers=(101, 102))
    assert torch.equal(made.tensor, again.tensor)


# --- from one format to another -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_export_writes_every_format(tmp_path):
    model = gf.build(small("qwen", n_kv_heads=1, d_head=12), seed=0)
    for to, name in (("hf", "hf"), ("gguf", "model.gguf"), ("native", "native")):
        written = gf.export(model, tmp_path / name, to=to)
        assert torch.equal(gf.load(written.folder)(TOKENS), model(TOKENS))
    assert gf.export(model.model, tmp_path / "bare").model_type == "qwen3"
    with pytest.raises(InputError, match="to"):
        gf.export(model, tmp_path / "odd", to="onnx")
    with pytest.raises(InputError, match="dtype does not go with hf"):
        gf.export(model, tmp_path / "odd", dtype="f16")
    wrapped = gf.load(tmp_path / "hf", backend="transformers")
    with pytest.raises(InputError, match="written by its own library"):
        gf.export(wrapped, tmp_path / "odd")


@pytest.mark.filterwarnings("ignore")
def test_what_a_foreign_module_does_not_offer_is_said(tmp_path):
    wrapped = gf.load(folder_of("llama", tmp_path), backend="transformers")
    for use in (wrapped.inspect, lambda ids: gf.patch_activations(wrapped, ids, ids)):
        with pytest.raises(InputError, match="taps"):
            use([3, 4])
    with pytest.raises(InputError, match="not one of our models"):
        gf.evaluate(wrapped, "digits")
    assert wrapped(their_tokens(1, 3)).shape == (1, 3, 97)


def test_a_model_is_built_of_a_spec_or_of_a_presets_name():
    assert gf.build("alibi-lm", seed=0).spec == gf.preset("alibi-lm")
    with pytest.raises(InputError, match="no preset 'alibi'"):
        gf.build("alibi")
    with pytest.raises(InputError, match="not of dict"):
        gf.build({"d_model": 8})
