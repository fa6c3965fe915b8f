"""What must hold of each part whatever the numbers are."""

import numpy as np
import pytest
import torch

from glassformer.byhand.activation import gelu_forward, relu_forward, silu_forward
from glassformer.byhand.attention import (
    CALM,
    attend_backward,
    attend_forward,
    masked_softmax,
    softmax_backward,
    softmax_forward,
)
from glassformer.byhand.embedding import (
    embedding_backward,
    l1_penalty,
    rotate_forward,
    rotations,
    sinusoids,
)
from glassformer.byhand.experts import route_forward
from glassformer.byhand.heads import readout_forward
from glassformer.byhand.inputs import allow_of, positions_of
from glassformer.byhand.linear import linear_forward
from glassformer.byhand.loss import cross_entropy_backward, cross_entropy_forward
from glassformer.byhand.model import Model
from glassformer.byhand.norm import layer_norm_backward, layer_norm_forward, rms_norm_forward
from glassformer.byhand.pass_context import PassContext, Workspace
from glassformer.nn.mask import build_mask
from glassformer.spec import model as spec
from tests.byhand.parts import ALLOW, B, D, H, K, N, S, T
from tests.byhand.witness import PRESETS, case_for

rng = np.random.default_rng(3)
DOUBLE = np.dtype(np.float64)


def pass_context() -> PassContext:
    return PassContext(Workspace(np.float64))


def test_linear_is_linear() -> None:
    x, y, w = rng.standard_normal((5, 7)), rng.standard_normal((5, 7)), rng.standard_normal((3, 7))
    both = linear_forward(2 * x + y, weight_OI=w)[0]
    apart = 2 * linear_forward(x, weight_OI=w)[0] + linear_forward(y, weight_OI=w)[0]
    np.testing.assert_allclose(both, apart, atol=1e-13)


@pytest.mark.parametrize("rows", [5, 300])
def test_repeated_tokens_accumulate(rows: int) -> None:
    tokens = np.array([[2, 2, 4], [2, 0, 4]])
    d = embedding_backward(np.ones((2, 3, 7)), (tokens, 1.0), dtable_VD=np.zeros((rows, 7)))
    np.testing.assert_array_equal(d[:5, 0], [1, 0, 3, 0, 2])
    assert not d[5:].any()


def test_embedding_backward_adds() -> None:
    d = embedding_backward(np.ones((1, 1, 2)), (np.array([[1]]), 1.0), dtable_VD=np.ones((3, 2)))
    np.testing.assert_array_equal(d[:, 0], [1, 2, 1])


def test_l1_penalty_pulls_towards_zero() -> None:
    u, du = np.array([[2.0, -3.0, 0.0]]), np.zeros((1, 3))
    assert l1_penalty(u, l1=0.5, du_VR=du) == 2.5
    np.testing.assert_array_equal(du, [[0.5, -0.5, 0.0]])


def test_sinusoids_are_bounded_and_unique() -> None:
    table = sinusoids(61, d_model=D)
    assert np.abs(table).max() <= 1
    assert len(np.unique(table.round(9), axis=0)) == 61
    np.testing.assert_array_equal(table[0], np.arange(D) % 2)


def test_rotation_keeps_lengths_and_sees_differences_only() -> None:
    cos, sin = rotations(spec.Rotary(base=100.0), length=23, d_head=H, dtype=DOUBLE)
    q, k = (rng.standard_normal(H) for _ in range(2))
    turned_q = rotate_forward(np.tile(q, (1, 1, 23, 1)), cos=cos, sin=sin)[0][0, 0]
    turned_k = rotate_forward(np.tile(k, (1, 1, 23, 1)), cos=cos, sin=sin)[0][0, 0]
    np.testing.assert_allclose(np.linalg.norm(turned_q, axis=1), np.linalg.norm(q))
    np.testing.assert_allclose(turned_q[3] @ turned_k[7], turned_q[13] @ turned_k[17])


def test_layer_norm_has_mean_0_and_variance_1_and_ignores_shift_and_scale() -> None:
    x, one, zero = rng.standard_normal((7, 101)), np.ones(101), np.zeros(101)
    out, cache = layer_norm_forward(x, weight_D=one, bias_D=zero, eps=1e-12)
    np.testing.assert_allclose(out.mean(-1), 0, atol=1e-12)
    np.testing.assert_allclose(out.var(-1), 1, atol=1e-10)
    again, _ = layer_norm_forward(5 * x + 3, weight_D=one, bias_D=zero, eps=1e-12)
    np.testing.assert_allclose(out, again, atol=1e-10)
    dx, _, _ = layer_norm_backward(rng.standard_normal((7, 101)), cache)
    np.testing.assert_allclose(dx.sum(-1), 0, atol=1e-11)  # a shift changes nothing
    np.testing.assert_allclose((dx * x).sum(-1), 0, atol=1e-9)  # nor does a scale


def test_rms_norm_has_mean_square_1() -> None:
    out, _ = rms_norm_forward(rng.standard_normal((7, 101)), weight_D=np.ones(101), eps=1e-12)
    np.testing.assert_allclose((out**2).mean(-1), 1, atol=1e-10)


def test_activations_at_the_ends() -> None:
    x = np.array([[-1e4, -50.0, 0.0, 50.0, 1e4]])
    for forward in (relu_forward, gelu_forward, silu_forward):
        np.testing.assert_allclose(forward(x)[0], np.maximum(x, 0), atol=1e-18)
        assert np.isfinite(forward(x)[1]).all()


def test_softmax_sums_to_one_and_ignores_a_shift() -> None:
    x = rng.standard_normal((7, 11))
    out, cache = softmax_forward(x)
    np.testing.assert_allclose(out.sum(-1), 1)
    np.testing.assert_allclose(softmax_forward(x + 1e4)[0], out, atol=1e-11)
    assert np.isfinite(softmax_forward(x * 1e4)[0]).all()
    dx = softmax_backward(rng.standard_normal((7, 11)), cache)
    np.testing.assert_allclose(dx.sum(-1), 0, atol=1e-14)


def test_the_calm_way_of_softmax_is_the_shifted_way() -> None:
    scores = rng.standard_normal((B, N, T, S))
    allow = ALLOW.astype(np.float64)
    calm = masked_softmax(scores.copy(), allow_BNTS=allow)
    loud = masked_softmax(scores + 2 * CALM, allow_BNTS=allow)
    np.testing.assert_allclose(calm, loud, atol=1e-13)


def test_attention_weights_sum_to_one_and_empty_rows_give_zeros() -> None:
    q, k, v = (rng.standard_normal((B, n, s, H)) for n, s in ((N, T), (K, S), (K, S)))
    out, cache = attend_forward(
        q, k_BKSH=k, v_BKSH=v, pass_context=pass_context(), allow=ALLOW.astype(np.float64)
    )
    total = cache.weights_BNTS.sum(-1)
    np.testing.assert_allclose(total, np.broadcast_to(ALLOW.any(-1), total.shape))
    assert not cache.weights_BNTS[~np.broadcast_to(ALLOW, (B, N, T, S))].any()
    assert not out[1, 2].any()
    dq, _, _ = attend_backward(np.ones((B, N, T, H)), cache, pass_context=pass_context())
    assert not dq[1, :, 2].any()
    assert dq[1, :, 3].any()


def test_grouped_heads_are_repeated_heads() -> None:
    q, k, v = (rng.standard_normal((B, n, s, H)) for n, s in ((N, T), (K, S), (K, S)))
    grouped = attend_forward(q, k_BKSH=k, v_BKSH=v, pass_context=pass_context())[0]
    k, v = (np.repeat(x, N // K, axis=1) for x in (k, v))
    np.testing.assert_allclose(
        attend_forward(q, k_BKSH=k, v_BKSH=v, pass_context=pass_context())[0], grouped
    )


def test_dropout_keeps_the_mean_and_is_off_without_a_generator() -> None:
    carried = PassContext(Workspace(np.float32), rng=np.random.default_rng(0))
    keep = carried.keep((997, 101), 0.3)
    assert keep is not None
    assert set(np.unique(keep)) == {np.float32(0), np.float32(1 / 0.7)}
    assert abs(keep.mean() - 1) < 0.01
    assert PassContext(Workspace(np.float32)).keep((2, 2), 0.3) is None
    assert carried.keep((2, 2), 0.0) is None


def test_readouts() -> None:
    hidden = np.arange(5.0)[None, :, None] * np.ones((2, 5, 3))
    valid = np.array([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]], np.bool_)
    for readout, want in (("last", [3, 4]), ("first", [1, 0]), ("mean", [2, 2])):
        out, _ = readout_forward(hidden, valid_BT=valid, readout=readout)
        np.testing.assert_allclose(out[:, 0], want)


def test_cross_entropy_of_a_sure_answer_and_of_a_sure_mistake() -> None:
    logits = np.array([[1e4, 0.0, 0.0], [0.0, 1e4, 0.0]])
    loss, cache = cross_entropy_forward(logits, targets=np.array([0, 0]))
    assert loss == 5e3  # the mean of 0 and 1e4, and no logarithm of 0
    np.testing.assert_allclose(cross_entropy_backward(1.0, cache), [[0, 0, 0], [-0.5, 0.5, 0]])


def test_cross_entropy_rows_sum_to_zero_and_what_does_not_count_gets_nothing() -> None:
    targets, weights = np.array([1, -100, 2]), np.array([1.0, 0.0, 2.0])
    _, cache = cross_entropy_forward(rng.standard_normal((3, 5)), targets=targets, weights=weights)
    d = cross_entropy_backward(1.0, cache)
    np.testing.assert_allclose(d.sum(-1), 0, atol=1e-16)
    assert not d[1].any()
    nothing, cache = cross_entropy_forward(
        rng.standard_normal((3, 5)), targets=targets, weights=np.zeros(3)
    )
    assert nothing == 0.0
    assert not cross_entropy_backward(1.0, cache).any()


def test_permissions() -> None:
    def allow(before: int | None = None, after: int | None = 0) -> np.ndarray:
        made = allow_of(before=before, after=after, queries=4, keys=4, dtype=DOUBLE)
        assert made is not None
        return made[0, 0]

    np.testing.assert_array_equal(allow(), np.tril(np.ones((4, 4))))
    np.testing.assert_array_equal(
        allow(before=1), np.tril(np.ones((4, 4))) - np.tril(np.ones((4, 4)), -2)
    )
    np.testing.assert_array_equal(allow(before=1, after=1), np.tri(4, k=1) - np.tri(4, k=-2))
    assert allow_of(before=None, after=None, queries=4, keys=4, dtype=DOUBLE) is None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 6])
def test_a_window_counts_real_tokens_as_torch_does(causal: bool, queries: int) -> None:
    valid_BS = np.array([[1, 1, 0, 0, 1, 1], [0, 1, 1, 0, 1, 1], [1] * 6], np.bool_)
    valid_BT = valid_BS[:, 6 - queries :]
    ours = allow_of(
        before=1,
        after=0 if causal else 1,
        queries=queries,
        keys=6,
        dtype=DOUBLE,
        valid_q_BT=valid_BT,
        valid_k_BS=valid_BS,
    )
    theirs = build_mask(
        queries,
        6,
        causal=causal,
        window=2,
        valid_q_BT=torch.from_numpy(valid_BT),
        valid_k_BS=torch.from_numpy(valid_BS),
    )
    np.testing.assert_array_equal(ours, (theirs.allow & ~theirs.empty).numpy())


def test_positions_count_real_tokens_and_begin_again_in_every_segment() -> None:
    valid = np.array([[0, 0, 1, 1], [1, 1, 0, 0]], np.bool_)
    np.testing.assert_array_equal(positions_of(4, valid_BS=valid)[0], [0, 0, 0, 1])
    segments = np.array([[7, 7, 7, 2, 2]])
    np.testing.assert_array_equal(positions_of(5, segments_BT=segments), [[0, 1, 2, 0, 1]])
    valid = np.array([[1, 1, 0, 1, 1]], np.bool_)  # a segment that begins with padding
    segments = np.array([[0, 0, 1, 1, 1]])
    found = positions_of(5, valid_BS=valid, segments_BT=segments)
    np.testing.assert_array_equal(found, [[0, 1, 0, 0, 1]])
    assert positions_of(3, past=2) == slice(2, 5)


def test_equal_router_logits_choose_the_lowest_index() -> None:
    logits = np.zeros((7, 5))
    logits[::2, 0] = -1.0
    routing, _, _ = route_forward(logits, chosen=2)
    np.testing.assert_array_equal(
        routing[::2] > 0, np.tile([False, True, True, False, False], (4, 1))
    )
    np.testing.assert_array_equal(
        routing[1::2] > 0, np.tile([True, True, False, False, False], (3, 1))
    )
    np.testing.assert_allclose(routing.sum(-1), 1.0, atol=1e-15)


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero() -> None:
    """Also where the last step left one."""
    spec_of = PRESETS["moe"]
    model, case = Model(spec_of, rng=np.random.default_rng(4)), case_for(spec_of)
    routers = [grad for name, grad in model.params.items() if name.endswith("ffn.gate.weight")]
    for router in routers:
        router[...] = 0.0  # every token goes to the first two
    model.grad_vector.fill(7.0)
    model.loss_and_grads(case.inputs(model), targets=case.targets)
    for name, grad in model.grads.items():
        if ".experts." in name:
            chosen = int(name.split(".experts.")[1].partition(".")[0]) < 2
            assert grad.any() == chosen, name
