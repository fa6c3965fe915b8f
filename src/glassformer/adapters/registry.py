"""The adapters of families of architectures: which one reads a config.

`register(MyAdapter)` adds an adapter; from then on `glassformer.load` opens its folders, and models
are exported to its families.
"""

import difflib
from typing import TypeVar, cast

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.config import ESCAPE, PAGE, Config
from glassformer.adapters.families.known import FAMILIES, NAMED
from glassformer.adapters.native import CustomTransformerAdapter, NativeAdapter
from glassformer.adapters.table import Family
from glassformer.spec.errors import FileError, GlassError, InputError, nearest

ADAPTERS: dict[str, type[BaseAdapter]] = {}

Adapter = TypeVar("Adapter", bound=type[BaseAdapter])

#: The page that lists what is read.
MODELS = "docs/models-supported.md"
#: Types that an error names; the page has the others.
COMMON = ("llama", "qwen2", "qwen3", "mistral", "gpt2")

#: What a `ModelSpec` cannot express, by a key that only such a config has (set, and not 0 or null).
MISSING = {
    "kv_lora_rank": "latent attention (keys and values compressed to one vector, MLA)",
    "linear_num_value_heads": "linear attention with a recurrent state",
    "full_attention_interval": "linear attention with a recurrent state",
    "mamba_d_state": "state-space layers (Mamba)",
    "ssm_cfg": "state-space layers (Mamba)",
    "ssm_state_size": "state-space layers (Mamba)",
    "state_size": "state-space layers (Mamba)",
    "conv_L_cache": "short convolutions between attention layers",
    "lru_width": "recurrent layers (RG-LRU)",
    "head_size_divisor": "recurrent layers (RWKV)",
    "relative_attention": "attention to distances beside the words (DeBERTa)",
    "vision_config": "an encoder of images",
    "audio_config": "an encoder of sound",
    "n_group": "a router that limits experts by groups",
    "num_experts": "a mixture of experts under other names",
    "num_local_experts": "a mixture of experts under other names",
    "n_routed_experts": "a mixture of experts under other names",
    "moe_intermediate_size": "a mixture of experts under other names",
}


class QwenAdapter(NativeAdapter):
    """Qwen2, Qwen2.5, Qwen3 and Qwen-1, dense and with experts."""

    architecture_type = "qwen"
    families = FAMILIES["qwen"]


class LlamaAdapter(NativeAdapter):
    """Llama 2 and 3, Mistral, Mixtral, and models that share their config."""

    architecture_type = "llama"
    families = FAMILIES["llama"]


class GPT2Adapter(NativeAdapter):
    """GPT-2 in all sizes, GPT-Neo, GPT-J and OPT."""

    architecture_type = "gpt2"
    families = FAMILIES["gpt2"]


class EncoderAdapter(NativeAdapter):
    """BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ModernBERT, with masked-token heads or without."""

    architecture_type = "encoder"
    families = FAMILIES["encoder"]


class TranslatorAdapter(NativeAdapter):
    """BART, mBART, Marian, Pegasus, M2M-100, NLLB and T5."""

    architecture_type = "translator"
    families = FAMILIES["translator"]


class StarCoderAdapter(NativeAdapter):
    """StarCoder and StarCoder 2."""

    architecture_type = "starcoder"
    families = FAMILIES["starcoder"]


def register(adapter: Adapter) -> Adapter:
    """Let `load` find an adapter by its architecture type and its families; also a decorator."""
    name = getattr(adapter, "architecture_type", None)
    if not isinstance(name, str) or not name:
        raise InputError(
            f"{adapter.__name__} has no architecture_type", hint='architecture_type = "mine"'
        )
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


for _adapter in (
    CustomTransformerAdapter,
    QwenAdapter,
    LlamaAdapter,
    GPT2Adapter,
    StarCoderAdapter,
    EncoderAdapter,
    TranslatorAdapter,
):
    register(_adapter)
for _name, _families in NAMED.items():
    _made = {"architecture_type": _name, "families": _families, "__doc__": f"{_name}, as read."}
    register(type(f"{_families[0].title}Adapter", (NativeAdapter,), _made))


def adapter_named(architecture_type: str) -> type[BaseAdapter]:
    """Return the adapter of an architecture type."""
    if architecture_type not in ADAPTERS:
        raise InputError(
            f"no architecture '{architecture_type}'", hint=nearest(architecture_type, ADAPTERS)
        )
    return ADAPTERS[architecture_type]


def reader_of_own(architecture_type: str | None) -> type[BaseAdapter] | None:
    """Return the adapter of this type that reads folders of its own; None if ours are read."""
    adapter = ADAPTERS.get(architecture_type or "")
    return None if adapter is None or issubclass(adapter, NativeAdapter) else adapter


def adapter_for(config: Config) -> tuple[type[NativeAdapter], Family]:
    """Return the adapter and family that read a config; an unknown one is refused with a list."""
    kind = str(config.any("model_type", default=""))
    for adapter in ADAPTERS.values():
        family = Family.of(adapter.families, config)
        if family is not None:
            return cast(type[NativeAdapter], adapter), family
    known = {family.model_type for adapter in ADAPTERS.values() for family in adapter.families}
    close = difflib.get_close_matches(kind, sorted(known), n=1, cutoff=0.85)
    raise FileError(
        f"no adapter reads model_type '{kind[:60]}': {_not_understood(config)}",
        where=config.where,
        hint=(f"did you mean '{close[0]}'? " if close else "") + f"{ESCAPE}; "
        f"read here: {', '.join(COMMON)} and {len(known) - len(COMMON)} more ({MODELS}); "
        f"{PAGE} tells how to add one",
    )


def _not_understood(config: Config) -> str:
    """Return the key of a config, or the part of a model, that is not understood here."""
    data = config.data
    dense = data.get("is_moe") is False  # then keys about experts have no effect
    idle = ("drop", "router", "expert") if dense else ("drop", "router")
    given = {key: value for key, value in data.items() if not any(word in key for word in idle)}
    given = {key: value for key, value in given.items() if value is not False}
    for key, part in MISSING.items():
        if data.get(key) and not (dense and "expert" in part):
            return f"its '{key}' means {part}, which no spec here has"
    if data.get("is_encoder_decoder"):
        return "an encoder-decoder of a type whose parts are not known here"
    try:  # what the most common decoder would not understand
        FAMILIES["llama"][0].spec_of(
            Config({**given, "model_type": "llama", "architectures": None})
        )
    except GlassError as error:
        what = error.what.removeprefix("config.json: ").removeprefix("config.json ")
        return f"read as a Llama, {what}"
    return (
        "its config has no key that a Llama's lacks, so what differs is in the type's own code, "
        "which is not known here"
    )


def families_that_write() -> dict[str, Family]:
    """Return the families that a spec can be exported to, by model_type.

    A second family of a model_type (BERT's body beside its masked-token head) has the name of its
    architecture.
    """
    made: dict[str, Family] = {}
    for adapter in ADAPTERS.values():
        for family in adapter.families:
            if family.written:
                kind = family.model_type
                made[family.architecture if kind in made else kind] = family
    return made
