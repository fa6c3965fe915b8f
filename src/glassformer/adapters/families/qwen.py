"""Qwen2 and 2.5, Qwen3 (dense), and Qwen-1 with its own names.

Qwen2 always has biases on q, k and v, and no key that says so; Qwen3 has q/k-norm instead, a head
width of its own, and biases everywhere if its config says so. Windows act on layers from
`max_window_layers`. Qwen-1 fuses q, k and v, calls the gate w2 and the other w1, and halves
`intermediate_size`.
"""

from dataclasses import replace
from typing import Any

from glassformer.adapters.config import Config
from glassformer.adapters.families.llama import BIAS, HEAD_DIM, KEYS, ROPE, SIZES, TABLE, WIDTH
from glassformer.adapters.families.rotary import FULL, SLIDING, kinds_of, slide, window_of
from glassformer.adapters.keys import Facts, Key, Own, flag, number, whole
from glassformer.adapters.table import QKV, Family, decoder_table
from glassformer.spec.model import ModelSpec, Rotary


def qwen_windows(*, alternate: bool = False) -> Own:
    """Return the entry of a window in some layers: by `layer_types`, or from a layer on.

    `alternate`: without `layer_types`, every other layer before `max_window_layers` has a window.
    """

    def read(config: Config, facts: Facts) -> None:
        layers = facts["layers"]
        used = config.flag("use_sliding_window", default=False)
        given = config.any("sliding_window", default=None)
        width: int | None = 4096
        if config.has("sliding_window") and not (given == 0 and not used):  # of Qwen2-MoE
            width = None if given is None else config.whole("sliding_window")
        window = width if used else None
        first = config.any("max_window_layers", default=28)
        kinds = config.any("layer_types", default=None)
        if kinds is None:
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                raise config.bad("max_window_layers", first, "a whole number")
            some = range(first, layers) if not alternate else range(0, min(first, layers), 2)
            kinds = [SLIDING if layer in some else FULL for layer in range(layers)]
        elif (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or any(kind not in (FULL, SLIDING) for kind in kinds)
            or (window is None and SLIDING in kinds)
        ):
            raise config.bad(
                "layer_types", kinds, f"{layers} of {FULL} and, with a window, {SLIDING}"
            )
        slide(facts, kinds, window)

    def write(spec: ModelSpec) -> dict[str, Any]:
        kinds, window = kinds_of(spec), window_of(spec)
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else len(kinds),
            "layer_types": kinds,
        }

    return Own(read, write)


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    TABLE,
    KEYS | HEAD_DIM | ROPE | {"windows": qwen_windows()},
    {"attn.bias": "qkv"},
    defaults={"num_key_value_heads": 32},
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    TABLE,
    KEYS
    | BIAS
    | {"head_dim": replace(WIDTH["head_dim"], default=128)}
    | ROPE
    | {"windows": qwen_windows()},
    {"qk_norm": True},
    defaults={"num_key_value_heads": 32},
)

# --- Qwen-1 -------------------------------------------------------------------------------------


def _read_context(config: Config, facts: Facts) -> None:
    """Attention is scaled only beyond the context, which `seq_length` says."""
    config.flag("use_dynamic_ntk", default=True)
    config.flag("use_logn_attn", default=True)
    facts["max_seq_len"] = config.whole("seq_length")
    config.whole("max_position_embeddings", default=facts["max_seq_len"])


def _halved(config: Config, *names: str, default: Any) -> int:
    d_ff = config.whole(*names)
    if d_ff % 2:
        raise config.bad(names[0], d_ff, "even")
    return d_ff // 2


QWEN1 = Family(
    "qwen",
    "QWenLMHeadModel",
    decoder_table(
        "transformer.",
        "h",
        outer={"wte": "embed", "ln_f": "final_norm"},
        parts={
            "ln_1": "attn_norm",
            "attn.c_attn": QKV,
            "attn.c_proj": "attn.o_proj",
            "ln_2": "ffn_norm",
            "mlp.w2": "ffn.gate_proj",
            "mlp.w1": "ffn.up_proj",
            "mlp.c_proj": "ffn.down_proj",
        },
        buffers=(
            "transformer.rotary_emb.inv_freq",
            "transformer.h.{}.attn.rotary_emb.inv_freq",
        ),
    ),
    {
        **{key: SIZES[key] for key in ("vocab_size", "hidden_size")},
        **{key: SIZES[key] for key in ("num_hidden_layers", "initializer_range")},
        "num_attention_heads": whole("attn.n_heads", "attn.n_kv_heads"),
        "tie_word_embeddings": flag("head.tied", default=False),
        "intermediate_size": Key(fields=("ffn.d_ff",), ask=_halved, outward=lambda d_ff: 2 * d_ff),
        "kv_channels": whole("attn.d_head", default=128, written="attn.width"),
        "context": Own(
            _read_context,
            lambda spec: dict.fromkeys(("seq_length", "max_position_embeddings"), spec.max_seq_len),
        ),
        "layer_norm_epsilon": number("norm.eps", default=1e-6),
        "rotary_emb_base": number("position.base", default=10_000.0),
        "attn_dropout_prob": number("dropout.attention", default=0.0),
        "emb_dropout_prob": 0.0,
        "no_bias": True,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
    },
    {"attn.bias": "qkv", "position": Rotary},
    harmless=(
        *("bf16", "fp16", "fp32", "onnx_safe", "use_flash_attn", "use_cache_kernel"),
        "softmax_in_fp32",
    ),
    idle={
        "emb_dropout_prob": 0.0,
        "no_bias": True,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "use_cache_quantization": False,
    },
    remote_code=True,
)
