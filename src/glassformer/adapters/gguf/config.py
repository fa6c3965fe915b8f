"""Convert between GGUF's metadata and config.json, and between its tensor names and ours.

Metadata becomes the config of a family, so that it is read and refused in the same way; a spec
becomes metadata by way of the same config. Some settings show only in the tensors: an untied head,
biases, Llama 3's scaling. The names are one more key table. llama.cpp's Llama rotates neighbouring
rows of q and k, ours (and Hugging Face's) rows half a head apart: those rows are reordered, both
ways. Its Qwen rotates as ours does. What an architecture calls things, and what it always has, is
an entry of `ARCHITECTURES`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from glassformer.adapters.config import Config, block_of
from glassformer.adapters.counterpart import differences, nearest_of
from glassformer.adapters.families.llama import MISTRAL
from glassformer.adapters.gguf.architectures import ARCHITECTURES, Architecture
from glassformer.adapters.gguf.header import shortest
from glassformer.adapters.keys import Key, value_of
from glassformer.adapters.table import (
    Array,
    Experts,
    Family,
    Interleaved,
    Layout,
    Plan,
    Row,
    Rows,
    Shape,
    Table,
    make_plan,
)
from glassformer.spec.errors import FileError, GlassError, InputError
from glassformer.spec.model import ALiBi, Llama3Scaling, ModelSpec, Rotary, rotary_of
from glassformer.spec.position import rotary_frequencies, single

if TYPE_CHECKING:
    from torch import Tensor

#: The key behind the architecture's name, and the fields that it says: the first that a family has.
WHOLE = {
    "vocab_size": ("vocab_size",),
    "embedding_length": ("d_model",),
    "block_count": ("layers",),
    "feed_forward_length": ("dense.d_ff", "ffn.d_ff"),
    "attention.head_count": ("attn.n_heads",),
    "attention.head_count_kv": ("attn.n_kv_heads",),
    "context_length": ("max_seq_len",),
}
THETA = "rope.freq_base"
WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
SCALING = "rope.scaling."
YARN = {"yarn_beta_fast": ("beta_fast", 32.0), "yarn_beta_slow": ("beta_slow", 1.0)}
#: Keys that do nothing at these values.
IDLE = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
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
    entry, kind = entry_of(metadata, where=where), metadata["general.architecture"]
    _whole_model(metadata, where)
    made = ARCHITECTURES[entry]
    family = made.family
    own = {key[len(kind) + 1 :]: metadata[key] for key in metadata if key.startswith(f"{kind}.")}
    absent = {
        "vocab_size": rows,
        "attention.head_count_kv": own.get("attention.head_count"),
        THETA: 10_000.0,
    }
    found = Config(absent | own, where=where, file="the metadata")
    sizes = {theirs: found.whole(theirs) for theirs in WHOLE}
    config: dict[str, Any] = {made.eps[0]: found.number(made.eps[1])}
    heads, d_model = sizes["attention.head_count"], sizes["embedding_length"]
    usual = {"feed_forward_length": 4 * d_model, "attention.head_count_kv": heads}
    for theirs, fields in WHOLE.items():
        if (name := family.key_of(*fields)) is not None:
            config[name] = sizes[theirs]
        elif made.translated is not None and fields == ("attn.n_kv_heads",):
            config["num_key_value_heads"] = sizes[theirs]
        elif sizes[theirs] != usual[theirs]:
            what = f"{theirs}: {sizes[theirs]}, and what is read here has {usual[theirs]}"
            raise FileError(f"the metadata: {what}", where=where)
    config |= {name: found.whole(theirs) for theirs, name in made.wholes.items()}
    config |= {name: found.number(theirs) for theirs, name in made.numbers.items()}
    config |= {name: found.flag(theirs) for theirs, name in made.flags.items()}
    config |= {name: tensor in tensors for name, tensor in made.biases.items()}
    config |= made.fixed
    if made.window:
        config["sliding_window"] = found.whole("attention.sliding_window")
    width = _head_width(found, config, made, usual=max(d_model // heads, 1))
    stated = family.keys.get("head_dim")
    if width * heads != d_model or (isinstance(stated, Key) and stated.default is not None):
        config["head_dim"] = width
    if made.width:
        config[made.width] = width
    config["rope_theta"] = found.number(THETA)
    config["rope_scaling"] = _scaling(found, sizes["context_length"])
    if factors is not None:
        if config["rope_scaling"] is not None:
            raise FileError(f"{FACTORS} and a scaling of positions as well", where=where)
        config["rope_scaling"] = _llama3(
            factors, metadata.get(LLAMA3_KEY), config["rope_theta"], width, where
        )
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if not made.rotary:
        if config["rope_scaling"] is not None:
            raise found.bad(f"{SCALING}type", found.any(f"{SCALING}type"), "none")
        del config["rope_theta"], config["rope_scaling"]
    if entry == "llama" and d_model % heads:
        family = MISTRAL
        del config["attention_bias"], config["mlp_bias"]
        config |= {"sliding_window": None}
    found.finish(harmless=HARMLESS, idle=IDLE)
    try:
        config = config if made.translated is None else made.translated(config, tensors)
    except InputError as error:
        raise FileError(f"the metadata: {error.what}", where=where) from error
    return family, family.spec_of(Config(config, where=where, file="the metadata"))


def entry_of(metadata: Mapping[str, Any], *, where: str) -> str:
    """Return the entry of a file's architecture: of several with its name, the one with experts."""
    kind = metadata.get("general.architecture")
    experts = bool(metadata.get(f"{kind}.expert_count"))
    named = [entry for entry, one in ARCHITECTURES.items() if one.name(entry) == kind]
    exact = [entry for entry in named if ("expert_count" in ARCHITECTURES[entry].wholes) == experts]
    for entry in exact or named:
        return entry
    known = sorted({one.name(entry) for entry, one in ARCHITECTURES.items()})
    raise FileError(
        f"no adapter reads the GGUF architecture {str(kind)[:60]!r}",
        where=where,
        hint=f"read here: {', '.join(known)}; docs/adding-an-architecture.md tells how to add one",
    )


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


def _head_width(found: Config, config: dict[str, Any], made: Architecture, *, usual: int) -> int:
    """Return the width of a head; of a head that is rotated in part, note the part."""
    width = found.whole(WIDTHS[0], default=usual)
    if found.whole(WIDTHS[1], default=width) != width:
        raise found.bad(WIDTHS[1], found.any(WIDTHS[1]), f"{width}, the width of a head")
    turned = found.whole(WIDTHS[2], default=width)
    if made.part and turned <= width:
        config[made.part] = turned / width
    elif turned != width:
        raise found.bad(WIDTHS[2], turned, f"{width}, the width of a head")
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


def write_settings(spec: ModelSpec, entry: str) -> dict[str, Any]:
    """Return a spec's metadata for an entry of `ARCHITECTURES`."""
    one = ARCHITECTURES[entry]
    config, kind = one.family.config_of(spec), one.name(entry)
    block = block_of(spec.decoder)
    attention = block.attention
    width, rotary = attention.head_width(spec.d_model), rotary_of(attention, spec.position)
    turned = spec.position if isinstance(spec.position, Rotary) else rotary
    if isinstance(spec.position, ALiBi):
        config["alibi_bias_max"] = spec.position.max_bias
    needed = (one.eps[0], *one.wholes.values(), *one.numbers.values(), *one.flags.values())
    if lacking := [name for name in needed if name not in config]:
        raise InputError(f"{', '.join(lacking)}: there it is stored, and this model has none")
    own: dict[str, Any] = {theirs: value_of(spec, fields[-1]) for theirs, fields in WHOLE.items()}
    own["attention.head_count_kv"] = attention.kv_heads
    if (dense := one.family.key_of("dense.d_ff")) is not None:
        own["feed_forward_length"] = config[dense]
    own |= {one.eps[1]: float(config[one.eps[0]])}
    if one.rotary:
        own[THETA] = 10_000.0 if turned is None else float(turned.base)
    own |= {theirs: config[name] for theirs, name in one.wholes.items()}
    own |= {theirs: float(config[name] or 0.0) for theirs, name in one.numbers.items()}
    own |= {theirs: bool(config[name]) for theirs, name in one.flags.items()}
    if one.window:
        own["attention.sliding_window"] = config["sliding_window"]
    own |= dict.fromkeys(WIDTHS if one.rotary else WIDTHS[:2], width)
    if one.part and rotary is not None:
        own[WIDTHS[2]] = rotary.width(width)
    made: dict[str, Any] = {"general.architecture": kind, "general.type": "model"}
    scaled = config.get("rope_scaling") or {}
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


def read_again(spec: ModelSpec, entry: str) -> tuple[Plan, ModelSpec]:
    """Return the plan of a spec's file, and the spec that a reader of the file would get."""
    plan = make_plan(table_of(entry, spec), spec)
    metadata = {
        key: shortest(single(value)) if isinstance(value, float) else value
        for key, value in write_settings(spec, entry).items()
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
    width = block_of(spec.decoder).attention.head_width(spec.d_model)
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
EXPERTS = {f"ffn_{part}_exps": f"{part}_proj" for part in ("gate", "up", "down")}
SHARED = {f"ffn_{part}_shexp": f"ffn.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
ROUTERS = {"ffn_gate_inp": "ffn.gate", "ffn_gate_inp_shexp": "ffn.shared_expert_gate"}
TURNED = ("attn_q", "attn_k")


@dataclass(frozen=True, slots=True)
class Gain:
    """A gain that is stored plus 1, as llama.cpp's converter writes Gemma's."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0]

    def split(self, stored: Array, shapes: Sequence[Shape]) -> list[Array]:
        from glassformer.store.tensors import BFLOAT16, rounded, widened

        if stored.dtype == BFLOAT16:
            wide = widened(stored)
            return [rounded(wide - wide.dtype.type(1))]
        return [stored - stored.dtype.type(1)]

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        return tensors[0] + 1


@dataclass(frozen=True, slots=True)
class Flat:
    """A matrix of one row that is stored as a vector: the gate of a shared expert."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0][1:]

    def split(self, stored: Array, shapes: Sequence[Shape]) -> list[Array]:
        return [stored.reshape(shapes[0])]

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        return tensors[0].reshape(-1)


def _names(ours: str | tuple[str, ...]) -> tuple[str, ...]:
    return (ours,) if isinstance(ours, str) else ours


def table_of(entry: str, spec: ModelSpec) -> Table:
    """Return the key table of an architecture; Llama's reordering depends on the head width."""
    one, attention = ARCHITECTURES[entry], block_of(spec.decoder).attention
    width, rotary = attention.head_width(spec.d_model), rotary_of(attention, spec.position)
    turned = width if rotary is None else rotary.width(width)

    def layout(part: str) -> Layout:
        if part.endswith("norm"):
            return Gain() if one.shifted else Rows()
        if part == "ffn_gate_inp_shexp":
            return Flat()
        return Interleaved(width, turned) if one.turned and part in TURNED else Rows()

    usual: dict[str, str | tuple[str, ...]] = {**NORMS, **PARTS, **SHARED, **ROUTERS}
    # A part has one name: those of the architecture come first.
    theirs = one.parts_of(spec)
    taken = {name for ours in theirs.values() for name in _names(ours)}
    parts = {part: ours for part, ours in usual.items() if ours not in taken} | dict(theirs)
    every = range(max((mixture.n_experts for mixture in spec.mixtures().values()), default=0))
    rows = [
        Row(
            f"{LAYER}{part}.{leaf}",
            tuple(f"{BLOCK}{name}.{leaf}" for name in _names(ours)),
            layout(part),
        )
        for part, ours in parts.items()
        for leaf in ("weight", "bias")
    ]
    if every:
        rows += [
            Row(
                f"{LAYER}{part}.{leaf}",
                tuple(f"{BLOCK}ffn.experts.{e}.{our}.{leaf}" for e in every),
                Experts(),
            )
            for part, our in EXPERTS.items()
            for leaf in ("weight", "bias")
        ]
    rows.append(Row(f"{LAYER}attn_sinks.weight", f"{BLOCK}attn.sinks"))
    outer = {
        "token_embd": "embed",
        "position_embd": "position",
        "token_embd_norm": "embed_norm",
        "output_norm": "final_norm",
        "output": "heads.next",
    }
    return Table(
        rows=(
            *rows,
            *(
                Row(f"{theirs}.{leaf}", f"{our}.{leaf}", layout(theirs))
                for theirs, our in outer.items()
                for leaf in ("weight", "bias")
            ),
        ),
        ignored=(FACTORS,),
    )


def architecture_of(spec: ModelSpec, *, first: str = "") -> tuple[str, Plan]:
    """Return the entry that computes a spec, and its plan; else name the nearest."""
    tried = {}

    def later(entry: str) -> bool:
        return ARCHITECTURES[entry].family.model_type != first

    for kind in sorted(ARCHITECTURES, key=later):
        try:
            if spec.encoder is not None:
                raise InputError("encoder: has one, and that is a decoder alone")
            windows = [block.attention.window for block in spec.decoder.blocks()]
            if not ARCHITECTURES[kind].window and windows != [None] * len(windows):
                raise InputError("attention in a sliding window, which is not written there")
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
