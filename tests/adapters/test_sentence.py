"""Folders of sentence-transformers: limits, prompts, pooling and the modules after it.

The reference is each module's published definition, written out in NumPy for one text at a time.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import glassformer as gf
from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.load import load
from glassformer.spec.errors import FileError, InputError
from tests.adapters.test_encoders import live, sentence_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

WORDS = ("the cat sat . a dog the cats " * 8).split()
TEXTS = [" ".join(WORDS[i : i + n]) for i, n in enumerate((1, 2, 3, 4, 5, 6, 7, 11, 23, 30))]
PREFIX = "sentence_transformers.models."
#: The shapes of the modules: 32 is the width of the transformer.
DENSE = {"in_features": 32, "out_features": 20, "bias": True}


def modules(folder: Path, *listed: tuple[str, dict, dict]) -> Path:
    """Add modules to a folder: their type, config and tensors, after the transformer."""
    names = [{"idx": 0, "name": "0", "path": "", "type": f"{PREFIX}Transformer"}]
    for place, (kind, config, tensors) in enumerate(listed, 1):
        path = f"{place}_{kind}"
        names.append({"idx": place, "name": str(place), "path": path, "type": f"{PREFIX}{kind}"})
        if config:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(config))
        if tensors:
            save_file(tensors, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(names))
    return folder


def settings(folder: Path, **given) -> Path:
    (folder / "sentence_bert_config.json").write_text(json.dumps(given))
    return folder


def states(folder: Path, text: str, limit: int) -> np.ndarray:
    """The last hidden states (T, D) of one text, by transformers alone."""
    import transformers

    tokenizer = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"))
    given = tokenizer(text, return_tensors="pt", truncation=True, max_length=limit)
    with torch.no_grad():
        return live("bert body")(**given).last_hidden_state[0].double().numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def agree(folder: Path, wanted) -> bool:
    """Whether every text's vector has a cosine of 1 with the one that is wanted."""
    found = gf.embed(load(folder), TEXTS, batch=3)
    cosines = [float(unit(wanted(t)) @ v) for t, v in zip(TEXTS, found.vectors, strict=True)]
    return min(cosines) > 0.999999


@pytest.mark.parametrize("limit", [3, 8, 9])
def test_a_text_is_cut_at_the_folder_s_max_seq_length(tmp_path, limit):
    folder = settings(sentence_folder(tmp_path / "m"), max_seq_length=limit, do_lower_case=False)
    modules(folder, ("Pooling", {"pooling_mode_mean_tokens": True}, {}), ("Normalize", {}, {}))
    assert agree(folder, lambda text: states(folder, text, limit).mean(0))
    found = gf.embed(load(folder), TEXTS)
    assert max(found.tokens) == found.limit == limit
    assert found.shortened == sum(len(states(folder, t, 40)) > limit for t in TEXTS)
    assert f"shortened to {limit} tokens" in repr(found) and "\n" not in repr(found)
    assert max(gf.embed(load(folder), TEXTS, max_length=12).tokens) == 12


def test_the_tokenizer_s_length_counts_where_the_folder_names_no_other(tmp_path):
    folder = sentence_folder(tmp_path / "m")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 6}))
    assert gf.embed(load(folder), TEXTS).limit == 6


def test_a_folder_s_files_are_kept_through_a_checkpoint(tmp_path):
    torch.manual_seed(0)
    tensors = {"linear.weight": torch.randn(20, 32), "linear.bias": torch.randn(20)}
    folder = settings(sentence_folder(tmp_path / "m"), max_seq_length=7)
    modules(folder, ("Pooling", {"pooling_mode": "max"}, {}), ("Dense", DENSE, tensors))
    first = gf.embed(load(folder), TEXTS)
    native = load(gf.save(load(folder), tmp_path / "native"))
    back = load(export_hf(native, tmp_path / "back").folder)
    for again in (native, back):
        made = gf.embed(again, TEXTS)
        assert (made.vectors == first.vectors).all() and made.tokens == first.tokens


POOLED = {
    "cls": lambda x, at: x[0],
    "max": lambda x, at: x.max(0),
    "mean": lambda x, at: x.mean(0),
    "mean_sqrt_len_tokens": lambda x, at: x.sum(0) / np.sqrt(len(x)),
    "weightedmean": lambda x, at: (x * at[:, None]).sum(0) / at.sum(),
    "lasttoken": lambda x, at: x[-1],
}


@pytest.mark.parametrize("mode", POOLED)
def test_every_pooling_is_computed_and_may_leave_out_the_prompt(tmp_path, mode):
    folder = modules(
        sentence_folder(tmp_path / "m"),
        ("Pooling", {"pooling_mode": mode, "include_prompt": False}, {}),
    )
    wanted = POOLED[mode]
    assert agree(
        folder, lambda text: wanted(x := states(folder, text, 40), np.arange(1, len(x) + 1))
    )
    prompts = {"prompts": {"query": "the dog ", "none": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))

    def prompted(text: str) -> np.ndarray:  # [CLS] and the prompt's two tokens are left out
        x = states(folder, "the dog " + text, 40)
        return wanted(x[3:], np.arange(1, len(x) + 1)[3:])

    assert agree(folder, prompted)


def test_several_poolings_are_put_side_by_side(tmp_path):
    switches = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    folder = modules(sentence_folder(tmp_path / "m"), ("Pooling", switches, {}))
    assert agree(
        folder,
        lambda text: np.concatenate(((x := states(folder, text, 40))[0], x.mean(0))),
    )
    assert gf.embed(load(folder), "a cat").pooling == "first+mean"


def test_dense_layer_norm_and_normalize_are_computed_in_their_order(tmp_path):
    torch.manual_seed(1)
    first = {"linear.weight": torch.randn(20, 32), "linear.bias": torch.randn(20)}
    first["residual.weight"] = torch.randn(20, 32)
    norm = {"norm.weight": torch.randn(20), "norm.bias": torch.randn(20)}
    second = {"linear.weight": torch.randn(11, 20)}
    plain = {
        "in_features": 20,
        "out_features": 11,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    folder = modules(
        sentence_folder(tmp_path / "m"),
        ("Pooling", {"pooling_mode": "mean"}, {}),
        ("Normalize", {}, {}),
        ("Dense", DENSE | {"use_residual": True}, first),
        ("LayerNorm", {"dimension": 20}, norm),
        ("Dense", plain, second),
        ("Normalize", {}, {}),
    )

    def wanted(text: str) -> np.ndarray:
        x = unit(states(folder, text, 40).mean(0))
        w = {name: value.double().numpy() for name, value in first.items()}
        x = np.tanh(w["linear.weight"] @ x + w["linear.bias"]) + w["residual.weight"] @ x
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        x = x * norm["norm.weight"].double().numpy() + norm["norm.bias"].double().numpy()
        return second["linear.weight"].double().numpy() @ x

    assert agree(folder, wanted)
    made = gf.embed(load(folder), TEXTS[0], normalize=False)
    assert made.vectors.shape == (1, 11) and abs(made.vectors[0] - wanted(TEXTS[0])).max() < 1e-4
    with pytest.raises(InputError, match="max, mean"):
        gf.embed(load(folder), TEXTS, pooling="largest")


def test_texts_are_written_in_lower_case_where_the_folder_says_so(tmp_path):
    folder = sentence_folder(tmp_path / "m")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"do_lower_case": False}))
    model = load(settings(folder, max_seq_length=30))
    large, small = gf.embed(model, ["The CAT", "the cat"]).vectors
    assert float(large @ small) < 0.9999
    settings(folder, max_seq_length=30, do_lower_case=True)
    large, small = gf.embed(model, ["The CAT", "the cat"]).vectors
    assert (large == small).all()


REFUSED = {
    "a module": (lambda f: modules(f, ("CNN", {"x": 1}, {})), "CNN"),
    "a pooling": (lambda f: modules(f, ("Pooling", {"pooling_mode": "median"}, {})), "median"),
    "a switch": (
        lambda f: modules(f, ("Pooling", {"pooling_mode_median_tokens": True}, {})),
        "median",
    ),
    "an activation": (
        lambda f: modules(f, ("Dense", DENSE | {"activation_function": "my.Own"}, {})),
        "my.Own",
    ),
    "no weights": (lambda f: modules(f, ("Dense", DENSE, {})), "model.safetensors"),
    "shapes": (
        lambda f: modules(f, ("Dense", DENSE, {"linear.weight": torch.zeros(3, 32)})),
        "linear.weight",
    ),
    "a setting": (lambda f: settings(f, query_expansion={"length": 3}), "query_expansion"),
    "a limit": (lambda f: settings(f, max_seq_length="long"), "max_seq_length"),
    "a path": (
        lambda f: (f / "modules.json").write_text('[{"path": "../x", "type": "a.Dense"}]'),
        "../x",
    ),
    "a list": (lambda f: (f / "modules.json").write_text('{"a": 1}'), "modules.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_by_name(tmp_path, case):
    change, named = REFUSED[case]
    folder = sentence_folder(tmp_path / "m")
    change(folder)
    with pytest.raises(FileError, match=named):
        gf.embed(load(folder), "a cat")
