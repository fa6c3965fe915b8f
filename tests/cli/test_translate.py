"""The translation task from the command line: train, evaluate, generate; and without its extra."""

import builtins
import json

import pytest

TINY = (
    "task.examples=600",
    "task.pieces=300",
    "model.d_model=16",
    "train.batch_size=8",
    "train.steps=4",
)


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_train_evaluate_and_generate(glass, tmp_path, engine):
    runs = ("--runs", tmp_path)
    code, _, err = glass("train", "translate", *TINY, "--engine", engine, *runs)
    assert code == 0, err
    code, out, _ = glass("evaluate", "translate", *runs, "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found["by"]) == {"direction", "language", "kind", "length"}
    assert {"exact_match", "chrf", "bleu", "by", "examples"} == set(found["decoded"])
    code, out, _ = glass("evaluate", "translate", *runs)
    assert "decoded, from the source alone" in out
    assert "chrF" in out
    code, out, _ = glass("generate", "translate", "de: 4217", *runs, "--max-new", 3, "--json")
    assert code == 0
    assert len(json.loads(out)["tokens"]) <= 3


def test_it_is_listed(glass, tmp_path):
    code, out, _ = glass("list", "--runs", tmp_path)
    assert code == 0
    assert "translate" in out


def test_without_the_extra_the_command_to_install_it_is_told(glass, tmp_path, monkeypatch):
    plain = builtins.__import__

    def without(name, *rest):
        if name == "num2words":
            raise ModuleNotFoundError("No module named 'num2words'", name="num2words")
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    code, _, err = glass("train", "translate", "--runs", tmp_path)
    assert code == 5
    assert "needs num2words, which is not installed" in err
    assert "pip install num2words" in err
