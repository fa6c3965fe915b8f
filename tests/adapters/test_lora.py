"""LoRA in PEFT's format: `peft` and we read what the other wrote and compute the same."""

import json
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from glassformer.adapters.folder.lora import (
    CONFIG,
    load_adapter,
    module_names,
    peft_files,
    read_peft,
    save_adapter,
)
from glassformer.adapters.load import adapt, load, save
from glassformer.adapters.opening import FACTORS
from glassformer.models.weights import weights_of
from glassformer.nn.lora import apply_lora, lora_parameters, merge
from glassformer.spec import presets
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.train import LoRA, lora_manifest
from glassformer.store.tensors import read_header, tensor_bytes
from tests.planting import Name, catches
from tests.tiny import tiny, token_ids

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
#: Parts of the largest logit, in float32. Worst over 120 draws: 0 against peft, 2.8e-6 merged.
SAME, MERGED = 1e-5, 1e-5


@cache
def theirs(name: str) -> torch.nn.Module:
    """A tiny model of transformers, far from its initialisation."""
    torch.manual_seed(0)
    made = {
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "qwen3": lambda: Qwen3ForCausalLM(
            Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)
        ),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    }[name]()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made.eval()


def drawn(model: torch.nn.Module, *, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in lora_parameters(model).values():
            factor.normal_(0.0, 0.2, generator=generator)


def peft_over(name: str, folder: Path) -> torch.nn.Module:
    """`peft`, over a fresh copy of their model, with the adapter of a folder."""
    import copy

    from peft import PeftModel

    return PeftModel.from_pretrained(copy.deepcopy(theirs(name)), folder).eval()


@torch.no_grad()
def difference(ours: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference of two logits, as a part of the largest logit."""
    logits = other(token_ids(3, 11, vocab=61)).logits
    gap = (ours(token_ids(3, 11, vocab=61))["next"] - logits).abs().max()
    return float(gap / logits.abs().max())


LORAS = {
    "qwen2": LoRA(rank=3, alpha=5.0),
    "qwen3": LoRA(rank=2, alpha=16.0, dropout=0.1, targets=("q_proj", "v_proj", "head")),
    "llama": LoRA(rank=4, targets=("blocks.1.ffn.up_proj", "k_proj")),
}


@catches(
    "rank as alpha",
    "adapters.folder.lora:peft_files",
    Name("rank"),
    to="int({value}.alpha)",
    case="qwen3",
)
@pytest.mark.parametrize("name", LORAS)
def test_peft_opens_what_we_write(name: str, tmp_path: Path) -> None:
    model = adapt(theirs(name)).model
    lora = LORAS[name]
    apply_lora(model, lora)
    drawn(model)
    save_adapter(model, lora, tmp_path / "adapter", base="somewhere")
    opened = peft_over(name, tmp_path / "adapter")
    assert difference(model, theirs(name)) > 0.1
    assert difference(model, opened) <= SAME
    merge(model)
    assert difference(model, opened) <= MERGED
    assert difference(model, opened.merge_and_unload()) <= MERGED


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["v_proj", "lm_head"], "all-linear"])
def test_we_open_what_peft_writes(targets, tmp_path):
    import copy

    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=7, target_modules=targets, lora_dropout=0.2)
    wrapped = get_peft_model(copy.deepcopy(theirs("qwen3")), config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora" in name:
                parameter.normal_(0.0, 0.2, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for the base's config on a hub
        wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    model = adapt(theirs("qwen3")).model
    lora = load_adapter(model, tmp_path / "adapter")
    assert (lora.rank, lora.alpha, lora.dropout) == (3, 7.0, 0.2)
    assert difference(model, wrapped) <= SAME


def test_an_adapter_is_read_back_bit_for_bit(tmp_path):
    for number, spec in enumerate((presets.qwen(n_layers=2), tiny(), tiny(encoder=True))):
        from glassformer.models.model import build

        lora = LoRA(rank=2, alpha=3.5, targets=("attention", "ffn"))
        model = build(spec)
        apply_lora(model, lora)
        drawn(model)
        folder = save_adapter(model, lora, tmp_path / str(number))
        found, arrays = read_peft(folder, spec)
        want = weights_of(model, rules=lora_manifest(spec, lora))
        assert arrays.keys() == want.keys()
        assert all((arrays[name] == want[name]).all() for name in want)
        assert (found.rank, found.alpha) == (2, 3.5)
        assert lora_manifest(spec, found) == lora_manifest(spec, lora)


def test_names_are_hugging_faces_where_the_model_is():
    names = module_names(presets.qwen(n_layers=2))
    assert names["blocks.1.attn.q_proj"] == "model.layers.1.self_attn.q_proj"
    assert names["blocks.0.ffn.down_proj"] == "model.layers.0.mlp.down_proj"
    own = module_names(tiny())
    assert own["blocks.1.attn.q_proj"] == "blocks.1.attn.q_proj"
    files = peft_files(presets.qwen(), LoRA(targets=("q_proj",)), {}, base="")
    assert json.loads(files[CONFIG])["target_modules"] == ["q_proj"]


def test_targets_are_whole_names_where_last_names_would_mean_more(tmp_path):
    spec = presets.qwen(n_layers=2)
    one = peft_files(spec, LoRA(targets=("blocks.1.attn.q_proj",)), {})
    assert json.loads(one[CONFIG])["target_modules"] == ["model.layers.1.self_attn.q_proj"]


# --- what is refused ------------------------------------------------------------------------------


def written(folder: Path, **changes: object) -> Path:
    """A good adapter for the qwen preset with some settings changed."""
    from glassformer.models.model import build

    spec = presets.qwen(n_layers=1)
    model = build(spec)
    apply_lora(model, LoRA(rank=2, targets=("q_proj",)))
    save_adapter(model, LoRA(rank=2, targets=("q_proj",)), folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "kind 'LOHA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"bias": "all"}, "bias is all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"r": 3}, "misshapen"),
        ({"r": "many"}, "adapter_config.json"),
        ({"r": -1}, "rank -1"),
        ({"lora_alpha": [1]}, "adapter_config.json"),
    ],
)
def test_what_would_compute_something_else_is_refused(changes, words, tmp_path):
    with pytest.raises(FileError, match=words):
        read_peft(written(tmp_path / "a", **changes), presets.qwen(n_layers=1))


def test_files_that_do_not_fit_are_refused(tmp_path):
    folder, spec = written(tmp_path / "a"), presets.qwen(n_layers=1)
    with pytest.raises(FileError, match="corrects nothing that this model has"):
        read_peft(folder, tiny())
    names = list(read_header(folder / FACTORS))
    whole = read_peft(folder, spec)[1]
    (folder / FACTORS).write_bytes(tensor_bytes({names[0]: next(iter(whole.values()))}))
    with pytest.raises(FileError, match=r"missing|misshapen"):
        read_peft(folder, spec)
    (folder / FACTORS).write_bytes(b"not tensors")
    with pytest.raises(FileError):
        read_peft(folder, spec)
    (folder / FACTORS).unlink()
    with pytest.raises(FileError):
        read_peft(folder, spec)
    (folder / FACTORS).write_bytes(b"")
    (folder / CONFIG).write_text("{")
    with pytest.raises(FileError, match="not JSON"):
        read_peft(folder, spec)


def test_nothing_is_lost_or_overwritten(tmp_path):
    from glassformer.models.model import build

    spec, lora = presets.qwen(n_layers=1), LoRA(rank=2)
    model = build(spec)
    apply_lora(model, lora)
    save_adapter(model, lora, tmp_path / "a")
    before = (tmp_path / "a" / FACTORS).read_bytes()
    with pytest.raises(InputError, match="exists"):
        save_adapter(model, lora, tmp_path / "a")
    assert (tmp_path / "a" / FACTORS).read_bytes() == before
    with pytest.raises(InputError, match="merge LoRA"):
        save(model, tmp_path / "b")
    merge(model)
    save(model, tmp_path / "b")
    assert load(tmp_path / "b").spec == spec
    apply_lora(model, lora)
    with torch.no_grad():
        next(iter(lora_parameters(model).values())).fill_(float("nan"))
    with pytest.raises(InputError, match="not saved"):
        save_adapter(model, lora, tmp_path / "c")
    assert not (tmp_path / "c").exists()
