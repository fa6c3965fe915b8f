"""Find the adapter of a config, and the Hugging Face architecture of a spec.

`register(MyAdapter)` adds an adapter; from then on `glassformer.load` opens its folders. A spec is
exported to a family whose config, read back, gives the same spec, so that nothing is lost; if none
fits, the error names the nearest one and what differs. Initialisation and dropout are ignored:
neither changes what a trained model computes.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeVar

from glassformer.adapters.config import Config
from glassformer.adapters.families.gpt2 import GPT2Adapter
from glassformer.adapters.families.llama import LlamaAdapter
from glassformer.adapters.families.qwen import QwenAdapter
from glassformer.adapters.native import CustomTransformerAdapter, NativeAdapter
from glassformer.adapters.table import Family
from glassformer.spec.checks import check_tree
from glassformer.spec.errors import FileError, GlassError, InputError, nearest
from glassformer.spec.init import NormalInit
from glassformer.spec.model import Block, Dropout, Layers, ModelSpec, Stack
from glassformer.spec.serialize import to_dict

ADAPTERS: dict[str, type[NativeAdapter]] = {}

Adapter = TypeVar("Adapter", bound=type[NativeAdapter])

#: Keys of layers that a `ModelSpec` cannot express, in a config of any name.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
HYBRID = ("linear_num_value_heads", "full_attention_interval", "mamba_d_state", "ssm_cfg")


def register(adapter: Adapter) -> Adapter:
    """Let `load` find an adapter by its architecture type and its families; also a decorator."""
    name = adapter.architecture_type
    known = ADAPTERS.get(name)
    if known is not None and known is not adapter:
        raise InputError(f"'{name}' is registered already, as {known.__name__}")
    theirs = {family.model_type: other for other in ADAPTERS.values() for family in other.families}
    for family in adapter.families:
        if theirs.get(family.model_type, adapter) is not adapter:
            reader = theirs[family.model_type].__name__
            raise InputError(f"model_type '{family.model_type}' is read by {reader} already")
    ADAPTERS[name] = adapter
    return adapter


for _adapter in (CustomTransformerAdapter, QwenAdapter, LlamaAdapter, GPT2Adapter):
    register(_adapter)


def adapter_named(architecture_type: str) -> type[NativeAdapter]:
    """Return the adapter of an architecture type."""
    if architecture_type not in ADAPTERS:
        raise InputError(
            f"no architecture '{architecture_type}'", hint=nearest(architecture_type, ADAPTERS)
        )
    return ADAPTERS[architecture_type]


def adapter_for(config: Config) -> tuple[type[NativeAdapter], Family]:
    """Return the adapter and family that read a config; an unknown one is refused with a list."""
    kind = str(config.any("model_type", default=""))
    for adapter in ADAPTERS.values():
        for family in adapter.families:
            if family.model_type == kind:
                return adapter, family
    known = sorted(
        family.model_type for adapter in ADAPTERS.values() for family in adapter.families
    )
    why = ""
    if "moe" in kind or any(config.data.get(key) for key in EXPERTS):
        why = ", a mixture of experts"
    elif any(config.data.get(key) for key in HYBRID):
        why = ", a hybrid of attention and recurrence"
    raise FileError(
        f"no adapter reads model_type '{kind[:60]}'{why}",
        where=config.where,
        hint=f"read here: {', '.join(known)}",
    )


def families_that_write() -> dict[str, Family]:
    """Return the families that a spec can be exported to, by model_type."""
    return {
        family.model_type: family
        for adapter in ADAPTERS.values()
        for family in adapter.families
        if family.write is not None
    }


#: The order of choice where several fit: the one that most programs read comes first.
PREFERRED = ("llama", "qwen2", "qwen3", "mistral", "gpt2")
SHOWN = 6


def counterpart(spec: ModelSpec, *, first: str = "") -> Family:
    """Return the family that can write this spec; `first` is tried before the others."""
    check_tree(spec)
    known = families_that_write()
    order = [name for name in (first, *PREFERRED, *known) if name in known]
    tried: dict[str, list[str]] = {}
    for name in dict.fromkeys(order):
        reasons = misfits(spec, known[name])
        if not reasons:
            return known[name]
        tried[name] = reasons
    raise InputError(
        "no Hugging Face architecture computes this model",
        where=nearest_of(tried),
        hint="--to native keeps every spec",
    )


def nearest_of(tried: dict[str, list[str]]) -> str:
    """Return the architecture with the fewest differences, and what they are, as text."""
    # A single reason that begins with config.json: the family could not be compared at all.
    able = {name: found for name, found in tried.items() if not found[0].startswith("config.json")}
    name, reasons = min((able or tried).items(), key=lambda item: len(item[1]))
    more = f", and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return f"the nearest is '{name}': {'; '.join(reasons[:SHOWN])}{more}"


def misfits(spec: ModelSpec, family: Family) -> list[str]:
    """Return what this family would compute differently, as text."""
    if spec.encoder is not None:
        return ["encoder: has one, and that is a decoder alone"]
    try:
        again = family.spec_of(Config(family.config_of(spec)))
    except GlassError as error:
        return [error.what]
    return differences(spec, again)


def differences(spec: ModelSpec, again: ModelSpec) -> list[str]:
    """Return the fields in which two specs compute differently, as text."""
    ours, theirs = to_dict(_comparable(spec)), to_dict(_comparable(again))
    return [
        f"{path}: {found} here, {other} there" for path, found, other in _differences(ours, theirs)
    ]


def _comparable(spec: ModelSpec) -> ModelSpec:
    """Return the spec with all defaults written out, and without training settings."""

    def block(one: Block) -> Block:
        attention = replace(
            one.attention,
            n_kv_heads=one.attention.kv_heads,
            d_head=one.attention.head_width(spec.d_model),
        )
        return replace(one, attention=attention)

    runs = groupby(spec.decoder.blocks())
    layers = tuple(Layers(count=len(list(run)), block=block(one)) for one, run in runs)
    decoder = Stack(layers=layers, final_norm=spec.decoder.final_norm, dropout=Dropout())
    return replace(spec, decoder=decoder, init=NormalInit())


def _differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.get("kind") != theirs.get("kind"):
            yield path, ours.get("kind"), theirs.get("kind")
            return
        for key in ours:
            below = f"{path}.{key}" if path else key
            yield from _differences(ours[key], theirs.get(key), below)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, f"{path}.{place}")
    elif ours != theirs:
        yield path, _word(ours), _word(theirs)


def _word(value: Any) -> Any:
    if isinstance(value, dict):
        return value.get("kind", "something")
    return f"{len(value)} of them" if isinstance(value, list) else value
