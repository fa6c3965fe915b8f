"""Tiny random models of every language model class of the installed transformers.

The default config of a model type, with every size that it has made small; weights are random and
of unit scale, so that no mistake hides behind a zero.
"""

import contextlib
import importlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Kind = Literal["causal", "masked", "encoder-decoder"]

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 97, 32, 2, 4, 64

#: Size attributes by the names that configs use; the value is what a tiny model takes.
_SIZES: tuple[tuple[str, int], ...] = (
    (
        "vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size",
        VOCABULARY,
    ),
    (
        "hidden_size d_model n_embd dim emb_dim embed_dim",
        WIDTH,
    ),
    (
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers "
        "num_encoder_layers num_decoder_layers",
        LAYERS,
    ),
    (
        "num_attention_heads n_head n_heads encoder_attention_heads num_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads",
        HEADS,
    ),
    (
        "num_key_value_heads num_kv_heads linear_num_key_heads",
        2,
    ),
    (
        "linear_num_heads linear_num_value_heads",
        HEADS,
    ),
    (
        "linear_head_dim linear_key_head_dim linear_value_head_dim",
        8,
    ),
    (
        "head_dim d_kv attention_head_dim kv_channels global_head_dim",
        8,
    ),
    (
        "intermediate_size d_ff n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim "
        "ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size "
        "mlp_hidden_size hidden_dim dff intermediate_size_mlp "
        "moe_shared_expert_intermediate_size expert_ffn_hidden_size "
        "shared_intermediate_size block_ff_dim",
        48,
    ),
    (
        "max_position_embeddings n_positions max_target_positions max_source_positions "
        "max_seq_len n_ctx max_sequence_length context_length "
        "max_encoder_position_embeddings max_decoder_position_embeddings block_size",
        LENGTH,
    ),
    (
        "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_layer",
        4,
    ),
    (
        "num_experts_per_tok num_experts_per_token moe_top_k moe_topk top_k_experts",
        2,
    ),
    (
        "n_group topk_group n_groups mamba_n_groups",
        1,
    ),
    (
        "embedding_size lru_width",
        WIDTH,
    ),
    (
        "qk_rope_head_dim qk_nope_head_dim v_head_dim",
        8,
    ),
    (
        "q_lora_rank kv_lora_rank qk_head_dim",
        16,
    ),
)
SIZES = {name: value for names, value in _SIZES for name in names.split()}

#: Sizes that are set even where the default config leaves them open.
OPEN = ("head_dim", "vocab_size", "n_routed_experts")

#: What some model types need besides: sizes that must fit each other.
LATENT = {"num_key_value_heads": HEADS, "head_dim": 8}
EXTRA: dict[str, dict[str, object]] = {
    "codegen": {"rotary_dim": 4},
    "dots1": {"first_k_dense_replace": 1},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "granitemoehybrid": {"layers_block_type": ["mamba", "attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (8, 8),
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "rwkv": {"attention_hidden_size": WIDTH},
    "xlstm": {"hidden_size": WIDTH, "embedding_dim": WIDTH, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1], "d_head": 8, "d_inner": 48},
    "luke": {"entity_vocab_size": 11},
    "perceiver": {"d_latents": WIDTH, "num_latents": 8, "d_model": WIDTH},
    "led": {"attention_window": [4, 4], "max_encoder_position_embeddings": LENGTH},
    "longformer": {"attention_window": [4, 4]},
    "esmc": {"d_model": WIDTH},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 32},
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A class of transformers that a config builds."""

    kind: Kind
    model_type: str
    class_name: str


def entries() -> Iterator[Entry]:
    """Return every causal, masked and encoder-decoder language model by its model type."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tables: dict[Kind, dict[str, str]] = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    for kind, table in tables.items():
        for model_type, class_name in table.items():
            if not (kind == "masked" and class_name.endswith("ForConditionalGeneration")):
                yield Entry(kind, model_type, class_name)


def shrink(config: Any, extra: dict[str, object]) -> None:
    """Make every size of a config and of the configs in it small."""
    for name in list(vars(config)):
        part = getattr(config, name)
        if hasattr(part, "to_dict") and hasattr(part, "model_type"):
            shrink(part, extra)

    def put(name: str, value: object) -> None:
        with contextlib.suppress(Exception):  # read-only, or one for each layer
            setattr(config, name, value)

    def has(name: str) -> object:
        try:
            return getattr(config, name, None)
        except Exception:  # one for each layer
            return 1

    latent = LATENT if has("kv_lora_rank") is not None else {}
    for name, value in {**SIZES, **latent}.items():
        if isinstance(has(name), int) or (name in OPEN and hasattr(type(config), name)):
            put(name, value)
    for name, value in extra.items():
        put(name, value)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "attention_layers"):
        listed = has(name)
        if isinstance(listed, list) and listed and name not in extra:
            kinds = list(dict.fromkeys(listed))
            put(name, (kinds * LAYERS)[:LAYERS])
    for name, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
        if hasattr(config, name):
            put(name, token)
    if has("decoder_start_token_id") is not None:
        put("decoder_start_token_id", 2)
    for name in ("forced_bos_token_id", "forced_eos_token_id", "sep_token_id", "mask_token_id"):
        if isinstance(has(name), int):
            put(name, 3 if "forced" not in name else None)


#: More parameters than this is not tiny: a part has sizes that the table above does not know.
TINY = 20_000_000


def build(entry: Entry, *, seed: int = 0) -> nn.Module:
    """Build a tiny model of one class, with random weights of unit scale."""
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, entry.class_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = kind.config_class()
        shrink(config, EXTRA.get(entry.model_type, {}))
        if entry.kind == "causal" and hasattr(config, "is_decoder"):
            config.is_decoder = True
        torch.manual_seed(seed)
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(config).parameters())
        if size > TINY:
            raise ValueError(f"{size:,} parameters: not tiny")
        model: nn.Module = kind(config)
    unit_scale(model, seed=seed)
    return model.eval()


@torch.no_grad()
def unit_scale(model: nn.Module, *, seed: int) -> None:
    """Add noise to every weight: 1/sqrt(fan in) to matrices, 0.1 to vectors."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 1 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.1
            parameter.add_(noise * scale)
