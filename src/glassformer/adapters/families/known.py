"""The families of every architecture that is read, in the order in which they are tried.

`registry` makes an adapter of each; `family_of` finds the one of a config without torch.
"""

from glassformer.adapters.config import Config
from glassformer.adapters.families import (
    encoders,
    experts,
    gpt2,
    layernorm,
    llama,
    qwen,
    relatives,
    translators,
)
from glassformer.adapters.table import Family

#: Families with an adapter that adds nothing to `NativeAdapter` but its name.
NAMED = {
    "gemma": (relatives.GEMMA, relatives.GEMMA2, relatives.GEMMA3),
    "exaone": (relatives.EXAONE4,),
    "phi": (layernorm.PHI, relatives.PHI3),
    "olmo": (relatives.OLMO2, relatives.OLMO3, experts.OLMOE),
    "granite": (relatives.GRANITE, experts.GRANITE_MOE),
    "glm": (relatives.GLM, relatives.GLM4),
    "gpt-neox": (layernorm.NEOX_FAMILY,),
    "gpt-oss": (experts.GPT_OSS,),
    "stablelm": (layernorm.STABLELM,),
    "falcon": (layernorm.FALCON,),
    "bloom": (layernorm.BLOOM,),
    "mpt": (layernorm.MPT,),
    "cohere": (layernorm.COHERE, layernorm.COHERE2),
}

#: All of them, by architecture type.
FAMILIES: dict[str, tuple[Family, ...]] = {
    "qwen": (qwen.QWEN2, qwen.QWEN3, qwen.QWEN1, experts.QWEN2_MOE, experts.QWEN3_MOE),
    "llama": (
        llama.LLAMA,
        llama.MISTRAL,
        experts.MIXTRAL,
        llama.MINISTRAL,
        llama.SEED_OSS,
        llama.ERNIE,
        relatives.ARCEE,
        relatives.HUNYUAN,
        relatives.SMOLLM3,
    ),
    "gpt2": (gpt2.GPT2, gpt2.GPT_NEO, gpt2.GPT_J, gpt2.OPT),
    "starcoder": (layernorm.BIGCODE, layernorm.STARCODER2),
    "encoder": encoders.ENCODERS,
    "translator": translators.TRANSLATORS,
    **NAMED,
}


def family_of(config: Config) -> Family | None:
    """Return the family that reads a config; None where none of these does."""
    found = (Family.of(families, config) for families in FAMILIES.values())
    return next((family for family in found if family is not None), None)
