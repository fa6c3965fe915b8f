"""A table of config keys: read into facts, made a spec, and written back."""

import pytest

from glassformer.adapters.config import Config
from glassformer.adapters.families.known import FAMILIES
from glassformer.adapters.keys import (
    flag,
    number,
    optional,
    read_entries,
    value_of,
    whole,
    word,
    write_entries,
)
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import MLP, LayerNorm

ENTRIES = {
    "vocab": whole("vocab_size"),
    "width": whole("d_model", also=("n_embd",)),
    "context": whole("max_seq_len", default=31),
    "depth": whole("layers", most=7),
    "heads": (whole("attn.n_heads"), whole("attn.n_kv_heads")),
    "window": optional("attn.window"),
    "act": word("ffn.activation", default="gelu"),
    "eps": number("norm.eps", default=1e-3),
    "biased": (flag("attn.bias", default=False, yes="all", no="none"), flag("ffn.bias")),
    "version": 2,
}
FIXED = {"norm": LayerNorm, "ffn": MLP, "block.placement": "post", "final_norm": False}
CONFIG = {"vocab": 13, "n_embd": 15, "depth": 3, "heads": 5, "act": "relu", "biased": True}


def test_a_table_is_read_and_written():
    spec = read_entries(ENTRIES, FIXED, Config(CONFIG))
    block = next(spec.decoder.blocks())
    assert (spec.vocab_size, spec.d_model, spec.max_seq_len, spec.n_layers) == (13, 15, 31, 3)
    assert block.ffn == MLP(d_ff=60, activation="relu")  # four times as wide, where nothing says
    assert (block.attention.bias, block.attention.n_kv_heads) == ("all", 5)
    assert (block.norm, block.placement, spec.decoder.final_norm) == (
        LayerNorm(eps=1e-3),
        "post",
        None,
    )
    written = write_entries(ENTRIES, spec)
    assert written == {
        "vocab": 13,
        "width": 15,
        "context": 31,
        "depth": 3,
        "heads": 5,
        "window": None,
        "act": "relu",
        "eps": 1e-3,
        "biased": True,
        "version": 2,
    }
    assert read_entries(ENTRIES, FIXED, Config(written)) == spec


def test_facts_of_each_layer_and_of_an_encoder():
    spec = read_entries(ENTRIES, FIXED | {"each.attn.window": [2, 2, None]}, Config(CONFIG))
    assert [run.count for run in spec.decoder.layers] == [2, 1]
    assert value_of(spec, "attn.window") == 2
    both = read_entries(ENTRIES, FIXED | {"encoder.layers": 2}, Config(CONFIG))
    assert both.encoder is not None and both.encoder.n_layers == 2
    assert not next(both.encoder.blocks()).attention.causal
    assert next(both.decoder.blocks()).cross is not None
    assert value_of(both, "encoder.layers") == 2
    with pytest.raises(InputError, match="encoder: none here"):
        value_of(spec, "encoder.layers")


@pytest.mark.parametrize(
    ("key", "value"), [("depth", 8), ("heads", True), ("act", "mish"), ("biased", 1), ("eps", "x")]
)
def test_a_value_that_cannot_be_is_refused_by_its_key(key, value):
    with pytest.raises(FileError, match=f"'{key}'"):
        read_entries(ENTRIES, FIXED, Config(CONFIG | {key: value}))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "starcoder", "translator", "encoder"])
def test_no_two_entries_of_a_family_say_the_same_field(kind):
    for family in FAMILIES[kind]:
        said = [family.key_of(key.fields[0]) for key in family.keys.values() if hasattr(key, "ask")]
        assert len(set(said)) == len(said)
