"""Find the Hugging Face architecture that computes a spec.

A spec is exported to a family whose config, read back, gives the same spec, so that nothing is
lost; if none fits, the error names the nearest one and what differs. Initialisation, dropout
and the weight of a balance loss are ignored: none changes what a trained model computes. Nothing
here needs torch, so that a design can be judged before it is built.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from glassformer.adapters.config import Config
from glassformer.adapters.families.known import FAMILIES
from glassformer.adapters.table import Family
from glassformer.spec.checks import check_tree
from glassformer.spec.errors import GlassError, InputError
from glassformer.spec.init import NormalInit
from glassformer.spec.model import Block, Dropout, Layers, ModelSpec, MoE, Stack
from glassformer.spec.serialize import to_dict

#: Where several families fit: the ones that most programs read come first.
FIRST = (
    *("llama", "qwen2", "qwen3", "mistral", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe"),
    *("ministral", "seed_oss", "ernie4_5", "starcoder2", "gpt_bigcode", "olmoe"),
)
#: The families that are written, in that order. A second one of a model_type is a body without its
#: head, or with another.
BUILT_IN: dict[str, Family] = {}
for _family in sorted(
    (family for families in FAMILIES.values() for family in families if family.written),
    key=lambda family: [*FIRST, family.model_type].index(family.model_type),
):
    BUILT_IN.setdefault(_family.model_type, _family)
SHOWN = 6
#: The settings with which our encoder-decoder is one of Hugging Face's.
MARIAN = ("model.position.form=halves", "model.heads.0.tied=true", "model.share_embedding=true")
#: Why a family of decoders does not fit a model that has an encoder.
ALONE = "encoder: has one, and that is a decoder alone"


def counterpart(
    spec: ModelSpec, families: Mapping[str, Family] = BUILT_IN, *, first: str = ""
) -> Family:
    """Return the family that can write this spec; `first` is tried before the others."""
    check_tree(spec)
    known = {name: family for name, family in families.items() if family.written}
    same = [name for name, family in known.items() if family.model_type == first]
    order = [name for name in (*same, *BUILT_IN, *known) if name in known]
    tried: dict[str, list[str]] = {}
    for name in dict.fromkeys(order):
        reasons = misfits(spec, known[name])
        if not reasons:
            return known[name]
        tried[name] = reasons
    raise InputError(
        "no Hugging Face architecture computes this model",
        where=nearest_of(tried),
        hint=_way_out(spec),
    )


def _way_out(spec: ModelSpec) -> str:
    """Return which models are exported, and the format that takes this one."""
    native = "{--to native|to='native'} keeps every spec"
    if spec.encoder is None:
        made = "rotary positions, RMSNorm and SwiGLU (`glass design`, `glass train lm-modern`)"
        return f"{made} are a Llama; {native}"
    return f"`glass train reverse {' '.join(MARIAN)}` trains a Marian; {native}"


def nearest_of(tried: dict[str, list[str]]) -> str:
    """Return the architecture with the fewest differences, and what they are, as text."""
    # A single reason that begins with config.json: the family could not be compared at all.
    able = {
        name: found
        for name, found in tried.items()
        if not found[0].startswith("config.json") and found[0] != ALONE
    }
    name, reasons = min((able or tried).items(), key=lambda item: len(item[1]))
    more = f", and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return f"the nearest is '{name}': {'; '.join(reasons[:SHOWN])}{more}"


def misfits(spec: ModelSpec, family: Family) -> list[str]:
    """Return what this family would compute differently, as text."""
    if spec.encoder is not None and not family.encodes:
        return [ALONE]
    try:
        again = family.spec_of(Config(family.config_of(spec)))
    except GlassError as error:
        # A rule of the family's that this model breaks, such as even heads for rotary positions,
        # is a reason only if the model is of that kind.
        return _misfits_apart_from_widths(spec, family) or [
            f"config.json: {error.what.removeprefix('config.json: ')}"
        ]
    return differences(spec, again)


def _misfits_apart_from_widths(spec: ModelSpec, family: Family) -> list[str]:
    """Return the differences of a model of twice the width, whose heads are even."""

    def block(one: Block) -> Block:
        attention, cross = (
            each if each is None or each.d_head is None else replace(each, d_head=2 * each.d_head)
            for each in (one.attention, one.cross)
        )
        assert attention is not None
        return replace(one, mixer=attention, cross=cross)

    def stack(one: Stack) -> Stack:
        layers = tuple(replace(each, block=block(each.block)) for each in one.layers)
        return replace(one, layers=layers)

    encoder = None if spec.encoder is None else stack(spec.encoder)
    try:
        wide = replace(spec, d_model=2 * spec.d_model, decoder=stack(spec.decoder), encoder=encoder)
        again = family.spec_of(Config(family.config_of(wide)))
    except GlassError:
        return []
    return [
        text for text in differences(wide, again) if not text.partition(":")[0].endswith("d_head")
    ]


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
        ffn = replace(one.ffn, balance=0.0) if isinstance(one.ffn, MoE) else one.ffn
        return replace(one, mixer=attention, ffn=ffn)

    def stack(one: Stack) -> Stack:
        runs = groupby(one.blocks())
        layers = tuple(Layers(count=len(list(run)), block=block(each)) for each, run in runs)
        return replace(one, layers=layers, dropout=Dropout())

    encoder = None if spec.encoder is None else stack(spec.encoder)
    return replace(spec, decoder=stack(spec.decoder), encoder=encoder, init=NormalInit())


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
