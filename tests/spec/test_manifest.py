"""The manifest alone: counts in closed form, ties, decay, roles, what is zero by theory."""

import pytest
from hypothesis import given

from glassformer.costs.parameter_table import format_table, parameter_table
from glassformer.spec.init import Constant, Gaussian, Uniform
from glassformer.spec.manifest import (
    attention_parameters,
    block_parameters,
    count_parameters,
    ffn_parameters,
    manifest,
    norm_parameters,
    stored,
)
from glassformer.spec.model import (
    MLP,
    Attention,
    ClassHead,
    FactorizedEmbedding,
    HeInit,
    LayerNorm,
    Learned,
    NextHead,
    NormalInit,
    RMSNorm,
    Rotary,
    SwiGLU,
    XavierInit,
    tap_shapes,
)
from glassformer.spec.presets import PRESETS, budget_lm, fsm_probe, preset
from tests.strategies import model_specs
from tests.tiny import D_FF, D_MODEL, MAX_SEQ_LEN, VOCAB, tiny

INIT = NormalInit()


def size(parameters):
    return sum(p.size for p in parameters)


def test_attention_without_bias_is_4_d_squared():
    assert size(attention_parameters(Attention(n_heads=3), "", 21, init=INIT)) == 4 * 21**2


def test_swiglu_is_3_d_dff_and_an_mlp_2():
    assert size(ffn_parameters(SwiGLU(d_ff=17), "", 13, init=INIT)) == 3 * 13 * 17
    assert size(ffn_parameters(MLP(d_ff=17, bias=False), "", 13, init=INIT)) == 2 * 13 * 17
    assert size(ffn_parameters(MLP(d_ff=17), "", 13, init=INIT)) == 2 * 13 * 17 + 17 + 13


@pytest.mark.parametrize(
    ("bias", "letters"),
    [("none", ""), ("qkv", "qkv"), ("all", "qkvo"), ("no_key", "qvo"), ("out", "o")],
)
def test_the_bias_policy_says_which_projections_carry_one(bias, letters):
    attention = Attention(n_heads=3, n_kv_heads=1, d_head=5, bias=bias)
    biased = [p for p in attention_parameters(attention, "", 13, init=INIT) if p.kind == "bias"]
    assert [p.name for p in biased] == [f"{letter}_proj.bias" for letter in letters]


def test_grouped_keys_are_narrower():
    shapes = {
        p.name: p.shape
        for p in attention_parameters(
            Attention(n_heads=6, n_kv_heads=2, d_head=5, qk_norm=RMSNorm()), "", 13, init=INIT
        )
    }
    assert shapes == {
        "q_proj.weight": (30, 13),
        "k_proj.weight": (10, 13),
        "v_proj.weight": (10, 13),
        "o_proj.weight": (13, 30),
        "q_norm.weight": (5,),
        "k_norm.weight": (5,),
    }


def test_norms_hold_a_gain_and_only_layernorm_a_shift():
    assert [p.name for p in norm_parameters(LayerNorm(), "n.", 5)] == ["n.weight", "n.bias"]
    assert [p.name for p in norm_parameters(RMSNorm(), "n.", 5)] == ["n.weight"]


def test_a_whole_model_in_closed_form():
    """Source 001: V d + T d + L (4 d^2 + 3 d f + 2 norms) + the final norm; tied, so no head."""
    V, d, f, L, T = 97, 24, 31, 5, 41
    spec = budget_lm(vocab_size=V, d_model=d, d_ff=f, n_layers=L, n_heads=3, max_seq_len=T)
    total = V * d + T * d + L * (4 * d * d + 3 * d * f + 2 * 2 * d) + 2 * d
    assert count_parameters(spec) == total
    untied = budget_lm(
        vocab_size=V, d_model=d, d_ff=f, n_layers=L, n_heads=3, max_seq_len=T, tied=False
    )
    assert count_parameters(untied) == total + V * d


def test_a_factorized_table_costs_rank_times_vocab_plus_width():
    plain, factorized = tiny(), tiny(embedding=FactorizedEmbedding(rank=5))
    difference = count_parameters(factorized) - count_parameters(plain)
    assert difference == 5 * (VOCAB + D_MODEL) - VOCAB * D_MODEL


def test_ties_point_at_owners_of_the_same_shape():
    spec = tiny(
        encoder=True,
        share_embedding=True,
        embedding=FactorizedEmbedding(rank=5),
        heads=(NextHead(tied=True, bias=True),),
    )
    ties = {p.name: p.tied_to for p in manifest(spec) if p.tied_to}
    assert ties == {
        "decoder.embed.u": "encoder.embed.u",
        "decoder.embed.v": "encoder.embed.v",
        "heads.next.u": "encoder.embed.u",
        "heads.next.v": "encoder.embed.v",
    }
    assert "heads.next.bias" in stored(spec)


@given(model_specs())
def test_every_manifest_is_sound(spec):
    parameters = manifest(spec)
    owners = stored(spec)
    assert len({p.name for p in parameters}) == len(parameters)
    for p in parameters:
        assert all(n >= 1 for n in p.shape)
        assert p.decay == (p.kind == "matrix")
        if p.tied_to is not None:
            assert owners[p.tied_to].shape == p.shape
        if p.kind == "bias":
            assert p.init == Constant(value=0.0)
        if p.kind == "gain":  # 0 where 1 is added to it
            assert p.init in (Constant(value=1.0), Constant(value=0.0))
    assert count_parameters(spec) == sum(p.size for p in owners.values())
    assert len(tap_shapes(spec)) > 5


@given(model_specs())
def test_the_table_adds_up(spec):
    *rows, total = parameter_table(spec)
    assert total.parameters == count_parameters(spec) == sum(row.parameters for row in rows)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert format_table(spec).splitlines()[-1].split()[-1] == "100.00%"


def test_the_key_bias_is_idle_unless_something_turns_or_norms_the_key():
    def idle(**changes):
        return [p.name for p in manifest(tiny(layers=1, **changes)) if p.zero_gradient]

    assert idle() == ["blocks.0.attn.k_proj.bias"]
    assert idle(position=Rotary()) == []
    assert idle(attention={"qk_norm": RMSNorm()}) == []
    assert idle(attention={"bias": "no_key"}) == []
    crossed = idle(encoder=True, position=Rotary())
    assert crossed == ["decoder.blocks.0.cross.k_proj.bias"]


# --- initialisation policies --------------------------------------------------------------------


def rules(init, **changes):
    return {p.name: p.init for p in manifest(tiny(init=init, position=Learned(), **changes))}


def glorot(rows, columns):
    return Uniform(bound=(6 / (rows + columns)) ** 0.5)


def test_xavier_is_glorots_bound_everywhere():
    made = rules(XavierInit())
    assert made["blocks.0.attn.q_proj.weight"] == glorot(12, D_MODEL)
    assert made["blocks.1.ffn.up_proj.weight"] == glorot(D_FF, D_MODEL)
    assert made["embed.weight"] == glorot(VOCAB, D_MODEL)
    assert made["position.weight"] == glorot(MAX_SEQ_LEN, D_MODEL)


def test_normal_is_one_std_and_scaled_residuals_are_gpt2s():
    made = rules(NormalInit(std=0.02))
    assert {rule for rule in made.values() if isinstance(rule, Gaussian)} == {Gaussian(std=0.02)}
    made = rules(NormalInit(std=0.02, scale_residual=True), layers=3)
    scaled = Gaussian(std=0.02 / 6**0.5)  # two writers in each of three layers
    writers = {n for n, rule in made.items() if rule == scaled}
    assert writers == {
        f"blocks.{i}.{leaf}.weight" for i in range(3) for leaf in ("attn.o_proj", "ffn.down_proj")
    }


def test_cross_attention_counts_as_a_writer():
    made = rules(NormalInit(std=0.02, scale_residual=True), layers=2, encoder=True)
    assert made["encoder.blocks.0.attn.o_proj.weight"] == Gaussian(std=0.02 / 4**0.5)
    assert made["decoder.blocks.0.cross.o_proj.weight"] == Gaussian(std=0.02 / 6**0.5)


def test_he_stands_before_relu_and_xavier_elsewhere():
    made = rules(HeInit(), ffn=MLP(d_ff=D_FF, activation="relu"))
    assert made["blocks.0.ffn.up_proj.weight"] == Gaussian(std=(2 / D_MODEL) ** 0.5)
    assert made["blocks.0.ffn.down_proj.weight"] == glorot(D_MODEL, D_FF)
    assert made["embed.weight"] == Gaussian(std=D_MODEL**-0.5)
    assert rules(HeInit())["blocks.0.ffn.up_proj.weight"] == glorot(D_FF, D_MODEL)


# --- presets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_a_manifest(name):
    assert count_parameters(preset(name)) > 0


def test_presets_say_what_their_sources_say():
    probe = preset("fsm-probe")
    block = next(probe.decoder.blocks())
    assert (probe.n_layers, block.placement, probe.decoder.final_norm) == (1, "pre", None)
    assert probe.head_names() == ("next", "class", "state")
    assert fsm_probe(num_states=0).head_names() == ("next", "class")
    digits = preset("digits")
    assert next(digits.decoder.blocks()).placement == "post"
    assert digits.head_names() == ("answer",)
    paper = preset("seq2seq")
    assert (paper.d_model, paper.n_layers, paper.encoder.n_layers) == (512, 6, 6)
    assert next(paper.decoder.blocks()).ffn == MLP(d_ff=2048, activation="relu")
    assert paper.decoder.final_norm is None
    assert preset("seq2seq-pre").decoder.final_norm == LayerNorm()
    sliding = [block.attention.window for block in preset("qwen-sliding").decoder.blocks()]
    assert sliding == [None, None, 5]


def test_an_unknown_preset_gets_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'qwen'"):
        preset("qwem")


def test_part_functions_agree_with_the_whole():
    spec = tiny(layers=1, heads=(ClassHead(num_classes=3),))
    block = next(spec.decoder.blocks())
    part = list(block_parameters(block, "blocks.0.", D_MODEL, init=spec.init))
    whole = [p for p in manifest(spec) if p.layer == 0]
    assert [(p.name, p.shape) for p in part] == [(p.name, p.shape) for p in whole]
