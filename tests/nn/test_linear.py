from torch import nn
from torch.autograd import gradcheck

from glassformer.nn.linear import Linear
from tests.compare import assert_matches
from tests.tiny import filled, noise


def test_shape():
    assert filled(Linear(5, 7, bias=True))(noise(2, 3, 5)).shape == (2, 3, 7)


def test_numbers_and_gradients_are_torchs():
    ours, theirs = filled(Linear(5, 7, bias=True)), nn.Linear(5, 7).double()
    pairs = {"weight": (ours.weight, theirs.weight), "bias": (ours.bias, theirs.bias)}
    assert_matches(ours, theirs, [noise(2, 3, 5)], parameters=pairs)


def test_without_a_bias_zero_stays_zero():
    ours = filled(Linear(5, 7, bias=False))
    assert ours.bias is None
    assert not ours(noise(3, 5) * 0).any()
    assert repr(ours) == "Linear(5 -> 7, bias=False)"


def test_gradient():
    assert gradcheck(filled(Linear(3, 5, bias=True)), [noise(2, 3).requires_grad_()])
