"""What a user's task must offer is checked when it is opened, and named where it is missing."""

import pytest

import glassformer as gf
from glassformer.data.build_task import build_task
from glassformer.spec.errors import InputError
from glassformer.spec.own import OwnTask, name_part
from tests.own.test_commands import PARTS

HEAD = """
import numpy as np
from glassformer.data.batch import Batch
from glassformer.data.task import Task
from glassformer.data.tokenizers.vocab import Vocab

class Mine(Task):
    def __init__(self):
        self.tokenizer = Vocab(("a", "b"))
        self.heads = {"next": 2}
    def sizes(self):
        return {"train": 4, "val": 2}
    def batch(self, split, rows):
        tokens = np.zeros((len(rows), 3), dtype=np.int64)
        return Batch(tokens=tokens, valid=np.ones(tokens.shape, bool), targets={"next": tokens})
"""


def built(folder, text):
    (folder / "mine.py").write_text(text)
    return build_task(name_part(OwnTask, f"{folder / 'mine.py'}:Mine"))


def test_defaults_fill_what_a_task_leaves_out(tmp_path):
    task = built(tmp_path, HEAD)
    assert task.name == "Mine"
    assert task.lengths("val").tolist() == [3, 3]
    assert task.describe("train", 0) == "a a a"
    assert task.groups("val", [0]) == task.confusions("val", [0], [0]) == {}
    assert task.oracle("val", [0]) is None
    assert task.facts()["sizes"] == {"train": 4, "val": 2}
    assert task.facts()["sha256"] == built(tmp_path, HEAD + "# again\n").facts()["sha256"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('        self.heads = {"next": 2}\n', "", "the task has no `heads`"),
        ('{"next": 2}', '{"next": 2, "verdict": 3}', "heads are next, verdict"),
        ('"val": 2', '"val": 0', "no examples in 'val'"),
        ("return Batch(", "return (lambda **kw: 3)(", "returned a int"),
        ('targets={"next": tokens}', "targets={}", "the targets of 'train' are none"),
        ("np.zeros((len(rows), 3)", "2 + np.zeros((len(rows), 3)", "tokens holds 2"),
        ('targets={"next": tokens}', 'targets={"next": tokens - 1}', r"targets\['next'\] holds -1"),
        ("np.zeros((len(rows), 3)", "np.zeros((1, 3)", "has 1 rows for 3"),
        ("    def sizes(self):", "    def counts(self):", "abstract"),
        ("def __init__(self):", "def __init__(self):\n        1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_is_missing_is_named(tmp_path, old, new, message):
    assert old in HEAD
    with pytest.raises(InputError, match=message):
        built(tmp_path, HEAD.replace(old, new))


def test_an_unknown_option_is_reported_with_the_line(tmp_path):
    part = name_part(OwnTask, f"{PARTS}:Palindromes", {"size": 3})
    with pytest.raises(InputError, match="unexpected keyword argument 'size'"):
        build_task(part)


def test_a_model_is_evaluated_on_a_task_by_its_source(tmp_path):
    (tmp_path / "mine.py").write_text(HEAD)
    model = gf.build(gf.preset("core", vocab_size=2, d_model=8, n_heads=2, d_ff=8, max_seq_len=8))
    found = gf.evaluate(model, f"{tmp_path / 'mine.py'}:Mine", split="val")
    assert found.examples == 2 and found.loss > 0
    with pytest.raises(InputError, match="no task 'mime'"):
        gf.evaluate(model, "mime")
