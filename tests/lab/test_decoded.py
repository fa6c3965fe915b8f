"""Whole answers: decoded from the source alone, counted right only to the last token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from glassformer.data.build_task import build_task
from glassformer.generation.stepper import TorchStepper
from glassformer.lab.measure.scores import answers, decode_split, wanted
from glassformer.lab.recipes import recipe
from glassformer.models.inputs import Inputs
from glassformer.models.model import build
from glassformer.models.stepping import Stepper
from glassformer.spec.errors import InputError


class Told(Stepper):
    """A stepper that knows the rule of the task, to the word: copies or reverses its source."""

    encoder_calls = positions = 0
    max_seq_len = 64

    def __init__(self, size: int, *, reverse: bool, late: int = 0) -> None:
        self.vocab_size = self.source_vocab = size
        self.reverse, self.late = reverse, late

    def start(self, prompts, *, room):
        rows = []
        for source in prompts.sources:
            symbols = list(source[:-1])
            rows.append([*(symbols[::-1] if self.reverse else symbols), *[3] * self.late, 2])
        past = Rows(rows)
        return past.logits(self.vocab_size), past

    def step(self, tokens_B, *, past):
        past.made += 1
        return past.logits(self.vocab_size)


class Rows:
    def __init__(self, rows):
        self.rows, self.made = rows, 0

    def reorder(self, rows_B):
        self.rows = [self.rows[i] for i in rows_B]

    def logits(self, size):
        chosen = [row[min(self.made, len(row) - 1)] for row in self.rows]
        return 9.0 * torch.nn.functional.one_hot(torch.tensor(chosen), size).double()


@pytest.fixture(scope="module")
def task():
    return build_task(recipe("reverse", ["task.examples=300"]).task)


@pytest.mark.parametrize("beams", [None, 3])
def test_a_perfect_model_has_everything_right(task, beams):
    size = task.tokenizer.vocab_size
    found = decode_split(Told(size, reverse=True), task, beams=beams)
    assert (found.examples, found.exact_match, found.wrong) == (30, 1.0, [])
    # An answer that goes on after the last symbol is wrong, every one of them.
    assert decode_split(Told(size, reverse=True, late=1), task, beams=beams).right == 0


def test_what_is_wrong_is_named(task):
    found = decode_split(Told(task.tokenizer.vocab_size, reverse=False), task, examples=20)
    batch = task.batch("test", np.arange(20))
    mirrored = [row for row, truth in enumerate(wanted(batch)) if truth[:-1] == truth[-2::-1]]
    assert sorted({*range(20)} - {*found.wrong}) == mirrored
    assert found.examples == 20


def test_answers_are_the_models_own(task):
    """A model of random weights, greedy: argmax after argmax, read with its own tokens."""
    spec = replace(recipe("reverse").model, vocab_size=task.tokenizer.vocab_size)
    model = build(spec, generator=torch.Generator().manual_seed(0)).eval()
    batch = task.batch("test", np.arange(3))
    for row, answer in enumerate(answers(TorchStepper(model), batch, eos=2, beams=None)):
        source = batch.source.tokens[row][batch.source.valid[row]]
        tokens = [1]
        for token in answer:
            inputs = Inputs(torch.tensor([tokens]), source_BS=torch.from_numpy(source)[None].long())
            with torch.no_grad():
                assert int(model(inputs)["next"][0, -1].argmax()) == token
            tokens.append(token)


def test_other_tasks_and_splits_are_refused(task):
    told = Told(task.tokenizer.vocab_size, reverse=True)
    with pytest.raises(InputError, match="no split 'best'"):
        decode_split(told, task, split="best")
    with pytest.raises(InputError, match="0 examples"):
        decode_split(told, task, examples=0)
    digits = build_task(recipe("digits", ["task.examples=100"]).task)
    with pytest.raises(InputError, match="has no source"):
        decode_split(told, digits)
