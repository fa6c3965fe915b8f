"""Head roles: hand-made maps score as they must, a hand-made induction model is found out."""

import math

import numpy as np
import pytest
import torch

from glassformer.data.batch import Batch
from glassformer.lens.heads import HeadName
from glassformer.lens.measure import roles
from glassformer.lens.measure.attention import BatchAttention, batch_attention
from glassformer.lens.measure.roles import NO_ROLE, ROLES, head_roles
from glassformer.models.model import build
from glassformer.spec.errors import InputError
from glassformer.spec.model import (
    MLP,
    Attention,
    Block,
    LayerNorm,
    Layers,
    Learned,
    ModelSpec,
    NextHead,
    Stack,
)
from tests.planting import Binary, If, catches
from tests.tiny import built, tiny

HEAD = HeadName("self", 0, 0)
B, T = 3, 7


def maps_of(weights_BTS, *, causal=True, lengths=None):
    """BatchAttention of one head, over rows of these lengths, padded on the right."""
    weights = torch.as_tensor(weights_BTS, dtype=torch.float64)
    rows, length = weights.shape[:2]
    lengths = torch.tensor([length] * rows if lengths is None else lengths)
    place = torch.arange(length).expand(rows, -1)
    real = place < lengths[:, None]
    allow = real[:, :, None] & real[:, None]
    if causal:
        allow = allow & (place[:, :, None] >= place[:, None])
    return BatchAttention(
        {HEAD: weights}, {("self", 0): allow}, {"tokens": place.masked_fill(~real, -1)}
    )


def looking(at, rows=B, length=T):
    """Every query t looks at `at(t)` alone."""
    weights = torch.zeros(rows, length, length)
    for t in range(length):
        weights[:, t, at(t)] = 1.0
    return weights


def even(causal=True):
    allow = torch.ones(T, T).tril() if causal else torch.ones(T, T)
    return (allow / allow.sum(-1, keepdim=True)).expand(B, T, T)


def chance_from(place):
    """A causal head that looks everywhere alike: the queries that come after, from the third."""
    asked = [t for t in range(roles.FROM, T) if t > place]
    return sum(1 / (t + 1) for t in asked) / len(asked)


# --- maps with known roles ------------------------------------------------------------------------


def test_known_maps_score_as_they_must():
    previous = maps_of(looking(lambda t: max(0, t - 1)))
    first = maps_of(looking(lambda t: 0))
    third = maps_of(looking(lambda t: min(t, 3)))
    for found, want in (
        (roles.previous_token(previous, HEAD, at="every"), 1.0),
        (roles.previous_token(first, HEAD, at="every"), 0.0),
        (roles.first_token(first, HEAD, at="every"), 1.0),
        (roles.first_token(previous, HEAD, at="every"), 0.0),
        (roles.fixed_position(third, HEAD, at="every"), 1.0),
    ):
        assert found.score == pytest.approx(want)
    assert roles.fixed_position(third, HEAD, at="every").position == 3
    assert roles.fixed_position(first, HEAD, at="every").lift < 0, "the first has its own role"
    for role in (roles.previous_token, roles.first_token):
        assert role(first, HEAD, at="every").chance == pytest.approx(chance_from(0))
    assert roles.fixed_position(third, HEAD, at="every").chance == pytest.approx(chance_from(3))


@pytest.mark.parametrize("causal", [True, False])
def test_a_head_that_looks_everywhere_alike_is_at_chance(causal):
    maps = maps_of(even(causal), causal=causal)
    for role in (roles.previous_token, roles.first_token, roles.fixed_position):
        found = role(maps, HEAD, at="every")
        assert found.score == pytest.approx(found.chance)
        assert abs(found.lift) < 1e-6
        if not causal:
            assert found.chance == pytest.approx(1 / T)
    assert roles.induction(maps, HEAD, half=3).lift == pytest.approx(0.0, abs=1e-6)


@catches("the earlier copy itself", "lens.measure.roles:induction", Binary("+"), to="{left}")
def test_induction_is_what_followed_the_earlier_copy():
    half = 3
    follows = maps_of(looking(lambda t: max(0, t - half + 1), length=2 * half))
    copies = maps_of(looking(lambda t: max(0, t - half), length=2 * half))
    assert roles.induction(follows, HEAD, half=half).score == 1.0
    assert roles.induction(copies, HEAD, half=half).score == 0.0
    want = sum(1 / (t + 1) for t in range(half, 2 * half)) / half
    assert roles.induction(copies, HEAD, half=half).chance == pytest.approx(want)


def test_padding_is_no_place():
    """Rows of 4 and 6 tokens: the last real place is -1 for both; padded queries are not asked."""
    lengths = [4, 6]
    weights = torch.zeros(2, T, T)
    for row, length in enumerate(lengths):
        weights[row, :length, length - 1] = 1.0
    found = roles.fixed_position(maps_of(weights, causal=False, lengths=lengths), HEAD, at="every")
    assert (found.score, found.position) == (1.0, -1)
    assert found.chance == pytest.approx((1 / 4 + 3 / 6) / 4), "queries 2 of 4, and 2, 3, 4 of 6"
    last = roles.previous_token(maps_of(weights, causal=False, lengths=lengths), HEAD, at="last")
    assert (last.score, last.chance) == (0.0, pytest.approx((1 / 4 + 1 / 6) / 2))


def by_group(share):
    """Rows of two groups: `share` of the attention goes to place 1 or 2 by group, the rest to 0."""
    groups = ["one", "two"] * 6
    weights = torch.zeros(12, T, T)
    for row, group in enumerate(groups):
        weights[row, :, 0] = 1 - share
        weights[row, :, 1 if group == "one" else 2] = share
    return maps_of(weights, causal=False), groups


@catches(
    "chance without shuffling", "lens.measure.roles:group_difference", If("shuffled"), to="False"
)
def test_groups_score_what_moves_between_them():
    for share in (1.0, 0.3, 0.01):
        maps, groups = by_group(share)
        found = roles.group_difference(maps, HEAD, groups, at="every", seed=0)
        assert found.score == pytest.approx(share), "all variance is by group, whatever its size"
        assert found.chance < 0.5 * share
    maps, groups = by_group(1.0)
    mixed = groups[:4] + ["one"] * 4 + ["two"] * 4
    assert roles.group_difference(maps, HEAD, mixed, at="every", seed=0).score < 0.5


def test_groups_that_say_nothing_are_at_chance():
    weights = torch.rand(200, T, T, generator=torch.Generator().manual_seed(3))
    maps = maps_of(weights / weights.sum(-1, keepdim=True), causal=False)
    found = roles.group_difference(maps, HEAD, ["a", "b", "c", "d"] * 50, at="last", seed=1)
    assert found.score == pytest.approx(found.chance, rel=0.2)


def test_groups_are_compared_among_rows_of_one_length():
    """A head that looks at the last token: its map follows the length, never the group."""
    lengths, groups = [4, 4, 4, 4, 6, 6, 6, 6], ["a", "b"] * 4
    weights = torch.zeros(8, T, T)
    for row, length in enumerate(lengths):
        weights[row, :length, length - 1] = 1.0
    maps = maps_of(weights, causal=False, lengths=lengths)
    assert roles.group_difference(maps, HEAD, groups, at="every", seed=0).score == 0.0
    by_length = ["a" if length == 4 else "b" for length in lengths]
    assert math.isnan(roles.group_difference(maps, HEAD, by_length, at="every", seed=0).score)


# --- real models ----------------------------------------------------------------------------------

TOKENS, PLACES = 9, 18
SHARP = 60.0


def induction_model():
    """Two layers by hand. The residual is [token | place | token before]: layer 0 looks one place
    back and writes what it sees there; layer 1 looks for a place whose token before is its own.
    """
    width = 2 * TOKENS + PLACES
    block = Block(attention=Attention(n_heads=1, d_head=PLACES), ffn=MLP(d_ff=1), norm=LayerNorm())
    spec = ModelSpec(
        vocab_size=TOKENS,
        d_model=width,
        max_seq_len=PLACES,
        position=Learned(),
        decoder=Stack(layers=(Layers(count=2, block=block),)),
        heads=(NextHead(tied=False, bias=False),),
    )
    model = build(spec, generator=torch.Generator().manual_seed(0))
    token, place, before = range(TOKENS), range(TOKENS, TOKENS + PLACES), TOKENS + PLACES
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        for i in token:
            model.embed.weight[i, i] = 1.0
        for p in range(PLACES):
            model.position.weight[p, place[p]] = 1.0
        back, match = (part.attn for part in model.blocks)
        for p in range(PLACES - 1):
            back.q_proj.weight[p, place[p + 1]] = SHARP
        for p in range(PLACES):
            back.k_proj.weight[p, place[p]] = 1.0
        for i in token:
            back.v_proj.weight[i, i] = 1.0
            back.o_proj.weight[before + i, i] = 1.0
            match.q_proj.weight[i, i] = SHARP
            match.k_proj.weight[i, before + i] = 1.0
    return model


def test_a_hand_made_induction_model_is_found_out():
    found = head_roles(induction_model())
    assert found.role("L0H0")[0] == "previous token"
    assert found.role("L1H0")[0] == "induction"
    assert found.role("L0H0")[1].score > 0.99
    # The first place has no token before it and copies itself: one query in nine is torn in two.
    assert found.role("L1H0")[1].score == pytest.approx(8.5 / 9, abs=0.02)
    assert found.role("L1H0")[1].chance == pytest.approx(sum(1 / (t + 1) for t in range(9, 18)) / 9)


def test_random_weights_have_no_clear_role():
    found = head_roles(built(tiny()).float())
    assert {row["role"] for row in found.rows()} == {NO_ROLE}
    assert found.tensor.shape == found.chance.shape == found.lift.shape
    assert found.tensor.shape == (len(found.heads), len(ROLES))
    assert torch.isnan(found.tensor[:, ROLES.index("operation")]).all(), "nobody named groups"


def test_the_value_shows_itself(tmp_path):
    found = head_roles(induction_model())
    assert "L1H0" in repr(found) and "induction" in repr(found)
    assert [row["head"] for row in found.rows()] == ["L0H0", "L1H0"]
    assert {"head", "role", "score", "chance", "lift"} <= set(found.rows()[0])
    assert "<script" not in found.html()
    for ending in ("png", "csv", "json", "html"):
        assert found.save(tmp_path / f"roles.{ending}").stat().st_size > 100


def test_padding_on_either_side_changes_no_score():
    model = built(tiny()).float().eval()
    sequences = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]
    right, left = (head_roles(model, Batch.of(sequences, side=side)) for side in ("right", "left"))
    assert torch.allclose(right.tensor, left.tensor, atol=1e-5, equal_nan=True)
    assert torch.allclose(right.chance, left.chance, atol=1e-9, equal_nan=True)


def test_an_encoder_decoder_has_heads_of_three_kinds():
    model = built(tiny(encoder=True)).float()
    found = head_roles(model)
    assert {head.kind for head in found.heads} == {"encoder", "self", "cross"}
    across = [place for place, head in enumerate(found.heads) if head.kind == "cross"]
    for role in ("previous token", "induction"):
        assert torch.isnan(found.tensor[across, ROLES.index(role)]).all()
    assert torch.isfinite(found.tensor[:, ROLES.index("first token")]).all()


def test_maps_are_what_the_taps_show():
    model = built(tiny()).float().eval()
    batch = Batch.of([[3, 1, 4, 1, 5], [9, 2, 6]])
    maps = batch_attention(model, batch)
    for head, weights_BTS in maps.weights.items():
        rows = weights_BTS.sum(-1)
        real = torch.from_numpy(batch.valid)
        assert torch.allclose(rows[real], torch.ones(1, dtype=rows.dtype), atol=1e-6)
        assert (weights_BTS[~maps.allow(head)] == 0).all()
        assert torch.allclose(maps.uniform(head).sum(-1)[real], torch.ones(1).double())


def test_what_cannot_be_scored_is_refused():
    model = built(tiny()).float()
    batch = np.array([[1, 2, 3]])
    for call in (
        lambda: head_roles(model, batch, groups=["a", "b"]),
        lambda: head_roles(model, groups=["a"]),
        lambda: head_roles(model, at="sometimes"),
        lambda: head_roles(model, tokens=[1, 2]),
        lambda: head_roles(model).role("L9H9"),
    ):
        with pytest.raises(InputError):
            call()


def test_the_threshold_decides():
    model = induction_model()
    strict = head_roles(model, threshold=0.999)
    assert strict.role("L1H0")[0] == NO_ROLE
    assert roles.THRESHOLD == 0.5
