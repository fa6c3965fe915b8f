"""The forms of a mixture in a decoding step, gathered or all, are the module's."""

import pytest
import torch

from glassformer.gpu.derived_products import FastFeedForward, FastMixtureOfExperts, Maker
from glassformer.nn.experts import MixtureOfExperts
from glassformer.nn.norm import build_norm
from glassformer.spec.model import MLP, MoE, RMSNorm, SwiGLU
from tests.tiny import filled, noise

D = 13
MIXTURES = {
    "gated": MoE(n_experts=7, experts_per_token=2, expert=SwiGLU(d_ff=11)),
    "biased, shared": MoE(
        n_experts=5,
        experts_per_token=2,
        expert=SwiGLU(d_ff=11, bias=True),
        shared=MLP(d_ff=3),
        shared_gate=True,
        normalize=False,
    ),
    "GELU": MoE(n_experts=5, experts_per_token=3, expert=MLP(d_ff=11)),
}


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
@pytest.mark.parametrize("form", ["stacked", "every"])
@pytest.mark.parametrize("name", MIXTURES)
def test_every_form_is_the_module(name, form, rows):
    part = filled(MixtureOfExperts(MIXTURES[name], D)).eval()
    norm = filled(build_norm(RMSNorm(), D))
    derived = FastMixtureOfExperts(part, Maker(), norm=norm)
    assert derived.stacked is not None
    if form == "every":
        derived.stacked = None
        derived.experts = [FastFeedForward(one, Maker(), norm=None) for one in part.experts]
    x_BD = noise(rows, D, seed=rows)
    with torch.inference_mode():
        want = x_BD + part(norm(x_BD)[:, None])[:, 0]
        torch.testing.assert_close(derived.onto(x_BD.clone()), want, rtol=0, atol=1e-12)
