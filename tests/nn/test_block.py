"""A block against torch's encoder and decoder layers, pre and post."""

import pytest
import torch
from torch.autograd import gradcheck

from glassformer.nn.block import TransformerBlock
from glassformer.nn.mask import Mask, build_mask
from glassformer.spec.model import MLP, Attention, Block, Dropout, LayerNorm, RMSNorm, SwiGLU
from tests.tiny import filled, noise

B, T, S, D, N, F_ = 2, 5, 7, 21, 3, 11
PLACEMENTS = pytest.mark.parametrize("placement", ["pre", "post"])


def block(*, placement="pre", activation="relu", crossed=False, causal=False, **changes):
    blind = Attention(n_heads=N, bias="all", causal=False)
    fields = {
        "attention": Attention(n_heads=N, bias="all", causal=causal),
        "ffn": MLP(d_ff=F_, activation=activation),
        "norm": LayerNorm(),
        "placement": placement,
        "cross": blind if crossed else None,
    }
    return Block(**fields | changes)


def made(spec, *, d_model=D, dropout=None):
    return filled(TransformerBlock(spec, d_model, dropout=dropout or Dropout()))


@PLACEMENTS
def test_shape_with_parts_that_torch_has_not(placement):
    spec = block(
        placement=placement,
        attention=Attention(n_heads=6, n_kv_heads=2, d_head=5, qk_norm=RMSNorm()),
        ffn=SwiGLU(d_ff=F_),
        norm=RMSNorm(),
    )
    part = made(spec, d_model=13)
    assert part(noise(B, T, 13), mask=build_mask(T, T, causal=True)).shape == (B, T, 13)


def silenced(part, *names):
    with torch.no_grad():
        for name in names:
            projection = part.get_submodule(name)
            projection.weight.zero_()
            projection.bias.zero_()


def test_pre_norm_is_the_identity_when_its_parts_are_silent():
    part = made(block(crossed=True))
    silenced(part, "attn.o_proj", "cross.o_proj", "ffn.down_proj")
    x = noise(B, T, D)
    out = part(x, mask=Mask(), memory_BSD=noise(B, S, D), memory_mask=Mask())
    assert torch.equal(out, x)


def test_post_norm_norms_the_residual_itself():
    part = made(block(placement="post"))
    silenced(part, "attn.o_proj", "ffn.down_proj")
    x = noise(B, T, D)
    assert torch.equal(part(x, mask=Mask()), part.ffn_norm(part.attn_norm(x)))


def test_the_residual_carries_the_gradient_whole():
    """Pre-norm: d out / d x is the identity plus what the parts add."""
    part = made(block())
    silenced(part, "attn.o_proj", "ffn.down_proj")
    x = noise(B, T, D).requires_grad_()
    probe = noise(B, T, D, seed=8)
    (grad,) = torch.autograd.grad(part(x, mask=Mask()), x, probe)
    assert torch.equal(grad, probe)


def test_cross_attention_reads_keys_and_values_from_the_memory():
    part = made(block(crossed=True, causal=True))
    x, memory = noise(B, T, D), noise(B, S, D, seed=2)
    mask = build_mask(T, T, causal=True)
    memory.requires_grad_()
    out = part(x, mask=mask, memory_BSD=memory, memory_mask=Mask())
    (grad,) = torch.autograd.grad(out.square().sum(), memory)
    assert (grad.abs().sum(-1) > 0).all()


@PLACEMENTS
@pytest.mark.parametrize("crossed", [False, True])
def test_gradient(placement, crossed):
    attention = Attention(n_heads=1, bias="all", causal=False)
    spec = block(
        placement=placement,
        attention=attention,
        cross=attention if crossed else None,
        ffn=MLP(d_ff=2, activation="gelu"),
    )
    part = made(spec, d_model=3)
    memory = noise(1, 2, 3, seed=4).requires_grad_()

    def run(x, memory):
        return part(x, mask=Mask(), memory_BSD=memory, memory_mask=Mask())

    inputs = [noise(1, 3, 3).requires_grad_(), memory if crossed else memory.detach()]
    assert gradcheck(run, inputs)


@PLACEMENTS
def test_every_parameter_but_the_key_bias_gets_a_gradient(placement):
    part = made(block(placement=placement, crossed=True))
    out = part(noise(B, T, D), mask=Mask(), memory_BSD=noise(B, S, D), memory_mask=Mask())
    (out * noise(B, T, D, seed=3)).sum().backward()
    dead = {name for name, p in part.named_parameters() if p.grad.abs().max() < 1e-12}
    assert dead == {"attn.k_proj.bias", "cross.k_proj.bias"}
