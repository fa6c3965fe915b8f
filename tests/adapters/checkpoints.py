"""Tiny random models of transformers, written as folders in both generations' style.

Weights are drawn anew everywhere: fresh ones have biases of 0 and gains of 1, and hide mistakes.
"""

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import nn

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
BASE = {"rope_type": "default", "rope_theta": 1e6}

#: Name: (class of the config, its fields).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 tied": ("Qwen2Config", {"tie_word_embeddings": True, "rope_parameters": BASE}),
    "qwen2 untied": ("Qwen2Config", {"rope_parameters": BASE}),
    "qwen2 window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3 wide heads": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 bias": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "qwen3 yarn": ("Qwen3Config", {"head_dim": 16, "rope_parameters": YARN}),
    "llama": ("LlamaConfig", {"rms_norm_eps": 1e-5}),
    "llama3 biases": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "smollm2": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": BASE}),
    "linear rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "mistral wide": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "gpt2": (
        "GPT2Config",
        {"n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97},
    ),
}


@cache
def live(case: str) -> Any:
    """The module of a case, in eval mode."""
    import transformers

    kind, fields = CASES[case]
    sizes = {} if kind == "GPT2Config" else SIZES
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, kind)(**(sizes | ends | json.loads(json.dumps(fields))))
    module = transformers.AutoModelForCausalLM.from_config(config)
    return perturbed(module).eval()


def perturbed(module: nn.Module) -> nn.Module:
    """Random values everywhere, activations of unit scale."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
    return module


@cache
def _folder(case: str, sharded: bool, old: bool) -> Path:
    place = Path(mkdtemp(prefix="glassformer-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    place = place / "model"
    live(case).save_pretrained(place, max_shard_size="30KB" if sharded else "1GB")
    if old:
        path = place / "config.json"
        path.write_text(json.dumps(as_written_by_4(json.loads(path.read_text())), indent=2))
    return place


def folder_of(case: str, place: Path, *, sharded: bool = False, old: bool = False) -> Path:
    """A copy of the case's folder that a test may damage."""
    return shutil.copytree(_folder(case, sharded, old), place / "model")


def as_written_by_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same config in the words of transformers 4."""
    config = dict(config)
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    config.pop("layer_types", None)
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    if config["model_type"].startswith("qwen") and not config["use_sliding_window"]:
        config["sliding_window"] = 32768
    return config


def change(folder: Path, **fields: Any) -> None:
    """Set keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def tokens(batch: int, length: int, *, seed: int = 3) -> torch.Tensor:
    """Random ids of the tiny vocabulary."""
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(seed))
