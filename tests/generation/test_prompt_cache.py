"""Prompts on disk: the same bits, entries of one model only, nothing of a damaged file."""

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.data.tokenizers.vocab import Bytes
from glassformer.generation.native import prompt_cache
from glassformer.generation.native.stepper import NativeStepper
from glassformer.models.model import build
from glassformer.models.prompts import Prompts
from glassformer.models.weights import model_digest
from glassformer.quant.convert import quantize_model
from glassformer.spec import presets
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int4
from glassformer.store.tensors import read_metadata, read_tensors, tensor_bytes

SPEC = presets.qwen(vocab_size=97, d_model=32, d_ff=64, n_layers=2)
ROW = tuple((7 * i) % 97 for i in range(53))


def model_of(seed=0):
    return build(SPEC, generator=torch.Generator().manual_seed(seed))


def start(model, folder, *rows):
    stepper = NativeStepper(model, prompt_cache=folder)
    return stepper.start(Prompts(rows), room=2)[0], stepper


def test_a_kept_beginning_is_not_read_again(tmp_path):
    model, folder = model_of(), tmp_path / "kept"
    want, _ = NativeStepper(model).start(Prompts((ROW,)), room=2)
    first, stepper = start(model, folder, ROW)
    assert stepper.reused == 0 and stepper.positions == len(ROW)
    again, stepper = start(model, folder, ROW)
    assert stepper.reused == 48 and stepper.positions == 5
    assert torch.equal(first, want) and torch.equal(again, want)
    assert len(list(folder.iterdir())) == 1


def test_rows_of_a_batch_begin_where_they_differ(tmp_path):
    model = model_of()
    start(model, tmp_path, ROW)
    rows = (ROW[:30], (*ROW[:21], 5, 6), (1, 2, 3), ROW[:32])
    found, stepper = start(model, tmp_path, *rows)
    want, _ = NativeStepper(model).start(Prompts(rows), room=2)
    assert torch.equal(found, want)
    assert stepper.reused == 29 + 21 + 31


def test_a_longer_prompt_takes_the_place_of_what_it_contains(tmp_path, monkeypatch):
    model = model_of()
    for length in (20, 40, 53):
        start(model, tmp_path, ROW[:length])
    (entry,) = tmp_path.iterdir()
    assert len(read_metadata(entry)["tokens"].split()) == 48
    monkeypatch.setattr(prompt_cache, "MOST", 2)
    for first in (1, 2, 3):
        start(model, tmp_path, (first, *ROW))
    assert len(list(tmp_path.iterdir())) == 2


def test_other_weights_are_another_model(tmp_path):
    one, other = model_of(), model_of(1)
    rounded = quantize_model(model_of(), QuantSpec(scheme=Int4()))
    again = quantize_model(model_of(1), QuantSpec(scheme=Int4()))
    digests = [
        model_digest(model, kind="")
        for model in (one, other, model_of().bfloat16(), rounded, again)
    ]
    assert len(set(digests)) == 5 and model_digest(model_of(), kind="") == digests[0]
    start(model_of(), tmp_path, ROW)
    assert start(other, tmp_path, ROW)[1].reused == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_changed_weights_are_noticed(tmp_path):
    model = model_of()
    stepper = NativeStepper(model, prompt_cache=tmp_path)
    stepper.start(Prompts((ROW,)), room=1)
    with torch.no_grad():
        model.blocks[0].attn_norm.weight.mul_(2.0)
    found, _ = stepper.start(Prompts((ROW,)), room=1)
    want, _ = NativeStepper(model).start(Prompts((ROW,)), room=1)
    assert stepper.reused == 0 and torch.equal(found, want)


def damaged(entry, change):
    about, arrays = read_metadata(entry), read_tensors(entry)
    change(about, arrays)
    entry.write_bytes(tensor_bytes(arrays, metadata=about))


def changed_bytes(about, arrays):
    arrays["own.pages"] = arrays["own.pages"] + np.uint8(1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed_bytes, "have changed"),
        (lambda about, arrays: about.update(tokens="1 2 3"), "3 tokens"),
        (lambda about, arrays: about.update(tokens="1 x"), "not numbers"),
        (lambda about, arrays: about.update(format="other"), "its format is other"),
        (lambda about, arrays: about.update(model="0" * 32), "of another model.*000000000000"),
        (
            lambda about, arrays: about.update(tokens=" ".join(map(str, ROW[:16]))),
            "does not have 1 pages",
        ),
    ],
)
def test_a_damaged_entry_is_refused(change, said, tmp_path):
    model = model_of()
    start(model, tmp_path, ROW)
    (entry,) = tmp_path.iterdir()
    damaged(entry, change)
    with pytest.raises(FileError, match=said):
        start(model, tmp_path, ROW)
    entry.write_bytes(entry.read_bytes()[:40])
    with pytest.raises(FileError):
        start(model, tmp_path, ROW)


def test_what_cannot_be_kept_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="not a folder"):
        start(model_of(), tmp_path / "file", ROW)
    seq2seq = build(presets.seq2seq(), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="for decoders"):
        NativeStepper(seq2seq, prompt_cache=tmp_path)
    with pytest.raises(InputError, match="default step"):
        gf.generate(model_of(), [1, 2], prompt_cache=str(tmp_path), cached=False)


def test_generate_takes_it(tmp_path):
    spec = presets.core(vocab_size=Bytes().vocab_size)
    model = gf.build(spec, seed=0, tokenizer=Bytes())
    text = "a prompt of more than a page of tokens"
    want = model.generate(text, max_new_tokens=5)
    for guess in ({}, {}, {"speculate": True}):
        found = model.generate(text, max_new_tokens=5, prompt_cache=str(tmp_path / "kept"), **guess)
        assert found == want
    assert len(list((tmp_path / "kept").iterdir())) == 1
