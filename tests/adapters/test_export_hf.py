"""Out and back: the same bytes, folders that transformers opens whole, refusals with reasons."""

import json
from dataclasses import replace

import pytest
import torch

import glassformer as gf
from glassformer.adapters.counterpart import MARIAN, counterpart, misfits
from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.load import load
from glassformer.adapters.registry import families_that_write
from glassformer.checks.preset_subjects import perturb
from glassformer.data.tasks.digits import VOCAB
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.lab.recipes import plan_run
from glassformer.spec import presets
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import (
    MLP,
    Attention,
    Block,
    LayerNorm,
    Layers,
    Llama3Scaling,
    NextHead,
    RMSNorm,
    Rotary,
    Stack,
    SwiGLU,
    YarnScaling,
)
from tests.adapters.checkpoints import CASES, change, folder_of, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_an_import_goes_back_byte_for_byte(case, sharded, tmp_path):
    first = folder_of(case, tmp_path, sharded=sharded, old=sharded)
    adapter = load(first)
    native = load(gf.save(adapter, tmp_path / "native"))
    assert type(native) is type(adapter)
    assert native.get_config() == json.loads((first / "config.json").read_text())
    again = export_hf(native, tmp_path / "again").folder
    assert bytes_of(again) == bytes_of(first)


def test_the_small_files_are_kept_verbatim(tmp_path):
    first = folder_of("qwen2 tied", tmp_path)
    texts = {
        "generation_config.json": '{"eos_token_id": [3, 5],   "temperature": 0.6}',
        "chat_template.jinja": "{{ messages }}  \n",
        "tokenizer_config.json": '{"eos_token": "x"}',
    }
    for name, text in texts.items():
        (first / name).write_text(text)
    (first / "modeling_evil.py").write_text("raise SystemExit")
    native = gf.save(load(first), tmp_path / "native")
    for name, text in texts.items():
        assert (native / "origin" / name).read_text() == text
    assert not list(native.rglob("*.py"))
    again = export_hf(load(native), tmp_path / "again").folder
    for name, text in texts.items():
        assert (again / name).read_text() == text


def test_a_changed_model_gets_a_config_that_is_true(tmp_path):
    """In another precision the old config would lie; its own files go along all the same."""
    first = folder_of("qwen2 tied", tmp_path)
    adapter = load(first, dtype=torch.bfloat16)
    again = export_hf(adapter, tmp_path / "again").folder
    config = json.loads((again / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert load(again).spec == adapter.spec
    assert (again / "generation_config.json").is_file()


def some(**changes):
    """A small spec of the common kind."""
    return replace(presets.qwen(vocab_size=97, d_model=32, n_layers=2, d_ff=48), **changes)


def stack(block, **rest):
    return Stack(layers=(Layers(count=2, block=block),), **rest)


def llama_like(*, window=None, **attention):
    heads = {"n_heads": 4, "n_kv_heads": 2} | attention
    block = Block(
        attention=Attention(**heads, window=window), ffn=SwiGLU(d_ff=48), norm=RMSNorm(eps=1e-5)
    )
    return some(decoder=stack(block, final_norm=RMSNorm(eps=1e-5)), heads=(NextHead(tied=False),))


SMALL = {"vocab_size": 97, "d_model": 32, "n_heads": 4, "d_ff": 48, "n_layers": 2}
#: Specs of our own, and the architecture that each must become.
OURS = {
    "llama": (llama_like(), "llama"),
    "llama, d_head of its own": (llama_like(d_head=6), "llama"),
    "llama, all biases": (llama_like(bias="all"), "llama"),
    "llama 3": (
        replace(llama_like(), position=Rotary(base=5e5, scaling=Llama3Scaling(factor=8.0))),
        "llama",
    ),
    "mistral": (llama_like(window=5), "mistral"),
    "qwen2": (llama_like(bias="qkv"), "qwen2"),
    "qwen2 with windows above": (
        presets.qwen(vocab_size=97, d_model=32, d_ff=48, window=5, qk_norm=False),
        "qwen2",
    ),
    "qwen3": (some(), "qwen3"),
    "qwen3, yarn": (
        some(position=Rotary(base=1e6, scaling=YarnScaling(factor=4.0, original_max_seq_len=64))),
        "qwen3",
    ),
    "core": (presets.core(**SMALL), "gpt2"),
    "gpt2, tied, relu": (
        replace(
            presets.core(**SMALL),
            decoder=stack(
                Block(
                    attention=Attention(n_heads=4, bias="all"),
                    ffn=MLP(d_ff=48, activation="relu"),
                    norm=LayerNorm(),
                ),
                final_norm=LayerNorm(),
            ),
            heads=(NextHead(tied=True),),
        ),
        "gpt2",
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_transformers_opens_our_models_whole(name, tmp_path):
    from transformers import AutoModelForCausalLM

    spec, kind = OURS[name]
    model = perturb(gf.build(spec), dtype=torch.float32, seed=5).eval()
    written = export_hf(model, tmp_path / "out")
    assert written.model_type == kind
    module, info = AutoModelForCausalLM.from_pretrained(written.folder, output_loading_info=True)
    assert not any(info.values()), info
    ids = tokens(2, 40)
    with torch.no_grad():
        gap = float((model(ids) - module.eval()(ids).logits).abs().max())
    assert gap <= 1e-5
    again = load(written.folder)
    native = gf.save(again, tmp_path / "native")
    first = gf.save(model, tmp_path / "first")
    assert (native / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_both_generations_of_keys_are_written(tmp_path):
    folder = export_hf(gf.build(OURS["llama 3"][0]), tmp_path / "out").folder
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    assert config["rope_scaling"]["factor"] == config["rope_parameters"]["factor"] == 8.0
    assert config["dtype"] == config["torch_dtype"] == "float32"


def test_large_weights_are_written_in_several_files(tmp_path):
    from transformers import AutoModelForCausalLM

    adapter = gf.build(some())
    folder = export_hf(adapter, tmp_path / "out", shard_bytes=20_000).folder
    assert len(list(folder.glob("model-0000*.safetensors"))) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * adapter.get_num_parameters()
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    for ours, again in zip(adapter.parameters(), load(folder).parameters(), strict=True):
        assert torch.equal(ours, again)


REFUSED = {
    "budget-lm": "'stablelm': position: Learned here, Rotary there",
    "digits": "AnswerHead",
    "fsm-probe": "Sinusoidal",
    "seq2seq": "marian': position.form: interleaved here, halves there",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_with_the_nearest(name):
    with pytest.raises(InputError, match="no Hugging Face architecture") as caught:
        counterpart(presets.preset(name))
    assert "the nearest is" in caught.value.where
    assert REFUSED[name] in caught.value.where


def test_a_model_of_odd_heads_is_refused_for_what_it_is_made_of():
    spec = presets.budget_lm(vocab_size=23, d_model=21, n_heads=3, d_ff=32, n_layers=1)
    (reason, *more) = misfits(spec, families_that_write()["llama"])
    told = [reason, *more]
    assert "position: Learned here, Rotary there" in told
    assert not [text for text in told if "rotary_factor" in text or "d_head" in text]
    even = misfits(replace(spec, d_model=24), families_that_write()["llama"])
    assert told == even


def test_the_hint_for_an_encoder_decoder_trains_one_that_is_exported():
    with pytest.raises(InputError, match="no Hugging Face architecture") as caught:
        counterpart(presets.preset("seq2seq"))
    assert f"glass train reverse {' '.join(MARIAN)}" in caught.value.hint
    assert counterpart(plan_run("reverse", MARIAN).spec.model).model_type == "marian"


def test_misfits_name_the_field():
    families = families_that_write()
    spec = OURS["llama"][0]
    assert misfits(spec, families["llama"]) == []
    assert misfits(spec, families["qwen3"])
    tilted = replace(spec, decoder=replace(spec.decoder, final_norm=RMSNorm(eps=1e-3)))
    assert misfits(tilted, families["llama"]) == ["decoder.final_norm.eps: 0.001 here, 1e-05 there"]


def test_tokenizers_go_along_where_they_can(tmp_path):
    from transformers import AutoTokenizer

    pieces = BytePairs.train(["some text to cut into pieces"] * 3, vocab_size=300)
    spec = replace(OURS["llama"][0], vocab_size=300)
    adapter = gf.build(spec, tokenizer=pieces)
    folder = export_hf(adapter, tmp_path / "a").folder
    text = "some text, naïve"
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == pieces.encode(text)
    assert load(folder).tokenizer.encode(text) == pieces.encode(text)
    named = gf.build(OURS["llama"][0], tokenizer=VOCAB)
    written = export_hf(named, tmp_path / "b")
    assert "not written" in written.notes[0]
    assert not (written.folder / "tokenizer.json").exists()


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path):
    adapter = gf.build(OURS["llama"][0])
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="exists"):
        export_hf(adapter, tmp_path / "there")
    with torch.no_grad():
        next(adapter.parameters())[0, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        export_hf(adapter, tmp_path / "nan")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_an_origin_that_was_tampered_with_is_not_believed(tmp_path):
    """The layout decides file names; one that leads elsewhere is left aside."""
    native = load(gf.save(load(folder_of("llama", tmp_path)), tmp_path / "native"))
    names = json.loads(native.kept["layout.json"])["model.safetensors"]
    native.kept["layout.json"] = json.dumps({"../../evil.safetensors": names}).encode()
    again = export_hf(native, tmp_path / "again").folder
    assert (again / "model.safetensors").is_file()
    assert not list(tmp_path.glob("**/evil*"))
    change(again, hidden_size=32)


def test_a_quantized_model_is_not_written_as_if_it_were_whole(tmp_path):
    from glassformer.quant.convert import quantize_model

    model = gf.build(OURS["llama"][0])
    quantize_model(model)
    adapter = model
    with pytest.raises(InputError, match="no plain weights"):
        export_hf(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_changed_bit_of_an_exported_model_is_noticed(tmp_path):
    folder = export_hf(gf.build(gf.preset("qwen", d_model=32), seed=0), tmp_path / "out").folder
    load(folder)
    for name in ("model.safetensors", "config.json", "SHA256SUMS"):
        data = bytearray((folder / name).read_bytes())
        data[-9] ^= 1
        (folder / name).write_bytes(data)
        with pytest.raises(FileError, match=r"SHA-256 differs|is missing|is damaged"):
            load(folder)
        data[-9] ^= 1
        (folder / name).write_bytes(data)
    load(folder)
