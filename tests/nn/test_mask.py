"""Permissions against loops that say the rule in words; rows that may attend to nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.nn.mask import (
    Mask,
    build_mask,
    causal_allow,
    mask_from_allow,
    padding_allow,
    window_allow,
)
from glassformer.spec.errors import InputError

DEVICE = torch.device("cpu")


def bools(*rows):
    return torch.tensor(rows, dtype=torch.bool)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 7), (3, 7)])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 11])
def test_causal_and_window_by_loop(queries, keys, window):
    causal, both = (
        torch.zeros(queries, keys, dtype=torch.bool),
        torch.zeros(queries, keys, dtype=torch.bool),
    )
    for t in range(queries):
        here = keys - queries + t
        for s in range(keys):
            near = window is None or abs(here - s) < window
            causal[t, s] = s <= here and near
            both[t, s] = near
    assert torch.equal(causal_allow(queries, keys, window=window), causal)
    if window is not None:
        assert torch.equal(window_allow(queries, keys, window=window), both)


def test_padding_neither_attends_nor_is_attended_to():
    allow = padding_allow(bools([1, 0]), bools([1, 0, 1]))
    assert allow.shape == (1, 1, 2, 3)
    assert torch.equal(allow[0, 0], bools([1, 0, 1], [0, 0, 0]))


def test_the_kernels_own_triangle_is_used_where_it_is_enough():
    assert build_mask(5, 5, causal=True).causal
    assert build_mask(5, 5, causal=True).allow is None
    assert build_mask(5, 5, causal=True, window=5).causal
    assert build_mask(1, 7, causal=True).allow is None
    assert build_mask(5, 7, causal=False).allow is None
    assert build_mask(3, 7, causal=True).allow is not None
    assert build_mask(1, 7, causal=True, window=3).allow is not None


def effective(mask, queries, keys, batch):
    """What the two halves of a mask mean together, (B, T, S)."""
    allow = mask.explicit(queries, DEVICE)
    if allow is None:
        allow = torch.ones(queries, keys, dtype=torch.bool)
    allow = allow.expand(batch, 1, queries, keys)
    return allow[:, 0] if mask.empty is None else (allow & ~mask.empty)[:, 0]


@given(
    queries=st.integers(1, 5),
    past=st.integers(0, 3),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 2, 4]),
    padded=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_all_rules_together_by_loop(queries, past, causal, window, padded, packed, seed):
    batch, keys = 2, queries + past
    draw = torch.Generator().manual_seed(seed)
    valid = torch.randint(2, (batch, keys), generator=draw).bool() if padded else None
    segments = torch.randint(2, (batch, keys), generator=draw).sort(1).values if packed else None
    mask = build_mask(
        queries,
        keys,
        causal=causal,
        window=window,
        valid_q_BT=None if valid is None else valid[:, past:],
        valid_k_BS=valid,
        segments_q_BT=None if segments is None else segments[:, past:],
        segments_k_BS=segments,
    )
    got = effective(mask, queries, keys, batch)
    for b in range(batch):
        for t in range(queries):
            here = past + t
            for s in range(keys):
                low, high = min(s, here), max(s, here)
                between = high - low if valid is None else int(valid[b, low + 1 : high + 1].sum())
                want = not causal or s <= here
                want &= window is None or between < window
                want &= valid is None or bool(valid[b, here] & valid[b, s])
                want &= segments is None or bool(segments[b, here] == segments[b, s])
                assert bool(got[b, t, s]) == want, (b, t, s)


def test_a_row_that_may_attend_to_nothing_is_open_for_the_kernel_and_marked():
    mask = mask_from_allow(bools([1, 0], [0, 0]))
    assert torch.equal(mask.allow, bools([1, 0], [1, 1]))
    assert torch.equal(mask.empty, bools([0], [1]))


def test_own_permissions_get_a_head_dimension():
    assert mask_from_allow(torch.ones(2, 3, 5, dtype=torch.bool)).allow.shape == (2, 1, 3, 5)
    assert mask_from_allow(torch.ones(2, 7, 3, 5, dtype=torch.bool)).allow.shape == (2, 7, 3, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_that_is_not_bool_is_refused(dtype):
    with pytest.raises(InputError, match="bool, True = may attend"):
        mask_from_allow(torch.ones(3, 3, dtype=dtype))


def test_what_is_added_closes_what_is_not_allowed_and_is_made_once_a_length_and_dtype():
    some = mask_from_allow(torch.rand(2, 5, 7) < 0.5)
    for mask in (Mask(causal=True), Mask(), some):
        for q in (torch.zeros(2, 3, 5, 1), torch.zeros(2, 3, 5, 1, dtype=torch.float64)):
            bias, allow = mask.added(q), mask.explicit(5, q.device)
            assert bias.dtype == q.dtype
            assert set(bias.flatten().tolist()) <= {0.0, -torch.inf}
            assert torch.equal(bias == 0, torch.ones(1, 1) == 1 if allow is None else allow)
            assert mask.added(q) is bias
    assert Mask(causal=True).added(torch.zeros(1, 1, 3, 1)).shape == (3, 3)
