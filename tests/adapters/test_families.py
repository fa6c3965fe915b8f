"""Every decoder family computes what transformers computes, and goes back byte for byte."""

from dataclasses import replace

import pytest
from bench.families import CASES, prove
from bench.random_families import drawn, outcome

from glassformer.adapters.config import Config
from glassformer.adapters.counterpart import differences
from glassformer.adapters.registry import ADAPTERS
from glassformer.adapters.table import Experts, Family
from glassformer.spec.errors import FileError, InputError

TOLERANCE = 1e-5  # of the largest logit, float32

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


#: Decoders; those of other kinds and the first five families have files of tests to themselves.
ELSEWHERE = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
DECODERS = [
    name
    for name, case in CASES.items()
    if case.auto == "AutoModelForCausalLM" and case.model_type not in ELSEWHERE
]


@pytest.mark.parametrize("name", DECODERS)
def test_a_family_is_what_transformers_computes(name, tmp_path):
    proof = prove(CASES[name], tmp_path)
    assert proof.worst <= TOLERANCE, proof
    assert proof.tokens
    assert proof.bytes
    assert proof.complete


FAMILIES = {
    f"{family.model_type}: {family.architecture}": family
    for adapter in ADAPTERS.values()
    for family in adapter.families
}
CLASSES = {case.model_type: case.config for case in CASES.values()} | {"pegasus": "PegasusConfig"}


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.model_type in CLASSES])
def test_a_key_that_is_left_out_means_what_transformers_takes(name):
    """The same model, or an error that names the key; a size may have no default here."""
    import transformers

    family = FAMILIES[name]
    full = getattr(transformers, CLASSES[family.model_type])().to_dict()
    full |= {"model_type": family.model_type, "architectures": [family.architecture]}
    spec = family.spec_of(Config(full))
    for key in full.keys() - {"model_type", "architectures"}:
        try:
            less = family.spec_of(Config({k: v for k, v in full.items() if k != key}))
        except FileError as error:
            why = error.what
        else:
            why = "; ".join(differences(spec, less))
        assert not why or why.startswith("config.json has no '"), (key, why)


WINDOWS = {"num_hidden_layers": 7, "use_sliding_window": True, "sliding_window": 5}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen2", WINDOWS | {"max_window_layers": 3}),
        ("qwen3", WINDOWS | {"max_window_layers": 3}),
        ("qwen2_moe", WINDOWS | {"max_window_layers": 3}),
        ("qwen2_moe", WINDOWS | {"max_window_layers": 9}),
        ("smollm3", WINDOWS | {"no_rope_layer_interval": 2}),
        ("gemma2", {"num_hidden_layers": 7}),
        ("gemma3_text", {"num_hidden_layers": 7}),
        ("olmo3", {"num_hidden_layers": 7}),
        ("cohere2", {"num_hidden_layers": 7}),
        ("gpt_oss", {"num_hidden_layers": 7}),
        ("exaone4", {"num_hidden_layers": 7}),
        ("modernbert", {"num_hidden_layers": 7}),
    ],
)
def test_windows_without_layer_types_are_where_transformers_has_them(kind, fields):
    import transformers

    family = next(f for f in FAMILIES.values() if f.model_type == kind)
    full = getattr(transformers, CLASSES[kind])(**fields).to_dict()
    full |= {"model_type": kind, "architectures": [family.architecture]}
    less = {key: value for key, value in full.items() if key != "layer_types"}
    assert not differences(family.spec_of(Config(full)), family.spec_of(Config(less)))


#: Drawn configs that were once read wrongly, refused without a name or not written.
ONCE = (
    *(("ministral", 8), ("gemma3_text", 6), ("m2m_100", 4), ("olmo3", 4), ("qwen3_moe", 5)),
    *(("glm", 3), ("granitemoe", 5), ("gemma", 2), ("mpt", 3), ("marian", 2)),
)


@pytest.mark.parametrize(("model_type", "seed"), ONCE)
def test_a_random_config_is_equal_or_refused_by_name(model_type, seed):
    own = [case for case in CASES.values() if case.model_type == model_type]
    found = outcome(drawn(own[seed % len(own)], seed), seed)
    assert found.kind in ("equal", "refused", "rounding", "theirs"), found


def rearranged(family: Family) -> Family:
    """Return the family with gate's rows before up's, in the tensors of all experts."""
    rows = (
        replace(row, layout=Experts(2, True)) if len(row.ours) == 2 else row
        for row in family.table.rows
    )
    return replace(family, table=replace(family.table, rows=tuple(rows)))


#: Mistakes in the tables of families.
FAULTS = {
    "scores are scaled": (
        "gpt_neo",
        lambda family: replace(family, fixed=family.fixed | {"attn.scale": None}),
    ),
    "no sinks": (
        "gpt_oss",
        lambda family: replace(family, fixed=family.fixed | {"attn.sinks": False}),
    ),
    "gate, then up": ("gpt_oss", rearranged),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_family_is_seen(fault, tmp_path, monkeypatch):
    kind, damaged = FAULTS[fault]
    for adapter in ADAPTERS.values():
        own = tuple(damaged(f) if f.model_type == kind else f for f in adapter.families)
        monkeypatch.setattr(adapter, "families", own)
    worst = []
    for case in (case for case in CASES.values() if case.model_type == kind):
        try:
            worst.append(prove(case, tmp_path / case.variant).worst)
        except (FileError, InputError, RuntimeError):
            return  # a key that nobody read, a tensor without a parameter or that does not fit
    assert max(worst) > 100 * TOLERANCE
