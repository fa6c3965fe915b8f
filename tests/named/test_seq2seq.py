"""Source 004's names: masks, layers, the paper's defaults, parity with PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from glassformer.checks.rows.layers import block_pairs
from glassformer.named.seq2seq import (
    DecoderLayer,
    EncoderLayer,
    PositionalEncoding,
    Transformer,
    causal_mask,
    padding_mask,
    scaled_dot_product_attention,
)
from glassformer.spec.errors import InputError


def x(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_mask_builders():
    mask = padding_mask(torch.tensor([3, 1]))
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    assert padding_mask(torch.tensor([2]), max_length=4).tolist() == [[True, True, False, False]]
    assert causal_mask(3).tolist() == [[True, False, False], [True, True, False], [True] * 3]


def test_attention_with_real_padding_matches_pytorch():
    q, k, v = (x(2, 3, 5, 7, seed=seed) for seed in (1, 2, 3))
    allow = padding_mask(torch.tensor([5, 2]))[:, None, None].expand(2, 1, 5, 5)
    out, weights = scaled_dot_product_attention(q, k, v, allow)
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(q, k, v, attn_mask=allow), atol=1e-5, rtol=0
    )
    assert weights[1, :, :, 2:].abs().max() == 0
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))


def test_large_scores_stay_finite():
    q = torch.full((1, 1, 3, 4), 1e4)
    out, weights = scaled_dot_product_attention(q, q, x(1, 1, 3, 4))
    assert out.isfinite().all()
    assert weights.isfinite().all()


def test_positional_encoding_is_a_buffer():
    part = PositionalEncoding(6, max_seq_len=11)
    assert not list(part.parameters())
    assert "table" in dict(part.named_buffers())
    torch.testing.assert_close(part(torch.zeros(2, 3, 6))[0, 1, 0], torch.tensor(1.0).sin())


@pytest.mark.parametrize("pre_norm", [False, True])
def test_layers_match_pytorch(pre_norm):
    settings = {"dropout": 0.0, "batch_first": True, "norm_first": pre_norm}
    valid = padding_mask(torch.tensor([5, 3]))
    ours = EncoderLayer(12, 3, 17, dropout=0.0, pre_norm=pre_norm)
    theirs = nn.TransformerEncoderLayer(12, 3, 17, **settings)
    for pair in block_pairs("layer", ours, theirs):
        pair.copy()
    expected = theirs(x(2, 5, 12), src_key_padding_mask=~valid)
    torch.testing.assert_close(ours(x(2, 5, 12), valid)[valid], expected[valid], atol=1e-5, rtol=0)

    ours = DecoderLayer(12, 3, 17, dropout=0.0, pre_norm=pre_norm)
    theirs = nn.TransformerDecoderLayer(12, 3, 17, **settings)
    for pair in block_pairs("layer", ours, theirs):
        pair.copy()
    target, memory = x(2, 7, 12, seed=2), x(2, 5, 12, seed=3)
    expected = theirs(target, memory, tgt_mask=~causal_mask(7), memory_key_padding_mask=~valid)
    torch.testing.assert_close(ours(target, memory, valid), expected, atol=1e-5, rtol=0)


def test_the_defaults_are_the_papers():
    with torch.device("meta"):
        layer = EncoderLayer()
    assert layer.ffn.up_proj.weight.shape == (2048, 512)
    spec = Transformer(7, 11, d_model=16, heads=2, N=1).model.spec
    assert spec.encoder.layers[0].block.placement == "post"
    assert spec.decoder.dropout.residual == 0.1
    from inspect import signature

    defaults = {p.name: p.default for p in signature(Transformer).parameters.values()}
    assert (defaults["d_model"], defaults["N"], defaults["heads"]) == (512, 6, 8)


def test_the_model_reads_the_source_and_not_its_padding():
    model = Transformer(7, 11, d_model=12, heads=3, N=2, dropout=0.0)
    source = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    target = torch.tensor([[1, 2, 3], [4, 5, 6]])
    valid = padding_mask(torch.tensor([4, 2]))
    logits = model(source, target, valid)
    assert logits.shape == (2, 3, 11)
    noise = source.clone()
    noise[1, 2:] = 3
    assert torch.equal(model(noise, target, valid), logits)
    other = source.clone()
    other[1, 0] = 1
    assert not torch.equal(model(other, target, valid)[1], logits[1])
    with pytest.raises(InputError, match="d_model 10 is not divisible by n_heads 3"):
        Transformer(7, 11, d_model=10, heads=3)


def test_every_parameter_gets_a_gradient_but_the_key_bias():
    model = Transformer(7, 11, d_model=12, heads=3, N=2, dropout=0.0)
    source = torch.tensor([[0, 1, 2, 3, 4, 5, 6]])
    target = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    model(source, target).square().sum().backward()
    for name, parameter in model.named_parameters():
        size = parameter.grad.abs().max()
        assert size < 1e-4 if name.endswith("k_proj.bias") else size > 1e-4, name
