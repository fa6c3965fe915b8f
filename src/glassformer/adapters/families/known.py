"""The families of every architecture that is read, in the order in which they are tried.

`registry` makes an adapter of each; `family_of` finds the one of a config without torch.
"""

from glassformer.adapters.config import Config
from glassformer.adapters.families.encoders import ENCODERS
from glassformer.adapters.families.experts import (
    GPT_OSS,
    GRANITE_MOE,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from glassformer.adapters.families.gpt2 import GPT2, GPT_J, GPT_NEO, OPT
from glassformer.adapters.families.layernorm import (
    BIGCODE,
    BLOOM,
    COHERE,
    COHERE2,
    FALCON,
    MPT,
    NEOX_FAMILY,
    PHI,
    STABLELM,
    STARCODER2,
)
from glassformer.adapters.families.llama import ERNIE, LLAMA, MINISTRAL, MISTRAL, SEED_OSS
from glassformer.adapters.families.qwen import QWEN1, QWEN2, QWEN3
from glassformer.adapters.families.relatives import (
    ARCEE,
    EXAONE4,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM,
    GLM4,
    GRANITE,
    HUNYUAN,
    OLMO2,
    OLMO3,
    PHI3,
    SMOLLM3,
)
from glassformer.adapters.families.translators import TRANSLATORS
from glassformer.adapters.table import Family

#: Families with an adapter that adds nothing to `NativeAdapter` but its name.
NAMED = {
    "gemma": (GEMMA, GEMMA2, GEMMA3),
    "exaone": (EXAONE4,),
    "phi": (PHI, PHI3),
    "olmo": (OLMO2, OLMO3, OLMOE),
    "granite": (GRANITE, GRANITE_MOE),
    "glm": (GLM, GLM4),
    "gpt-neox": (NEOX_FAMILY,),
    "gpt-oss": (GPT_OSS,),
    "stablelm": (STABLELM,),
    "falcon": (FALCON,),
    "bloom": (BLOOM,),
    "mpt": (MPT,),
    "cohere": (COHERE, COHERE2),
}

#: All of them, by architecture type.
FAMILIES: dict[str, tuple[Family, ...]] = {
    "qwen": (QWEN2, QWEN3, QWEN1, QWEN2_MOE, QWEN3_MOE),
    "llama": (LLAMA, MISTRAL, MIXTRAL, MINISTRAL, SEED_OSS, ERNIE, ARCEE, HUNYUAN, SMOLLM3),
    "gpt2": (GPT2, GPT_NEO, GPT_J, OPT),
    "starcoder": (BIGCODE, STARCODER2),
    "encoder": ENCODERS,
    "translator": TRANSLATORS,
    **NAMED,
}


def family_of(config: Config) -> Family | None:
    """Return the family that reads a config; None where none of these does."""
    found = (Family.of(families, config) for families in FAMILIES.values())
    return next((family for family in found if family is not None), None)
