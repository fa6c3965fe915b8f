"""Tokenizers and chat templates in GGUF files: the same ids on both sides, or a reason why not."""

import unicodedata
from dataclasses import replace

import gguf
import pytest

import glassformer as gf
from glassformer.adapters.chat.template import read_chat, read_templates
from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.gguf.export_gguf import export_gguf
from glassformer.adapters.gguf.header import read_head
from glassformer.adapters.load import load
from glassformer.adapters.native import CustomTransformerAdapter
from glassformer.data.tasks.digits import VOCAB
from glassformer.data.tokenizers.bpe import BytePairs
from tests.adapters.folders import SAMPLE, llama_engine, write, write_model
from tests.adapters.gguf.files import finish
from tests.adapters.official import PLACE
from tests.adapters.texts import HARD, varied

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def test_the_tokenizer_goes_along(tmp_path):
    first = load(write_model(tmp_path / "model"))
    written = export_gguf(first, tmp_path / "m.gguf")
    assert written.notes == ("sampling settings (generation_config.json) are not written",)
    opened = load(tmp_path / "m.gguf")
    native = load(gf.save(opened, tmp_path / "native"))
    texts = [*HARD, *varied(200), "a <|im_end|> b<|endoftext|>"]
    for adapter in (opened, native, load(export_hf(native, tmp_path / "hf").folder)):
        ours, theirs = adapter.tokenizer, first.tokenizer
        assert [ours.encode(text) for text in texts] == [theirs.encode(text) for text in texts]
        assert (ours.names, ours.eos_ids, ours.bos) == (theirs.names, theirs.eos_ids, theirs.bos)
        assert (ours.unnamed, ours.special_ids) == (theirs.unnamed, theirs.special_ids)
        assert read_templates(adapter.origin) == read_templates(first.origin)
        assert adapter.generate("The cat", max_new_tokens=9) == first.generate(
            "The cat", max_new_tokens=9
        )
    chat = read_chat(tmp_path / "m.gguf")
    assert chat.render([{"role": "user", "content": "hi"}]).startswith("<|im_start|>user\nhi")
    chat.close()


def test_transformers_cuts_as_our_file_says(tmp_path):
    import transformers

    first = load(write_model(tmp_path / "model"))
    export_gguf(first, tmp_path / "m.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in [*HARD, *varied(100)]:
        text = unicodedata.normalize("NFC", text)  # which it leaves out
        assert theirs(text, add_special_tokens=False).input_ids == first.tokenizer.encode(text)


def test_a_real_vocabulary_keeps_its_ids(tmp_path):
    official = PLACE / "qwen3"
    if not (official / "tokenizer.json").is_file():
        pytest.skip("the official tokenizers are not here: make tokenizers")
    spec = replace(gf.preset("qwen"), vocab_size=151_936, d_model=32)
    model = gf.build(spec)
    folder = export_hf(model, tmp_path / "model").folder
    for path in official.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    first = load(folder)
    assert export_gguf(first, tmp_path / "m.gguf", dtype="q8_0").notes == ()
    again = load(tmp_path / "m.gguf")
    texts = [*HARD, *varied(1000)]
    assert again.tokenizer.encode_many(texts) == first.tokenizer.encode_many(texts)
    assert again.tokenizer.unnamed == first.tokenizer.unnamed
    assert again.tokenizer.eos_ids == first.tokenizer.eos_ids
    assert read_templates(again.origin) == read_templates(folder)


def test_our_own_pairs_go_along_and_other_kinds_are_named(tmp_path):
    pairs = BytePairs.train([SAMPLE], vocab_size=300)
    model = gf.build(replace(gf.preset("qwen"), vocab_size=320))
    adapter = CustomTransformerAdapter(model, tokenizer=pairs)
    assert export_gguf(adapter, tmp_path / "m.gguf").notes == ()
    again = load(tmp_path / "m.gguf").tokenizer
    assert all(again.encode(text) == pairs.encode(text) for text in [*HARD, *varied(100)])
    (note,) = export_gguf(
        CustomTransformerAdapter(model, tokenizer=VOCAB), tmp_path / "digits.gguf"
    ).notes
    assert "Vocab is not written" in note
    assert load(tmp_path / "digits.gguf").get_tokenizer() is None
    folder = write_model(tmp_path / "pieces")
    write(folder, "tokenizer.json", llama_engine().to_str())
    write(folder, "tokenizer_config.json", {})
    write(folder, "generation_config.json", {})
    (note,) = export_gguf(load(folder), tmp_path / "pieces.gguf").notes
    assert "no byte-level BPE" in note


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "of the kind 'rwkv'"),
        ({"tokenizer.ggml.pre": "default"}, "('default') is not known"),
        ({"tokenizer.ggml.pre": None}, "('absent') is not known"),
    ],
)
def test_a_tokenizer_that_is_not_understood_is_left_out_and_named(keys, said, tmp_path):
    export_gguf(load(write_model(tmp_path / "model")), tmp_path / "m.gguf")
    arrays = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    known = dict(read_head(tmp_path / "m.gguf").metadata) | keys
    finish(gguf.GGUFWriter(tmp_path / "odd.gguf", "qwen2"), arrays, known)
    adapter = load(tmp_path / "odd.gguf")
    assert adapter.get_tokenizer() is None
    assert said in str(adapter.report)
