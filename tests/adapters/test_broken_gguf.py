"""GGUF files that lie, or are cut: each is a named error, before memory is taken."""

import struct

import gguf
import numpy as np
import pytest

from glassformer.adapters.chat.template import read_templates
from glassformer.adapters.gguf.header import Head, read_head
from glassformer.adapters.load import load
from glassformer.spec.errors import FileError, GlassError
from tests.adapters.checkpoints import live
from tests.adapters.folders import write_model
from tests.adapters.gguf.files import arrays_of, finish, write_foreign

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return write_foreign("llama", tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def at(place: int, form: str, value: int):
    """Other bytes at a place."""
    return lambda data: (
        data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]
    )


def behind(text: str, form: str, value: int, *, skip: int = 0):
    """Other bytes behind a name."""

    def change(data: bytes) -> bytes:
        return at(data.index(text.encode()) + len(text) + skip, form, value)(data)

    return change


def renamed(old: str, new: str):
    assert len(old) == len(new)
    return lambda data: data.replace(old.encode(), new.encode(), 1)


NONSENSE = "beyond its end|unknown kind|not UTF-8|a text of|dimensions|the shape"
UP = "blk.0.ffn_up.weight"
DAMAGE = {
    "empty": (lambda data: b"", "fewer than 24 bytes"),
    "no magic": (lambda data: b"GGML" + data[4:], "no GGUF file"),
    "a pickle": (lambda data: b"\x80\x04" + data, "no GGUF file"),
    "version 1": (at(4, "<I", 1), "version 1"),
    "version 9": (at(4, "<I", 9), "version 9"),
    "other byte order": (at(4, ">I", 3), "version 50331648"),
    "2^60 tensors": (at(8, "<Q", 2**60), "tensors, more than"),
    "2^60 keys": (at(16, "<Q", 2**60), "keys, more than"),
    "more keys than there are": (at(16, "<Q", 400), NONSENSE),
    "more tensors than there are": (at(8, "<Q", 5000), NONSENSE),
    "a key of 2^50 bytes": (at(24, "<Q", 2**50), "a text of"),
    "a value of no kind": (behind("llama.block_count", "<I", 77), "unknown kind 77"),
    "a key twice": (
        renamed("llama.attention.key_length", "llama.attention.head_count"),
        "there twice",
    ),
    "a tensor twice": (renamed(UP, "blk.1.ffn_up.weight"), "there twice"),
    "no dimensions": (behind(UP, "<I", 0), "0 dimensions"),
    "2^31 dimensions": (behind(UP, "<I", 2**31), "dimensions"),
    "2^62 rows": (behind(UP, "<Q", 2**62, skip=4), "has the shape"),
    "no rows": (behind(UP, "<Q", 0, skip=4), "has the shape"),
    "another shape": (behind(UP, "<Q", 16, skip=4), "misshapen: blk.0.ffn_up"),
    "a kind that is none": (behind(UP, "<I", 99, skip=20), "kind 99"),
    "whole numbers": (behind(UP, "<I", 26, skip=20), "kind 26"),
    "blocks that do not fit": (behind("blk.0.ffn_down.weight", "<I", 8, skip=20), "rows of 48"),
    "outside": (behind(UP, "<Q", 2**40, skip=24), "outside of the file"),
    "far outside": (behind(UP, "<Q", 2**64 - 32, skip=24), "outside of the file"),
    "between places": (behind(UP, "<Q", 4, skip=24), "not aligned"),
    "on another": (behind(UP, "<Q", 0, skip=24), "shares bytes"),
    "cut in its data": (lambda data: data[:-200], "outside of the file"),
    "cut in its head": (lambda data: data[:300], "the file is truncated"),
    "NaN": (lambda data: data[:-64] + b"\xff" * 64, "NaN or infinity"),
    "a tensor too few": (renamed(UP, "blk.9.ffn_up.weight"), "missing: blk.0.ffn_up"),
    "no embedding": (renamed("token_embd.weight", "tokem_embd.weight"), "no tensor token_embd"),
    "not UTF-8": (lambda data: data.replace(b"blk.0", b"bl\xff.0", 1), "not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name, whole, tmp_path):
    change, said = DAMAGE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(change(whole))
    with pytest.raises(FileError, match=said) as error:
        load(path)
    assert str(path) in error.value.where


def settings(*values: bytes) -> bytes:
    """A file of so many settings, and no tensor."""
    keys = (struct.pack("<Q", 4) + b"k%03d" % i + value for i, value in enumerate(values))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(keys)


def a_list(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + data


SUMS = {
    "lists of numbers": [a_list(0, 200_000, bytes(200_000))] * 16,
    "lists of empty texts": [a_list(8, 100_000, bytes(800_000))] * 31,
    "long texts": [struct.pack("<IQ", 8, 3_900_000) + bytes(3_900_000)] * 17,
    "lists of long texts": [
        a_list(8, 9, (struct.pack("<Q", 3_900_000) + bytes(3_900_000)) * 9) for _ in range(2)
    ],
}


@pytest.mark.parametrize("name", SUMS)
def test_what_each_may_have_is_bounded_together_too(name, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(settings(*SUMS[name]))
    with pytest.raises(FileError, match="together"):
        read_head(path)


KEYS = {
    "no architecture": ({"general.architecture": None}, "architecture 'None'"),
    "unknown": ({"general.architecture": "mamba"}, "architecture 'mamba'"),
    "a list": ({"general.architecture": ["llama"]}, "architecture"),
    "experts": ({"llama.expert_count": 8}, "no 'expert_used_count'"),
    "a window": ({"llama.attention.sliding_window": 64}, "sliding_window=64"),
    "a switch that nobody knows": ({"llama.attention.backwards": True}, "backwards=true"),
    "part of a head turned": ({"llama.rope.dimension_count": 4}, "rope.dimension_count' is 4"),
    "wide values": ({"llama.attention.value_length": 16}, "value_length' is 16"),
    "another scaling": ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    "half a scaling": ({"llama.rope.scaling.factor": 4.0}, "rope.scaling.factor=4.0"),
    "heads by layer": ({"llama.attention.head_count": [4, 4, 4]}, "head_count' is"),
    "no eps": ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
    "eps is no number": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "finite"),
    "no layers": ({"llama.block_count": 0}, "block_count"),
    "too many layers": ({"llama.block_count": 2_000_000}, "num_hidden_layers"),
    "a layer too many": ({"llama.block_count": 4}, "missing: blk.3"),
    "3 heads": ({"llama.attention.head_count": 3}, "head|misshapen"),
    "other vocabulary": ({"llama.vocab_size": 98}, "misshapen: token_embd"),
    "split": ({"split.count": 3}, "split over 3 files"),
    "a LoRA": ({"general.type": "adapter"}, "no model but 'adapter'"),
    "odd alignment": ({"general.alignment": 12}, "alignment is 12"),
    "alignment 0": ({"general.alignment": 0}, "alignment is 0"),
}


@pytest.mark.parametrize("name", KEYS)
def test_settings_that_cannot_be_are_named(name, tmp_path):
    keys, said = KEYS[name]
    with pytest.raises(FileError, match=said):
        load(write_foreign("llama", tmp_path / "m.gguf", **keys))


def test_what_says_nothing_is_let_through(tmp_path):
    keys = {"llama.expert_count": 0, "llama.rope.scaling.attn_factor": 1.0, "other.key": "x"}
    load(write_foreign("llama", tmp_path / "m.gguf", **keys))


WORDS = {
    "kinds for half": ({"tokenizer.ggml.token_type": [1, 1]}, "kinds of tokens"),
    "kinds are texts": ({"tokenizer.ggml.token_type": ["a"] * 320}, "kinds of tokens"),
    "tokens are numbers": ({"tokenizer.ggml.tokens": [1] * 320}, "no list of texts"),
    "twice": ({"tokenizer.ggml.tokens": ["a"] * 320}, "the same text"),
    "a merge of three": ({"tokenizer.ggml.merges": ["a b c"]}, "not two pieces"),
    "a merge of strangers": ({"tokenizer.ggml.merges": ["ab cd"]}, "cannot be used"),
    "an end outside": ({"tokenizer.ggml.eos_token_id": 5000}, "5000 of 320"),
    "cut by a list": ({"tokenizer.ggml.pre": ["qwen2"]}, None),
    "BOS is no switch": ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token"),
    "a template in numbers": ({"tokenizer.chat_template": 7}, "no text"),
    "a template without text": ({"tokenizer.chat_templates": ["x"]}, "no text"),
    "a long template": ({"tokenizer.chat_template": "x" * 1_500_000}, "very long"),
}


@pytest.mark.parametrize("name", WORDS)
def test_tokenizers_that_cannot_be_are_named(name, tmp_path):
    from glassformer.adapters.gguf.export_gguf import export_gguf

    keys, said = WORDS[name]
    export_gguf(load(write_model(tmp_path / "model")), tmp_path / "good.gguf")
    arrays = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "good.gguf").tensors}
    known = dict(read_head(tmp_path / "good.gguf").metadata) | keys
    path = finish(gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2"), arrays, known)

    def use() -> object:
        adapter = load(path)
        read_templates(path)
        return adapter.get_tokenizer()

    if said is None:
        assert use() is None
    else:
        with pytest.raises(FileError, match=said):
            use()


def test_no_byte_of_the_head_brings_a_traceback(whole, tmp_path):
    """Every change of one byte is read, or refused by name."""
    rng = np.random.default_rng(11)
    path = tmp_path / "m.gguf"
    end = whole.index(b"blk.0.ffn_up.weight") + 200
    refused = 0
    for place in rng.choice(end, 250, replace=False):
        data = bytearray(whole)
        data[place] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        try:
            load(path)
        except GlassError:
            refused += 1
    assert refused > 100


def test_a_small_file_cannot_ask_for_much(tmp_path):
    """A list of 2^40 texts in forty bytes ends at once."""
    text = b"x"
    head = struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, len(text), text, 9, 8, 2**40)
    (tmp_path / "m.gguf").write_bytes(head)
    with pytest.raises(FileError, match="texts in a list"):
        read_head(tmp_path / "m.gguf")


def test_the_head_is_what_the_library_reads(tmp_path):
    path = write_foreign("llama3 biases", tmp_path / "m.gguf")
    head, theirs = read_head(path), gguf.GGUFReader(path)
    assert isinstance(head, Head)
    assert head.data == theirs.data_offset
    assert [*head.tensors] == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        stored = head.tensors[tensor.name]
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))
        assert head.data + stored.offset == tensor.data_offset
    assert len(arrays_of(live("llama3 biases"), "llama")) == len(head.tensors)
    for key, value in head.metadata.items():
        found = theirs.fields[key].contents()
        assert value == (pytest.approx(found) if isinstance(value, float | list) else found)
