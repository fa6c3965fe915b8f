"""Corpora: every format gives the same documents, a kill changes no bit, damage is named."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet
from tokenizers import Tokenizer as Engine

from glassformer.data.batch import Batch
from glassformer.data.build_task import build_task
from glassformer.data.corpus import prepare as module
from glassformer.data.corpus.prepare import preparing
from glassformer.data.corpus.readers import find_sources, read_documents
from glassformer.data.corpus.shards import SPLITS, ShardReader, read_index, read_tokenizer_file
from glassformer.data.corpus.windows import BLOCK, Corpus, WindowOrder, is_corpus
from glassformer.data.rng import permuted
from glassformer.data.tasks.text import Text
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.spec.errors import FileError, GlassError, InputError
from glassformer.spec.tasks import PrepareSpec, TextTask
from tests.planting import Constant, catches

WORDS = ("the", "naïve", "fox", "—", "jumps", "over", "a", "dog", "in", "東京", "every", "day")
DOCUMENTS = [
    f"document {i}\n" + " ".join(WORDS[i * k % len(WORDS)] for k in range(1, 20 + i % 37))
    for i in range(120)
]
SPEC = PrepareSpec(vocab_size=300, held_out=0.2, shard_size=6_000)
LENGTH = 13


def prepare(paths, folder, spec=SPEC, **rest):
    """Prepare to the end; how far it was each time."""
    return list(preparing([paths] if isinstance(paths, Path) else paths, folder, spec, **rest))


def bits(folder):
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shards(folder):
    """The files that hold tokens, whatever text they came from."""
    return {name: data for name, data in bits(folder).items() if not name.endswith(".json")}


def lines(texts=DOCUMENTS, field="text"):
    made = [json.dumps({"id": i, field: text}) for i, text in enumerate(texts)]
    return ("\n".join(made) + "\n").encode()


def table(texts=DOCUMENTS, field="text"):
    return pa.table({"id": list(range(len(texts))), field: list(texts)})


def written(kind, folder):
    """The documents as a file of this kind."""
    file = folder / f"corpus.{kind}"
    if kind == "jsonl":
        file.write_bytes(lines())
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress(lines()))
    elif kind == "jsonl.zst":
        with pa.CompressedOutputStream(pa.OSFile(str(file), "wb"), "zstd") as out:
            out.write(lines())
    elif kind == "parquet":
        parquet.write_table(table(), file, row_group_size=17)
    elif kind == "arrow":
        with ipc.new_file(str(file), table().schema) as out:
            out.write_table(table(), max_chunksize=11)
    else:  # a dataset that was saved to disk, two splits of two files
        (file / "train").mkdir(parents=True)
        (file / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        for name, part in zip(names, (table().slice(0, 70), table().slice(70)), strict=True):
            with ipc.new_stream(str(file / "train" / name), part.schema) as out:
                out.write_table(part, max_chunksize=10)
        (file / "train" / "dataset_info.json").write_text("{}")
        state = {"_data_files": [{"filename": name} for name in names]}
        (file / "train" / "state.json").write_text(json.dumps(state))
    return file


KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "dataset")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A prepared corpus in several shards, and the file that it was made from."""
    root = tmp_path_factory.mktemp("corpus")
    prepare(written("jsonl", root), root / "prepared")
    return root / "prepared"


# --- documents, tokens, splits --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_shards(folder, tmp_path, kind):
    prepare(written(kind, tmp_path), tmp_path / "out")
    assert shards(tmp_path / "out") == shards(folder)
    assert len(shards(folder)) >= 18


def test_documents_are_encoded_and_split_by_their_hash(folder):
    """Each document once, in order, as the library alone encodes it, on the side of its hash."""
    import hashlib

    engine = Engine.from_file(str(folder / "tokenizer.json"))
    index = read_index(folder)
    expected = {split: [] for split in SPLITS}
    for text in DOCUMENTS:
        digest = hashlib.sha256(b"0/" + text.encode()).digest()
        held_out = int.from_bytes(digest[:8], "little") / 2**64 < SPEC.held_out
        expected["val" if held_out else "train"].append([*engine.encode(text).ids, 0])
    assert engine.id_to_token(0) == "EOS"
    for split in SPLITS:
        reader, found = ShardReader(folder, index, split), []
        for number, shard in enumerate(reader.shards):
            one = reader.shard(number)
            starts = [0, *one.ends[:-1].tolist()]
            found += [one.read(a, int(b)).tolist() for a, b in zip(starts, one.ends, strict=True)]
            assert shard.tokens == one.ends[-1]
        assert found == expected[split]
        assert index.documents(split) == len(found)
    assert sum(map(index.text_bytes, SPLITS)) == sum(len(text.encode()) for text in DOCUMENTS)
    assert 10 <= index.documents("val") <= 40


def test_the_tokenizer_learns_from_the_training_part_of_a_sample(tmp_path):
    texts = [f"{word} " * 40 + str(i) for i, word in enumerate(("abcd", "wxyz") * 30)]
    (tmp_path / "x.jsonl").write_bytes(lines(texts))
    prepare(tmp_path / "x.jsonl", tmp_path / "all")
    index = read_index(tmp_path / "all")
    assert index.sample["documents"] == index.documents("train")
    small = PrepareSpec(vocab_size=300, held_out=0.2, sample=1_000)
    prepare(tmp_path / "x.jsonl", tmp_path / "some", small)
    assert 1_000 <= read_index(tmp_path / "some").sample["bytes"] < 1_300


def test_text_is_cut_at_empty_lines_and_nothing_is_lost(tmp_path):
    text = "".join(f"paragraph {i} " + "word " * (i % 90) + "\n" * (1 + i % 2) for i in range(900))
    (tmp_path / "novel.md").write_text(text, encoding="utf-8")
    found = find_sources([tmp_path])
    pieces = list(read_documents(found.sources[0], text_field="", longest_text=8_000))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 10
    assert all(piece.text.endswith("\n\n") for piece in pieces[:-1])
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    prepare(tmp_path / "novel.md", tmp_path / "out", PrepareSpec(tokenizer="bytes"))
    index = read_index(tmp_path / "out")
    assert sum(map(index.tokens, SPLITS)) == len(text.encode())
    long = "東" * 9_000  # no line ends at all, and no character is cut in two
    (tmp_path / "long.txt").write_text(long, encoding="utf-8")
    one = find_sources([tmp_path / "long.txt"]).sources[0]
    parts = [p.text for p in read_documents(one, text_field="", longest_text=1_000)]
    assert "".join(parts) == long


def test_a_folder_is_read_without_what_is_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.md").write_text("one " * 50)
    (tmp_path / "b" / "c.txt").write_text("two " * 50)
    (tmp_path / "b" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    found = find_sources([tmp_path])
    assert [source.name for source in found.sources] == ["a.md", "b/c.txt"]
    assert "1 .png" in found.notes[0]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_reading_goes_on_behind_any_document(tmp_path, kind):
    (source,) = find_sources([written(kind, tmp_path)]).sources
    settings = {"text_field": "text", "longest_text": 1_000}
    whole = list(read_documents(source, **settings))
    assert [document.text for document in whole] == DOCUMENTS
    for number in range(0, len(whole), 13):
        rest = read_documents(source, start=whole[number].position, **settings)
        assert [each.text for each in rest] == DOCUMENTS[number + 1 :]


# --- kills ----------------------------------------------------------------------------------------


def stopping_anywhere_changes_no_bit(tmp_path, folder, every=1):
    """Stopped after each step of the work in turn, then gone on with."""
    source = folder.parent / "corpus.jsonl"
    steps = len(prepare(source, tmp_path / "whole"))
    assert bits(tmp_path / "whole") == bits(folder)
    for stop in range(1, steps, every):
        place = tmp_path / f"stopped-{stop}"
        work = preparing([source], place, SPEC)
        for _ in range(stop):
            next(work)
        work.close()
        assert not (place / "index.json").exists()
        (place / ".train-00000.bin.tmp").write_bytes(b"half")  # what a real kill leaves
        prepare(source, place)
        assert bits(place) == bits(folder)


def test_stopping_anywhere_changes_no_bit(tmp_path, folder):
    stopping_anywhere_changes_no_bit(tmp_path, folder, every=17)


def test_a_torn_line_of_the_journal_does_not_count(tmp_path, folder):
    work = preparing([folder.parent / "corpus.jsonl"], tmp_path, SPEC)
    for _ in range(60):
        next(work)
    work.close()
    journal = tmp_path / module.JOURNAL
    journal.write_bytes(journal.read_bytes()[:-40])
    prepare(folder.parent / "corpus.jsonl", tmp_path)
    assert bits(tmp_path) == bits(folder)


CHILD = """
import sys
from pathlib import Path
from glassformer.data.corpus.prepare import preparing
from glassformer.spec.tasks import PrepareSpec
spec = PrepareSpec(vocab_size=300, held_out=0.2, shard_size=6_000)
print("ready", flush=True)
for step in preparing([sys.argv[1]], Path(sys.argv[2]), spec):
    pass
"""


def test_sigkill_changes_no_bit(tmp_path, folder):
    for turn, units in enumerate((1, 4)):
        place = tmp_path / str(turn)
        command = [sys.executable, "-c", CHILD, str(folder.parent / "corpus.jsonl"), str(place)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ})
        assert child.stdout is not None
        child.stdout.readline()
        while child.poll() is None and not (place / f"train-{units:05d}.bin").exists():
            time.sleep(0.0005)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        prepare(folder.parent / "corpus.jsonl", place)
        assert bits(place) == bits(folder)


def test_a_complete_corpus_is_left_as_it_is(folder, tmp_path):
    source, before = folder.parent / "corpus.jsonl", bits(folder)
    assert prepare(source, folder) == []
    assert bits(folder) == before
    with pytest.raises(InputError, match="another request: vocab_size"):
        prepare(source, folder, PrepareSpec(vocab_size=301, held_out=0.2, shard_size=6_000))
    prepare(source, tmp_path / "x", PrepareSpec(vocab_size=301))
    prepare(source, tmp_path / "x", overwrite=True)
    assert bits(tmp_path / "x") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(InputError, match="holds something else: notes"):
        prepare(source, tmp_path / "mine")


# --- windows, packing, order ----------------------------------------------------------------------


def corpus(folder, **fields):
    return Corpus(TextTask(path=str(folder), length=LENGTH, **fields), {str(folder): 1.0})


@catches(
    "a document predicts the next one's first token",
    "data.corpus.windows:Corpus.batch",
    Constant(0.0),
    drop=True,
)
def test_windows_are_the_shards_with_documents_apart(folder):
    """Against a plain loop over every token: tokens, targets, segments and weights."""
    task, index = corpus(folder), read_index(folder)
    row = 0
    for number in range(len(index.shards["train"])):
        shard = ShardReader(folder, index, "train").shard(number)
        document = np.searchsorted(shard.ends, np.arange(len(shard.ids)), side="right")
        for first in range(0, len(shard.ids) - LENGTH, LENGTH):
            batch = task.batch("train", np.array([row]))
            place = slice(first, first + LENGTH)
            after = slice(first + 1, first + LENGTH + 1)
            np.testing.assert_array_equal(batch.tokens[0], shard.ids[place])
            np.testing.assert_array_equal(batch.targets["next"][0], shard.ids[after])
            np.testing.assert_array_equal(batch.weights[0], document[place] == document[after])
            segments = document[place] - document[first]
            if batch.segments is None:
                assert not segments.any()
            else:
                np.testing.assert_array_equal(batch.segments[0], segments)
            row += 1
    assert row == task.sizes()["train"]
    joined = corpus(folder, packing="joined").batch("train", np.arange(20))
    assert joined.segments is None
    assert (joined.weights == 1).all()


def test_the_held_out_windows_are_all_there_in_another_order(folder):
    task = corpus(folder)
    rows = np.arange(task.sizes()["val"])
    index = read_index(folder)
    reader = ShardReader(folder, index, "val")
    expected = []
    for number in range(len(reader.shards)):
        ids = reader.shard(number).ids
        expected += [ids[i : i + LENGTH].tolist() for i in range(0, len(ids) - LENGTH, LENGTH)]
    found = task.batch("val", rows).tokens.tolist()
    assert found != expected
    assert sorted(found) == sorted(expected)


def test_a_document_does_not_see_its_neighbour(folder):
    """Bitwise: what a token of one document is changes no logit of another, unless joined."""
    import torch

    from glassformer.models.model import build
    from glassformer.spec import presets

    task = corpus(folder)
    batch = next(
        batch
        for row in range(50)
        if (batch := task.batch("train", np.array([row]))).segments is not None
        and 3 < (batch.segments[0] == 0).sum() < 10
    )
    first = int((batch.segments[0] == 0).sum())
    size = task.tokenizer.vocab_size
    spec = presets.budget_lm(
        vocab_size=size, d_model=24, d_ff=32, n_layers=2, n_heads=2, max_seq_len=LENGTH
    )
    model = build(spec, generator=torch.Generator().manual_seed(0))
    changed = batch.tokens.copy()
    changed[0, :first] = (changed[0, :first] + 7) % size
    for segments, same in ((batch.segments, True), (None, False)):
        outs = []
        for tokens in (batch.tokens, changed):
            one = Batch(tokens=tokens, valid=batch.valid, segments=segments)
            with torch.no_grad():
                outs.append(model(one)["next"][0, first:])
        assert torch.equal(*outs) is same


def an_epoch_is_a_permutation(size=257, batch=7):
    order = WindowOrder([size], [1.0], batch_size=batch, seed=3)
    steps = 4 * -(-size // batch)
    rows = np.concatenate([order.rows(step) for step in range(steps)])
    epochs = [rows[i * size : (i + 1) * size] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(size))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], np.arange(size))


def test_an_epoch_is_a_permutation():
    an_epoch_is_a_permutation()
    for size in (1, 2, 3, 4, 5, 16, 17, 1_000):
        found = permuted(np.arange(size), size, seed=1, purpose=("x",))
        assert sorted(found.tolist()) == list(range(size))


def test_a_mixture_has_its_shares():
    """Exactly, in every block of rows; and each corpus goes through all its windows."""
    sizes, weights = [100, 40_000, 7], [5.0, 2.0, 1.0]
    order = WindowOrder(sizes, weights, batch_size=64, seed=0)
    rows = np.concatenate([order.rows(step) for step in range(2 * BLOCK // 64)])
    starts = np.cumsum([0, *sizes])
    of = np.searchsorted(starts, rows, side="right") - 1
    for block in range(2):
        counts = np.bincount(of[block * BLOCK : (block + 1) * BLOCK], minlength=3)
        np.testing.assert_allclose(counts / BLOCK, np.array(weights) / 8, atol=1.5 / BLOCK)
    for corpus_number, size in enumerate(sizes):
        mine = rows[of == corpus_number] - starts[corpus_number]
        for begin in range(0, len(mine) - size, size):
            assert sorted(mine[begin : begin + size].tolist()) == list(range(size))
        assert len(set(mine[:size].tolist())) == min(size, len(mine))
    again = WindowOrder(sizes, weights, batch_size=64, seed=0)
    for step in (100, 3, 64, 65):  # any step, in any order: what resuming needs
        np.testing.assert_array_equal(again.rows(step), rows[step * 64 : (step + 1) * 64])


def test_a_mixture_of_corpora_with_the_same_tokens(folder, tmp_path):
    (tmp_path / "other.jsonl").write_bytes(lines([text[::-1] for text in DOCUMENTS]))
    tokens = read_tokenizer_file(folder, read_index(folder))
    spec = PrepareSpec(tokenizer=str(folder), held_out=0.2)
    prepare(tmp_path / "other.jsonl", tmp_path / "other", spec, tokenizer=tokens)
    prepare(tmp_path / "other.jsonl", tmp_path / "strange")
    task = build_task(TextTask(mixture=(f"{folder}=3", f"{tmp_path / 'other'}=1"), length=LENGTH))
    rows = task.order(batch_size=BLOCK, seed=0).rows(0)
    ours = corpus(folder).sizes()["train"]
    assert (rows < ours).sum() == 3 * BLOCK // 4
    assert task.facts()["weights"] == [3.0, 1.0]
    assert task.batch("train", rows[:5]).tokens.shape == (5, LENGTH)
    with pytest.raises(InputError, match="different tokens"):
        build_task(TextTask(mixture=(str(folder), str(tmp_path / "strange")), length=LENGTH))
    for mixture, words in (
        (("a=0",), "not a positive"),
        (("a=1", "a=2"), "twice"),
        (("a=1", "b=1e-9"), "the least"),
    ):
        with pytest.raises(InputError, match=words):
            TextTask(mixture=mixture)
    with pytest.raises(InputError, match="a path and a mixture"):
        TextTask(path="x", mixture=("a",))


def test_a_task_s_files_become_shards_in_the_cache(tmp_path, folder):
    file = written("jsonl.gz", tmp_path)
    spec = TextTask(path=str(file), vocab_size=300, length=LENGTH)
    task = build_task(spec, cache=tmp_path / "cache")
    assert isinstance(task, Corpus)
    (stored,) = (tmp_path / "cache").iterdir()
    before = bits(stored)
    again = build_task(spec, cache=tmp_path / "cache")
    assert again.facts() == task.facts()
    assert bits(stored) == before
    free = build_task(spec)  # temporary shards, as long as the task
    assert free.facts() == task.facts()
    assert str(tmp_path) not in json.dumps(task.facts())
    plain = tmp_path / "plain.txt"
    plain.write_text("\n\n".join(DOCUMENTS), encoding="utf-8")
    small = TextTask(path=str(plain), vocab_size=300, length=LENGTH)
    assert isinstance(build_task(small), Text)  # as ever
    packed = TextTask(path=str(plain), vocab_size=300, length=LENGTH, packing="joined")
    assert isinstance(build_task(packed), Corpus)
    assert not is_corpus(TextTask())


def test_the_end_of_a_model_s_text_survives_a_checkpoint(tmp_path):
    from glassformer.adapters.folder.origin import find_tokenizer
    from glassformer.data.tokenizers.own import tokenizer_files

    plain = BytePairs.train(DOCUMENTS, vocab_size=300, specials=("<|endoftext|>",))
    assert plain.eos is None
    files = tokenizer_files(plain.with_ends(bos=None, eos=0))
    for name, data in {**files, "MANIFEST.json": b"{}", "spec.json": b"{}"}.items():
        (tmp_path / name).write_bytes(data)
    found = find_tokenizer(tmp_path)
    assert (found.bos, found.eos) == (None, 0)
    assert tokenizer_files(BytePairs.train(DOCUMENTS, vocab_size=300)).keys() == {"tokenizer.json"}


# --- bad input ------------------------------------------------------------------------------------


def of(name, data):
    def make(folder):
        (folder / name).write_bytes(data)
        return folder / name

    return make


def cut_parquet(folder):
    file = written("parquet", folder)
    file.write_bytes(file.read_bytes()[:-100])
    return file


def nameless(folder):
    parquet.write_table(table(field="content"), folder / "x.parquet")
    return folder / "x.parquet"


def numbers(folder):
    parquet.write_table(pa.table({"text": [1, 2]}), folder / "x.parquet")
    return folder / "x.parquet"


def cut_zstd(folder):
    file = written("jsonl.zst", folder)
    file.write_bytes(file.read_bytes()[:-30])
    return file


GZ = gzip.compress(lines())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (of("x.jsonl.gz", GZ[:-40]), ("ends early", "x.jsonl.gz")),
        (of("x.jsonl.gz", GZ[:300] + b"\0\1" + GZ[302:]), ("damaged", "x.jsonl.gz")),
        (of("x.txt.gz", b"not gzip at all"), ("damaged", "x.txt.gz")),
        (cut_zstd, ("damaged", "corpus.jsonl.zst")),
        (cut_parquet, ("damaged", "corpus.parquet")),
        (of("x.arrow", b"ARROW1 but not really"), ("damaged", "x.arrow")),
        (nameless, ("'text' is not there", "x.parquet", "text_field= names it: content")),
        (numbers, ("holds int64, no text", "x.parquet")),
        (of("x.md", b"good\nand \xff bad"), ("byte 0xff at offset 9 is not UTF-8", "x.md")),
        (of("x.jsonl", lines()[:-5] + b'\xff"}\n'), ("is not UTF-8", "x.jsonl")),
        (of("x.jsonl", b'{"text": "a"}\n{"content": "b"}\n'), ("no text under", "line 2")),
        (of("x.jsonl", b'{"text": "a"}\n[1, 2]\n'), ("no text under", "line 2")),
        (of("x.jsonl", b'{"text": "a"\n'), ("not JSON", "line 1")),
        (of("x.jsonl", b'{"text": "\\ud800"}\n'), ("half of a character", "line 1")),
        (of("x.txt", b" \n\n"), ("the corpus is empty", "x.txt")),
        (of("x.txt", b"all alone"), ("a single document", "x.txt")),
        (lambda folder: folder / "nowhere", ("no such file or folder", "nowhere")),
        (lambda folder: folder, ("nothing to read",)),
        (of("x.parquet.gz", b""), ("cannot be read in pieces", "x.parquet.gz")),
    ],
)
def test_bad_files_are_named(tmp_path, make, words):
    (tmp_path / "in").mkdir()
    path = make(tmp_path / "in")
    with pytest.raises(GlassError) as caught:
        prepare(path, tmp_path / "out")
    for each in words:
        assert each in str(caught.value)
    assert not (tmp_path / "out" / "index.json").exists()


def copied(folder, tmp_path):
    for name, data in bits(folder).items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def told(place):
    """What reading everything says is wrong; nothing, if it says nothing."""
    try:
        task = corpus(place)
        for split, size in task.sizes().items():
            task.batch(split, np.arange(size))
    except FileError as error:
        return str(error)
    return ""


def test_damage_is_found_before_it_is_used(folder, tmp_path):
    """A flipped bit in any byte of any file that is read: an error with its name, or no change."""
    place = copied(folder, tmp_path)
    whole = corpus(place).batch("train", np.arange(30)).tokens
    assert whole.shape == (30, LENGTH)
    for name, data in bits(place).items():
        damaged = bytearray(data)
        damaged[len(data) // 2] ^= 0x10
        (place / name).write_bytes(damaged)
        assert name in told(place), name
        (place / name).write_bytes(data)
    index = (place / "index.json").read_text()
    (place / "index.json").write_text(index.replace('"seed": 0', '"seed": 1'))
    assert "SHA-256 differs" in told(place)


def test_a_shard_that_is_cut_or_missing_is_named_when_opened(folder, tmp_path):
    place = copied(folder, tmp_path)
    (place / "val-00000.bin").write_bytes(b"short")
    with pytest.raises(FileError, match=r"has 5 bytes, not"):
        read_index(place)
    (place / "val-00000.bin").unlink()
    with pytest.raises(FileError, match="is missing"):
        read_index(place)
    (place / "index.json").write_text('{"format": 99}')
    with pytest.raises(FileError, match="corpus format 99"):
        read_index(place)
    (place / "index.json").unlink()
    with pytest.raises(InputError, match="no prepared corpus"):
        read_index(place)


def test_a_setting_that_the_corpus_decided_otherwise_is_refused(folder):
    with pytest.raises(InputError, match=r"task.held_out=0.3, and the corpus was prepared with"):
        corpus(folder, held_out=0.3)
    corpus(folder, held_out=0.2, vocab_size=300)
    with pytest.raises(InputError, match="one sequence needs 100001"):
        Corpus(TextTask(path=str(folder), length=100_000), {str(folder): 1.0})
    with pytest.raises(InputError, match="no prepared corpus"):
        Corpus(TextTask(path=str(folder.parent)), {str(folder.parent): 1.0})
