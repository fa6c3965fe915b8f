"""Tokenizers from folders: every form gives the same ids, streams whole, and is refused if bad."""

import json
import random
import unicodedata

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from glassformer.adapters.folder.files import GenerationDefaults, generation_defaults
from glassformer.adapters.tokenizers.files import QWEN_1_SPECIALS, QWEN_WORDS
from glassformer.adapters.tokenizers.folder_tokenizer import FolderTokenizer, read_tokenizer
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.constraint import Constraint
from glassformer.generation.text_stream import TextStream
from glassformer.spec.errors import FileError, GlassError, InputError
from glassformer.spec.units import visible
from tests.adapters import folders
from tests.adapters.texts import varied


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """The same tokenizer in the four forms in which folders hold it."""
    place = tmp_path_factory.mktemp("forms")
    return {
        "lists": read_tokenizer(folders.write_json_form(place / "lists")),
        "strings": read_tokenizer(folders.write_json_form(place / "strings", merges="strings")),
        "merges": read_tokenizer(folders.write_merges_form(place / "merges")),
        "ranks": read_tokenizer(folders.write_ranks_form(place / "ranks")),
    }


def test_every_form_gives_the_ids_of_an_independent_tokenizer(forms):
    marks = {mark: folders.PIECES + place for place, mark in enumerate(folders.MARKS)}
    other = tiktoken.Encoding(
        "tiny", pat_str=QWEN_WORDS, mergeable_ranks=folders.ranks(), special_tokens=marks
    )
    for text in varied(400, marks=folders.MARKS):
        normal = unicodedata.normalize("NFC", text)
        ids = other.encode(normal, allowed_special="all")
        for name, tokenizer in forms.items():
            assert tokenizer.encode(text) == ids, (name, text)
            assert tokenizer.decode(ids) == normal, (name, text)


def test_many_at_once_are_each_alone(forms):
    texts = varied(50)
    tokenizer: Tokenizer = forms["lists"]
    assert forms["lists"].encode_many(texts) == [tokenizer.encode(text) for text in texts]


def test_special_tokens_by_name(forms):
    for name in ("lists", "strings", "merges"):
        tokenizer = forms[name]
        assert tokenizer.vocab_size == 313
        assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (None, 312, 310)
        assert tokenizer.special_ids == {310, 311, 312}
    first = forms["ranks"]
    assert first.vocab_size == folders.PIECES + len(QWEN_1_SPECIALS)
    assert (first.bos, first.eos, first.pad) == (None, folders.PIECES, folders.PIECES)


def test_several_ends_and_a_padded_vocabulary(tmp_path):
    folder = folders.write_json_form(tmp_path)
    folders.write(folder, "config.json", {"vocab_size": 320, "eos_token_id": 310})
    tokenizer = read_tokenizer(folder)
    assert tokenizer.eos_ids == (310,)
    folders.write(folder, "generation_config.json", {"eos_token_id": [312, 310, 312]})
    tokenizer = read_tokenizer(folder)
    assert tokenizer.eos_ids == (312, 310)
    assert tokenizer.vocab_size == 313
    assert tokenizer.unnamed == tuple(range(313, 320))
    assert tokenizer.decode([65, 315, 66]) == tokenizer.decode([65, 66])
    for bad in (-1, 320):
        with pytest.raises(InputError, match="no token's id"):
            tokenizer.decode([bad])


def test_its_json_is_read_again(forms, tmp_path):
    folders.write(tmp_path, "tokenizer.json", forms["ranks"].to_json())
    again = read_tokenizer(tmp_path)
    for text in varied(60, marks=folders.MARKS):
        assert again.encode(text) == forms["ranks"].encode(text)


def test_a_constraint_reads_its_tokens(tmp_path):
    folder = folders.write_json_form(tmp_path)
    folders.write(folder, "config.json", {"vocab_size": 320})
    constraint = Constraint.of_regex("(the|cat)+", tokenizer=read_tokenizer(folder))
    assert constraint.vocab_size == 313


def test_gpt2_files_are_cut_as_gpt2_cuts(tmp_path):
    model = folders.data()["model"]
    folders.write(tmp_path, "vocab.json", model["vocab"])
    folders.write(tmp_path, "merges.txt", "\n".join(" ".join(pair) for pair in model["merges"]))
    folders.write(tmp_path, "config.json", {"model_type": "gpt2"})
    words = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    other = tiktoken.Encoding(
        "gpt2", pat_str=words, mergeable_ranks=folders.ranks(), special_tokens={}
    )
    tokenizer = read_tokenizer(tmp_path)
    for text in varied(200):
        assert tokenizer.encode(text) == other.encode(text, disallowed_special=())


# --- SentencePiece-like tokenizers --------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Bytes for what has no piece, and a token before every text."""
    folder = tmp_path_factory.mktemp("llama")
    folders.write(folder, "tokenizer.json", folders.llama_engine().to_str())
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folders.write(folder, "tokenizer_config.json", names)
    return read_tokenizer(folder)


def test_the_token_that_really_begins_a_text(llama, tmp_path):
    assert llama.bos == 1
    assert llama.encode("the cat")[0] != 1  # `encode` adds nothing
    folders.write(tmp_path, "tokenizer.json", folders.llama_engine().to_str())
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    folders.write(tmp_path, "tokenizer_config.json", names)
    assert read_tokenizer(tmp_path).bos is None


def test_ids_and_text_are_those_of_transformers(llama):
    other = PreTrainedTokenizerFast(tokenizer_object=folders.llama_engine())
    for text in ("the cat", "cat the  cat", "naïve 你好 👩🏽\u200d🚀", " x", "<s> the</s>"):
        ids = other.encode(text, add_special_tokens=False)
        assert llama.encode(text) == ids
        assert llama.decode(ids) == other.decode(ids, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: FolderTokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_no_piece_of_a_stream_is_half_a_character(llama, forms):
    text = "the cat naïve 你好 👩🏽\u200d🚀 the"
    for tokenizer in (llama, forms["lists"]):
        pieces = pieces_of(tokenizer, tokenizer.encode(text))
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)


@given(st.lists(st.integers(0, 274), max_size=25))
def test_any_tokens_stream_to_their_text(llama, ids):
    ids = [i % llama.vocab_size for i in ids]
    assert "".join(pieces_of(llama, ids)) == llama.decode(ids)


@given(st.lists(st.integers(0, 319), max_size=25))
def test_any_tokens_of_byte_level_stream_to_their_text(forms, ids):
    ids = [i % 313 for i in ids]
    assert "".join(pieces_of(forms["lists"], ids)) == forms["lists"].decode(ids)


# --- what is refused ----------------------------------------------------------------------------


def broken(change):
    """tokenizer.json after a change to its data."""
    made = folders.data()
    change(made)
    return {"tokenizer.json": json.dumps(made)}


def vocab(made):
    return made["model"]["vocab"]


BAD = {
    "nothing": ({}, "no tokenizer in this folder"),
    "not JSON": ({"tokenizer.json": "{"}, "not JSON"),
    "a list": ({"tokenizer.json": "[]"}, "holds no tokenizer"),
    "our own": ({"tokenizer.json": '{"kind": "bytes"}'}, "holds no tokenizer"),
    "deep": ({"tokenizer.json": "[" * 100_000}, "not JSON"),
    "twice": ({"tokenizer.json": '{"model": 1, "model": 2}'}, "occurs twice"),
    "bytes": ({"tokenizer.json": "\udcff"}, "not UTF-8"),
    "another kind": (broken(lambda m: m["model"].update(type="Magic")), "type 'Magic'"),
    "unigram": (broken(lambda m: m["model"].update(type="Unigram")), "token 0 is not a text"),
    "no merges": (broken(lambda m: m["model"].pop("merges")), "missing"),
    "same id": (broken(lambda m: vocab(m).update(zz=5)), "same id"),
    "negative": (broken(lambda m: vocab(m).update(zz=-1)), "not a number from 0"),
    "huge id": (broken(lambda m: vocab(m).update(zz=10**12)), "not a number from 0"),
    "text id": (broken(lambda m: vocab(m).update(zz="1")), "not a number from 0"),
    "long": (broken(lambda m: vocab(m).update({"z" * 2000: 900})), "more than 1024"),
    "strange merge": (broken(lambda m: m["model"]["merges"].append(["qq", "q"])), "cannot be used"),
    "marks": (broken(lambda m: m["added_tokens"][0].update(id=777)), "should have id 777"),
    "pattern": (
        broken(lambda m: m["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="(" * 9)),
        "cannot be used",
    ),
    "long pattern": (
        broken(
            lambda m: m["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="a" * 9_000)
        ),
        "9,000 characters",
    ),
    "sentencepiece": ({"tokenizer.model": "x"}, "not a SentencePiece model"),
    "half": ({"vocab.json": '{"a": 0}'}, "no tokenizer in this folder"),
    "unknown cut": ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "how a tokenizer of class"),
    "merge of three": (
        {"vocab.json": '{"a": 0}', "merges.txt": "a a a", "config.json": '{"model_type": "qwen2"}'},
        "not two pieces",
    ),
    "merge unknown": (
        {"vocab.json": '{"a": 0}', "merges.txt": "a b", "config.json": '{"model_type": "qwen2"}'},
        "merges do not fit",
    ),
    "ranks": ({"qwen.tiktoken": "!!! 0"}, "not a token in base64"),
    "rank gap": ({"qwen.tiktoken": "YQ== 0\nYg== 2"}, "gaps"),
    "few bytes": ({"qwen.tiktoken": "YQ== 0\nYg== 1"}, "not all of the 256"),
    "vocab size": (
        {**broken(lambda m: None), "config.json": '{"vocab_size": 1e99}'},
        "vocab_size",
    ),
    "strange end": (
        {**broken(lambda m: None), "tokenizer_config.json": '{"eos_token": "<nope>"}'},
        "is no token",
    ),
    "half a character": (
        {**broken(lambda m: None), "tokenizer_config.json": '{"eos_token": "\\ud800"}'},
        "surrogates not allowed",
    ),
    "strange ends": (
        {**broken(lambda m: None), "generation_config.json": '{"eos_token_id": "5"}'},
        "not a token id",
    ),
    "far end": (
        {**broken(lambda m: None), "generation_config.json": '{"eos_token_id": [5, 9999]}'},
        "eos token id 9999",
    ),
    "strange added": (
        {**broken(lambda m: None), "added_tokens.json": '{"<new>": 9}'},
        "should have id 9",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_folder_is_refused_by_name(name, tmp_path):
    files, message = BAD[name]
    for file, text in files.items():
        (tmp_path / file).write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(FileError, match=message):
        read_tokenizer(tmp_path)


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="no folder"):
        read_tokenizer(tmp_path / "nowhere")


def test_a_file_that_is_none_and_one_that_is_too_large(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(FileError, match="no tokenizer"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(65_000_000)
    with pytest.raises(FileError, match="65,000,000 bytes"):
        read_tokenizer(tmp_path)


def test_a_pattern_without_end_is_an_error_and_no_crash(tmp_path):
    made = folders.data()
    made["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+b"
    folders.write(tmp_path, "tokenizer.json", made)
    tokenizer = read_tokenizer(tmp_path)
    with pytest.raises(FileError, match="the tokenizer fails"):
        tokenizer.encode("a" * 40)


def test_changed_bytes_give_our_errors_or_a_tokenizer(tmp_path):
    whole = json.dumps(folders.data()).encode()
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        (tmp_path / "tokenizer.json").write_bytes(raw)
        try:
            read_tokenizer(tmp_path).decode(read_tokenizer(tmp_path).encode("the cat 你"))
        except GlassError:
            refused += 1
    assert refused > 30


def test_control_characters_are_shown_not_obeyed():
    assert visible("a\x1b[31m\x07\n\tb\x9b") == "a\\x1b[31m\\x07\n\tb\\x9b"


# --- generation_config.json ---------------------------------------------------------------------


def test_generation_settings_become_a_decode_spec(tmp_path):
    assert generation_defaults(tmp_path) == GenerationDefaults()
    assert generation_defaults(tmp_path).decode_spec().greedy
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    more = {"repetition_penalty": 1.05, "eos_token_id": [7, 5], "transformers_version": "4.51"}
    folders.write(tmp_path, "generation_config.json", {**settings, **more})
    spec = generation_defaults(tmp_path).decode_spec(max_new_tokens=9, forbidden=(3,), seed=4)
    assert (spec.temperature, spec.top_k, spec.top_p, spec.min_p) == (0.6, 20, 0.95, 0.1)
    assert (spec.repetition_penalty, spec.eos, spec.forbidden) == (1.05, (7, 5), (3,))
    assert (spec.max_new_tokens, spec.seed) == (9, 4)
    folders.write(tmp_path, "generation_config.json", {**settings, "do_sample": False})
    assert generation_defaults(tmp_path).decode_spec().greedy


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": True},
        {"top_k": 2.5},
        {"top_k": -4},
        {"do_sample": 1},
        {"eos_token_id": -1},
        {"eos_token_id": list(range(65))},
        {"repetition_penalty": -2.0},
    ],
)
def test_bad_generation_settings_are_refused(bad, tmp_path):
    folders.write(tmp_path, "generation_config.json", bad)
    with pytest.raises(FileError):
        generation_defaults(tmp_path)


def test_nan_among_the_settings_is_refused(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": NaN}')
    with pytest.raises(FileError, match="not a number"):
        generation_defaults(tmp_path)
