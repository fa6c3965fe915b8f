import pytest
import torch
from torch.autograd import gradcheck

from glassformer.nn.embedding import build_embedding
from glassformer.nn.heads import TiedHead, read_out
from glassformer.spec.errors import InputError
from glassformer.spec.model import FactorizedEmbedding, PlainEmbedding
from tests.tiny import filled, noise

V, D = 11, 7
RIGHT = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)
LEFT = RIGHT.flip(1)
NOTHING = torch.zeros(3, 5, dtype=torch.bool)


def by_hand(x, valid, readout):
    rows = [row[ok] for row, ok in zip(x, valid, strict=True)]
    pick = {"last": lambda r: r[-1], "first": lambda r: r[0], "mean": lambda r: r.mean(0)}[readout]
    return torch.stack([pick(row) for row in rows])


@pytest.mark.parametrize("readout", ["last", "first", "mean"])
@pytest.mark.parametrize("valid", [RIGHT, LEFT, None], ids=["right", "left", "whole"])
def test_an_answer_is_read_from_real_tokens(readout, valid):
    x = noise(3, 5, D)
    want = by_hand(x, torch.ones(3, 5, dtype=torch.bool) if valid is None else valid, readout)
    got = read_out(x, valid, readout=readout)
    assert got.shape == (3, D)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("readout", ["last", "first", "mean"])
@pytest.mark.parametrize("valid", [RIGHT, LEFT], ids=["right", "left"])
def test_padding_is_never_read_and_gets_no_gradient(readout, valid):
    x = noise(3, 5, D).requires_grad_()
    read_out(x, valid, readout=readout).sum().backward()
    assert not x.grad[~valid].any()
    changed = torch.where(valid[..., None], x, noise(3, 5, D, seed=5))
    assert torch.equal(
        read_out(x, valid, readout=readout), read_out(changed, valid, readout=readout)
    )


@pytest.mark.parametrize("readout", ["last", "first", "mean"])
def test_gradient(readout):
    x = noise(3, 5, D).requires_grad_()
    assert gradcheck(lambda x: read_out(x, LEFT, readout=readout), [x])


@pytest.mark.parametrize("readout", ["last", "first", "mean"])
def test_a_row_of_padding_gives_numbers(readout):
    assert read_out(noise(3, 5, D), NOTHING, readout=readout).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_mean_keeps_the_dtype(dtype):
    assert read_out(noise(3, 5, D).to(dtype), LEFT, readout="mean").dtype == dtype


def test_an_unknown_readout_is_named():
    with pytest.raises(InputError, match="median"):
        read_out(noise(3, 5, D), None, readout="median")


@pytest.mark.parametrize("embedding", [PlainEmbedding(), FactorizedEmbedding(rank=3)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_tied_head_holds_no_weight_of_its_own(embedding, bias):
    embed, head = filled(build_embedding(embedding, V, D)), filled(TiedHead(V, bias=bias))
    x = noise(2, 3, D)
    assert sum(p.numel() for p in head.parameters()) == (V if bias else 0)
    dense = embed.weight if isinstance(embedding, PlainEmbedding) else embed.u @ embed.v
    want = x @ dense.T + (head.bias if bias else 0)
    torch.testing.assert_close(head(x, embed), want, rtol=0, atol=1e-13)
    head(x, embed).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in embed.parameters())
