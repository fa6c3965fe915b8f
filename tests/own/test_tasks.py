"""What a user's task must offer is checked when it is opened, and named where it is missing."""

import pytest
import torch

import glassformer as gf
from glassformer.data.build_task import build_task
from glassformer.data.own_code import name_part
from glassformer.lab.recipes import plan_run
from glassformer.lab.runs.planned import check_fit
from glassformer.spec.errors import InputError
from glassformer.spec.model import AnswerHead
from glassformer.spec.own import OwnTask
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


COUNTED = '''
import numpy as np
from glassformer.data.batch import Batch, Source
from glassformer.data.task import Task
from glassformer.data.tokenizers.vocab import Vocab

class Sums(Task):
    """The sum of a row of digits, modulo a number of answers that is not that of tokens."""
    def __init__(self, *, answers=3):
        self.tokenizer = Vocab(tuple("0123456"))
        self.heads = {"answer": answers}
        self.rows = np.random.default_rng(0).integers(0, 7, size=(200, 5))
    def sizes(self):
        return {"train": 150, "val": 50}
    def batch(self, split, rows):
        tokens = self.rows[np.asarray(rows) + (150 if split == "val" else 0)]
        answers = tokens.sum(1) % self.heads["answer"]
        return Batch(tokens=tokens, valid=np.ones(tokens.shape, bool), targets={"answer": answers})
'''


@pytest.mark.parametrize("answers", [3, 31])
def test_an_answer_head_has_as_many_classes_as_the_task_declares(tmp_path, answers):
    (tmp_path / "sums.py").write_text(COUNTED)
    run = gf.train(
        f"{tmp_path / 'sums.py'}:Sums",
        overrides=[f"task.answers={answers}", "train.schedule.warmup=1"],
        steps=2,
        progress=False,
        runs=tmp_path / "runs",
    )
    model = gf.load(run.path)
    assert model.spec.head_size("answer") == answers
    assert model.model.get_parameter("heads.answer.weight").shape == (answers, 64)
    index = int(model(torch.tensor([[1, 2, 3, 4, 5]]))[0].argmax())
    assert model.generate("1 2 3 4 5") == f"answer {index}"
    seen = model.inspect("1 2 3 4 5", target=str(answers - 1))
    assert seen.target() == (answers - 1, f"answer {answers - 1}")
    with pytest.raises(InputError, match=f"0 to {answers - 1}"):
        model.inspect("1 2 3 4 5", target=str(answers))
    report = gf.evaluate(run)
    assert report.examples == 50


def test_as_many_answers_as_tokens_are_tokens(tmp_path):
    (tmp_path / "sums.py").write_text(COUNTED)
    spec = plan_run(f"{tmp_path / 'sums.py'}:Sums", ["task.answers=7"]).spec
    assert spec.model.heads == (AnswerHead(),) and spec.model.predicts_tokens("answer")


def test_a_source_does_not_lose_the_answer_head(tmp_path):
    sourced = COUNTED.replace(
        "targets={", "source=Source(tokens=tokens, valid=np.ones(tokens.shape, bool)), targets={"
    )
    (tmp_path / "sums.py").write_text(sourced)
    spec = plan_run(f"{tmp_path / 'sums.py'}:Sums", ["task.answers=4"]).spec
    assert spec.model.heads == (AnswerHead(num_answers=4),)
    assert spec.model.encoder is not None


def test_a_model_with_too_few_answers_is_told_which_setting_helps(tmp_path):
    (tmp_path / "sums.py").write_text(COUNTED)
    planned = plan_run(
        f"{tmp_path / 'sums.py'}:Sums", ["task.answers=9", "model.heads.0.num_answers=4"]
    )
    with pytest.raises(InputError, match="9 answers for the head 'answer', the model 4") as caught:
        check_fit(planned.spec.model, planned.task)
    assert caught.value.hint == "model.heads.0.num_answers=9"


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ('{"answer": 0}', "the head 'answer' has 0 classes"),
        ('{"answer": "3"}', "the head 'answer' has '3' classes"),
        ('{"next": 2}', "the head 'next' has 2 classes, the tokenizer 7 tokens"),
    ],
)
def test_a_number_of_classes_that_cannot_be_is_named(tmp_path, heads, message):
    (tmp_path / "sums.py").write_text(COUNTED.replace('{"answer": answers}', heads))
    with pytest.raises(InputError, match=message):
        build_task(name_part(OwnTask, f"{tmp_path / 'sums.py'}:Sums"))
