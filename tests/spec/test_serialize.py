"""Plain data and back, strictly; overrides."""

import json
from dataclasses import replace

import pytest
from hypothesis import given

from glassformer.spec import decoding, init, model, position, tasks, train
from glassformer.spec.errors import InputError
from glassformer.spec.model import (
    MLP,
    AnswerHead,
    Attention,
    Block,
    Dropout,
    FactorizedEmbedding,
    LayerNorm,
    Layers,
    Learned,
    ModelSpec,
    NextHead,
    NoPosition,
    RMSNorm,
    Rotary,
    YarnScaling,
)
from glassformer.spec.presets import PRESETS, preset
from glassformer.spec.serialize import from_dict, from_json, override, to_dict, to_json
from tests.strategies import model_specs
from tests.tiny import tiny


@given(model_specs())
def test_json_gives_back_the_same_spec(spec):
    text = to_json(spec)
    again = from_json(ModelSpec, text)
    assert again == spec
    assert to_json(again) == text
    assert from_dict(ModelSpec, to_dict(spec)) == spec


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    assert from_json(ModelSpec, to_json(preset(name))) == preset(name)


def message_of(data):
    with pytest.raises(InputError) as caught:
        from_dict(ModelSpec, data)
    return str(caught.value)


def test_an_unknown_key_gets_the_nearest_one_and_its_path():
    data = to_dict(tiny())
    data["d_modle"] = 4
    assert message_of(data) == "d_modle: unknown key; did you mean 'd_model'?"
    data = to_dict(tiny())
    data["decoder"]["layers"][0]["block"]["attention"]["n_head"] = 4
    assert message_of(data).startswith(
        "decoder.layers.0.block.attention.n_head: unknown key; did you mean 'n_heads'?"
    )


def test_all_problems_are_told_at_once():
    data = to_dict(tiny())
    del data["vocab_size"]
    data["colour"] = "red"
    data["max_seq_len"] = "long"
    data["position"] = {"kind": "Rotray"}
    data["decoder"]["layers"][0]["block"]["ffn"]["d_ff"] = 0
    data["decoder"]["layers"][0]["block"]["placement"] = "per"
    lines = [line.strip() for line in message_of(data).splitlines()]
    assert lines[0] == "6 problems:"
    assert sorted(lines[1:]) == [
        "colour: unknown key; known: "
        "d_model, decoder, embedding, encoder, heads, init, max_seq_len, position, "
        "share_embedding, source_vocab_size, token_types, vocab_size",
        "decoder.layers.0.block.ffn: d_ff 0 is below 1 (the nearest valid d_ff is 1)",
        "decoder.layers.0.block.placement: unknown value 'per'; did you mean 'pre'?",
        "max_seq_len: 'long' is not a whole number",
        "position: unknown kind 'Rotray'; did you mean 'Rotary'?",
        "vocab_size: missing",
    ]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("vocab_size", 7.0, "vocab_size: 7.0 is not a whole number"),
        ("vocab_size", True, "vocab_size: True is not a whole number"),
        ("vocab_size", None, "vocab_size: None is not a whole number"),
        ("share_embedding", 1, "share_embedding: 1 is not true or false"),
        ("heads", "next", "heads: 'next' is not a list"),
        ("heads", [{"tied": True}], "heads.0: needs a kind"),
        ("decoder", 3, "decoder: 3 is not a table of fields"),
        ("init", {"kind": "NormalInit", "std": float("nan")}, "init.std: nan is not a finite"),
        ("init", {"kind": "NormalInit", "std": "big"}, "init.std: 'big' is not a number"),
        ("d_model", -1, "d_model -1 is below 1 (the nearest valid d_model is 1)"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(path, value, words):
    assert words in message_of({**to_dict(tiny()), path: value})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, '{"vocab_size": ' + "9" * 5_000 + "}", "[1]", "null", '"spec"'],
    ids=["empty", "cut", "deep", "huge number", "list", "null", "text"],
)
def test_what_is_no_spec_is_bad_input(text):
    with pytest.raises(InputError):
        from_json(ModelSpec, text)


def test_nan_is_never_written():
    assert json.loads(to_json(tiny()), parse_constant=pytest.fail)


# --- overrides ----------------------------------------------------------------------------------


def test_overrides_reach_every_kind_of_field():
    spec = override(tiny(), ["vocab_size=23", "decoder.dropout=0.1"])
    assert spec.vocab_size == 23
    assert spec.decoder.dropout == Dropout.from_number(0.1)
    spec = override(
        spec,
        [
            "decoder.dropout.residual=0.2",
            "position=Learned",
            "decoder.final_norm=RMSNorm",
            "decoder.layers.count=3",
            "decoder.layers.0.block.ffn.d_ff=5",
            'embedding={"kind": "FactorizedEmbedding", "rank": 3}',
            'heads=[{"kind": "AnswerHead", "readout": "mean"}]',
        ],
    )
    assert spec.decoder.dropout == Dropout(embedding=0.1, attention=0.1, residual=0.2, ffn=0.1)
    assert spec.position == Learned()
    assert spec.decoder.final_norm == RMSNorm()
    assert spec.n_layers == 3
    assert next(spec.decoder.blocks()).ffn == MLP(d_ff=5)
    assert spec.embedding == FactorizedEmbedding(rank=3)
    assert spec.heads == (AnswerHead(readout="mean"),)


def test_null_takes_a_part_away():
    spec = tiny(
        final_norm=RMSNorm(),
        position=Rotary(scaling=YarnScaling(factor=4.0, original_max_seq_len=16)),
    )
    assert override(spec, ["decoder.final_norm=null"]).decoder.final_norm is None
    assert override(spec, ["position.scaling=null"]).position == Rotary()
    assert override(spec, ["position=NoPosition"]).position == NoPosition()


def test_a_later_override_wins_and_the_old_spec_stays():
    spec = tiny()
    assert override(spec, ["vocab_size=5", "vocab_size=6"]).vocab_size == 6
    assert spec == tiny()
    assert override(spec, []) == spec


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("d_modle=4", "did you mean 'd_model'?"),
        ("decoder.dropuot=0.1", "did you mean 'dropout'?"),
        ("decoder.layers.7.count=1", "there is no item 7"),
        ("decoder.layers.0.block.attention.n_heads=5x", "'5x' is not a whole number"),
        ("vocab_size", "write path=value"),
        ("=3", "write path=value"),
        ("vocab_size.deeper=3", "has no fields"),
        ("decoder.dropout=1.5", "outside [0, 1)"),
        ("decoder.dropout=NaN", "outside [0, 1)"),
        ("d_model=" + "9" * 5_000, "is not a whole number"),
    ],
    ids=range(10),
)
def test_a_bad_override_is_bad_input(assignment, words):
    with pytest.raises(InputError) as caught:
        override(tiny(), [assignment])
    assert words in str(caught.value)


def test_a_key_that_occurs_twice_is_refused():
    text = to_json(preset("core")).replace('"d_model"', '"vocab_size"', 1)
    with pytest.raises(InputError, match="a key occurs twice"):
        from_json(ModelSpec, text)


def test_overrides_are_strings_lists_or_keywords():
    spec = preset("qwen")
    wanted = override(spec, ["d_model=64", "decoder.layers.count=2", "position=Learned"])
    assert override(spec, "d_model=64", "decoder.layers.count=2", position=Learned()) == wanted
    assert override(spec, ["d_model=64"], **{"decoder.layers.count": 2}, position="Learned") == (
        wanted
    )
    layers = override(spec, **{"decoder.layers": spec.decoder.layers * 2})
    assert layers.n_layers == 2 * spec.n_layers
    assert override(spec, heads=(NextHead(tied=False),)).heads == (NextHead(tied=False),)
    assert override(spec, encoder=None) == spec
    with pytest.raises(InputError, match=r"position: NextHead is none of .*Rotary"):
        override(spec, position=NextHead())
    with pytest.raises(InputError, match=r"unknown key 'd_modl'"):
        override(spec, d_modl=3)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_sizes(name):
    sizes = {"vocab_size": 37, "d_model": 48, "n_heads": 4, "d_ff": 53, "max_seq_len": 41}
    spec = preset(name, n_layers=3, **sizes)
    assert (spec.vocab_size, spec.d_model, spec.max_seq_len, spec.n_layers) == (37, 48, 41, 3)
    for block in spec.decoder.blocks():
        ffn = block.ffn.expert if name == "moe" else block.ffn
        assert (block.attention.n_heads, ffn.d_ff) == (4, 53)
    with pytest.raises(InputError, match=f"the preset '{name}' has no size 'd_modl'"):
        preset(name, d_modl=3)


def test_a_spec_prints_as_the_python_that_makes_it():
    names = {
        name: value
        for module in (model, init, position, train, tasks, decoding)
        for name, value in vars(module).items()
        if isinstance(value, type)
    }
    for name, make in PRESETS.items():
        spec = make()
        assert eval(repr(spec), dict(names)) == spec, name
        assert max(map(len, repr(spec).splitlines())) <= 100
    run = train.RunSpec(model=PRESETS["moe"](), task=tasks.FsmTask(), train=train.TrainSpec(lr=0.1))
    assert eval(repr(run), dict(names)) == run
    assert repr(train.TrainSpec()) == "TrainSpec()"
    assert repr(tasks.FsmTask(order="uniform")) == "FsmTask(order='uniform')"


def test_a_blocks_mixer_is_written_as_attention_and_read_under_both_names():
    spec = preset("core")
    data = to_dict(spec)
    block = data["decoder"]["layers"][0]["block"]
    assert "attention" in block and "mixer" not in block
    assert from_dict(ModelSpec, data) == spec
    block["mixer"] = block.pop("attention")
    assert from_dict(ModelSpec, data) == spec
    block["attention"] = block["mixer"]
    with pytest.raises(InputError, match="mixer is given twice"):
        from_dict(ModelSpec, data)
    for name in ("attention", "mixer"):
        made = override(spec, f"decoder.layers.block.{name}.n_kv_heads=1")
        assert [each.kv_heads for each in made.decoder.attentions().values()] == [1] * 2
        made = override(spec, **{f"decoder.layers.block.{name}": Attention(n_heads=2)})
        assert next(made.decoder.blocks()).attention == Attention(n_heads=2)
    given = {"ffn": MLP(d_ff=5), "norm": LayerNorm()}
    one, other = (Block(**{name: Attention(n_heads=2)}, **given) for name in ("attention", "mixer"))
    assert one == other and repr(one).startswith("Block(mixer=")


def test_layers_that_differ_in_what_they_should_share_are_named():
    spec = override(preset("core"), "decoder.layers.count=3")
    layers = spec.decoder.layers
    wide = replace(layers[0].block, mixer=Attention(n_heads=2))
    stack = replace(spec.decoder, layers=(*layers, Layers(count=1, block=wide)))
    assert stack.common(lambda block: block.norm, "norm") == layers[0].block.norm
    with pytest.raises(InputError, match=r"layers differ in n_heads: 4 in layers .*; 2 in layer 3"):
        stack.common(lambda block: block.attention.n_heads, "n_heads")
