"""One face for every architecture: source 002's methods, the registry, the door."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.config import Config
from glassformer.adapters.folder.paths import load_tokenizer
from glassformer.adapters.load import adapt, load, load_model
from glassformer.adapters.native import CustomTransformerAdapter, NativeAdapter, TrainingConfig
from glassformer.adapters.registry import (
    ADAPTERS,
    GPT2Adapter,
    LlamaAdapter,
    QwenAdapter,
    adapter_for,
    adapter_named,
    register,
)
from glassformer.adapters.table import Columns, Row, Rows, Table, identity_plan, make_plan
from glassformer.data.tasks.digits import VOCAB
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.weights import numpy_view, tensor_view
from glassformer.spec import presets
from glassformer.spec.errors import InputError
from glassformer.spec.model import ClassHead
from glassformer.spec.serialize import to_dict
from tests.adapters.checkpoints import CASES, folder_of, live, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

KINDS = {"qwen2 tied": QwenAdapter, "llama": LlamaAdapter, "mistral": LlamaAdapter}
KINDS |= {"qwen3 bias": QwenAdapter, "gpt2": GPT2Adapter}
TYPES = {QwenAdapter: "qwen", LlamaAdapter: "llama", GPT2Adapter: "gpt2"}


@pytest.mark.parametrize("case", KINDS)
def test_the_folder_decides_which_adapter(case, tmp_path):
    folder = folder_of(case, tmp_path)
    adapter = gf.load(folder)
    assert type(adapter) is KINDS[case]
    assert isinstance(adapter, BaseAdapter)
    assert adapter.get_architecture_type() == TYPES[KINDS[case]]
    assert adapter.get_config() == json.loads((folder / "config.json").read_text())
    assert adapter.get_num_parameters() == sum(p.numel() for p in live(case).parameters())
    assert adapter(tokens(2, 5)).shape == (2, 5, 97)
    assert adapter.origin == folder
    assert not adapter.training


def test_our_own_checkpoints_are_custom_transformers(tmp_path):
    model = gf.build(gf.preset("core"))
    adapter = gf.load(gf.save(model, tmp_path / "core"))
    assert type(adapter) is CustomTransformerAdapter
    assert adapter.get_architecture_type() == "custom-transformer"
    assert adapter.get_config() == to_dict(model.spec)
    assert adapter.get_tokenizer() is None
    ids = tokens(2, 7)
    assert torch.equal(adapter(ids), model(ids))
    assert type(load_model(tmp_path / "core")) is type(model.model)


def test_a_live_qwen_becomes_a_qwen_adapter():
    adapter = QwenAdapter(live("qwen3 bias"))
    assert adapter.reference is live("qwen3 bias")
    assert adapter.get_config()["model_type"] == "qwen3"
    with pytest.raises(InputError, match="does not read model_type 'llama'"):
        QwenAdapter(live("llama"))
    with pytest.raises(InputError, match="has no config to read"):
        adapt(torch.nn.Linear(2, 2))


@torch.no_grad()
def test_transformers_can_compute_behind_the_same_face(tmp_path):
    folder = folder_of("qwen2 tied", tmp_path)
    adapter = load(folder, backend="transformers")
    ids = tokens(2, 9)
    assert adapter.get_architecture_type() == "qwen"
    assert torch.equal(adapter(ids), live("qwen2 tied")(ids).logits)
    assert adapter.spec == load(folder).spec
    adapter.save_checkpoint(tmp_path / "saved")
    for parameter in adapter.parameters():
        parameter.zero_()
    adapter.load_checkpoint(tmp_path / "saved")
    assert torch.equal(adapter(ids), live("qwen2 tied")(ids).logits)
    with pytest.raises(InputError, match="backend"):
        load(folder, backend="jax")


def test_masks_are_ones_and_zeros():
    adapter = adapt(live("llama"))
    ids = tokens(2, 6)
    for mask in (torch.ones(2, 6), torch.ones(2, 6, dtype=torch.bool), torch.ones_like(ids)):
        assert torch.equal(adapter(ids, mask), adapter(ids))
    with pytest.raises(InputError, match="other numbers than 0 and 1"):
        adapter(ids, torch.full((2, 6), -1e9))
    with pytest.raises(InputError, match="shape"):
        adapter(ids, torch.ones(2, 5))


@pytest.mark.parametrize("case", ["qwen2 tied", "gpt2", "core"])
def test_one_training_loop_for_all(case):
    """The loop knows nothing of architectures; the loss falls; tied weights are there once."""
    torch.manual_seed(0)
    model = presets.core(vocab_size=97, d_model=32, n_heads=4, d_ff=48, n_layers=1)
    adapter = adapt(gf.build(model) if case == "core" else live(case))
    parameters = adapter.trainable_parameters()
    assert len({id(p) for p in parameters}) == len(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    ids, losses = tokens(4, 16), []
    for _ in range(12):
        logits = adapter(ids)[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in parameters)
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_checkpoints_go_into_the_same_parameters(tmp_path):
    folder = folder_of("qwen3 bias", tmp_path)
    adapter = load(folder)
    adapter.save_checkpoint(tmp_path / "native")
    before, held = adapter(tokens(1, 8)), adapter.trainable_parameters()
    for path in (tmp_path / "native", folder):
        with torch.no_grad():
            for parameter in held:
                parameter.zero_()
        adapter.load_checkpoint(path)
        assert torch.equal(adapter(tokens(1, 8)), before)
        assert all(a is b for a, b in zip(held, adapter.trainable_parameters(), strict=True))
    other = load(folder_of("qwen3 yarn", tmp_path / "other"))
    with pytest.raises(InputError, match="another architecture"):
        other.load_checkpoint(tmp_path / "native")


def test_the_file_stays_as_it_is_when_the_model_learns(tmp_path):
    """Weights are mapped from the file, not copied; writing to them must not reach it."""
    folder = folder_of("llama", tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    adapter = load(folder)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(1.0)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not torch.equal(next(adapter.parameters()), next(load(folder).parameters()))


# --- settings of a training ---------------------------------------------------------------------


def test_a_training_s_settings_are_brought_to_the_model(tmp_path):
    folder = folder_of("qwen2 tied", tmp_path)
    config = TrainingConfig(
        architecture_type="qwen", dropout=0.5, precision="float64", frozen=("embed.*", "*norm*")
    )
    adapter = gf.load(folder, config)
    assert next(adapter.parameters()).dtype == torch.float64
    assert adapter.spec.decoder.dropout.residual == 0.5
    adapter.train()
    assert not torch.equal(adapter(tokens(1, 9)), adapter(tokens(1, 9)))
    names = {name for name, p in adapter.model.named_parameters() if not p.requires_grad}
    assert {"embed.weight", "final_norm.weight", "blocks.0.attn_norm.weight"} <= names
    assert len(adapter.trainable_parameters()) == len(list(adapter.parameters())) - len(names)
    adapter.load_checkpoint(folder)
    with pytest.raises(InputError, match="this is a qwen model, and llama was requested"):
        gf.load(folder, TrainingConfig(architecture_type="llama"))
    with pytest.raises(InputError, match="no parameter is named 'mbed'"):
        gf.load(folder, TrainingConfig(frozen=("mbed",)))
    with pytest.raises(InputError, match="no architecture 'qwne'"):
        gf.load(folder, TrainingConfig(architecture_type="qwne"))


def test_a_preset_by_name_is_a_fresh_model():
    config = TrainingConfig(overrides=("d_model=32", "decoder.layers.count=1"), seed=3)
    first, again = gf.load("core", config), gf.load("core", config)
    assert first.get_architecture_type() == "custom-transformer"
    assert first.spec.d_model == 32
    assert torch.equal(first(tokens(1, 5)), again(tokens(1, 5)))
    with pytest.raises(InputError, match="there is no folder core"):
        gf.load("core")


# --- what takes a model takes an adapter --------------------------------------------------------


def test_tracing_decoding_verifying_and_saving_take_an_adapter(tmp_path):
    adapter = load(folder_of("qwen3 wide heads", tmp_path))
    with gf.trace(adapter, read="blocks.0.attn.weights") as seen:
        adapter(tokens(1, 6))
    assert seen["blocks.0.attn.weights"].shape == (1, 4, 6, 6)
    assert adapter.model.scoped_taps is None
    assert RecordedStepper(adapter).vocab_size == 97
    report = gf.verify(adapter, only="cache")
    assert report.passed >= 2
    assert report.failed == 0
    again = gf.load(gf.save(adapter, tmp_path / "again"))
    for ours, theirs in zip(adapter.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_reference_is_compared_with(tmp_path):
    adapter = load(folder_of("mistral", tmp_path), reference=True)
    finding = next(f for f in gf.verify(adapter, only="reference").findings)
    assert finding.verdict == "passed"
    assert finding.worst <= 1e-5
    with torch.no_grad():
        adapter.model.get_parameter("blocks.1.ffn.up_proj.weight").mul_(1.01)
    assert gf.verify(adapter, only="reference").failed == 1


def test_a_model_that_answers_answers():
    adapter = gf.build(gf.preset("digits"), tokenizer=VOCAB)
    answer = adapter.generate("SECOND 7 3 9")
    assert answer in VOCAB.names
    assert adapter.generate("SECOND 7 3 9 SEP") == answer
    with pytest.raises(InputError, match="one answer"):
        adapter.generate("SECOND 7 3 9", temperature=1.0)


def test_text_goes_in_and_comes_out(tmp_path):
    from glassformer.data.tokenizers.vocab import Bytes

    spec = presets.core(vocab_size=Bytes().vocab_size, d_model=32, n_heads=4, d_ff=48, n_layers=1)
    made = gf.build(spec, tokenizer=Bytes())
    made.save_checkpoint(tmp_path / "bytes")
    adapter = gf.load(tmp_path / "bytes").train()
    text = adapter.generate("ab", max_new_tokens=6)
    assert adapter.training
    assert adapter.generate("ab", max_new_tokens=6) == text
    drawn = {adapter.generate("ab", max_new_tokens=6, temperature=2.0, seed=i) for i in range(4)}
    assert len(drawn) > 1
    assert load_tokenizer(tmp_path / "bytes").encode("é") == Bytes().encode("é")


# --- registry and tables ------------------------------------------------------------------------


def test_the_registry_knows_every_architecture():
    assert {"custom-transformer", "qwen", "llama", "gpt2"} <= set(ADAPTERS)
    assert adapter_named("qwen") is QwenAdapter
    assert adapter_for(Config({"model_type": "mistral"}))[0] is LlamaAdapter
    with pytest.raises(InputError, match="did you mean 'llama'"):
        adapter_named("lama")


def test_a_name_is_registered_once(monkeypatch):
    monkeypatch.setattr("glassformer.adapters.registry.ADAPTERS", dict(ADAPTERS))

    class Another(NativeAdapter):
        architecture_type = "qwen"

    class Grabber(NativeAdapter):
        architecture_type = "grabber"
        families = LlamaAdapter.families

    assert register(QwenAdapter) is QwenAdapter
    with pytest.raises(InputError, match="'qwen' is registered already"):
        register(Another)
    with pytest.raises(InputError, match="read by LlamaAdapter already"):
        register(Grabber)


@pytest.mark.parametrize("case", CASES)
def test_every_plan_goes_both_ways(case):
    """Joined and split again, every parameter of a family's model is what it was."""
    adapter, family = adapter_for(config := Config.of_module(live(case)))
    spec = family.spec_of(config)
    own = dict(adapter(live(case)).model.named_parameters())
    seen = set()
    for entry in make_plan(family.table, spec).entries.values():
        joined = entry.layout.join([own[name] for name in entry.ours])
        assert tuple(joined.shape) == entry.shape
        for name, part in entry.split(numpy_view(joined)).items():
            assert torch.equal(tensor_view(part), own[name])
            seen.add(name)
    assert seen == set(own)


def test_layouts_with_primes():
    parts = [torch.randn(3, 7), torch.randn(5, 7), torch.randn(2, 7)]
    shapes = [tuple(part.shape) for part in parts]
    for layout, shape in ((Rows(), (10, 7)), (Columns(), (7, 10))):
        joined = layout.join(parts)
        assert tuple(joined.shape) == layout.stored_shape(shapes) == shape
        for part, again in zip(parts, layout.split(joined.numpy(), shapes), strict=True):
            assert np.array_equal(part.numpy(), again)


def test_a_table_that_forgets_a_parameter_is_refused():
    with pytest.raises(InputError, match=r"no row for embed\.weight"):
        make_plan(Table((Row("a", "final_norm.weight"),)), presets.qwen())
    assert len(identity_plan(presets.qwen()).entries) == 35


# --- memory -------------------------------------------------------------------------------------

PEAK = """
import sys, torch
from glassformer.adapters.load import load
dtype = None if sys.argv[2] == "same" else torch.float32
def high():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
load(sys.argv[3], dtype=dtype)
before = high()
model = load(sys.argv[1], dtype=dtype)
print((high() - before) / sum(p.numel() * p.itemsize for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel's own peak")
@pytest.mark.parametrize("how", ["same", "widened"])
def test_loading_takes_the_weights_and_little_more(how, tmp_path):
    spec = presets.qwen(
        vocab_size=30_000, d_model=512, d_ff=1024, n_layers=6, d_head=64, max_seq_len=64
    )
    from glassformer.adapters.folder.export_hf import export_hf

    model = gf.build(spec).to(torch.float16 if how == "widened" else torch.float32)
    folder = export_hf(model, tmp_path / "big").folder
    small = folder_of("qwen3 bias", tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PEAK, str(folder), how, str(small)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1.2


def test_an_answer_is_the_answer_head_s_and_leaves_the_mode_alone():
    spec = presets.digits(d_model=8, n_heads=2, n_layers=1, d_ff=11)
    model = gf.build(replace(spec, heads=(ClassHead(num_classes=3), *spec.heads)))
    with torch.no_grad():
        model.heads["answer"].bias[4] = 99.0
    adapter = CustomTransformerAdapter(model, tokenizer=VOCAB).train()
    assert adapter.generate("SECOND 7 3 9") == "4"
    with pytest.raises(InputError, match="exceeds max_seq_len"):
        adapter.answer("MAX" + " 1" * spec.max_seq_len)
    assert adapter.training
