"""`glass train finetune` from a base and a file to a model that speaks, and what it refuses."""

import json

import pytest
from transformers import AutoModelForCausalLM

from glassformer.store.rundir import RunDirectory
from tests.adapters.folders import write_model
from tests.cli.test_train import RESULT
from tests.lab.test_finetune import hashes, tally

SHORT = ("task.length=90", "train.steps=4", "train.checkpoint_every=2", "train.evaluate_every=2")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with a tiny Qwen2 and a file of chats."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "qwen")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(x) + "\n" for x in tally(20)))
    return tmp_path


def test_from_a_base_and_a_file_to_a_model_that_speaks(glass, place):
    words = ("train", "finetune", "base=qwen", "data=chats.jsonl", *SHORT)
    code, out, err = glass(*words, "lora.rank=4", "lora.alpha=8", "--name=a", "--json")
    assert code == 0, err
    assert set(json.loads(out)) == RESULT
    assert "LoRA of rank 4 on 14 projections of qwen: " in err
    assert "% of 25,888" in err
    code, out, err = glass("generate", "a", "<|im_start|>user\n1 + 3?", "--max-new=3", "--json")
    assert code == 0, err
    assert len(json.loads(out)["tokens"]) <= 3
    code, out, err = glass("evaluate", "a", "--json")
    assert code == 0, err
    assert json.loads(out)["split"] == "val"
    code, out, _ = glass("list", "--json")
    assert [run["task"] for run in json.loads(out)["runs"]] == ["finetune"]
    code, out, err = glass(*words, "base=a", "--name=b")  # the last word counts: a run by its name
    assert code == 0, err
    assert "fine-tuning all 25,888 parameters of runs/a" in err
    assert AutoModelForCausalLM.from_pretrained(place / "qwen") is not None


@pytest.mark.parametrize("lora", [(), ("lora=4",)])
def test_a_tuned_model_is_quantized_measured_and_brought_back(glass, place, lora):
    words = ("train", "finetune", "base=qwen", "data=chats.jsonl", *SHORT, *lora, "--name=a")
    assert glass(*words)[0] == 0
    code, out, err = glass("quantize", "a", "--bits=8", "--json")
    assert code == 0, err
    assert json.loads(out)["folder"] == "runs/a-int8"
    assert json.loads(out)["agreement"]["full_to_small"]["mean"] < 0.01
    code, _, err = glass("quantize", "a-int8", "--dequantize", "--out=runs/back")
    assert code == 0, err
    losses = []
    for name in ("a", "a-int8", "back"):
        code, out, err = glass("evaluate", name, "--json")
        assert code == 0, err
        losses.append(json.loads(out)["loss"])
    assert losses[0] != losses[1]
    # Five positions of a model that knows nothing: the divergence above is the steadier figure.
    assert losses == pytest.approx([losses[0]] * 3, abs=0.1)


def test_a_stopped_run_goes_on_and_keeps_its_spec(glass, place):
    words = ("train", "finetune", "base=qwen", "data=chats.jsonl", *SHORT, "lora=4")
    assert glass(*words, "--name=whole")[0] == 0
    assert glass(*words, "--name=a")[0] == 0
    directory = RunDirectory(place / "runs" / "a")
    for path in directory.step_folder(4).rglob("*"):
        path.is_file() and path.unlink()
    code, _, err = glass(*words, "--name=a", "--resume")
    assert code == 0, err
    assert "resuming at step 2" in err
    assert hashes(place / "runs" / "a") == hashes(place / "runs" / "whole")
    code, _, err = glass(*words, "lora.alpha=9", "--name=a", "--resume")
    assert code == 2
    assert "tuning.lora.alpha=9 changes it" in err


def test_what_is_cut_is_told(glass, place):
    (place / "some.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{i}: ", "completion": "word " * (40 + i)}) + "\n"
            for i in range(4)
        )
    )
    code, _, err = glass(
        *("train", "finetune", "base=qwen", "data=some.jsonl", "task.length=32", "train.steps=1")
    )
    assert code == 0, err
    assert "4 of 4 examples are longer than task.length=32 and were cut" in err
    assert "(line 1, line 2, line 3, line 4)" in err
    told = RunDirectory(place / "runs" / "finetune").read_json("run.json")
    assert told["data"]["cut"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "fine-tuning needs a base"),
        (("base=qwen",), "fine-tuning needs data"),
        (("base=nothing", "data=chats.jsonl"), "nothing"),
        (("base=qwen", "data=bad.jsonl"), "line 2: not JSON"),
        (("base=qwen", "data=chats.jsonl", "model.d_model=9"), "keeps its base's spec"),
    ],
)
def test_bad_input_is_a_message_and_no_run(words, message, glass, place):
    (place / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    code, out, err = glass("train", "finetune", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not (place / "runs").exists()
