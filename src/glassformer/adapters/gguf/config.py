"""Convert between GGUF's metadata and config.json, and between its tensor names and ours.

Metadata becomes the config of a family, so that it is read and refused in the same way; a spec
becomes metadata by way of the same config. Some settings show only in the tensors: an untied head,
biases, Llama 3's scaling. The names are one more key table. llama.cpp's Llama rotates neighbouring
rows of q and k, ours (and Hugging Face's) rows half a head apart: those rows are reordered, both
ways. Its Qwen rotates as ours does.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from glassformer.adapters.config import Config
from glassformer.adapters.counterpart import differences, nearest_of
from glassformer.adapters.families.llama import LLAMA, MISTRAL
from glassformer.adapters.families.qwen import QWEN2, QWEN3
from glassformer.adapters.gguf.header import shortest
from glassformer.adapters.table import (
    Family,
    Interleaved,
    Layout,
    Plan,
    Row,
    Rows,
    Table,
    make_plan,
)
from glassformer.spec.errors import FileError, GlassError, InputError
from glassformer.spec.model import Llama3Scaling, ModelSpec, Rotary
from glassformer.spec.position import rotary_frequencies, single

#: llama.cpp's own Llama reads Mistral's files too, without their window.
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}

#: The key behind the architecture's name, and config.json's.
WHOLE = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}
NUMBER = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
SCALING = "rope.scaling."
YARN = {"yarn_beta_fast": ("beta_fast", 32.0), "yarn_beta_slow": ("beta_slow", 1.0)}
#: Keys that do nothing at these values.
IDLE = {
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scale_linear": 1.0,
    f"{SCALING}attn_factor": 1.0,
    f"{SCALING}yarn_attn_factor": 1.0,
    f"{SCALING}yarn_ext_factor": 1.0,
    f"{SCALING}yarn_log_multiplier": 0.0,
}
HARMLESS = (f"{SCALING}finetuned", "tensor_data_layout")

#: Llama 3's scaling is stored as its factors; a key of ours records its settings.
LLAMA3_KEY = "glassformer.rope.llama3"
LLAMA3 = (1.0, 4.0, 8192.0)  # of every released model; the overall factor is the largest one


# --- reading ------------------------------------------------------------------------------------


def read_settings(
    metadata: Mapping[str, Any],
    *,
    tensors: Collection[str],
    rows: int,
    factors: Sequence[float] | None,
    where: str,
) -> tuple[Family, ModelSpec]:
    """Read the family and spec of a file, given embedding rows and rotary frequency factors."""
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise FileError(
            f"no adapter reads the GGUF architecture {str(kind)[:60]!r}",
            where=where,
            hint=f"read here: {', '.join(FAMILIES)}",
        )
    _whole_model(metadata, where)
    own = {key[len(kind) + 1 :]: metadata[key] for key in metadata if key.startswith(f"{kind}.")}
    absent = {
        "vocab_size": rows,
        "attention.head_count_kv": own.get("attention.head_count"),
        "rope.freq_base": 10_000.0,
    }
    found = Config(absent | own, where=where, file="the metadata")
    config: dict[str, Any] = {name: found.whole(theirs) for theirs, name in WHOLE.items()}
    config |= {name: found.number(theirs) for theirs, name in NUMBER.items()}
    width = _head_width(found, config)
    if kind == "qwen3" or width * config["num_attention_heads"] != config["hidden_size"]:
        config["head_dim"] = width
    config["rope_scaling"] = _scaling(found, config["max_position_embeddings"])
    if factors is not None:
        if config["rope_scaling"] is not None:
            raise FileError(f"{FACTORS} and a scaling of positions as well", where=where)
        stated = metadata.get(LLAMA3_KEY)
        config["rope_scaling"] = _llama3(factors, stated, config["rope_theta"], width, where)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    family = FAMILIES[kind]
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
        if config["hidden_size"] % config["num_attention_heads"]:
            family = MISTRAL
            config |= {"sliding_window": None}
    found.finish(harmless=HARMLESS, idle=IDLE)
    return family, family.spec_of(Config(config, where=where, file="the metadata"))


def _whole_model(metadata: Mapping[str, Any], where: str) -> None:
    """Refuse files that hold part of a model (a shard) or only an adapter."""
    if metadata.get("general.type", "model") != "model":
        raise FileError(f"this is no model but {str(metadata['general.type'])[:40]!r}", where=where)
    parts = metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise FileError(
            f"the model is split over {str(parts)[:20]} files",
            where=where,
            hint="llama-gguf-split --merge makes one of them",
        )


def _head_width(found: Config, config: Mapping[str, Any]) -> int:
    usual = config["hidden_size"] // config["num_attention_heads"]
    width = found.whole(WIDTHS[0], default=max(usual, 1))
    for key in WIDTHS[1:]:
        if found.whole(key, default=width) != width:
            raise found.bad(key, found.any(key), f"{width}, the width of a head")
    return width


def _scaling(found: Config, context: int) -> dict[str, Any] | None:
    kind = found.any(f"{SCALING}type", default="none")
    if kind not in ("none", "linear", "yarn"):
        raise found.bad(f"{SCALING}type", kind, "none, linear or yarn")
    if kind == "none":
        return None
    made = {"rope_type": kind, "factor": found.number(f"{SCALING}factor")}
    original = found.whole(f"{SCALING}original_context_length", default=context)
    if kind == "yarn":
        made["original_max_position_embeddings"] = original
        for theirs, (name, usual) in YARN.items():
            made[name] = found.number(SCALING + theirs, default=usual)
    return made


def _llama3(
    factors: Sequence[float], stated: Any, theta: float, width: int, where: str
) -> dict[str, Any] | None:
    """Return the Llama 3 scaling with these frequency factors."""
    if all(factor == 1.0 for factor in factors):
        return None
    try:
        numbers = [max(factors), *LLAMA3] if stated is None else [float(each) for each in stated]
        factor, low, high, original = map(shortest, numbers)
        scaling = Llama3Scaling(
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_seq_len=int(original),
        )
        made = llama3_factors(Rotary(base=theta, scaling=scaling), width)
        pairs = zip(made, factors, strict=True)
        same = all(abs(one - other) <= 1e-5 * one for one, other in pairs)
    except (ValueError, TypeError, ArithmeticError):  # InputError is one
        same = False
    if not same:
        raise FileError(
            f"{FACTORS} scales positions by factors that are not Llama 3's", where=where
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original),
    }


# --- writing ------------------------------------------------------------------------------------


def write_settings(spec: ModelSpec, kind: str) -> dict[str, Any]:
    """Return a spec's metadata for an architecture."""
    config = FAMILIES[kind].config_of(spec)
    width = next(spec.decoder.blocks()).attention.head_width(spec.d_model)
    own: dict[str, Any] = {theirs: config[name] for theirs, name in WHOLE.items()}
    own |= {theirs: float(config[name]) for theirs, name in NUMBER.items()}
    own |= dict.fromkeys(WIDTHS, width)
    made: dict[str, Any] = {"general.architecture": kind, "general.type": "model"}
    scaled = config["rope_scaling"] or {}
    match scaled.get("rope_type"):
        case "linear" | "yarn":
            own[f"{SCALING}type"] = scaled["rope_type"]
            own[f"{SCALING}factor"] = float(scaled["factor"])
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            rest = float(scaled["original_max_position_embeddings"])
            made[LLAMA3_KEY] = [*(float(scaled[name]) for name in names), rest]
    if scaled.get("rope_type") == "yarn":
        own[f"{SCALING}original_context_length"] = scaled["original_max_position_embeddings"]
        for theirs, (name, usual) in YARN.items():
            if scaled[name] != usual:
                own[SCALING + theirs] = float(scaled[name])
    return made | {f"{kind}.{key}": value for key, value in own.items()}


def read_again(spec: ModelSpec, kind: str) -> tuple[Plan, ModelSpec]:
    """Return the plan of a spec's file, and the spec that a reader of the file would get."""
    plan = make_plan(table_of(kind, spec), spec)
    metadata = {
        key: shortest(single(value)) if isinstance(value, float) else value
        for key, value in write_settings(spec, kind).items()
    }
    _, again = read_settings(
        metadata,
        tensors=plan.entries,
        rows=spec.vocab_size,
        factors=factors_of(spec),
        where="the file to be written",
    )
    return plan, again


def factors_of(spec: ModelSpec) -> list[float] | None:
    """Return the contents of `rope_freqs.weight`, or None if the model needs none."""
    if not isinstance(spec.position, Rotary) or not isinstance(
        spec.position.scaling, Llama3Scaling
    ):
        return None
    width = next(spec.decoder.blocks()).attention.head_width(spec.d_model)
    return llama3_factors(spec.position, width)


def llama3_factors(rotary: Rotary, width: int) -> list[float]:
    """Return the divisor of each plain rotary frequency."""
    plain, _ = rotary_frequencies(replace(rotary, scaling=None), width)
    scaled, _ = rotary_frequencies(rotary, width)
    return [single(one / other) for one, other in zip(plain, scaled, strict=True)]


LAYER, BLOCK = "blk.{}.", "blocks.{}."
#: Divisors of rotary frequencies: no parameter; `settings` reads them.
FACTORS = "rope_freqs.weight"
PARTS = {
    "attn_q": "attn.q_proj",
    "attn_k": "attn.k_proj",
    "attn_v": "attn.v_proj",
    "attn_output": "attn.o_proj",
    "ffn_gate": "ffn.gate_proj",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
NORMS = {
    "attn_norm": "attn_norm",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "ffn_norm": "ffn_norm",
}
TURNED = ("attn_q", "attn_k")


def table_of(kind: str, spec: ModelSpec) -> Table:
    """Return the key table of an architecture; Llama's reordering depends on the head width."""
    width = next(spec.decoder.blocks()).attention.head_width(spec.d_model)

    def layout(part: str) -> Layout:
        return Interleaved(width) if kind == "llama" and part in TURNED else Rows()

    return Table(
        rows=(
            Row("token_embd.weight", "embed.weight"),
            *(Row(f"{LAYER}{one}.weight", f"{BLOCK}{our}.weight") for one, our in NORMS.items()),
            *(
                Row(f"{LAYER}{part}.{leaf}", f"{BLOCK}{our}.{leaf}", layout(part))
                for part, our in PARTS.items()
                for leaf in ("weight", "bias")
            ),
            Row("output_norm.weight", "final_norm.weight"),
            Row("output.weight", "heads.next.weight"),
        ),
        ignored=(FACTORS,),
    )


def architecture_of(spec: ModelSpec, *, first: str = "") -> tuple[str, Plan]:
    """Return the architecture that computes a spec, and its plan; else name the nearest."""
    tried = {}
    for kind in sorted(FAMILIES, key=lambda name: name != first):
        try:
            if spec.encoder is not None:
                raise InputError("encoder: has one, and that is a decoder alone")
            if any(block.attention.window is not None for block in spec.decoder.blocks()):
                raise InputError("attention in a sliding window, which none of them has")
            plan, again = read_again(spec, kind)
            reasons = differences(spec, again)
        except GlassError as error:
            reasons = [error.what]
        if not reasons:
            return kind, plan
        tried[kind] = reasons
    raise InputError(
        "no GGUF architecture that is written here computes this model",
        where=nearest_of(tried),
        hint="{--to native|to='native'} keeps every spec",
    )
