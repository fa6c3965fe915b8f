"""Every family computes what transformers computes: whole, padded, cached, and while it writes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from glassformer.adapters.load import adapt, load
from glassformer.generation.streaming import generate_batch
from glassformer.nn.cache import FixedCache
from glassformer.spec.decoding import DecodeSpec
from tests.adapters.checkpoints import CASES, folder_of, live, tokens

TOLERANCE = 1e-5
STYLES = {"one file, 5.x": {}, "shards, 4.x": {"sharded": True, "old": True}}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_transformers(case, style, tmp_path):
    adapter = load(folder_of(case, tmp_path, **STYLES[style]))
    module, ids = live(case), tokens(3, 64)
    theirs = module(ids).logits
    ours = adapter(ids)
    assert gap(ours, theirs) <= TOLERANCE

    valid = torch.ones_like(ids)
    valid[0, 40:] = 0
    valid[1, 11:] = 0
    real = valid.bool()
    padded = module(ids, attention_mask=valid).logits
    assert gap(adapter(ids, valid)[real], padded[real]) <= TOLERANCE

    cache, columns = FixedCache(64), []
    for t in range(64):
        columns.append(adapter.model(ids[:, t : t + 1], cache=cache)["next"])
    # One token at a time rounds otherwise: relative to the largest logit, as `glass verify` has it.
    assert gap(torch.cat(columns, 1), theirs) <= TOLERANCE * float(theirs.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_sixty_four_greedy_tokens_are_transformers(case, tmp_path):
    adapter = load(folder_of(case, tmp_path))
    prompt = tokens(1, 5, seed=5)
    theirs = live(case).generate(
        prompt, max_new_tokens=64, do_sample=False, attention_mask=torch.ones_like(prompt)
    )
    ours = generate_batch(adapter.stepper(), prompt.tolist(), spec=DecodeSpec(max_new_tokens=64))
    assert list(ours[0].tokens) == theirs[0, 5:].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_kept_and_close(dtype, tmp_path):
    import copy

    module = copy.deepcopy(live("qwen3 wide heads")).to(dtype)
    module.save_pretrained(tmp_path / "half")
    adapter = load(tmp_path / "half")
    assert {p.dtype for p in adapter.parameters()} == {dtype}
    again = type(module).from_pretrained(tmp_path / "half", dtype=dtype).eval()
    ids = tokens(2, 32)
    bar = {torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    assert gap(adapter(ids).float(), again(ids).logits.float()) <= bar
    wide = load(tmp_path / "half", dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def as_qwen1(state, config):
    """Qwen2's weights under Qwen-1's names: q, k, v fused, the gate called w2, the other w1."""
    made = {}
    for name, tensor in state.items():
        name = name.replace("model.layers.", "transformer.h.")
        name = name.replace("model.embed_tokens", "transformer.wte")
        name = name.replace("model.norm", "transformer.ln_f")
        name = name.replace("input_layernorm", "ln_1").replace("post_attention_layernorm", "ln_2")
        name = name.replace("self_attn.o_proj", "attn.c_proj").replace("down_proj", "c_proj")
        name = name.replace("gate_proj", "w2").replace("up_proj", "w1")
        made[name] = tensor
    for layer in range(config.num_hidden_layers):
        for leaf in ("weight", "bias"):
            parts = [
                made.pop(f"transformer.h.{layer}.self_attn.{letter}_proj.{leaf}")
                for letter in "qkv"
            ]
            made[f"transformer.h.{layer}.attn.c_attn.{leaf}"] = torch.cat(parts)
    return made


@torch.no_grad()
def test_qwen_1_names_and_fused_weights(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.adapters.checkpoints import SIZES, perturbed

    config = Qwen2Config(**(SIZES | {"num_key_value_heads": 4}))
    module = perturbed(Qwen2ForCausalLM(config)).eval()
    save_file(as_qwen1(module.state_dict(), config), tmp_path / "model.safetensors")
    described = {
        "architectures": ["QWenLMHeadModel"],
        "auto_map": {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
        "model_type": "qwen",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "kv_channels": 8,
        "seq_length": 128,
        "max_position_embeddings": 512,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "no_bias": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "tie_word_embeddings": False,
        "bf16": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    adapter = load(tmp_path)
    assert adapter.get_architecture_type() == "qwen"
    assert adapter.spec.max_seq_len == 128
    ids = tokens(2, 64)
    assert gap(adapter(ids), module(ids).logits) <= TOLERANCE


@torch.no_grad()
def test_a_body_s_file_without_its_prefix_is_read(tmp_path):
    """GPT-2's own files leave `transformer.` out and keep the masks."""
    folder = folder_of("gpt2", tmp_path)
    path = folder / "model.safetensors"
    bare = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(3)}
    save_file(bare, path)
    adapter = load(folder)
    assert set(adapter.report.ignored) == {f"h.{i}.attn.bias" for i in range(3)}
    ids = tokens(2, 16)
    assert gap(adapter(ids), live("gpt2")(ids).logits) <= TOLERANCE


@pytest.mark.parametrize("case", ["qwen2 tied", "llama3 biases", "gpt2"])
@torch.no_grad()
def test_a_live_module_is_taken_over_and_stays_the_reference(case):
    module, ids = live(case), tokens(2, 16)
    adapter = adapt(module)
    assert adapter.reference is module
    assert gap(adapter(ids), module(ids).logits) <= TOLERANCE
    assert adapter.get_num_parameters() == sum(p.numel() for p in module.parameters())
    first = next(adapter.parameters())
    assert all(first.data_ptr() != p.data_ptr() for p in module.parameters())
    assert not any(name.startswith("_reference") for name, _ in adapter.named_parameters())


@torch.no_grad()
def test_an_old_file_s_extra_tensors_are_told_apart(tmp_path):
    folder = folder_of("qwen2 tied", tmp_path)
    path = folder / "model.safetensors"
    state = load_file(path)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, path)
    report = load(folder).report
    assert report.ignored == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    assert report.tied == ("lm_head.weight",)
    assert len(report.loaded) == 38
    assert report.complete
    assert "tied copies: lm_head.weight" in str(report)
