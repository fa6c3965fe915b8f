"""SentencePiece and WordPiece: the ids of the programs that such files come from.

The models under `fixtures/pieces` were trained with sentencepiece 0.2.2, and the ids beside them
are that program's for the texts of `texts.py`: `SentencePieceProcessor(model).encode(text)`.
"""

import json
from pathlib import Path

import gguf
import pytest

from glassformer.adapters.gguf.export_gguf import export_gguf
from glassformer.adapters.gguf.header import read_head
from glassformer.adapters.load import load
from glassformer.adapters.tokenizers.folder_tokenizer import read_tokenizer
from glassformer.adapters.tokenizers.pieces import BPE, BYTE, NORMAL, read_pieces
from glassformer.spec.errors import FileError
from tests.adapters.folders import write, write_model
from tests.adapters.gguf.files import finish
from tests.adapters.texts import HARD, varied

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

PLACE = Path(__file__).parents[1] / "fixtures" / "pieces"
TEXTS = [*HARD, *varied(40)]
CLASSES = {"bpe": "LlamaTokenizer", "unigram": "T5Tokenizer"}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "un", "##aff", "##able"]
WORDS += ["na", "##ive", "cafe", ",", "!", "1", "##2", "x", "a", "b", "c", "d", "你", "好", "世"]


def model_of(kind):
    data = (PLACE / f"{kind}.model").read_bytes()
    return data, read_pieces(data, where=kind), json.loads((PLACE / f"{kind}.json").read_text())


@pytest.mark.parametrize("kind", CLASSES)
def test_a_model_file_gives_sentencepiece_s_ids(kind, tmp_path):
    data, pieces, wanted = model_of(kind)
    name = "tokenizer.model" if kind == "bpe" else "spiece.model"
    (tmp_path / name).write_bytes(data)
    names = {n: pieces.pieces[i].text for n, i in pieces.names.items()}
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": CLASSES[kind], **names})
    found = read_tokenizer(tmp_path)
    assert [found.encode(text) for text in TEXTS] == wanted
    if kind == "bpe":  # it has every byte: nothing is lost
        assert all(found.decode(found.encode(text)) == text for text in TEXTS)
        assert found.bos == pieces.names["bos_token"]
        assert found.encode_marked("cat") == ([1, *found.encode("cat")], [0] * 3)
        sep = pieces.ids(4)["<sep>"]
        assert found.encode("a<sep>b")[len(found.encode("a"))] == sep
    else:
        ids, kinds = found.encode_marked("the model")
        assert ids[-1] == found.eos and set(kinds) == {0} and found.bos is None
        assert found.vocab_size == len(pieces.pieces) + 100  # T5's hundred places to fill in
        assert found.encode("<extra_id_0>") == [found.vocab_size - 1]


def in_gguf(tmp_path, keys, size):
    """A file of the tiny model whose tokenizer is described by these keys."""
    export_gguf(load(write_model(tmp_path / "model")), tmp_path / "m.gguf")
    arrays = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    kept = dict(read_head(tmp_path / "m.gguf").metadata)
    kept = {key: kept[key] for key in kept if "tokenizer" not in key}
    rows = arrays["token_embd.weight"].shape[0]
    arrays["token_embd.weight"] = arrays["token_embd.weight"].repeat(-(-size // rows), 0)[:size]
    kept["qwen2.vocab_size"] = size
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    finish(gguf.GGUFWriter(tmp_path / "odd.gguf", "qwen2"), arrays, kept | keys)
    adapter = load(tmp_path / "odd.gguf")
    assert adapter.report.notes == ()
    return adapter.get_tokenizer()


@pytest.mark.parametrize("kind", CLASSES)
def test_the_same_pieces_in_a_gguf_file(kind, tmp_path):
    _, model, wanted = model_of(kind)
    ids = {n.replace("_token", ""): i for n, i in model.names.items()}
    keys = {
        "model": {"bpe": "llama", "unigram": "t5"}[kind],
        "tokens": [piece.text for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "token_type": [piece.kind for piece in model.pieces],
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
    }
    found = in_gguf(tmp_path, keys, len(model.pieces))
    assert [found.encode(text) for text in TEXTS] == wanted
    assert found.bos == (ids["bos"] if kind == "bpe" else None)
    ends = found.encode_marked("x")[0][-1] == ids["eos"]
    assert ends == (kind == "unigram")


def test_words_and_their_pieces_are_bert_s(tmp_path):
    import transformers

    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    names = {f"{n.lower()}_token": f"[{n}]" for n in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", **names})
    theirs = transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt"))
    texts = [*TEXTS, "The cats, unaffable! naïve CAFÉ x [MASK] 12你好"]
    found = read_tokenizer(tmp_path)
    for text in texts:
        assert found.encode_marked(text)[0] == theirs(text).input_ids, text
    pair = theirs("the cat", "a cat")
    assert found.encode_marked("the cat", "a cat") == (pair.input_ids, pair.token_type_ids)
    assert (found.mask, found.pad) == (4, 0)
    theirs.save_pretrained(tmp_path / "json")
    again = read_tokenizer(tmp_path / "json")
    assert [again.encode(text) for text in texts] == [found.encode(text) for text in texts]
    tokens = [w if w[0] == "[" else w[2:] if w[:2] == "##" else f"\u2581{w}" for w in WORDS]
    keys = {"model": "bert", "tokens": tokens, "token_type": [3] * 5 + [1] * (len(WORDS) - 5)}
    keys |= {"cls_token_id": 2, "seperator_token_id": 3, "mask_token_id": 4, "padding_token_id": 0}
    other = in_gguf(tmp_path, keys | {"unknown_token_id": 1}, len(WORDS))
    for text in texts:
        assert other.encode_marked(text) == found.encode_marked(text)


def test_a_unigram_tokenizer_json_with_its_table_is_read(tmp_path):
    """T5's own: a table of replaced characters that is longer than any other text of the file."""
    _, model, _ = model_of("unigram")
    data = model.to_json()
    long = {"type": "Precompiled", "precompiled_charsmap": "A" * 20_000}
    write(tmp_path, "tokenizer.json", data | {"normalizer": None})
    assert read_tokenizer(tmp_path).vocab_size == 300
    write(tmp_path, "tokenizer.json", data | {"normalizer": {"type": "Replace", "x": "A" * 20_000}})
    with pytest.raises(FileError, match="a text of 20,000"):
        read_tokenizer(tmp_path)
    write(tmp_path, "tokenizer.json", data | {"normalizer": long})
    assert read_tokenizer(tmp_path).vocab_size == 300
    data["model"]["vocab"][7] = ["x", "y"]
    write(tmp_path, "tokenizer.json", data)
    with pytest.raises(FileError, match="token 7 is not a text of its own and its score"):
        read_tokenizer(tmp_path)


def test_damaged_model_files_are_refused_or_read_as_what_is_left(tmp_path):
    data, model, _ = model_of("bpe")
    assert model.kind == BPE and model.has_bytes and not model.folds
    assert len(model.ids(BYTE)) == 256 and len(model.ids(NORMAL)) > 200
    damaged = [data[:cut] for cut in range(1, len(data), 97)]
    for place in range(0, len(data), 61):
        damaged.append(data[:place] + bytes([data[place] ^ 0x5A]) + data[place + 1 :])
    refused = 0
    for each in damaged:
        try:
            read_pieces(each, where="damaged").to_json()
        except FileError:
            refused += 1
    assert refused > len(damaged) // 3
    (tmp_path / "tokenizer.model").write_bytes(data)
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "OtherTokenizer"})
    with pytest.raises(FileError, match="numbers the pieces"):
        read_tokenizer(tmp_path)


def test_marian_numbers_sentencepiece_s_pieces_itself(tmp_path):
    """A shared `vocab.json` in another order, with pieces that only the target side has."""
    data, model, wanted = model_of("unigram")
    plain = [piece.text for piece in model.pieces if piece.kind == NORMAL]
    order = ["</s>", "<unk>", *reversed(plain), "\u2581ziel", "<pad>"]
    vocab = {text: i for i, text in enumerate(order)}
    (tmp_path / "source.spm").write_bytes(data)
    write(tmp_path, "vocab.json", vocab)
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "MarianTokenizer", **names})
    found = read_tokenizer(tmp_path)
    texts = {i: piece.text for i, piece in enumerate(model.pieces)}
    for text, ids in zip(TEXTS, wanted, strict=True):
        assert found.encode(text) == [vocab[texts[i]] for i in ids], text
    assert found.encode_source("the model")[-1] == 0
    assert found.decode([vocab["\u2581ziel"]]) == "ziel"
    write(
        tmp_path, "vocab.json", {text: i for text, i in vocab.items() if text != "<pad>"} | {"x": 9}
    )
    with pytest.raises(FileError, match="same id"):
        read_tokenizer(tmp_path)
