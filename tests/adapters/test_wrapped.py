"""Models that no adapter of ours reads, computed by transformers behind the same methods."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import glassformer as gf
from glassformer.adapters.load import adapt
from glassformer.lab.smallbench.question import examinee_of
from glassformer.quant.contents import quantization_report
from glassformer.spec.errors import FileError, InputError
from tests.adapters.checkpoints import perturbed
from tests.adapters.folders import write_json_form
from tests.command import glass

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

PLAIN = {"vocab_size": 313, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = PLAIN | {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: Name of the class: its config, and what a refusal by our adapters names.
CASES = {
    "Mamba": (PLAIN | {"state_size": 4}, "'state_size' means state-space layers"),
    "Lfm2": (HEADS | {"layer_types": ["conv", "full_attention"]}, "'conv_L_cache'"),
    "Nemotron": (HEADS, "'hidden_act' is \"relu2\""),
    "Cwm": (HEADS, "layer_types"),
    "Olmo": (HEADS, "in the type's own code"),
    "XGLM": (
        {
            "vocab_size": 313,
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 64,
        },
        "'hidden_size'",
    ),
    "OPT": (
        {key: value for key, value in HEADS.items() if key[:9] not in ("intermedi", "num_key_v")}
        | {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        "'word_embed_proj_dim' is 16",
    ),
}
PROMPT = [5, 6, 7]


@cache
def live(name: str):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CASES[name][0], **ENDS)
    return perturbed(transformers.AutoModelForCausalLM.from_config(config)).eval()


def folder_of(name: str, place: Path) -> Path:
    folder = place / name
    live(name).save_pretrained(folder)
    return write_json_form(folder)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_model_that_is_not_read_is_computed_by_transformers(tmp_path, name):
    folder = folder_of(name, tmp_path)
    with pytest.raises(FileError) as refused:
        gf.load(folder)
    assert CASES[name][1] in refused.value.what
    assert "--backend transformers" in str(refused.value.in_command())
    model = gf.load(folder, backend="transformers")
    assert f"{type(live(name)).__name__} computed by transformers" in repr(model)
    assert model.get_num_parameters() == sum(p.numel() for p in live(name).parameters())
    ids = torch.tensor([PROMPT])
    wanted = (
        live(name)
        .generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 3:]
        .tolist()
    )
    assert model.generate(PROMPT, max_new_tokens=6, eos=()) == wanted
    both = model.generate([[9, 5, 6, 8, 7], PROMPT, PROMPT], max_new_tokens=6, eos=())
    assert both[1] == both[2] == wanted
    beams = gf.beam_search(model, PROMPT, width=3, max_new_tokens=4)
    assert len(beams) == 3 and beams[0].score >= beams[1].score
    assert isinstance(model.generate("The cat", max_new_tokens=3), str)
    assert model.generate("The cat", max_new_tokens=3, temperature=1.0, regex="[ab]+")


@pytest.mark.parametrize("name", ["Mamba", "XGLM", "OPT"])
@torch.no_grad()
def test_padding_changes_nothing_on_either_side(tmp_path, name):
    model = gf.load(folder_of(name, tmp_path), backend="transformers")
    alone = model(torch.tensor([PROMPT]))
    rows = torch.tensor([[0, 0, *PROMPT], [*PROMPT, 0, 0], [9, 8, 5, 6, 7], [0, *PROMPT, 0]])
    valid = rows != 0
    logits = model(rows, valid=valid)
    for row in (0, 1, 3):
        assert torch.allclose(logits[row][valid[row]], alone[0], atol=1e-6)
    assert torch.allclose(logits[2], model(rows[2:3])[0], atol=1e-6)
    assert not logits[~valid].any()


@torch.no_grad()
def test_vectors_suites_and_reports_work_on_it(tmp_path):
    model = gf.load(folder_of("Lfm2", tmp_path), backend="transformers")
    texts = ["The cat", "sat on the mat"]
    found = gf.embed(model, texts)
    for text, vector in zip(texts, found.vectors, strict=True):
        ids = torch.tensor([model.tokenizer.encode(text)])
        last = live("Lfm2").model(input_ids=ids).last_hidden_state[0, -1]
        assert np.allclose(vector, torch.nn.functional.normalize(last, dim=0), atol=1e-5)
    assert gf.embed(gf.load(folder_of("OPT", tmp_path), backend="transformers"), "a").vectors.size
    examinee = examinee_of(model, model.tokenizer, name="tiny")
    rows = np.array([[5, 6, 7, 0], [5, 6, 7, 8]])
    logits = examinee.logits(rows, rows > 0)
    assert logits.shape == (2, 4, 313) and np.allclose(logits[0, :3], logits[1, :3], atol=1e-5)
    assert not quantization_report(model)
    report = gf.verify(model, only="causality")
    assert not report.failed and len(report.findings)
    with pytest.raises(InputError, match="another library's module"):
        gf.quantize(model, bits=8)
    with pytest.raises(InputError, match="another library's"):
        model.generate(PROMPT, kv_cache="int8")
    saved = gf.load(model.save(tmp_path / "saved"), backend="transformers")
    assert torch.equal(saved(torch.tensor([PROMPT])), model(torch.tensor([PROMPT])))
    assert torch.equal(
        adapt(live("Lfm2"), backend="transformers")(torch.tensor([PROMPT])),
        model(torch.tensor([PROMPT])),
    )


def test_the_commands_take_the_backend_and_say_once_that_it_is_slower(tmp_path):
    folder = str(folder_of("Nemotron", tmp_path))
    model = gf.load(folder, backend="transformers")
    by = ["--backend", "transformers"]
    ids = glass("generate", folder, "5, 6 7", "--ids", "--max-new", "4", *by)
    wanted = model.generate(PROMPT, max_new_tokens=4)
    assert [int(word) for word in ids.stdout.split()] == wanted
    assert ids.stderr.count("transformers computes this model") == 1
    text = glass("generate", folder, "The cat", "--max-new", "3", *by)
    assert text.stdout.rstrip("\n") == model.generate("The cat", max_new_tokens=3)
    cosines = glass("embed", folder, "a cat", "a dog", *by)
    assert cosines.returncode == 0 and "2 vectors of 32 numbers" in cosines.stdout
    checked = glass("verify", folder, "--only", "causality", *by)
    assert checked.returncode == 0, checked.stdout
    refused = glass("generate", folder, "The cat")
    assert refused.returncode == 3 and "--backend transformers" in refused.stderr
    odd = glass("generate", folder, "The cat", "--backend", "jax")
    assert odd.returncode == 2 and "native, transformers" in odd.stderr


def test_what_is_no_causal_model_or_lacks_weights_is_refused(tmp_path):
    import transformers

    folder = folder_of("Nemotron", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(FileError, match=r"no weight .*down_proj"):
        gf.load(folder, backend="transformers")
    config = json.loads((folder / "config.json").read_text())
    for change, named in (
        ({"model_type": "nosuch"}, "does not open this"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}, "model_type": "own"}, "own"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(FileError, match=named):
            gf.load(folder, backend="transformers")
    both_ways = transformers.BertLMHeadModel(transformers.BertConfig(**HEADS)).eval()
    both_ways.save_pretrained(tmp_path / "bert")
    with pytest.raises((InputError, FileError), match=r"causal|later"):
        gf.load(tmp_path / "bert", backend="transformers")
