import math

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from glassformer.nn.embedding import build_embedding
from glassformer.spec.model import FactorizedEmbedding, PlainEmbedding, ScaledEmbedding
from tests.compare import assert_matches
from tests.tiny import filled, noise, token_ids

V, D, R = 13, 7, 5
ALL = [PlainEmbedding(), ScaledEmbedding(), FactorizedEmbedding(rank=R, l1=0.25)]


def table(part):
    return part.u @ part.v if hasattr(part, "u") else part.weight


@pytest.mark.parametrize("embedding", ALL)
def test_shapes_both_ways(embedding):
    part = filled(build_embedding(embedding, V, D))
    assert part(token_ids(2, 3, vocab=V)).shape == (2, 3, D)
    assert part.as_linear(noise(2, 3, D)).shape == (2, 3, V)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_table_is_torchs_times_the_scale(scaled):
    ours = filled(build_embedding(ScaledEmbedding() if scaled else PlainEmbedding(), V, D))
    theirs = nn.Embedding(V, D).double()
    scale = math.sqrt(D) if scaled else 1.0
    assert_matches(
        ours,
        lambda tokens: theirs(tokens) * scale,
        [token_ids(2, 3, vocab=V)],
        parameters={"weight": (ours.weight, theirs.weight)},
    )


def test_full_rank_and_an_identity_are_a_plain_table():
    plain = filled(build_embedding(PlainEmbedding(), V, D))
    factored = filled(build_embedding(FactorizedEmbedding(rank=D), V, D))
    with torch.no_grad():
        factored.u.copy_(plain.weight)
        factored.v.copy_(torch.eye(D))
    tokens = token_ids(2, 3, vocab=V)
    assert torch.equal(factored(tokens), plain(tokens))


@pytest.mark.parametrize("embedding", ALL)
def test_backwards_is_the_transposed_table_without_the_scale(embedding):
    part, x = filled(build_embedding(embedding, V, D)), noise(2, 3, D)
    torch.testing.assert_close(part.as_linear(x), x @ table(part).T, rtol=0, atol=1e-13)


def test_the_penalty_is_l1_of_u_and_its_gradient_the_sign():
    part = filled(build_embedding(FactorizedEmbedding(rank=R, l1=0.25), V, D))
    penalty = part.penalty()
    assert penalty.item() == pytest.approx(0.25 * float(abs(part.u.detach().numpy()).sum()))
    penalty.backward()
    assert torch.equal(part.u.grad, 0.25 * part.u.detach().sign())
    assert part.v.grad is None


@pytest.mark.parametrize("embedding", ALL)
def test_gradient_and_unused_rows(embedding):
    part = filled(build_embedding(embedding, V, D))
    assert gradcheck(part.as_linear, [noise(2, D).requires_grad_()])
    part(torch.tensor([[0, 2]])).sum().backward()
    rows = part.u if hasattr(part, "u") else part.weight
    used = rows.grad.abs().sum(1) > 0
    assert used.nonzero().flatten().tolist() == [0, 2]
