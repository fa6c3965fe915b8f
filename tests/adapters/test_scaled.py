"""Weights of eight and four bits in safetensors: the numbers that they stand for, or a refusal."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.folder.scaled import ScaledWeights
from glassformer.adapters.load import load
from glassformer.models.weights import tensor_view
from glassformer.spec.errors import FileError
from tests.adapters.checkpoints import change, folder_of, live, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
#: Name: (quantization_config, shape of the scale of a weight, its leaf).
KINDS = {
    "blocks": ({"quant_method": "fp8", "weight_block_size": [16, 13]}, None, "weight_scale_inv"),
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, (), "weight_scale_inv"),
    "rows": (COMPRESSED | {"config_groups": {"group_0": GROUP}}, (-1, 1), "weight_scale"),
}


def packed_folder(kind, place):
    """A folder of FP8, and transformers' module with the numbers that its bytes mean."""
    config, shape, leaf = KINDS[kind]
    folder = folder_of("llama", place)
    change(folder, quantization_config=config)
    module, state = copy.deepcopy(live("llama")), load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in state if "proj.weight" in name]:
        rows, columns = state[name].shape
        if shape is None:
            size = (-(-rows // 16), -(-columns // 13))
        else:
            size = tuple(rows if n < 0 else n for n in shape)
        scale = torch.rand(size, generator=generator) * 1e-2 + 1e-3
        state[name] = (state[name] * 100).to(torch.float8_e4m3fn)
        state[name.replace("weight", leaf)] = scale
        if kind == "tensor":
            state[name.replace("weight", "activation_scale")] = torch.ones(())
        full = scale if shape is not None else None
        if full is None:
            full = torch.stack(
                [
                    torch.stack([scale[i // 16, j // 13] for j in range(columns)])
                    for i in range(rows)
                ]
            )
        module.get_parameter(name).data = state[name].float() * full
    save_file(state, folder / "model.safetensors")
    return folder, module


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fp8_is_read_as_the_product_with_its_scales(kind, tmp_path):
    folder, module = packed_folder(kind, tmp_path)
    adapter, ids = load(folder), tokens(2, 32)
    assert (adapter(ids) - module(ids).logits).abs().max() <= 1e-5
    assert adapter.report.notes == ("unpacked to float32: 21 FP8",)
    own = dict(adapter.model.named_parameters())
    assert torch.equal(
        own["blocks.0.attn.q_proj.weight"], module.model.layers[0].self_attn.q_proj.weight
    )
    written = export_hf(adapter, tmp_path / "plain").folder
    assert "quantization_config" not in json.loads((written / "config.json").read_text())
    assert torch.equal(load(written)(ids), adapter(ids))


def test_mxfp4_is_what_transformers_unpacks(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 7, 5, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 7, 5), generator=generator, dtype=torch.uint8)
    path = tmp_path / "model.safetensors"
    save_file({"e.up_blocks": blocks, "e.up_scales": scales, "n.weight": torch.ones(3)}, path)
    weights = ScaledWeights({path.name: path}, where="here", block=None)
    assert weights.shapes == {"n.weight": (3,), "e.up": (3, 160, 7)}
    assert sorted(weights.files[path.name]) == ["e.up", "n.weight"]
    unpacked = tensor_view(weights.read("e.up"))
    assert torch.equal(unpacked, convert_moe_packed_tensors(blocks, scales))
    assert weights.notes == ("unpacked to bfloat16: 1 MXFP4",)


@torch.no_grad()
def test_gpt_oss_with_experts_in_mxfp4(tmp_path):
    """The weights as released: every expert's matrices in blocks of 32 with one scale."""
    import transformers
    from bench.families import perturbed
    from safetensors.torch import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(
        vocab_size=53, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2,
        sliding_window=5, max_position_embeddings=64, pad_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    module = perturbed(transformers.GptOssForCausalLM(config)).eval()
    packed, generator = {}, torch.Generator().manual_seed(2)
    for name, parameter in module.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, width, rows = parameter.shape
            shape = (count, rows, width // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 124, shape, generator=generator, dtype=torch.uint8)
            parameter.copy_(convert_moe_packed_tensors(blocks, scales))
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    module.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    plain = {name: x for name, x in load_file(path).items() if f"{name}_blocks" not in packed}
    save_file(plain | packed, path)
    folder_config = json.loads((tmp_path / "config.json").read_text())
    folder_config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(folder_config))
    adapter, ids = load(tmp_path), torch.randint(0, 53, (2, 9), generator=generator)
    theirs = module(ids).logits
    assert (adapter(ids) - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert adapter.report.notes == ("unpacked to bfloat16: 4 MXFP4",)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "another format.*gptq"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [16]}, "blocks of"),
        ({"quant_method": "fp8", "weight_block_size": [8, 8]}, "has the shape"),
        (COMPRESSED | {"format": "pack-quantized"}, "pack-quantized"),
        ([1], "not a table"),
    ],
)
def test_other_formats_are_refused_by_name(quantization, said, tmp_path):
    folder, _ = packed_folder("blocks", tmp_path)
    change(folder, quantization_config=quantization)
    with pytest.raises(FileError, match=said):
        load(folder)


def test_a_weight_without_its_scale_is_refused(tmp_path):
    folder, _ = packed_folder("rows", tmp_path)
    path = folder / "model.safetensors"
    state = load_file(path)
    del state["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(state, path)
    with pytest.raises(FileError, match=r"up_proj\.weight is of FP8 and has no"):
        load(folder)
