"""Probes: what a snapshot keeps is what the model shows; its file can be read again, or refused."""

from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import torch

from glassformer.data.batch import Batch, Source
from glassformer.lens.heads import HeadName
from glassformer.lens.inspection import inspect
from glassformer.lens.measure.probes import LIMIT, MASKED, read_probes
from glassformer.lens.measure.snapshot import (
    EXAMPLES,
    MAPS,
    TOKENS,
    max_bytes,
    size_limits,
    snapshot,
)
from glassformer.models.model import build
from glassformer.spec import presets
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import AnswerHead, LayerNorm
from glassformer.store.tensors import BFLOAT16
from tests.tiny import MAX_SEQ_LEN, VOCAB, built, tiny, token_ids
from tests.training.samples import RUNS, engine_of, uneven


def batch_of(*, lengths=(5, 3, 7), source=(), seed=4):
    """Random sequences with next-token targets, of which every third does not count."""
    tokens = token_ids(len(lengths), max(lengths), seed=seed).numpy()
    valid = np.arange(max(lengths)) < np.array(lengths)[:, None]
    weights = (valid & (np.arange(max(lengths)) % 3 != 2)).astype(np.float32)
    side = None
    if source:
        ids = token_ids(len(source), max(source), seed=seed + 1).numpy()
        side = Source(tokens=ids, valid=np.arange(max(source)) < np.array(source)[:, None])
    target = token_ids(len(lengths), max(lengths), seed=seed + 2).numpy()
    return Batch(tokens=tokens, valid=valid, targets={"next": target}, weights=weights, source=side)


def row_of(batch, b):
    """One example without its padding."""
    length = int(batch.valid[b].sum())
    source = batch.source
    side = None
    if source is not None:
        end = int(source.valid[b].sum())
        side = Source(tokens=source.tokens[b : b + 1, :end], valid=source.valid[b : b + 1, :end])
    return Batch(
        tokens=batch.tokens[b : b + 1, :length], valid=batch.valid[b : b + 1, :length], source=side
    )


@pytest.mark.parametrize("encoder", [False, True])
def test_a_snapshot_shows_what_a_look_shows(encoder):
    """Example by example, against the lens of one sequence."""
    model = built(tiny(encoder=encoder, final_norm=LayerNorm())).float().eval()
    batch = batch_of(source=(4, 6, 2) if encoder else ())
    found = snapshot(model, batch, names=lambda i: f"w{i}")
    for b, length in enumerate((5, 3, 7)):
        seen = inspect(model, row_of(batch, b))
        assert found.words[b] == tuple(f"w{i}" for i in batch.tokens[b, :length])
        for head in found.heads():
            theirs = seen.attention.of(head.kind)[head.layer, head.head]
            ours = found.map(b, head)
            assert torch.equal(ours.allowed, theirs.allowed), head
            gap = (ours.tensor - theirs.tensor.float()).abs().max()
            assert gap <= 0.5 / 254 + 1e-5, head
        assert np.allclose(found.norms_BRT[b, :, :length], seen.norms.residual, rtol=1e-5)
        for place, row in enumerate((*found.row_names, "final")):
            for t in range(length):
                words, shares = zip(*found.top(b, t, row=row), strict=True)
                theirs = seen.lens.choices(t, 5, row=row)
                assert shares == pytest.approx([share for _, _, share in theirs], abs=2e-3)
                assert words[0] == f"w{theirs[0][0]}", (place, t)
    logp = torch.log_softmax(model(batch)["next"].double(), -1).detach().numpy()
    nll = -np.take_along_axis(logp, batch.targets["next"][..., None], -1)[..., 0]
    asked = batch.weights > 0
    assert np.array_equal(found.counted_BT, asked)
    assert np.allclose(found.losses_BT[asked], nll[asked], atol=1e-4)
    assert found.loss == pytest.approx(nll[asked].mean(), abs=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_both_engines_take_the_same_snapshot(name):
    run = RUNS[name]("train.precision=float64")
    batch = uneven(run, 7)
    ours, theirs = (snapshot(engine_of(run, kind).model, batch) for kind in ("torch", "numpy"))
    assert ours.heads() == theirs.heads()
    for place, maps in ours.attention.items():
        assert np.array_equal(maps == MASKED, theirs.attention[place] == MASKED)
        assert np.abs(maps.astype(int) - theirs.attention[place].astype(int)).max() <= 1
    assert np.allclose(ours.norms_BRT, theirs.norms_BRT, rtol=1e-5)
    assert np.allclose(ours.losses_BT, theirs.losses_BT, atol=1e-5)
    assert np.allclose(ours.lens_shares, theirs.lens_shares, atol=2e-3)
    assert (ours.words, ours.row_names, ours.complete) == (
        theirs.words,
        theirs.row_names,
        theirs.complete,
    )
    assert ours.loss is not None and ours.loss == pytest.approx(theirs.loss, abs=1e-6)


def test_an_answers_loss_stands_where_it_is_read():
    run = RUNS["digits"]()
    batch = uneven(run, 6)
    found = snapshot(engine_of(run).model, batch)
    ends = batch.valid.sum(1) - 1
    assert np.argwhere(found.counted_BT).tolist() == [[b, end] for b, end in enumerate(ends)]


def test_what_is_long_is_cut():
    """A causal model's losses are those of the whole; another's are not shown."""
    lengths = (TOKENS + 9, TOKENS, 5)
    spec = tiny(max_seq_len=2 * TOKENS)
    batch = batch_of(lengths=lengths)
    model = built(spec).float().eval()
    found = snapshot(model, batch)
    assert found.complete == (False, True, True)
    assert found.attention["self.0"].shape[-2:] == (TOKENS, TOKENS)
    assert [len(words) for words in found.words] == [TOKENS, TOKENS, 5]
    logp = torch.log_softmax(model(batch)["next"].double(), -1).detach().numpy()
    nll = -np.take_along_axis(logp, batch.targets["next"][..., None], -1)[..., 0][:, :TOKENS]
    asked = batch.weights[:, :TOKENS] > 0
    assert np.allclose(found.losses_BT[asked], nll[asked], atol=1e-4)
    seeing = tiny(attention={"causal": False}, heads=(AnswerHead(),), max_seq_len=99)
    asking = replace(batch, targets={"answer": np.array([3, 1, 4])}, weights=None)
    ahead = snapshot(built(seeing).float().eval(), asking)
    assert ahead.counted_BT.any(1).tolist() == [False, True, True]


def test_a_model_of_many_heads_keeps_less():
    small, large = presets.digits(), presets.qwen()
    assert size_limits(small) == (EXAMPLES, TOKENS)
    many = replace(
        large,
        decoder=replace(large.decoder, layers=(replace(large.decoder.layers[0], count=200),)),
    )
    heads = 200 * many.decoder.layers[0].block.attention.n_heads
    examples, tokens = size_limits(many)
    assert examples * heads * tokens**2 <= MAPS
    assert examples >= 1 and tokens >= 8


def test_a_file_can_be_read_again(tmp_path):
    model = built(tiny(encoder=True)).float().eval()
    found = snapshot(model, batch_of(source=(4, 6, 2)), names=lambda i: f'€{i}\n"\\', step=120)
    file = tmp_path / "step-000120.safetensors"
    file.write_bytes(found.to_bytes())
    again = read_probes(file)
    assert again.to_bytes() == found.to_bytes()
    assert repr(again) == repr(found)
    assert again.rows() == found.rows()
    assert again.heads() == found.heads()
    assert file.stat().st_size <= max_bytes(found, VOCAB)
    # other tools open it too
    arrays = safetensors.numpy.load_file(file)
    assert arrays["attention.cross.1"].dtype == np.uint8
    for ending in ("png", "csv", "json", "html"):
        assert again.save(tmp_path / f"probes.{ending}").stat().st_size > 100
    assert "<script" not in again.html()


def test_no_snapshot_is_larger_than_foreseen():
    """Words at their worst: every letter escaped twice, every answer named."""
    model = built(tiny(max_seq_len=MAX_SEQ_LEN)).float().eval()
    for word in ("\U0001f600" * 99, '"' * 99, "\x01" * 99, "\\" * 99):
        found = snapshot(model, batch_of(lengths=(20, 29, 3)), names=lambda i, word=word: word)
        assert len(found.to_bytes()) <= max_bytes(found, VOCAB)


def test_what_is_not_there_is_refused():
    found = snapshot(built(tiny()).float().eval(), batch_of())
    for call in (
        lambda: found.map(3, "L0H0"),
        lambda: found.map(0, "L9H0"),
        lambda: found.map(0, HeadName("cross", 0, 0)),
        lambda: found.top(0, 9),
        lambda: found.top(0, 0, row="L9 mlp"),
    ):
        with pytest.raises(InputError):
            call()


def test_files_that_hold_something_else_are_refused(tmp_path):
    good = snapshot(build(presets.digits()).eval(), uneven(RUNS["digits"](), 6))
    file = tmp_path / "step-000001.safetensors"
    other = tmp_path / "other.safetensors"
    other.write_bytes(safetensors.numpy.save({"x": np.zeros(3)}))
    with pytest.raises(FileError):
        read_probes(other)
    with pytest.raises(InputError):
        read_probes(tmp_path / "missing.safetensors")
    for damage in (
        {"losses_BT": good.losses_BT[:1]},
        {"norms_BRT": good.norms_BRT[:, :1]},
        {"words": good.words[:1]},
        {"words": ((),) * 6},
        {"attention": {}},
        {"attention": {"other.0": good.attention["self.0"]}},
        {"attention": {"self.x": good.attention["self.0"]}},
        {"attention": {"self.0": good.attention["self.0"][:, :, :1]}},
        {"attention": {"self.0": good.attention["self.0"].astype(np.int32)}},
        {"attention": {"self.1": good.attention["self.0"]}},
        {"attention": {"self.00": good.attention["self.0"]}},
        {"attention": {"self.0": good.attention["self.0"], "self.0.5": good.attention["self.0"]}},
        {"attention": {"self.0": good.attention["self.0"][:, :0]}},
        {"step": float("inf")},
        {"step": -1},
        {"examples": (-1,) * 6},
        {"counted_BT": good.counted_BT.astype(np.int64)},
        {"losses_BT": good.losses_BT.astype(np.int64)},
        {"norms_BRT": np.zeros(good.norms_BRT.shape, BFLOAT16)},
        {"lens_ids": good.lens_ids.astype(np.float32)},
        {"lens_ids": good.lens_ids[..., :0], "lens_shares": good.lens_shares[..., :0]},
        {"lens_ids": good.lens_ids[..., 0], "lens_shares": good.lens_shares[..., 0]},
        {
            "row_names": (),
            "norms_BRT": good.norms_BRT[:, :0],
            "lens_ids": good.lens_ids[:, :1],
            "lens_shares": good.lens_shares[:, :1],
        },
        {"lens_ids": good.lens_ids[:, :1]},
        {"source_words": good.words[:1]},
    ):
        file.write_bytes(replace(good, **damage).to_bytes())
        with pytest.raises(FileError):
            read_probes(file)
    whole = good.to_bytes()
    for end in (0, 7, 300, len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(FileError):
            read_probes(file)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path):
    file = tmp_path / "step-000001.safetensors"
    with file.open("wb") as hollow:
        hollow.truncate(LIMIT + 1)
    with pytest.raises(FileError, match="268,435,457 bytes"):
        read_probes(file)
