"""No key of a config is ignored: it is read, known to do nothing, or refused by its name.

Held for every family: configs with the keys of released folders, keys that nobody knows, and each
key of transformers' own config class with another value.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.families import CASES, FIRST, Case, Sides, implementation, module_of

from glassformer.adapters.config import Config
from glassformer.adapters.counterpart import differences
from glassformer.adapters.registry import ADAPTERS, adapter_for
from glassformer.adapters.table import Family
from glassformer.spec.errors import FileError

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

#: What config.json holds in folders of models that people use: their keys, and mostly their values.
RELEASED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "released_configs.json").read_text()
)


@pytest.mark.parametrize("name", RELEASED)
def test_the_config_of_a_released_model_is_read_as_transformers_reads_it(name):
    from transformers import AutoConfig

    config = Config(RELEASED[name])
    _, family = adapter_for(config)
    spec = family.spec_of(config)
    fields = {key: value for key, value in RELEASED[name].items() if key != "auto_map"}
    full = AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
    theirs = family.spec_of(Config(full | {"architectures": [family.architecture]}))
    odd = differences(spec, theirs)
    if family.model_type == "t5":  # transformers 5 ties every head, until a file has another one
        odd = [each for each in odd if not each.startswith("heads.0.tied")]
    assert not odd


FAMILIES = {f"{f.model_type} {f.architecture}": f for a in ADAPTERS.values() for f in a.families}
TRIED = {name: f for name, f in FAMILIES.items() if f.model_type in FIRST and f.written}


def full_config(family: Family) -> dict[str, Any]:
    """Return the complete config of a tiny model of a family."""
    module = module_of(CASES[FIRST[family.model_type]])
    return module.config.to_dict() | {"architectures": [family.architecture]}


@pytest.mark.parametrize("name", TRIED)
def test_a_key_that_nobody_knows_is_refused_by_name(name):
    family = TRIED[name]
    full = full_config(family)
    family.spec_of(Config(full))
    for value in (True, False, 0, 3, 0.5, "on", [1], {"on": True}):
        with pytest.raises(FileError, match="frobnication"):
            family.spec_of(Config(full | {"frobnication": value}))
    for key in ("rope_parameters", "attn_config"):
        inner = json.loads(json.dumps(full.get(key) or {}))
        by_layer = inner.get("full_attention", inner)
        by_layer["frobnication"] = False
        if full.get(key):
            with pytest.raises(FileError, match="frobnication"):
                family.spec_of(Config(full | {key: inner}))


def others(value: Any) -> list[Any]:
    """Return other values of a key."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value + 2]
        case float():
            return [value * 1.7 + 0.1]
        case str():
            return ["relu", "tanh", value + "x"]
        case None:
            return [True, 2, 0.37, "x"]
        case list():
            return [value[::-1], [*value, *value[:1]], [1]]
        case _:
            return []


#: Names, and what a module returns beside its results.
OUTSIDE = {"architectures", "model_type", "transformers_version", "output_attentions"}


@pytest.mark.parametrize("model_type", sorted(FIRST))
def test_every_key_of_transformers_is_read_refused_or_does_nothing(model_type):
    """What leaves our spec as it is must leave transformers' results as they are."""
    case = CASES[FIRST[model_type]]
    module = module_of(case)
    full = module.config.to_dict()
    full["architectures"] = [type(module).__name__]
    family = Family.of(adapter_for(Config(full))[0].families, Config(full))
    assert family is not None
    spec = family.spec_of(Config(full))
    ids = torch.randint(4, case.sizes["vocab_size"] - 2, (2, 13))
    wanted = results(case, module, ids)
    silent = []
    for key in sorted(full.keys() - OUTSIDE):
        for value in others(full[key]):
            changed = full | {key: value}
            try:
                if differences(spec, family.spec_of(Config(changed))):
                    continue
            except FileError:
                continue
            other = rebuilt(case, module, changed)
            if other is None:
                continue  # transformers has no such model
            if isinstance(other, str) or not same(results(case, other, ids), wanted):
                silent.append((key, value))
    assert not silent


def rebuilt(case: Case, module: Any, changed: dict[str, Any]) -> Any:
    """Return the module with a changed config and the same weights; None: it cannot be built."""
    import transformers

    try:
        config = type(module.config).from_dict(json.loads(json.dumps(changed)))
        kind = implementation(case.model_type)
        other = getattr(transformers, case.auto).from_config(config, attn_implementation=kind)
        results(case, other.eval(), torch.full((1, 3), 4))
    except Exception:  # of their code, whatever it is
        return None
    try:
        other.load_state_dict(module.state_dict())
    except RuntimeError:
        return "other parameters"
    return other.eval()


@torch.no_grad()
def results(case: Case, module: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return transformers' logits."""
    return Sides(case, ids).theirs(module, ids)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether results are equal but for rounding."""
    return one.shape == two.shape and bool(((one - two).abs() <= 1e-5 * two.abs().max()).all())
