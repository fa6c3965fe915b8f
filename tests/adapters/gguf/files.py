"""GGUF files made without our code: the library's names and keys, llama.cpp's order of rows."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.adapters.checkpoints import live

#: Cases of `checkpoints` that have a form in GGUF, and their architecture there.
ARCHITECTURES = {
    "qwen2 tied": "qwen2",
    "qwen2 untied": "qwen2",
    "qwen3 wide heads": "qwen3",
    "qwen3 yarn": "qwen3",
    "llama": "llama",
    "llama3 biases": "llama",
    "smollm2": "llama",
    "linear rope": "llama",
    "mistral wide": "llama",
}


def arrays_of(module: Any, architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a live module as llama.cpp's converter would write them."""
    config = module.config
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for name, parameter in module.named_parameters():
        array = parameter.detach().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            heads = getattr(config, key)
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        found[names.get_name(name, try_suffixes=(".weight", ".bias")) or name] = array
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        width = config.hidden_size // config.num_attention_heads
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        found["rope_freqs.weight"] = (plain / scaled).numpy()
    return found


def write_foreign(case: str, path: Path, **more: Any) -> Path:
    """The file of a case, settings by the library's own methods."""
    module = live(case)
    config, rope = module.config, module.config.rope_parameters
    writer = gguf.GGUFWriter(path, ARCHITECTURES[case])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":  # tiny: no released model has these numbers
        names = ("factor", "low_freq_factor", "high_freq_factor")
        numbers = [float(rope[name]) for name in (*names, "original_max_position_embeddings")]
        writer.add_array("glassformer.rope.llama3", numbers)
    arrays = arrays_of(module, ARCHITECTURES[case])
    return finish(writer, arrays, more)


def finish(writer: gguf.GGUFWriter, arrays: dict[str, np.ndarray], more: dict[str, Any]) -> Path:
    """Further keys (a None takes one out) and the tensors; a pair is packed bytes and a kind."""
    for key, value in more.items():
        writer.kv_data[0].pop(key, None)
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, array in arrays.items():
        if isinstance(array, tuple):
            writer.add_tensor(name, array[0], raw_dtype=array[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)
