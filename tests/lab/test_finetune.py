"""Fine-tuned runs: a tiny Qwen learns, is resumed to the same bits, loads, and opens in peft."""

import hashlib
import json
import random
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.kills import Children, kill

import glassformer as gf
from glassformer.adapters.load import load_model
from glassformer.adapters.native import CustomTransformerAdapter
from glassformer.data.batch import Batch
from glassformer.data.tokenizers.vocab import Bytes
from glassformer.lab import finetune as finetuning
from glassformer.lab.api import evaluate
from glassformer.lab.finetune import Base
from glassformer.lab.measure import evaluate as module
from glassformer.lab.quantize import Wish, quantize_folder
from glassformer.lab.recipes import plan_finetune, read_config, recipe
from glassformer.lab.runs import assemble as assembling
from glassformer.lab.runs.assemble import assemble
from glassformer.lab.runs.run import TrainingRun
from glassformer.models.model import Model, build
from glassformer.models.weights import load_weights, weights_hash, weights_of
from glassformer.nn.lora import apply_lora, corrected_layers
from glassformer.quant.convert import dequantize_model, quantize_model
from glassformer.spec import presets
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.manifest import stored
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Int4
from glassformer.spec.serialize import to_json
from glassformer.spec.train import LoRA, RunSpec, lora_manifest
from glassformer.store.rundir import RunDirectory
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import TorchEngine
from tests.adapters.folders import write_model
from tests.lab.runs import metrics, resumed, rewritten, trained
from tests.planting import If, catches
from tests.tiny import token_ids

SHORT = ("task.length=90", "train.schedule.warmup=5", "train.keep=1000")
LORA = ("lora.rank=8", "lora.alpha=16", "train.lr=2e-2")
FULL = ("train.lr=1e-2",)
#: Relative to the largest logit, float32: merged when loaded, and against peft. Worst seen 2.1e-6.
SAME = 1e-5


def tally(count: int) -> list[dict[str, Any]]:
    """Chats about sums, all different."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{i} + 3?"},
                {"role": "assistant", "content": str(i + 3)},
            ]
        }
        for i in range(count)
    ]


def written(folder: Path, *, lines: list[dict[str, Any]] | None = None) -> Path:
    """A tiny Qwen2 folder `qwen` with a chat template, and data.jsonl of 55 chats."""
    write_model(folder / "qwen")
    text = "".join(json.dumps(line) + "\n" for line in (tally(55) if lines is None else lines))
    (folder / "data.jsonl").write_text(text)
    return folder


def trained_model(run: TrainingRun) -> Model:
    """The torch model that a run trained, or one of the weights that the native engine trained."""
    if isinstance(run.engine, TorchEngine):
        return run.engine.model
    assert isinstance(run.engine, NumpyEngine)
    held, lora = run.engine.model.params, run.engine.model.lora
    model = build(run.spec.model)
    load_weights(model, {name: held[name] for name in stored(model.spec)})
    if lora is not None:
        apply_lora(model, lora)
        load_weights(model, run.engine.weights(), rules=lora_manifest(model.spec, lora))
    return model.eval()


def spec_in(folder: Path, *changes: str) -> RunSpec:
    return plan_finetune(
        [f"base={folder / 'qwen'}", f"data={folder / 'data.jsonl'}", *SHORT, *changes]
    ).spec


def hashes(folder: Path) -> dict[str, str]:
    """Every file of a run's last checkpoint but its clocks."""
    directory = RunDirectory(folder)
    last = directory.step_folder(directory.steps()[-1])
    return {
        path.relative_to(last).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(last.rglob("*"))
        if path.is_file() and path.name not in ("MANIFEST.json", "state.json")
    }


def logits(model: torch.nn.Module, *, vocab: int = 313) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(token_ids(3, 11, vocab=vocab))["next"]


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


# --- learning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "steps"), [(FULL, 50), (LORA, 120)], ids=["full", "LoRA"])
def test_a_tiny_qwen_learns_fifty_examples(kind, steps, tmp_path):
    written(tmp_path, lines=tally(56))
    spec = spec_in(
        tmp_path,
        *(f"train.steps={steps}", f"train.evaluate_every={steps}"),
        *(f"train.checkpoint_every={steps}", "train.batch_size=32", *kind),
    )
    run = trained(spec, tmp_path / "run")
    losses = [line["nll"]["next"] for line in metrics(tmp_path / "run") if "nll" in line]
    assert run.facts["examples"]["train"] == 50
    after = evaluate(tmp_path / "run@last", split="train").loss
    assert after < 0.1 * losses[0]  # seen: 2.1 % and 1.6 %


# --- what a run leaves ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """A folder with a base, data, and a full and a LoRA run of nine steps."""
    folder = written(tmp_path_factory.mktemp("tuned"))
    short = ("train.steps=9", "train.checkpoint_every=3", "train.evaluate_every=4")
    trained(spec_in(folder, *short, *FULL), folder / "full")
    trained(spec_in(folder, *short, *LORA, "lora.dropout=0.1"), folder / "lora")
    return folder


def test_a_checkpoint_holds_what_trains_and_what_came_with_the_base(both):
    origin = {f"origin/{name}" for name in ("config.json", "generation_config.json")}
    origin |= {"origin/layout.json", "origin/tokenizer.json", "origin/tokenizer_config.json"}
    state = {"run.json", "spec.json", "state.safetensors", "tuning.json"}
    assert set(hashes(both / "full")) == {*origin, *state, "model.safetensors"}
    assert set(hashes(both / "lora")) == {
        *origin,
        *state,
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base = gf.load(both / "qwen")
    for kind in ("full", "lora"):
        told = RunDirectory(both / kind).read_json("run.json")["tuning"]
        assert told["base"] == str(both / "qwen")
        assert told["sha256"] == weights_hash(base.model)


def test_sizes_of_a_quantized_lora_run_are_of_two_complete_models(both, tmp_path):
    outcome = quantize_folder(str(both / "lora@last"), tmp_path / "small", Wish(spec=QuantSpec()))
    before, after = outcome.comparison.disk
    assert before == sum(4 * p.numel() for p in gf.load(both / "lora@last").parameters())
    assert after < before / 2
    assert "LoRA alone" in outcome.comparison.note


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_loads_as_the_model_that_it_trained(kind, both):
    run = TrainingRun(read_config(both / kind / "config.json"), both / kind)
    run.resume()
    adapter = gf.load(both / f"{kind}@last")
    assert adapter.get_architecture_type() == "qwen"
    assert adapter.end_ids() == gf.load(both / "qwen").end_ids() != ()
    assert not corrected_layers(adapter.model)
    assert all(p.requires_grad for p in adapter.parameters())
    assert apart(logits(adapter.model), logits(trained_model(run))) <= SAME
    assert apart(logits(adapter.model), logits(load_model(both / "qwen"))) > 0.1
    assert isinstance(adapter.generate("<|im_start|>user\n1", max_new_tokens=3), str)
    measured = evaluate(both / f"{kind}@last", split="val")
    assert measured.loss == pytest.approx(run.progress.val["loss"], rel=1e-6)


def test_peft_opens_the_checkpoint_of_a_run(both):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = TrainingRun(read_config(both / "lora" / "config.json"), both / "lora")
    run.resume()
    theirs = AutoModelForCausalLM.from_pretrained(both / "qwen", dtype=torch.float32)
    opened = PeftModel.from_pretrained(theirs, RunDirectory(both / "lora").step_folder(9)).eval()
    with torch.no_grad():
        got = opened(token_ids(3, 11, vocab=313)).logits
    assert float((logits(trained_model(run)) - got).abs().max()) <= SAME  # 0 was seen
    assert apart(logits(load_model(both / "lora@last")), got) <= SAME


def test_the_base_stands_still(tmp_path: Path) -> None:
    """Neither its files nor, with LoRA, its weights in memory change."""
    written(tmp_path)
    before = {p.name: p.read_bytes() for p in (tmp_path / "qwen").iterdir()}
    weights = weights_of(load_model(tmp_path / "qwen"))
    for kind in (FULL, LORA):
        run = trained(
            spec_in(tmp_path, "train.steps=2", "train.optimizer.weight_decay=0.1", *kind),
            tmp_path / kind[0],
        )
        own = dict(trained_model(run).named_parameters())
        if kind is LORA:
            assert all((own[name].detach().numpy() == weights[name]).all() for name in weights)
            assert set(run.engine.weights()) == {n for n in own if "lora" in n}
        else:
            assert any((own[name].detach().numpy() != weights[name]).any() for name in weights)
    assert {p.name: p.read_bytes() for p in (tmp_path / "qwen").iterdir()} == before


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_config_toml_repeats_the_run(kind, both, tmp_path):
    again = read_config(both / kind / "config.toml")
    assert again == read_config(both / kind / "config.json")
    trained(again, tmp_path / "again")
    assert hashes(tmp_path / "again") == hashes(both / kind)


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("step", [3, 6])
def test_a_resumed_run_ends_with_the_same_bits(kind, step, both, tmp_path):
    shutil.copytree(both / kind, tmp_path / "copy")
    directory = RunDirectory(tmp_path / "copy")
    for later in directory.steps():
        if later > step:
            shutil.rmtree(directory.step_folder(later))
    resumed(tmp_path / "copy")
    assert hashes(tmp_path / "copy") == hashes(both / kind)
    assert metrics(tmp_path / "copy") == metrics(both / kind)


def test_a_killed_run_ends_with_the_same_bits(both, tmp_path):
    spec = read_config(
        both / "lora" / "config.json", ["train.steps=24", "train.checkpoint_every=2"]
    )
    children, chance = Children(spec), random.Random(1)
    seconds = children.finish(tmp_path / "whole")
    folder = tmp_path / "killed"
    kill(children.start(folder), folder, chance=chance, seconds=seconds)
    children.finish(folder)
    assert hashes(folder) == hashes(tmp_path / "whole")
    assert metrics(folder) == metrics(tmp_path / "whole")


@catches("another base is used", "adapters.folder.lora:check_base", If(), to="False")
def test_another_base_is_refused(tmp_path: Path) -> None:
    """One number of the base changed: neither going on nor loading is possible."""
    written(tmp_path)
    trained(spec_in(tmp_path, "train.steps=2", *LORA), tmp_path / "run")
    whole = (tmp_path / "qwen" / "model.safetensors").read_bytes()
    (tmp_path / "qwen" / "model.safetensors").write_bytes(whole[:-4] + b"\x00\x00\x80\x3f")
    with pytest.raises(InputError, match="not the one that was fine-tuned"):
        resumed(tmp_path / "run")
    with pytest.raises(InputError, match="not the one that was fine-tuned"):
        gf.load(tmp_path / "run")
    shutil.rmtree(tmp_path / "qwen")
    with pytest.raises(InputError, match="no folder"):
        gf.load(tmp_path / "run")


def test_other_data_or_another_correction_is_refused(both, tmp_path):
    shutil.copytree(both / "lora", tmp_path / "run")
    with pytest.raises(InputError, match="another model"):
        resumed(tmp_path / "run", spec=spec_in(both, "train.steps=9", *LORA, "lora.alpha=17"))
    moved = tmp_path / "moved.jsonl"
    moved.write_text("".join(json.dumps(line) + "\n" for line in tally(54)))
    other = read_config(both / "lora" / "config.json", [f"task.path={moved}"])
    with pytest.raises(InputError, match="another run's spec"):
        resumed(tmp_path / "run", spec=other)
    run = TrainingRun(read_config(both / "lora" / "config.json"), tmp_path / "run")
    run.facts["sha256"] = "other"
    with pytest.raises(InputError, match="the data changed"):
        run.resume()


def test_a_damaged_adapter_is_noticed(both, tmp_path):
    shutil.copytree(both / "lora", tmp_path / "run")
    file = RunDirectory(tmp_path / "run").step_folder(9) / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(FileError, match="was changed after it was written"):
        gf.load(tmp_path / "run@9")
    notes = resumed(tmp_path / "run")[1]
    assert notes[0].startswith("step-000009: adapter_model.safetensors")
    assert hashes(tmp_path / "run") == hashes(both / "lora")


# --- other bases, other engines -------------------------------------------------------------------


def own_base(folder: Path, spec=None) -> Path:
    """A checkpoint of ours that reads bytes, and prompts for it."""
    small = presets.qwen(
        vocab_size=256, d_model=16, n_heads=2, n_kv_heads=1, d_head=8, d_ff=24, n_layers=1
    )
    model = build(small if spec is None else spec, generator=torch.Generator().manual_seed(0))
    CustomTransformerAdapter(model, tokenizer=Bytes()).save_checkpoint(folder / "base")
    lines = [{"prompt": f"{i}*", "completion": f"{i * 7}"} for i in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def own_spec(folder: Path, *changes: str, base: str = "base") -> RunSpec:
    return recipe("finetune", [f"base={folder / base}", f"data={folder / 'data.jsonl'}", *changes])


def test_the_by_hand_engine_tunes_all_of_it_to_the_same_numbers(tmp_path):
    own_base(tmp_path)
    short = ("train.steps=4", "train.lr=1e-3")
    trained(own_spec(tmp_path, *short), tmp_path / "torch")
    trained(own_spec(tmp_path, *short, "engine=numpy"), tmp_path / "numpy")
    ours, theirs = metrics(tmp_path / "numpy"), metrics(tmp_path / "torch")
    for one, other in zip(ours, theirs, strict=True):
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_a_base_of_a_relative_path_is_found_from_anywhere(tmp_path, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    own_base(project)
    monkeypatch.chdir(project)
    trained(own_spec(Path(), "train.steps=1", "lora=2"), Path("runs") / "helper")
    here = load_model("runs/helper")
    monkeypatch.chdir(tmp_path)
    there = load_model("project/runs/helper")
    assert all(map(torch.equal, here.parameters(), there.parameters()))
    (project / "base").rename(project / "gone")
    with pytest.raises(InputError, match="there is no folder base, the base of this LoRA"):
        load_model("project/runs/helper")


def test_a_run_can_be_the_base_of_another(tmp_path):
    own_base(tmp_path)
    trained(own_spec(tmp_path, "train.steps=2", "lora=2"), tmp_path / "one")
    trained(own_spec(tmp_path, "train.steps=2", "train.lr=1e-2", base="one"), tmp_path / "two")
    trained(own_spec(tmp_path, "train.steps=2", "lora=3", base="two@last"), tmp_path / "three")
    models = [load_model(tmp_path / name) for name in ("base", "one", "two", "three")]
    made = [logits(model, vocab=256) for model in models]
    assert all(not torch.equal(a, b) for a, b in pairwise(made))


def test_a_model_without_a_hugging_face_form_is_tuned_too(tmp_path):
    spec = presets.budget_lm(
        vocab_size=256, d_model=16, n_heads=2, d_ff=24, n_layers=1, max_seq_len=32
    )
    own_base(tmp_path, spec)
    run = trained(own_spec(tmp_path, "train.steps=2", "lora=2"), tmp_path / "run")
    got, want = (
        logits(load_model(tmp_path / "run"), vocab=256),
        logits(trained_model(run), vocab=256),
    )
    assert apart(got, want) <= SAME


def test_double_precision_stays_double(tmp_path):
    own_base(tmp_path)
    changes = ("train.steps=2", "lora=2", "train.precision=float64")
    run = trained(own_spec(tmp_path, *changes), tmp_path / "run")
    model = load_model(tmp_path / "run")
    assert next(model.parameters()).dtype == torch.float64
    got, want = logits(model, vocab=256), logits(trained_model(run), vocab=256)
    assert float((got - want).abs().max()) <= 1e-12


def test_short_words_are_paths_of_the_spec(tmp_path):
    own_base(tmp_path)
    lora = own_spec(tmp_path, "train.steps=1", "lora=4", "lora.dropout=0.1").tuning.lora
    assert lora == LoRA(rank=4, alpha=8.0, dropout=0.1)
    assert own_spec(tmp_path, "train.steps=1", "lora.rank=2").tuning.lora == LoRA(rank=2)
    assert own_spec(tmp_path, "train.steps=1", "lora=null").tuning.lora is None
    assert own_spec(tmp_path, "train.steps=1").train.lr < 1e-4
    with pytest.raises(InputError, match="lora"):
        own_spec(tmp_path, "lora=yes")


def test_steps_are_three_epochs_unless_said(tmp_path):
    own_base(tmp_path)
    spec = own_spec(tmp_path, "train.batch_size=2", "task.length=12")
    rows = assemble(spec).task.sizes()["train"]
    assert spec.train.steps == 3 * -(-rows // 2)
    assert spec.train.evaluate_every == spec.train.checkpoint_every == spec.train.steps // 3
    assert own_spec(tmp_path, "train.steps=7").train.steps == 7


# --- what is refused, and what is told ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data=x.jsonl"], "needs a base"),
        (["base=x"], "needs data"),
        (["base={0}/base", "data={0}/data.jsonl", "model.max_seq_len=9"], "keeps its base's spec"),
        (["base={0}/base", "data={0}/data.jsonl", "lora.rnk=9"], "unknown key 'rnk'"),
        (["base={0}/base", "data={0}/data.jsonl", "lora.targets=[\"x\"]"], "'x' is in no layer"),
        (["base={0}/base", "data={0}/data.jsonl", "lora.rank=999"], "rank 999 is above"),
        (["base={0}/none", "data={0}/data.jsonl"], "no folder"),
        (["base={0}/base", "data={0}/none.jsonl"], "cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(changes, words, tmp_path):
    own_base(tmp_path)
    with pytest.raises(InputError, match=words):
        assemble(recipe("finetune", [text.format(tmp_path) for text in changes]))


def test_a_chat_for_a_base_without_a_template_is_refused(tmp_path):
    own_base(tmp_path)
    (tmp_path / "data.jsonl").write_text(json.dumps(tally(1)[0]) + "\n")
    with pytest.raises(InputError, match="no chat template"):
        own_spec(tmp_path)


def quantized_base(folder: Path) -> None:
    """`base`, and `small`: the same with weights of 4 bits, a tied table of 8."""
    own_base(
        folder,
        presets.qwen(
            vocab_size=256, d_model=32, n_heads=2, n_kv_heads=1, d_head=16, d_ff=64, n_layers=2
        ),
    )
    small = quantize_model(load_model(folder / "base"), QuantSpec(scheme=Int4()))
    adapter = CustomTransformerAdapter(small, tokenizer=Bytes())
    adapter.save_checkpoint(folder / "small")


def test_all_weights_of_a_quantized_base_are_not_trained(tmp_path):
    quantized_base(tmp_path)
    with pytest.raises(InputError, match="quantized, so they cannot be trained") as error:
        own_spec(tmp_path, base="small")
    assert "lora=8" in error.value.hint
    with pytest.raises(InputError, match="not compiled"):
        assemble(own_spec(tmp_path, "lora=2", "train.compile=on", base="small"))


def test_lora_trains_over_quantized_weights(tmp_path):
    quantized_base(tmp_path)
    before = (tmp_path / "small" / "model.safetensors").read_bytes()
    changes = ("lora=4", "train.steps=12", "train.lr=1e-2", "train.checkpoint_every=6")
    run = trained(own_spec(tmp_path, *changes, base="small"), tmp_path / "run")
    plain = dequantize_model(load_model(tmp_path / "small"))
    CustomTransformerAdapter(plain, tokenizer=Bytes()).save_checkpoint(tmp_path / "plain")
    trained(own_spec(tmp_path, *changes, "engine=torch", base="plain"), tmp_path / "float")
    quantized, wide = metrics(tmp_path / "run"), metrics(tmp_path / "float")
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (quantized, wide)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] - 0.1
    assert (tmp_path / "small" / "model.safetensors").read_bytes() == before
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        loaded = load_model(tmp_path / "run")(ids)["next"]
        here = trained_model(run).eval()(ids)["next"]
    assert apart(loaded, here) < SAME
    last = hashes(tmp_path / "run")
    trained(own_spec(tmp_path, *changes, base="small"), tmp_path / "again", stop_at=6)
    resumed(tmp_path / "again")
    assert hashes(tmp_path / "again") == last


def test_a_run_over_quantized_weights_knows_its_base(tmp_path):
    quantized_base(tmp_path)
    trained(own_spec(tmp_path, "lora=2", "train.steps=1", base="small"), tmp_path / "run")
    other = quantize_model(load_model(tmp_path / "base"), QuantSpec(scheme=Int4(), method="absmax"))
    shutil.rmtree(tmp_path / "small")
    CustomTransformerAdapter(other, tokenizer=Bytes()).save_checkpoint(tmp_path / "small")
    with pytest.raises(InputError, match="its weights differ"):
        gf.load(tmp_path / "run")


def test_a_base_that_is_made_of_itself_is_refused(tmp_path):
    own_base(tmp_path)
    run = trained(own_spec(tmp_path, "train.steps=1", "lora=2"), tmp_path / "run")
    tuning = replace(run.spec.tuning, base=str(tmp_path / "run"))
    rewritten(tmp_path / "run", 1, tuning__json=to_json(tuning).encode())
    with pytest.raises(FileError, match="leads back to itself"):
        gf.load(tmp_path / "run")


def test_a_base_that_continues_no_text_is_refused(tmp_path):
    own_base(tmp_path, presets.digits())
    with pytest.raises(InputError, match="does not continue a text"):
        own_spec(tmp_path)


def test_a_length_beyond_the_context_is_refused_where_it_is_used(tmp_path):
    own_base(tmp_path)
    (tmp_path / "data.txt").write_text("many words " * 200)
    changes = [f"base={tmp_path / 'base'}", f"data={tmp_path / 'data.txt'}", "task.length=300"]
    with pytest.raises(InputError, match="max_seq_len of 256") as caught:
        assemble(recipe("finetune", changes))
    assert caught.value.hint == "task.length=256"


def test_the_run_tells_what_trains_and_what_was_cut(tmp_path):
    own_base(tmp_path)
    parts = assemble(own_spec(tmp_path, "task.length=3", "lora=2"))
    assert "examples are longer than task.length=3 and were cut" in parts.notes[0]
    assert parts.notes[-1].startswith("LoRA of rank 2 on 7 projections of ")
    assert parts.task.facts()["cut"] > 0


def test_logits_are_made_in_pieces_that_fit(tmp_path, monkeypatch):
    own_base(tmp_path)
    parts = assemble(own_spec(tmp_path))
    whole = module.evaluate(parts.engine, parts.task, split="train")
    monkeypatch.setattr(type(parts.engine), "logits_at_once", 1)
    sizes = []
    made = parts.engine.logits

    def seen(batch: Batch):
        sizes.append(len(batch.tokens))
        return made(batch)

    parts.engine.logits = seen
    pieces = module.evaluate(parts.engine, parts.task, split="train")
    assert set(sizes) == {1}
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-6)


def test_a_planned_run_opens_its_base_and_reads_its_data_once(tmp_path, monkeypatch):
    folder = written(tmp_path)
    opened, read = [], []
    for room in (finetuning, assembling):
        before = room.open_base
        monkeypatch.setattr(
            room, "open_base", lambda path, f=before: opened.append(path) or f(path)
        )
    task = Base.task
    monkeypatch.setattr(Base, "task", lambda self, spec: read.append(spec) or task(self, spec))
    plan = plan_finetune([f"base={folder / 'qwen'}", f"data={folder / 'data.jsonl'}", "lora=2"])
    first = assemble(plan).engine.weights()
    assert (len(opened), len(read)) == (1, 1)
    second = assemble(plan).engine.weights()  # training changes a base, so it is opened again
    assert (len(opened), len(read)) == (2, 1)
    assert all((first[name] == second[name]).all() for name in first)
