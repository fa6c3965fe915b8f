import pytest
import torch
from torch.autograd import gradcheck

from glassformer.nn.ffn import build_ffn
from glassformer.nn.operations import activate
from glassformer.spec.model import MLP, Clamp, SwiGLU
from tests.tiny import filled, noise

D, F_ = 5, 11
ALL = [
    MLP(d_ff=F_, activation="relu"),
    MLP(d_ff=F_, activation="gelu"),
    MLP(d_ff=F_, activation="gelu_tanh", bias=False),
    SwiGLU(d_ff=F_),
    SwiGLU(d_ff=F_, bias=True),
    SwiGLU(d_ff=F_, clamp=Clamp(limit=0.5)),
]


@pytest.mark.parametrize("ffn", ALL)
def test_shape(ffn):
    assert filled(build_ffn(ffn, D))(noise(2, 3, D)).shape == (2, 3, D)


@pytest.mark.parametrize("ffn", ALL)
def test_each_position_stands_alone(ffn):
    part, x = filled(build_ffn(ffn, D)), noise(2, 3, D)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(part(x[:, order]), part(x)[:, order], rtol=0, atol=1e-14)


@pytest.mark.parametrize("ffn", ALL)
def test_gradient(ffn):
    assert gradcheck(filled(build_ffn(ffn, D)), [noise(2, D).requires_grad_()])


@pytest.mark.parametrize("ffn", ALL)
def test_dropout_only_in_training(ffn):
    part, x = filled(build_ffn(ffn, D, dropout=0.5)), noise(4, 3, D)
    part.eval()
    assert torch.equal(part(x), part(x))
    part.train()
    assert not torch.equal(part(x), part(x))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_in_place_without_gradients_is_the_same(activation):
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1))
    expected = activate(x.clone(), activation)
    with torch.no_grad():
        spare = x.clone()
        assert torch.equal(activate(spare, activation), expected)
        assert torch.equal(spare, expected)
    assert not torch.equal(x, expected)
