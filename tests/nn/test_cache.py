"""Both caches hold the same past: grown, fixed, padded, reordered; in 8 bits, once rounded."""

import numpy as np
import pytest
import torch

from glassformer.costs.estimates import cache_bytes
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.cache import FixedCache, GrowingCache, from_int8, joined_valid, to_int8
from glassformer.nn.mask import Mask, build_mask
from glassformer.spec.errors import InputError
from glassformer.spec.model import Attention, Rotary
from tests.tiny import built, filled, noise, tiny

B, K, H, D = 3, 2, 5, 13
CACHES = pytest.mark.parametrize(
    "make", [GrowingCache, lambda: FixedCache(11)], ids=["grow", "fix"]
)


def bools(*rows):
    return torch.tensor(rows, dtype=torch.bool)


@CACHES
def test_what_was_put_in_comes_out_in_order(make):
    cache, steps = make(), [4, 1, 2]
    k_all, v_all = noise(2, B, K, 7, H, seed=1), noise(2, B, K, 7, H, seed=2)
    for count in steps:
        end = cache.length + count
        for layer in range(2):
            new = slice(cache.length, end)
            k, v = cache.extend(layer, k_all[layer, :, :, new], v_all[layer, :, :, new])
            assert torch.equal(k, k_all[layer, :, :, :end])
            assert torch.equal(v, v_all[layer, :, :, :end])
        cache.advance(count, None)
        assert cache.length == end
    assert cache.valid_BS is None


@CACHES
def test_validity_is_remembered_only_once_some_place_is_padded(make):
    cache = make()
    cache.advance(2, None)
    assert cache.valid_BS is None
    cache.advance(2, bools([1, 0], [1, 1], [0, 1]))
    cache.advance(1, None)
    want = bools([1, 1, 1, 0, 1], [1, 1, 1, 1, 1], [1, 1, 0, 1, 1])
    assert torch.equal(cache.valid_BS, want)


def test_joining_knows_all_four_cases():
    past, new = bools([1, 0]), bools([0])
    assert joined_valid(None, 2, None, 1) is None
    assert torch.equal(joined_valid(past, 2, None, 1), bools([1, 0, 1]))
    assert torch.equal(joined_valid(None, 2, new, 1), bools([1, 1, 0]))
    assert torch.equal(joined_valid(past, 2, new, 1), bools([1, 0, 0]))


@CACHES
@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1], [0, 2, 2], [2, 1], [0, 0, 1, 1, 2]])
def test_reorder_moves_rows_of_everything_and_later_steps_follow(make, rows):
    cache, rows = make(), torch.tensor(rows)
    k, v = noise(B, K, 4, H, seed=1), noise(B, K, 4, H, seed=2)
    valid = bools([1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1])
    cache.extend(0, k, v)
    cache.cross[0] = (k + 1, v + 1)
    cache.advance(4, valid)
    cache.reorder(rows)
    more_k, more_v = (noise(len(rows), K, 1, H, seed=seed) for seed in (3, 4))
    got_k, got_v = cache.extend(0, more_k, more_v)
    assert torch.equal(got_k, torch.cat((k[rows], more_k), 2))
    assert torch.equal(got_v, torch.cat((v[rows], more_v), 2))
    assert torch.equal(cache.cross[0][0], k[rows] + 1)
    assert torch.equal(cache.cross[0][1], v[rows] + 1)
    assert torch.equal(cache.valid_BS, valid[rows])


def test_a_fixed_cache_says_when_it_is_full_and_is_unharmed():
    cache = FixedCache(5)
    k = noise(B, K, 4, H)
    cache.extend(0, k, k)
    cache.advance(4, None)
    with pytest.raises(InputError, match="holds 5 positions, and 6 are needed"):
        cache.extend(0, k[:, :, :2], k[:, :, :2])
    assert cache.length == 4
    assert torch.equal(cache.extend(0, k[:, :, :1], k[:, :, :1])[0][:, :, :4], k)


def test_a_fixed_cache_takes_its_memory_once():
    cache = FixedCache(7)
    places = set()
    for _ in range(7):
        k, _ = cache.extend(0, noise(B, K, 1, H), noise(B, K, 1, H))
        cache.advance(1, None)
        places.add(k.data_ptr())
    assert len(places) == 1


@CACHES
def test_attention_step_by_step_is_attention_at_once(make):
    part = filled(MultiHeadAttention(Attention(n_heads=4, n_kv_heads=2, d_head=H), D))
    x, cache, rows = noise(B, 7, D), make(), []
    whole = part(x, mask=build_mask(7, 7, causal=True))
    for start, end in [(0, 3), (3, 4), (4, 7)]:
        mask = build_mask(end - start, end, causal=True)
        rows.append(part(x[:, start:end], mask=mask, cache=cache))
        cache.advance(end - start, None)
    torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=0, atol=1e-12)


@CACHES
def test_cross_keys_are_computed_once(make):
    part = filled(MultiHeadAttention(Attention(n_heads=2, d_head=H, causal=False), D))
    cache, context, x = make(), noise(B, 5, D, seed=2), noise(B, 1, D)
    first = part(x, mask=Mask(), context_BSD=context, cache=cache)
    kept = cache.cross[0]
    again = part(x, mask=Mask(), context_BSD=noise(B, 5, D, seed=3), cache=cache)
    assert cache.cross[0] is kept
    assert torch.equal(first, again)
    assert torch.equal(first, part(x, mask=Mask(), context_BSD=context))


# --- keys and values in 8 bits --------------------------------------------------------------------

ROUNDED = pytest.mark.parametrize(
    "make",
    [lambda: GrowingCache(kv_cache="int8"), lambda: FixedCache(11, kv_cache="int8")],
    ids=["grow", "fix"],
)


def by_definition(x):
    """Codes and scales, a group at a time, in NumPy: nothing is shared with the cache."""
    codes = np.zeros(x.shape, dtype=np.int8)
    scales = np.zeros((*x.shape[:-1], -(-x.shape[-1] // 32)), dtype=np.float32)
    for place in np.ndindex(scales.shape):
        group = slice(32 * place[-1], 32 * place[-1] + 32)
        numbers = x[place[:-1]][group].astype(np.float32)
        scale = np.float32(max(abs(number) for number in numbers) / np.float32(127))
        scales[place] = scale
        if scale > 0:
            codes[place[:-1]][group] = [
                min(127, max(-127, round(float(n / scale)))) for n in numbers
            ]
    return codes, scales


@pytest.mark.parametrize("width", [5, 32, 37, 80])
def test_codes_and_scales_are_their_definition(width):
    x = noise(2, 3, 7, width, seed=5).float()
    x[0, 0, 0] = 0.0
    x[1, 2, 3, :4] = torch.tensor([127.0, 0.5, -1.5, 2.5])
    codes, scale = to_int8(x)
    assert (codes.shape, scale.shape) == ((2, 3, 7, width), (2, 3, 7, -(-width // 32)))
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
    want_codes, want_scale = by_definition(x.numpy())
    assert np.array_equal(codes.numpy(), want_codes) and np.array_equal(scale.numpy(), want_scale)
    wide = np.repeat(want_scale, 32, -1)[..., :width]
    assert np.array_equal(from_int8(codes, scale, torch.float32).numpy(), want_codes * wide)
    assert (np.abs(x.numpy() - want_codes * wide) <= wide * 0.50001).all(), "half a step at most"


def test_what_is_not_finite_spoils_its_own_group_alone():
    x = noise(1, 1, 3, 70).float()
    x[0, 0, 1, 40], x[0, 0, 2, 69] = torch.nan, torch.inf
    back = from_int8(*to_int8(x), torch.float32)
    assert back[0, 0, 0].isfinite().all()
    assert back[0, 0, 1].isnan().tolist() == [32 <= n < 64 for n in range(70)]
    assert back[0, 0, 2].isnan().tolist() == [n >= 64 for n in range(70)]


@ROUNDED
def test_a_vector_is_rounded_once_however_it_came(make):
    """In any pieces, after a cut and a reorder: the bits of rounding each vector by itself."""
    k, v = noise(B, K, 7, 37, seed=1), noise(B, K, 7, 37, seed=2)
    want = [from_int8(*to_int8(x), x.dtype) for x in (k, v)]
    cache = make()
    for start, end in [(0, 4), (4, 5), (5, 7)]:
        got = cache.extend(0, k[:, :, start:end], v[:, :, start:end])
        cache.advance(end - start, None)
        assert all(torch.equal(a, b[:, :, :end]) for a, b in zip(got, want, strict=True))
    rows = torch.tensor([2, 0, 0])
    assert cache.rewind([3, 3, 3]) == [3, 3, 3]
    cache.reorder(rows)
    got = cache.extend(0, k[rows][:, :, 3:5], v[rows][:, :, 3:5])
    assert all(torch.equal(a, b[rows][:, :, :5]) for a, b in zip(got, want, strict=True))


@ROUNDED
def test_attention_over_rounded_keys_step_by_step_is_attention_at_once(make):
    part = filled(MultiHeadAttention(Attention(n_heads=4, n_kv_heads=2, d_head=H), D))
    x, cache, rows = noise(B, 7, D), make(), []
    fresh = GrowingCache(kv_cache="int8")
    whole = part(x, mask=build_mask(7, 7, causal=True), cache=fresh)
    for start, end in [(0, 3), (3, 4), (4, 7)]:
        mask = build_mask(end - start, end, causal=True)
        rows.append(part(x[:, start:end], mask=mask, cache=cache))
        cache.advance(end - start, None)
    torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=0, atol=1e-12)
    plain = part(x, mask=build_mask(7, 7, causal=True))
    moved, size = (x.detach().abs().max() for x in (whole - plain, plain))
    assert 1e-6 < float(moved) < 0.05 * float(size)
    assert cache.cross == {}


def test_bytes_are_those_that_the_spec_predicts():
    spec = tiny(position=Rotary(), attention={"n_heads": 4, "n_kv_heads": 2, "d_head": 64})
    model = built(spec).float()
    for kv_cache, itemsize in (("float", 4), ("int8", 0)):
        for cache in (GrowingCache(kv_cache=kv_cache), FixedCache(5, kv_cache=kv_cache)):
            model.hidden(model.inputs(torch.tensor([[1, 2, 3, 4, 5]] * 3)), cache=cache)
            want = cache_bytes(spec, batch=3, length=5, itemsize=itemsize, kv_cache=kv_cache)
            assert cache.nbytes == want
    assert want / cache_bytes(spec, batch=3, length=5, itemsize=4) == 0.28125
