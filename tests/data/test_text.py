"""Text: the default corpus offline, windows shifted, parts apart, files that are no text."""

import json
import math

import numpy as np
import pytest

from glassformer.data.tasks import text as module
from glassformer.data.tasks.text import Text, held_out_text, read_corpus
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.tasks import TextTask
from tests.planting import Return, catches

LINES = "".join(f"line {i}: the naïve fox — {i * 7919 % 1000}\n" for i in range(600))
KINDS = ("characters", "bytes", "bpe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    (root / "b").mkdir()
    (root / "a.txt").write_text(LINES, encoding="utf-8")
    (root / "b" / "c.txt").write_text(LINES.upper(), encoding="utf-8")
    (root / ".hidden").write_bytes(b"\xff")
    (root / "empty.txt").write_text(" \n")
    return root


def spec(path, **fields):
    return TextTask(path=str(path), **{"length": 16, "vocab_size": 300, **fields})


def joined(task, split):
    """Every window's text, in order."""
    return "".join(task.describe(split, row) for row in range(task.sizes()[split]))


@catches(
    "text labels not shifted",
    "data.tasks.text:Text.batch",
    Return(),
    arg="targets",
    to="{{{keys[0]}: window_BT[:, :-1]}}",
)
@pytest.mark.parametrize("kind", KINDS)
def test_targets_are_the_tokens_one_later(folder, kind):
    task = Text(spec(folder, tokenizer=kind))
    for split, size in task.sizes().items():
        batch = task.batch(split, np.arange(size))
        assert batch.tokens.shape == (size, 16)
        # windows follow one another without a gap, so all tokens in a row, and all targets in a row
        tokens, targets = batch.tokens.ravel(), batch.targets["next"].ravel()
        np.testing.assert_array_equal(targets[:-1], tokens[1:])
        assert (tokens[:-1] != targets[:-1]).any()
        assert batch.valid.all()
        assert (batch.weights == 1).all()


def parts_are_the_text_in_two(folder, kind="characters"):
    task = Text(spec(folder, tokenizer=kind))
    names = [document.name for document in read_corpus(str(folder), seed=0)]
    assert sorted(names) == ["a.txt", "b/c.txt"]
    text = {"a.txt": LINES, "b/c.txt": LINES.upper()}
    whole = "\n".join(text[name] for name in names)
    train, val = joined(task, "train"), joined(task, "val")
    assert whole.startswith(train)
    assert val[:-1] in whole[len(train) :]
    facts = task.facts()
    assert facts["bytes"] == len(whole.encode())
    stands_for = sum(facts["tokens"][s] * facts["bytes_per_token"][s] for s in ("train", "val"))
    assert math.isclose(stands_for, len(whole.encode()))
    held_out = facts["tokens"]["val"] * facts["bytes_per_token"]["val"] / facts["bytes"]
    assert 0.09 < held_out <= 0.1


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe"])
def test_parts_are_the_text_in_two(folder, kind):
    if kind == "characters":
        parts_are_the_text_in_two(folder)
    else:
        facts = Text(spec(folder, tokenizer=kind)).facts()
        expected = 256 if kind == "bytes" else 300
        assert facts["vocab_size"] == expected
        assert all(value >= 1.0 for value in facts["bytes_per_token"].values())


def test_pieces_are_learned_from_the_training_part(tmp_path):
    file = tmp_path / "two.txt"
    file.write_text("abcd " * 900 + "\n" + "wxyz " * 90 + "\n")
    task = Text(spec(file, held_out=0.1))
    assert len(task.tokenizer.encode(" abcd")) == 1
    assert len(task.tokenizer.encode(" wxyz")) == 5
    assert set(joined(task, "val")) <= set(" wxyz\n")


def test_python_s_own_manuals_need_no_download():
    task = Text(TextTask(length=64))
    facts = task.facts()
    assert facts["vocab_size"] == 2_000
    assert facts["corpus"].startswith("manuals of ")
    assert facts["bytes"] > 500_000
    assert facts["bytes_per_token"]["val"] > 2.5
    assert task.tokenizer.decode(task.tokenizer.encode("def f(x): 東")) == "def f(x): 東"
    assert isinstance(task._parts["train"].ids, np.memmap)
    again = Text(TextTask(length=64))
    assert again.facts() == facts
    rows = np.arange(50)
    np.testing.assert_array_equal(again.batch("val", rows).tokens, task.batch("val", rows).tokens)


def test_the_seed_orders_the_documents_of_the_manuals():
    orders = [[document.name for document in read_corpus("", seed=seed)] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    held_out = orders[0][-len(orders[0]) // 10 :]
    assert {name.split()[0] for name in held_out} == {"topic", "module"}
    assert not any("test" in name.split()[1].split(".") for name in orders[0])


def test_a_cache_gives_the_same_and_is_found_again(folder, tmp_path):
    for kind in KINDS:
        plain = Text(spec(folder, tokenizer=kind))
        first = Text(spec(folder, tokenizer=kind), cache=tmp_path / "cache")
        again = Text(spec(folder, tokenizer=kind), cache=tmp_path / "cache")
        assert plain.facts() == first.facts() == again.facts()
        rows = np.arange(plain.sizes()["val"])
        for task in (first, again):
            assert isinstance(task._parts["val"].ids, np.memmap)
            got, expected = task.batch("val", rows), plain.batch("val", rows)
            np.testing.assert_array_equal(got.tokens, expected.tokens)
        assert again.tokenizer.to_json() == plain.tokenizer.to_json()
    assert len(list((tmp_path / "cache").iterdir())) == 3  # one each, nothing left beside
    Text(spec(folder, tokenizer="bytes", held_out=0.2), cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_a_damaged_cache_is_named(folder, tmp_path):
    Text(spec(folder), cache=tmp_path)
    (stored,) = tmp_path.iterdir()
    whole = (stored / "val.npy").read_bytes()
    for damaged in (whole[:100], whole[:3], b""):
        (stored / "val.npy").write_bytes(damaged)
        with pytest.raises(FileError, match="the cache of tokens is damaged"):
            Text(spec(folder), cache=tmp_path)
    np.save(stored / "val.npy", np.ones((500, 2)))
    with pytest.raises(FileError, match="no token ids"):
        Text(spec(folder), cache=tmp_path)


def test_facts_name_no_path(folder):
    text = json.dumps(Text(spec(folder)).facts())
    assert str(folder) not in text
    assert folder.name not in text


def test_bytes_read_anything(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(range(256)) * 20)
    task = Text(spec(tmp_path / "x.bin", tokenizer="bytes"))
    batch = task.batch("train", np.arange(10))
    assert batch.tokens[0].tolist() == list(range(16))


def bad_byte(tmp_path):
    (tmp_path / "good.txt").write_text("fine\n" * 100)
    (tmp_path / "bad.txt").write_bytes(b"some text\nand \xff then\n" * 3)
    return tmp_path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: spec(t / "nowhere"), ("no such file or folder", "nowhere")),
        (lambda t: spec(t), ("the corpus is empty",)),
        (lambda t: spec(bad_byte(t)), ("byte 0xff at offset 14 is not UTF-8", "at: bad.txt")),
        (lambda t: spec(bad_byte(t), tokenizer="characters"), ("offset 14", "tokenizer=bytes")),
    ],
)
def test_bad_corpora_are_named(tmp_path, make, words):
    task = make(tmp_path)
    with pytest.raises(InputError) as caught:
        Text(task)
    for each in words:
        assert each in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", ["a", "short\n", "é" * 30])
def test_a_corpus_shorter_than_one_sequence(tmp_path, kind, content):
    (tmp_path / "x.txt").write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        Text(spec(tmp_path / "x.txt", tokenizer=kind, length=64))
    assert "one sequence needs 65" in str(caught.value)


def test_a_spec_that_cannot_be():
    with pytest.raises(InputError, match="the nearest valid vocab_size is 256"):
        TextTask(vocab_size=100)
    assert TextTask(vocab_size=100, tokenizer="bytes").vocab_size == 100


def test_one_huge_line_is_learned_from_in_parts(tmp_path):
    """Learning takes time in proportion to the text, not to its square, even without a space."""
    (tmp_path / "spaces.txt").write_text("many words on one line " * 9_000)
    (tmp_path / "none.txt").write_text("abcde" * 60_000)
    task = Text(spec(tmp_path))
    assert all(len(line) <= module.LONGEST_LINE for line in module.learning_lines("x" * 5_000))
    assert task.facts()["bytes_per_token"]["train"] > 4
    assert joined(task, "train").count("\n") <= 2  # between the files


def test_parts_of_a_line_are_the_line():
    text = "a b" * 900 + "\n" + "y" * 3_500 + " end\nshort\n"
    parts = list(module.learning_lines(text))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= module.LONGEST_LINE
    assert parts[-1] == "short\n"


def test_the_held_out_text_is_what_val_is_made_of(folder):
    task = Text(spec(folder, tokenizer="characters"))
    text = held_out_text(spec(folder))
    assert text.startswith(joined(task, "val"))
    assert len(text) == task.facts()["tokens"]["val"]
