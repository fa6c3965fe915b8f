import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from glassformer.nn.norm import LayerNorm, RMSNorm, build_norm
from glassformer.spec import model as spec
from tests.tiny import filled, noise

WIDTH = 7


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_shape(kind):
    assert filled(kind(WIDTH, eps=1e-5))(noise(2, 3, 5, WIDTH)).shape == (2, 3, 5, WIDTH)


def test_layernorm_gives_mean_0_and_variance_1_whatever_the_scale():
    norm = LayerNorm(WIDTH, eps=1e-12).double()
    nn.init.ones_(norm.weight)
    nn.init.zeros_(norm.bias)
    x = 1e3 * noise(5, WIDTH) + 1e3
    y = norm(x)
    torch.testing.assert_close(y.mean(-1), torch.zeros(5).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(y.var(-1, unbiased=False), torch.ones(5).double())
    torch.testing.assert_close(norm(7 * x - 2), y)


def test_rmsnorm_gives_mean_square_1_and_keeps_direction():
    norm = RMSNorm(WIDTH, eps=1e-12).double()
    nn.init.ones_(norm.weight)
    x = noise(5, WIDTH)
    y = norm(x)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(5).double())
    torch.testing.assert_close(torch.cosine_similarity(x, y), torch.ones(5).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_in_half_precision_is_the_float32_result_rounded(dtype):
    """The square of 300 overflows float16; the statistics must not."""
    norm = RMSNorm(WIDTH, eps=1e-6).to(dtype)
    nn.init.ones_(norm.weight)
    x = (300 * noise(5, WIDTH)).to(dtype)
    wide = RMSNorm(WIDTH, eps=1e-6)
    nn.init.ones_(wide.weight)
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), wide(x.float()).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_gradient(kind):
    assert gradcheck(filled(kind(5, eps=1e-5)), [noise(2, 5).requires_grad_()])


def test_a_spec_says_which():
    assert isinstance(build_norm(spec.LayerNorm(eps=1e-3), 5), LayerNorm)
    rms = build_norm(spec.RMSNorm(eps=1e-3), 5)
    assert isinstance(rms, RMSNorm)
    assert rms.eps == 1e-3
    assert "eps=0.001" in repr(rms)
