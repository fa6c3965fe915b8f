"""Models of other interfaces: the checks they are asked, and the rows that see their mistakes."""

import pytest
import torch

import glasscheck as gc
from tests.checks.interfaces import MODELS


def made(kind, fault=""):
    torch.manual_seed(3)
    return kind(fault).eval()


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_healthy_models_pass_what_they_offer(kind):
    found = gc.verify(made(kind))
    assert found.failed == 0, found
    assert found.ran >= MODELS[kind][0], found


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind, (_, faults) in MODELS.items() for fault in faults],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_mistake_fails_its_row(kind, fault):
    found = gc.verify(made(kind, fault))
    failed = [f.name for f in found.findings if f.failed]
    assert MODELS[kind][1][fault] in failed, found
