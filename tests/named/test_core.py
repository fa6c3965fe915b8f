"""Source 002's core: shapes, causality, determinism by seed."""

import pytest
import torch
import torch.nn.functional as F

from glassformer.named.core import MLP, LayerNorm, MultiHeadAttention, Transformer, TransformerBlock
from glassformer.spec.errors import InputError


def x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


PARTS = {
    "attention": lambda g: MultiHeadAttention(15, 5, generator=g),
    "mlp": lambda g: MLP(15, 23, generator=g),
    "block": lambda g: TransformerBlock(15, 5, 23, generator=g),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_keep_the_shape_and_follow_the_seed(name):
    one, two = (PARTS[name](torch.Generator().manual_seed(7)) for _ in range(2))
    other = PARTS[name](torch.Generator().manual_seed(8))
    out = one(x(2, 7, 15))
    assert out.shape == (2, 7, 15)
    assert torch.equal(out, two(x(2, 7, 15)))
    assert not torch.equal(out, other(x(2, 7, 15)))


@pytest.mark.parametrize("name", PARTS)
def test_parts_follow_torchs_own_seed(name):
    outs = []
    for _ in range(2):
        torch.manual_seed(11)
        outs.append(PARTS[name](None)(x(2, 7, 15)))
    assert torch.equal(*outs)


def test_position_i_sees_no_later_one():
    part, before = MultiHeadAttention(15, 5), x(2, 7, 15)
    after = before.clone()
    after[:, 4:] += 1
    assert torch.equal(part(before)[:, :4], part(after)[:, :4])
    assert part.n_heads == 5


def test_heads_must_divide_the_width():
    with pytest.raises(InputError, match="d_model 15 is not divisible by n_heads 4"):
        MultiHeadAttention(15, 4)


def test_layer_norm_normalises():
    out = LayerNorm(11)(x(3, 5, 11) * 4 + 2)
    torch.testing.assert_close(out, F.layer_norm(x(3, 5, 11) * 4 + 2, (11,)))
    torch.testing.assert_close(out.mean(-1), torch.zeros(3, 5), atol=1e-6, rtol=0)


def test_gradients_pass_through_the_residuals():
    block, inputs = TransformerBlock(15, 5, 23), x(2, 7, 15).requires_grad_()
    with torch.no_grad():
        block.attn.o_proj.weight.zero_()
        block.ffn.down_proj.weight.zero_()
    out = block(inputs)
    assert torch.equal(out, inputs)  # both sublayers silent: the residual path is the identity
    out.sum().backward()
    assert torch.equal(inputs.grad, torch.ones_like(inputs))


def test_the_model_gives_logits_fit_for_a_loss():
    model = Transformer(19, 15, 5, 23, 2, max_seq_len=13)
    tokens = torch.randint(0, 19, (3, 11), generator=torch.Generator().manual_seed(2))
    logits = model(tokens)
    assert logits.shape == (3, 11, 19)
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert all(p.grad is not None for p in model.parameters())
