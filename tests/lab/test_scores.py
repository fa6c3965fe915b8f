"""chrF and BLEU of whole answers: against their definitions, and of a model's own words."""

import builtins
import math
from collections import Counter

import numpy as np
import pytest

from glassformer.data.build_task import build_task
from glassformer.lab.measure.scores import (
    Decoded,
    corpus_scores,
    decode_split,
    decoded_scores,
    text_scores,
    wanted,
)
from glassformer.lab.recipes import recipe
from glassformer.spec.errors import InputError, MachineError
from tests.lab.test_decoded import Rows, Told

TRUTHS = ["one thousand, two hundred and three", "dreiundvierzig", "2024-03-17"]


def chrf(ours, truths):
    """Popović 2015: F2 of character n-grams without spaces, averaged over n from 1 to 6."""
    precisions, recalls = [], []
    for n in range(1, 7):
        hits = said = due = 0
        for one, truth in zip(ours, truths, strict=True):
            a, b = (Counter(t[i : i + n] for i in range(len(t) - n + 1))
                    for t in (one.replace(" ", ""), truth.replace(" ", "")))  # fmt: skip
            hits, said, due = hits + (a & b).total(), said + a.total(), due + b.total()
        precisions.append(hits / said)
        recalls.append(hits / due)
    p, r = np.mean(precisions), np.mean(recalls)
    return 100 * 5 * p * r / (4 * p + r)


def bleu(ours, truths):
    """Papineni 2002, of words alone: the mean of the precisions' logarithms, and brevity."""
    logs, said, due = [], 0, 0
    for one, truth in zip(ours, truths, strict=True):
        said, due = said + len(one.split()), due + len(truth.split())
    for n in range(1, 5):
        hits = all_ = 0
        for one, truth in zip(ours, truths, strict=True):
            a, b = (Counter(tuple(t.split()[i : i + n]) for i in range(len(t.split()) - n + 1))
                    for t in (one, truth))  # fmt: skip
            hits, all_ = hits + (a & b).total(), all_ + a.total()
        logs.append(math.log(hits / all_))
    return 100 * math.exp(min(0, 1 - due / said) + sum(logs) / 4)


def test_the_right_answers_have_everything():
    found = corpus_scores(TRUTHS, TRUTHS)
    assert found["chrf"] == pytest.approx(100)
    assert found["bleu"] == pytest.approx(100)


def test_scores_are_the_papers():
    ours = ["one thousand two hundred and four", "a b c d e f g", "five six seven eight"]
    truths = ["one thousand two hundred and three", "a b c e d f g", "five six seven eight"]
    found = corpus_scores(ours, truths)
    assert found["chrf"] == pytest.approx(chrf(ours, truths), rel=1e-6)
    assert found["bleu"] == pytest.approx(bleu(ours, truths), rel=1e-6)


def test_what_cannot_be_scored_is_refused(monkeypatch):
    with pytest.raises(InputError, match="2 texts beside 3"):
        corpus_scores(TRUTHS[:2], TRUTHS)
    plain = builtins.__import__

    def without(name, *rest):
        if name.startswith("sacrebleu"):
            raise ModuleNotFoundError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MachineError, match="pip install sacrebleu"):
        corpus_scores(TRUTHS, TRUTHS)


class Prompter(Told):
    """A stepper that was told every answer, but says one token less to some sources."""

    def __init__(self, task, *, short):
        super().__init__(task.tokenizer.vocab_size, reverse=False)
        batch = task.batch("test", np.arange(task.sizes()["test"]))
        self.answers = {}
        for row, truth in enumerate(wanted(batch)):
            source = tuple(batch.source.tokens[row][batch.source.valid[row]].tolist())
            cut = truth if row not in short else (*truth[:-2], truth[-1])
            self.answers[source] = cut

    def start(self, prompts, *, room):
        past = Rows([list(self.answers[source]) for source in prompts.sources])
        return past.logits(self.vocab_size), past


@pytest.fixture(scope="module")
def task():
    return build_task(recipe("translate", ["task.examples=1200", "task.pieces=400"]).task)


def test_texts_are_scored_by_group_and_as_texts(task):
    perfect = decoded_scores(Prompter(task, short=()), task, split="test")
    assert perfect["exact_match"] == 1.0
    assert (round(perfect["chrf"], 6), round(perfect["bleu"], 6)) == (100, 100)
    rows = np.arange(task.sizes()["test"])
    kinds = task.groups("test", rows)["kind"]
    short = [row for row in rows if kinds[row] == "date"][:30]
    found = decoded_scores(Prompter(task, short=short), task, split="test")
    assert found["by"]["kind"] == {"date": 1 - 30 / kinds.count("date"), "number": 1.0}
    assert found["exact_match"] == 1 - 30 / len(rows)
    assert 50 < found["chrf"] < 100
    assert list(found["by"]["length"])[-1] == "date"


def test_the_end_is_no_part_of_a_text(task):
    """A model that says nothing but the end has empty texts, not texts of EOS."""
    found = decode_split(Prompter(task, short=()), task, examples=10)
    silent = Decoded("test", 10, 0, list(range(10)), [(task.tokenizer.eos,)] * 10)
    assert text_scores(silent, task)["chrf"] == 0.0
    assert found.said == list(wanted(task.batch("test", np.arange(10))))


def test_symbols_have_no_text_scores():
    reverse = build_task(recipe("reverse", ["task.examples=300"]).task)
    told = Told(reverse.tokenizer.vocab_size, reverse=True)
    found = decoded_scores(told, reverse, split="longer")
    assert set(found) == {"examples", "exact_match", "by"}
    assert list(found["by"]["length"]) == ["11", "12", "13", "14"]
