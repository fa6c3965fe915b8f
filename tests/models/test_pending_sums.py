"""Sums that are left to the next norm: the same stream as sums that are made at once."""

import pytest
import torch

from glassformer.models import stack
from glassformer.models.inputs import Inputs
from glassformer.models.model import build
from glassformer.nn.residual import Pending
from glassformer.spec import presets


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_a_stack_that_defers_its_sums_is_the_stack(name, monkeypatch):
    """Hidden states and every gradient, bit for bit, whatever the placement of the norms."""
    model = build(presets.preset(name), generator=torch.Generator().manual_seed(0)).eval()
    tokens_BT = torch.arange(14).view(2, 7) % model.spec.vocab_size
    source_BS = None if model.spec.encoder is None else tokens_BT.flip(1)[:, :5]
    inputs, found = Inputs(tokens_BT, source_BS=source_BS), []
    for defers in (False, True):
        monkeypatch.setattr(stack, "defers_sums", lambda x, defers=defers: defers)
        model.zero_grad()
        hidden_BTD = model.hidden(inputs)
        hidden_BTD.square().sum().backward()
        found.append([hidden_BTD.detach(), *(p.grad for p in model.parameters())])
    for plain, deferred in zip(*found, strict=True):
        assert (plain is None and deferred is None) or torch.equal(plain, deferred)


def test_what_is_pending_is_added_once():
    pending, x, added = Pending(), torch.ones(2, 3, 5), torch.full((2, 3, 5), 2.0)
    assert pending.onto(x) is x
    pending.added_BTD = added
    assert torch.equal(pending.onto(x), x + added) and pending.onto(x) is x
