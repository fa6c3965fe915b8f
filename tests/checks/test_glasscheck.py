"""The distribution glasscheck: alone, by its command, and beside a library with rows of its own."""

import json
import subprocess
import sys

import pytest

import glasscheck as gc
import glassformer as gf
from glasscheck.__main__ import main
from glassformer.spec.errors import InputError

MODEL = """
import torch
from torch import nn

class Bigrams(nn.Module):
    def __init__(self, wrong=False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.wrong = wrong

    def forward(self, input_ids):
        x = self.table(input_ids)
        return self.head(x.flip(1).cumsum(1).flip(1) if self.wrong else x)

def right(): return Bigrams()
def wrong(): return Bigrams(wrong=True)
def scaled():
    model = Bigrams()
    with torch.no_grad():
        model.head.weight.mul_(2)
    return model
def setup(): return {"model": Bigrams()}
"""

#: Verifies, compares and examines where glassformer cannot be imported.
ALONE = """
import sys
sys.modules["glassformer"] = None
sys.path.insert(0, sys.argv[1])
import glasscheck as gc
import mine

assert gc.verify(mine.right()).failed == 0
assert gc.verify(mine.wrong(), only="causality").failed == 1

assert not gc.diff(mine.right(), mine.scaled()).same
assert gc.doctor(mine.setup(), quick=True).findings
others = {"glassformer", "safetensors", "transformers", "scipy", "rich", "typer"}
loaded = {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}
print(sorted(loaded & others))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def test_it_needs_nothing_of_glassformer(place):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(place)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_help_and_the_front_door_load_no_torch():
    script = (
        "import sys, glasscheck.__main__ as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_the_command(place, capsys):
    assert command("mine.py:right", "--out", "kept.json", "--junit", "j.xml") == 0
    assert "0 failed" in capsys.readouterr().out
    assert "<testsuite" in (place / "j.xml").read_text()
    assert json.loads((place / "kept.json").read_text())["versions"]["glasscheck"]
    assert command("mine.py:wrong", "--only", "causality") == 1
    assert command("mine.py:wrong", "--against", "kept.json", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["failed"] >= 1
    assert "the future changes no bit of the past: was passed" in err
    assert command("diff", "mine.py:right", "mine.py:scaled") == 1
    assert "scale: head.weight is 0.5 times the other" in capsys.readouterr().out
    assert command("diff", "mine.py:right", "mine.py:right") == 0
    assert command("doctor", "mine.py:setup", "--quick") in (0, 1)
    assert "kinds passed" in capsys.readouterr().out
    assert command("mine.py:nothing") == 2
    assert "has no 'nothing'" in capsys.readouterr().err
    assert command("mine.py:right", "--only", "everything") == 2
    assert command("mine.py:right", "--against", "nowhere.json") == 3


def test_models_of_ours_get_the_rows_of_ours():
    model = gf.build(gf.preset("modern-lm", d_model=16, d_ff=24, n_layers=1, n_heads=2,
        n_kv_heads=1, vocab_size=31), seed=0)  # fmt: skip
    found = gc.verify(model, only="names")
    assert isinstance(found, type(gf.verify(model, only="names")))
    assert "parameters = manifest" in {f.name for f in found.findings}


def test_errors_of_glasscheck_are_ours_where_ours_is_called():
    with pytest.raises(InputError, match="cannot verify"):
        gf.verify(object())
    with pytest.raises(InputError, match="no group of checks"):
        gf.verify(gf.build(gf.preset("qwen", n_layers=1), seed=0), only="everything")
    with pytest.raises(gc.InputError):
        gc.verify(object())
