"""Folders that are damaged, hostile or simply not what is read here: a named error, nothing run."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from bench.families import CASES, module_of
from safetensors.torch import load_file, save_file

from glassformer.adapters.folder.paths import load_tokenizer
from glassformer.adapters.load import load, load_model
from glassformer.spec.errors import FileError, GlassError
from tests.adapters.checkpoints import change, folder_of

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

INDEX = "model.safetensors.index.json"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def weights(folder: Path, **changes: object) -> None:
    """Tensors of the single file replaced, added, or (None) removed."""
    path = folder / "model.safetensors"
    state = load_file(path)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, path)


def index(folder: Path, edit) -> None:
    path = folder / INDEX
    found = json.loads(path.read_text())
    edit(found["weight_map"])
    path.write_text(json.dumps(found))


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def point_all_to(name):
    def edit(folder):
        index(folder, lambda files: files.update(dict.fromkeys(files, name)))

    return edit


def link_out(folder: Path) -> None:
    outside = folder.parent / "elsewhere.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)


def pickle_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(canary_pickle(folder))


def canary_pickle(folder: Path) -> bytes:
    """Whoever unpickles this leaves a file behind."""
    import pickle

    class Canary:
        def __reduce__(self):
            return os.system, (f"touch {folder.parent / 'canary'}",)

    return pickle.dumps(Canary())


def remote_code(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text(f"open({str(folder.parent / 'canary')!r}, 'w')\n")
    change(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Model"})


def long_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**40) + path.read_bytes()[8:])


def long_headers(folder: Path) -> None:
    """Each as long as one may be; together more than is read."""
    names = [f"model-{number}.safetensors" for number in range(4)]
    for name in names:
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", 9_999_000))
            file.truncate(10_000_000)
    index(folder, lambda files: files.update(zip(list(files), names, strict=False)))


def many_tensors(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps({f"t{i}": entry for i in range(100_001)}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def strange_dtype(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F8_E4M3"', 1))


def same_tensor_twice(folder: Path) -> None:
    first, second = shards(folder)[:2]
    save_file(load_file(first) | load_file(second), second)


def twice_in_json(folder: Path) -> None:
    text = (folder / "config.json").read_text().strip()
    (folder / "config.json").write_text(text[:-1] + ', "hidden_size": 64}')


EMBED = "model__embed_tokens__weight"
#: Name: (folder's case, sharded, damage, words of the error).
BROKEN = {
    "no weights": ("llama", 0, lambda f: (f / "model.safetensors").unlink(), "there is no model.s"),
    "missing shard": ("llama", 1, lambda f: shards(f)[1].unlink(), "is missing"),
    "truncated shard": ("llama", 1, lambda f: cut(shards(f)[1], 0.6), "damaged tensor file"),
    "truncated file": ("llama", 0, lambda f: cut(f / "model.safetensors", 0.5), "damaged tensor"),
    "truncated header": ("llama", 0, lambda f: cut(f / "model.safetensors", 0.005), "cut off"),
    "endless header": ("llama", 0, long_header, "cut off or too long"),
    "empty file": ("llama", 0, lambda f: cut(f / "model.safetensors", 0), "cut off"),
    "a hundred thousand tensors": ("llama", 0, many_tensors, "tensors in one file"),
    "wrong shape": ("llama", 0, lambda f: weights(f, **{EMBED: torch.ones(96, 32)}), "misshapen"),
    "extra tensor": (
        "llama",
        0,
        lambda f: weights(f, score__weight=torch.ones(2)),
        "unexpected: s",
    ),
    "missing tensor": (
        "llama",
        0,
        lambda f: weights(f, model__norm__weight=None),
        "missing: model",
    ),
    "own head absent": ("llama", 0, lambda f: weights(f, lm_head__weight=None), "missing: lm_head"),
    "tied head differs": (
        "qwen2 tied",
        0,
        lambda f: weights(f, lm_head__weight=torch.ones(97, 32)),
        "differs from",
    ),
    "tied copy misshapen": (
        "qwen2 tied",
        0,
        lambda f: weights(f, lm_head__weight=torch.ones(9, 32)),
        "misshapen",
    ),
    "NaN": (
        "llama",
        0,
        lambda f: weights(f, model__norm__weight=torch.full((32,), torch.nan)),
        "NaN",
    ),
    "infinity": (
        "llama",
        0,
        lambda f: weights(f, model__norm__weight=torch.full((32,), torch.inf)),
        "infin",
    ),
    "whole numbers": (
        "llama",
        0,
        lambda f: weights(f, model__norm__weight=torch.ones(32).to(torch.int8)),
        "I8",
    ),
    "eight-bit floats": ("llama", 0, strange_dtype, "dtype F8_E4M3"),
    "../ in the index": ("llama", 1, point_all_to("../model.safetensors"), "no file of the model"),
    "absolute path in the index": ("llama", 1, point_all_to("/etc/passwd"), "no file of the model"),
    "backslash in the index": ("llama", 1, point_all_to("..\\x.safetensors"), "no file of the m"),
    "NUL in the index": ("llama", 1, point_all_to("a\0.safetensors"), "no file of the model"),
    "a number in the index": ("llama", 1, point_all_to(7), "no file of the model"),
    "a list in the index": ("llama", 1, point_all_to(["x"]), "no file of the model"),
    "a pickle in the index": (
        "llama",
        1,
        point_all_to("pytorch_model.bin"),
        "no file of the model",
    ),
    "a file that is not there": ("llama", 1, point_all_to("x.safetensors"), "is missing"),
    "link out of the folder": ("llama", 0, link_out, "leads out of the folder"),
    "index is no JSON": ("llama", 1, lambda f: (f / INDEX).write_text("{"), "is not JSON"),
    "index is a list": ("llama", 1, lambda f: (f / INDEX).write_text("[]"), "no JSON object"),
    "index without a map": ("llama", 1, lambda f: (f / INDEX).write_text("{}"), "no weight_map"),
    "index that lies": (
        "llama",
        1,
        lambda f: index(f, lambda files: files.update(ghost=next(iter(files.values())))),
        "tensor ghost is not in",
    ),
    "long headers together": ("llama", 1, long_headers, "headers have 39,999,000"),
    "one tensor in two files": ("llama", 1, same_tensor_twice, "in two files"),
    "pickle alone": ("llama", 0, pickle_alone, "a pickle"),
    "code of its own": ("llama", 0, remote_code, "auto_map"),
    "config is no JSON": ("llama", 0, lambda f: (f / "config.json").write_text("{,"), "not JSON"),
    "config is a list": (
        "llama",
        0,
        lambda f: (f / "config.json").write_text("[1]"),
        "no JSON obj",
    ),
    "a key twice": ("llama", 0, twice_in_json, "a key occurs twice"),
    "deep JSON": (
        "llama",
        0,
        lambda f: (f / "config.json").write_text("[" * 99_999),
        "is not JSON",
    ),
    "size is a word": ("llama", 0, lambda f: change(f, hidden_size="wide"), "a whole number"),
    "size is negative": ("llama", 0, lambda f: change(f, hidden_size=-32), "a whole number"),
    "a layer too many": (
        "llama",
        0,
        lambda f: change(f, num_hidden_layers=4),
        "missing: model.lay",
    ),
    "endless layers": ("llama", 0, lambda f: change(f, num_hidden_layers=10**9), "from 1 to 1,000"),
    "endless context": (
        "llama",
        0,
        lambda f: change(f, max_position_embeddings=10**9),
        "from 1 to 4,194,304",
    ),
    "a number of 5,000 digits": (
        "llama",
        0,
        lambda f: (f / "config.json").write_text('{"a": ' + "9" * 5000 + "}"),
        "not JSON",
    ),
    "endless vocabulary": ("llama", 0, lambda f: change(f, vocab_size=2**30), "misshapen: lm_head"),
    "no size": ("llama", 0, lambda f: change(f, vocab_size=None), "has no 'vocab_size'"),
    "eps is no number": (
        "llama",
        0,
        lambda f: change(f, rms_norm_eps=float("nan")),
        "not a finite",
    ),
    "heads do not divide": ("llama", 0, lambda f: change(f, num_key_value_heads=3), "divisible"),
    "another activation": ("llama", 0, lambda f: change(f, hidden_act="relu6"), "'hidden_act' is"),
    "unknown switch": ("llama", 0, lambda f: change(f, use_magic=True), "use_magic=true"),
    "softcapping": ("llama", 0, lambda f: change(f, attn_logit_softcapping=50.0), "softcapping=50"),
    "partial rotation": ("llama", 0, lambda f: change(f, partial_rotary_factor=0.5), "partial_rot"),
    "quantized weights": (
        "llama",
        0,
        lambda f: change(f, quantization_config={"bits": 4}),
        "quantized in another",
    ),
    "another head": (
        "llama",
        0,
        lambda f: change(f, architectures=["LlamaForSequenceClassification"]),
        "names the architecture",
    ),
    "architectures that are no names": (
        "llama",
        0,
        lambda f: change(f, architectures=[{"LlamaForCausalLM": 1}]),
        "names the architecture",
    ),
    "long rope": (
        "llama",
        0,
        lambda f: change(f, rope_parameters={"rope_type": "longrope"}),
        "no 'short_factor'",
    ),
    "rope of a kind that is not known": (
        "llama",
        0,
        lambda f: change(f, rope_parameters={"rope_type": "spiral", "factor": 2.0}),
        "'rope_type' is",
    ),
    "rope by layer": (
        "llama",
        0,
        lambda f: change(f, rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        "differs between layers",
    ),
    "two thetas": ("llama", 0, lambda f: change(f, rope_theta=5e5), "two values of rope_theta"),
    "strange layer types": (
        "qwen2 window",
        0,
        lambda f: change(f, layer_types=["full_attention", "x", "y"]),
        "'layer_types' is",
    ),
    "unknown family": ("llama", 0, lambda f: change(f, model_type="mamba"), "no adapter reads"),
    "another family's name": (
        "llama",
        0,
        lambda f: change(f, model_type="qwen3_moe"),
        "config.json names the architecture",
    ),
    "latent attention": (
        "llama",
        0,
        lambda f: change(f, model_type="deepseek_v3", kv_lora_rank=512, n_routed_experts=8),
        "'kv_lora_rank' means latent attention",
    ),
    "hybrid": (
        "llama",
        0,
        lambda f: change(f, model_type="qwen3_next", full_attention_interval=4),
        "'full_attention_interval' means linear attention",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_a_named_error(name, tmp_path):
    case, sharded, damage, words = BROKEN[name]
    folder = folder_of(case, tmp_path, sharded=bool(sharded))
    load(folder)
    damage(folder)
    with pytest.raises(FileError) as caught:
        load(folder)
    assert words in caught.value.what
    assert caught.value.where
    assert len(str(caught.value).splitlines()) <= 3
    assert not (tmp_path / "canary").exists()


def test_what_is_no_model_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("not a model")
    with pytest.raises(FileError, match="a file, and models are folders"):
        load(tmp_path / "notes.txt")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(FileError, match="an adapter of PEFT, which corrects org/base"):
        load(adapter)


def test_an_unread_architecture_is_told_every_one_of_its_type(tmp_path):
    folder = folder_of("llama", tmp_path)
    change(folder, model_type="bert", architectures=["BertForSequenceClassification"])
    with pytest.raises(FileError, match="BertForSequenceClassification") as caught:
        load(folder)
    assert "BertForMaskedLM" in caught.value.hint and "BertModel" in caught.value.hint


def test_unsupported_families_are_told_what_is_read(tmp_path):
    folder = folder_of("llama", tmp_path)
    change(folder, model_type="grok", num_local_experts=8)
    with pytest.raises(FileError) as caught:
        load(folder)
    assert "mixture of experts" in caught.value.what
    for name in ("qwen2", "qwen3", "llama", "mistral", "gpt2"):
        assert name in caught.value.hint
    assert "docs/adding-an-architecture.md" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "name", "table"),
    [
        ("gpt2", "transformer.h.0.attn.bias", torch.ones(1, 1, 8, 8).bool()),
        ("gpt2", "transformer.h.1.attn.bias", torch.ones(1, 1, 8, 8).to(torch.uint8)),
        ("bert", "bert.embeddings.position_ids", torch.arange(64)[None]),
    ],
)
def test_tables_of_whole_numbers_in_older_files_are_ignored(kind, name, table, tmp_path):
    """Real MiniLM and GPT-2 files hold them; transformers no longer writes them."""
    module_of(CASES[f"{kind}: usual"]).save_pretrained(tmp_path)
    before = load(tmp_path).state_dict()
    weights(tmp_path, **{name: table})
    found = load(tmp_path)
    assert found.report.ignored == (name,)
    assert all(torch.equal(before[key], tensor) for key, tensor in found.state_dict().items())


def test_a_pickle_beside_the_weights_is_never_opened(tmp_path):
    folder = folder_of("llama", tmp_path)
    for name in ("pytorch_model.bin", "training_args.bin", "rng_state.pth"):
        (folder / name).write_bytes(canary_pickle(folder))
    load(folder)
    assert not (tmp_path / "canary").exists()


def test_files_of_the_hub_s_cache_are_links_and_are_read(tmp_path):
    """Its snapshots hold links into blobs/, which is inside the model's own folder there."""
    folder = folder_of("llama", tmp_path)
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert load(snapshot).get_architecture_type() == "llama"


def test_a_path_that_is_no_model(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(GlassError) as caught:
            load_model(path)
        assert caught.value.exit_code in (2, 3)


def test_a_model_without_a_tokenizer_says_so(tmp_path):
    folder = folder_of("llama", tmp_path)
    adapter = load(folder)
    assert adapter.get_tokenizer() is None
    with pytest.raises(GlassError, match="has no tokenizer"):
        adapter.generate("a")
    with pytest.raises(GlassError, match="no tokenizer"):
        load_tokenizer(folder)
