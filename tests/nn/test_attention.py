"""The one attention: against torch's, fused against explicit, masked, grouped, windowed."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from glassformer.nn.attention import MultiHeadAttention, attend
from glassformer.nn.mask import Mask, build_mask, mask_from_allow
from glassformer.nn.taps import Taps, TapsAt
from glassformer.spec.model import Attention
from tests.compare import assert_matches
from tests.tiny import filled, noise

B, T, S, N, K, H = 2, 5, 7, 6, 3, 11
D = 13


def explicitly():
    return TapsAt(Taps(read="*"), "")


def qkv(n=N, k=K, t=T, s=S):
    return [noise(B, n, t, H, seed=1), noise(B, k, s, H, seed=2), noise(B, k, s, H, seed=3)]


def reference(q, k, v, allow=None):
    """One query at a time, from the definition; a row that may attend to nothing is zero."""
    group = q.shape[1] // k.shape[1]
    rows = []
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            for t in range(q.shape[2]):
                open_ = slice(None) if allow is None else allow[b, t].nonzero().flatten()
                keys, values = k[b, n // group][open_], v[b, n // group][open_]
                weight = torch.exp(keys @ q[b, n, t] / math.sqrt(q.shape[-1]))
                rows.append((weight / weight.sum()) @ values if len(keys) else 0 * q[b, n, t])
    return torch.stack(rows).view(q.shape)


SOME = torch.rand(B, T, S, generator=torch.Generator().manual_seed(5)) < 0.6
SOME[:, 2] = False  # a query that may attend to nothing
SOME[:, :, 4] = False  # a key that nobody may attend to
PATHS = pytest.mark.parametrize(
    "taps",
    [lambda: None, explicitly, lambda: TapsAt(Taps(read="weights"), "")],
    ids=["fused", "explicit", "explicit, weights only"],
)


@PATHS
@pytest.mark.parametrize("k_heads", [1, 3, 6])
def test_shape_numbers_and_gradients_from_the_definition(taps, k_heads):
    assert_matches(
        lambda q, k, v: attend(q, k, v, mask=Mask(), taps=taps()), reference, qkv(k=k_heads)
    )


@PATHS
def test_masked_with_rows_that_may_attend_to_nothing(taps):
    assert_matches(
        lambda q, k, v: attend(q, k, v, mask=mask_from_allow(SOME), taps=taps()),
        lambda q, k, v: reference(q, k, v, SOME),
        qkv(),
    )


@PATHS
@pytest.mark.parametrize("window", [None, 3])
def test_causal_is_the_triangle(taps, window):
    triangle = torch.ones(B, T, T, dtype=torch.bool).tril()
    if window is not None:
        triangle &= torch.ones(T, T, dtype=torch.bool).triu(1 - window)
    mask = build_mask(T, T, causal=True, window=window)
    assert_matches(
        lambda q, k, v: attend(q, k, v, mask=mask, taps=taps()),
        lambda q, k, v: reference(q, k, v, triangle),
        qkv(s=T),
    )


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_empty_row_is_zero_forward_and_backward_and_never_nan(taps, dtype):
    q, k, v = (x.to(dtype).requires_grad_() for x in qkv())
    allow = SOME.clone()
    allow[1] = False  # a whole sequence of padding
    out = attend(q, k, v, mask=mask_from_allow(allow), taps=taps())
    assert not out[:, :, 2].any()
    assert not out[1].any()
    out.sum().backward()
    for grad in (q.grad, k.grad, v.grad):
        assert grad.isfinite().all()
        assert not grad[1].any()
    assert not q.grad[:, :, 2].any()
    assert not k.grad[:, :, 4].any()
    assert not v.grad[:, :, 4].any()


def test_the_explicit_weights_are_probabilities_over_what_is_allowed():
    taps = explicitly()
    attend(*qkv(), mask=mask_from_allow(SOME), taps=taps)
    weights = taps.taps.seen["weights"]
    assert weights.shape == (B, N, T, S)
    assert not weights[~SOME[:, None].expand(B, N, T, S)].any()
    total = SOME.any(-1)[:, None].double().expand(B, N, T)
    torch.testing.assert_close(weights.sum(-1), total, rtol=0, atol=1e-14)
    want = qkv()[0] @ qkv()[1].repeat_interleave(2, 1).transpose(-2, -1) / math.sqrt(H)
    torch.testing.assert_close(taps.taps.seen["scores"], want, rtol=0, atol=1e-13)


@PATHS
def test_gradient(taps):
    inputs = [noise(1, 2, 3, 2, seed=s).requires_grad_() for s in range(3)]
    allow = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.bool)
    mask = mask_from_allow(allow)
    assert gradcheck(lambda q, k, v: attend(q, k, v, mask=mask, taps=taps()), inputs)


# --- with projections ---------------------------------------------------------------------------


def test_shape_with_grouped_heads_of_their_own_width():
    part = filled(MultiHeadAttention(Attention(n_heads=N, n_kv_heads=K, d_head=H), D))
    assert part(noise(B, T, D), mask=Mask()).shape == (B, T, D)
    assert part(noise(B, T, D), mask=Mask(), context_BSD=noise(B, S, D)).shape == (B, T, D)


@pytest.mark.parametrize("taps", [lambda: None, explicitly], ids=["fused", "explicit"])
def test_the_future_does_not_touch_the_past_bit_for_bit(taps):
    part = filled(MultiHeadAttention(Attention(n_heads=N, n_kv_heads=K, d_head=H), D))
    mask = build_mask(T, T, causal=True)
    x = noise(B, T, D)
    out = part(x, mask=mask, taps=taps())
    for t in range(1, T):
        changed = x.clone()
        changed[:, t:] = noise(B, T - t, D, seed=t)
        assert torch.equal(part(changed, mask=mask, taps=taps())[:, :t], out[:, :t])


def test_the_key_bias_has_no_gradient_and_shifts_nothing():
    part = filled(MultiHeadAttention(Attention(n_heads=2, d_head=4, bias="all"), D))
    out = part(noise(B, T, D), mask=build_mask(T, T, causal=True))
    out.square().sum().backward()
    assert part.k_proj.bias.grad.abs().max() < 1e-12 < part.q_proj.bias.grad.abs().max()


@pytest.mark.parametrize("bias", ["none", "qkv", "all", "no_key", "out"])
def test_gradient_of_the_whole_part(bias):
    part = filled(MultiHeadAttention(Attention(n_heads=2, n_kv_heads=1, d_head=2, bias=bias), 3))
    mask = build_mask(3, 3, causal=True)
    assert gradcheck(lambda x: part(x, mask=mask), [noise(2, 3, 3).requires_grad_()])


@pytest.mark.parametrize("taps", [lambda: None, explicitly], ids=["fused", "explicit"])
def test_dropout_only_in_training_and_right_on_average(taps):
    attention = Attention(n_heads=2, d_head=4)
    part, x = filled(MultiHeadAttention(attention, D, dropout=0.5)), noise(1, 64, D)
    mask = build_mask(64, 64, causal=False)
    part.eval()
    still = part(x, mask=mask, taps=taps())
    assert torch.equal(part(x, mask=mask, taps=taps()), still)
    part.train()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        some = torch.stack([part(x, mask=mask, taps=taps()) for _ in range(200)])
    assert some.std(0).min() > 0
    error = (some.mean(0) - still).abs() / (some.std(0) / math.sqrt(200))
    assert error.max() < 6
