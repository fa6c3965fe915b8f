"""Source 000's contract: `ModelConfig`, `SingleLayerTransformer`, capture."""

import dataclasses

import pytest
import torch

import glassformer as gf
from glassformer.named import fsm_probe
from glassformer.named.fsm_probe import ModelConfig, SingleLayerTransformer, add_positional, capture
from glassformer.nn.position import sinusoids
from glassformer.spec.errors import InputError


def config(**changes):
    fields = {"vocab_size": 11, "num_classes": 3, "num_states": 5, "d_model": 12, "n_heads": 3}
    return ModelConfig(**{**fields, "d_mlp": 17, "max_seq_len": 13, **changes})


def batch():
    tokens = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    return tokens, mask


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 10}, "d_model 10 is not divisible by n_heads 3"),
        ({"vocab_size": 0}, "vocab_size 0 is below 1"),
        ({"max_seq_len": 0}, "max_seq_len 0 is below 1"),
        ({"d_mlp": -1}, "d_mlp -1 is below 1"),
        ({"positional_type": "learned"}, "positional_type 'learned'"),
        ({"factorized_embedding": True}, "give both or neither"),
        ({"factor_rank": 3}, "give both or neither"),
        ({"dropout": 1.0}, r"dropout 1.0 is outside \[0, 1\)"),
    ],
)
def test_the_configuration_is_checked(changes, message):
    with pytest.raises(InputError, match=message):
        config(**changes)


def test_forward_gives_the_dict_of_the_source():
    model = SingleLayerTransformer(config())
    tokens, mask = batch()
    out = model(tokens, mask)
    assert {name: tuple(x.shape) for name, x in out.items()} == {
        "next_logits": (2, 7, 11),
        "class_logits": (2, 7, 3),
        "state_logits": (2, 7, 5),
    }
    assert model(tokens, mask, return_attn=True)["attn"].shape == (2, 3, 7, 7)
    assert "state_logits" not in SingleLayerTransformer(config(num_states=0))(tokens, mask)


def test_pad_gives_and_gets_no_attention():
    model = SingleLayerTransformer(config())
    tokens, mask = batch()
    attn = model(tokens, mask, return_attn=True)["attn"]
    assert attn[0, :, 4:].abs().max() == 0
    assert attn[0, :, :, 4:].abs().max() == 0
    torch.testing.assert_close(attn[0, :, :4].sum(-1), torch.ones(3, 4))
    assert all(x.isfinite().all() for x in model(tokens, mask).values())


def test_the_future_has_no_influence():
    model = SingleLayerTransformer(config())
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    before, after = model(tokens), model(changed)
    for name in before:
        assert torch.equal(before[name][:, :4], after[name][:, :4])
    tokens_seen = set(tokens[0, :2].tolist())
    # Tied: the output side touches every row, so the input side is asked of an untied model.
    untied = SingleLayerTransformer(config(tie_weights=False))
    table = untied.model.embed.weight
    (gradient,) = torch.autograd.grad(untied(tokens)["next_logits"][0, 1].sum(), table)
    touched = set(gradient.abs().sum(1).nonzero().flatten().tolist())
    assert touched <= tokens_seen


def test_tied_weights_are_one_storage():
    model = SingleLayerTransformer(config())
    (weight,) = model.output_weight()
    assert weight is model.model.embed.weight
    factorized = SingleLayerTransformer(config(factorized_embedding=True, factor_rank=2))
    u, v = factorized.output_weight()
    assert u.data_ptr() == factorized.model.embed.u.data_ptr()
    assert v.data_ptr() == factorized.model.embed.v.data_ptr()
    (own,) = SingleLayerTransformer(config(tie_weights=False)).output_weight()
    assert own.shape == (11, 12)


def test_the_l1_penalty_is_of_u():
    model = SingleLayerTransformer(config(factorized_embedding=True, factor_rank=2, l1_u=0.5))
    torch.testing.assert_close(model.l1_penalty(), 0.5 * model.model.embed.u.abs().sum())
    assert SingleLayerTransformer(config()).l1_penalty() == 0


def test_positions_can_be_left_out():
    model = SingleLayerTransformer(config(positional_type="none"))
    assert model.model.position is None
    assert add_positional(torch.zeros(2, 5, 6)).shape == (2, 5, 6)
    torch.testing.assert_close(add_positional(torch.zeros(2, 5, 6))[1], sinusoids(5, 6).float())


def test_capture_fills_a_plain_dict_and_leaves_nothing():
    model = SingleLayerTransformer(config())
    tokens, mask = batch()
    with capture(model) as seen:
        model(tokens, mask)
    assert type(seen) is dict
    assert seen["attn"].shape == (2, 3, 7, 7)
    assert seen["hidden_pre"].shape == seen["hidden_post"].shape == (2, 7, 12)
    seen.clear()
    model(tokens, mask)
    assert seen == {}
    assert not any(part._forward_hooks for part in model.modules())


def test_capture_sees_every_forward_whatever_else_looks():
    model = SingleLayerTransformer(config())
    tokens, mask = batch()

    def full(seen):
        return set(seen) == {"attn", "hidden_pre", "hidden_post"}

    with capture(model) as outer:
        gf.inspect(model, [1, 2, 3])
        assert full(outer) and outer["attn"].shape == (1, 3, 3, 3)
        with capture(model) as inner:
            expected = model(tokens, mask, return_attn=True)["attn"]
        assert full(inner) and torch.equal(inner["attn"], expected)
        assert all(torch.equal(outer[name], inner[name]) for name in outer)
        with gf.trace(model, read="blocks.0.resid_post") as seen:
            model(tokens[:1])
        assert outer["hidden_post"] is seen["blocks.0.resid_post"]
        assert len(inner["attn"]) == len(tokens)  # its block has ended
    with gf.trace(model, read="blocks.0.attn.weights") as seen, capture(model) as inside:
        model(tokens, mask)
    assert seen["blocks.0.attn.weights"] is inside["attn"]
    assert model.scoped_taps is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l1_u": -1.0, "factorized_embedding": True, "factor_rank": 2}, "l1_u -1.0"),
        ({"l1_u": 0.5}, "l1_u=0.5 without U"),
        ({"l1_u": float("nan"), "factorized_embedding": True, "factor_rank": 2}, "l1_u nan"),
        ({"l1_u": "much"}, "l1_u 'much'"),
        ({"tie_weights": "no"}, "tie_weights='no'"),
        ({"tie_weights": 1}, "tie_weights=1"),
        ({"factorized_embedding": "yes", "factor_rank": 2}, "factorized_embedding='yes'"),
        ({"factorized_embedding": True, "factor_rank": 0}, "factor_rank 0"),
        ({"factor_rank": 2}, "give both or neither"),
        ({"n_heads": 0}, "n_heads 0"),
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"dropout": "0.1"}, "dropout"),
    ],
)
def test_a_field_that_would_do_nothing_or_something_else_raises(changes, message):
    with pytest.raises(gf.GlassError, match=message):
        config(**changes)


def test_every_field_and_forward_is_described():
    for field in dataclasses.fields(fsm_probe.ModelConfig):
        assert f"\n    {field.name} " in fsm_probe.ModelConfig.__doc__
    for name in fsm_probe.__all__:
        assert getattr(fsm_probe, name).__doc__
    for part in ("CausalSelfAttention", "PositionalEncoding", "TransformerBlock"):
        assert "(B, T, d_model)" in getattr(fsm_probe, part).forward.__doc__
    assert "attn_mask_bxt" in SingleLayerTransformer.forward.__doc__


def test_the_same_seed_gives_the_same_model_and_output():
    tokens, mask = batch()
    outs = []
    for _ in range(2):
        model = SingleLayerTransformer(config(), generator=torch.Generator().manual_seed(3))
        outs.append(model(tokens, mask)["next_logits"])
    assert torch.equal(*outs)


def test_float64_propagates():
    tokens, mask = batch()
    out = SingleLayerTransformer(config()).double()(tokens, mask)
    assert all(x.dtype == torch.float64 for x in out.values())
