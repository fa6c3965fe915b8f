"""The questions: fair by construction, solved by reading, the same on every machine."""

from collections import Counter

import numpy as np
import pytest

from glassformer.data.tokenizers.vocab import Bytes
from glassformer.lab.smallbench.question import Question, grouped, mark
from glassformer.lab.smallbench.suite import EXAMS, questions_of
from tests.lab.smallbench.readers import HABITS, all_knowing, habit, uniform

SQUARES = ("copy", "recall", "induction", "fsm")
every_exam = pytest.mark.parametrize("name", EXAMS)


def groups_of(name, *, items=64, seed=0):
    return questions_of(EXAMS[name], items=items, seed=seed)


def chance_of(groups):
    return np.mean([1 / len(one.choices) for group in groups for one in group.questions])


@every_exam
def test_every_choice_is_right_equally_often(name):
    for group in groups_of(name):
        counts = Counter(one.right for one in group.questions)
        assert set(counts) == set(range(len(group.questions[0].choices)))
        assert len(set(counts.values())) == 1
        assert len({one.choices for one in group.questions}) == 1
        assert len({one.context for one in group.questions}) == len(group.questions)


@pytest.mark.parametrize("name", SQUARES)
def test_squares_show_every_choice_equally_often_before_the_query(name):
    for group in groups_of(name):
        for one in group.questions:
            before = {"copy": "\n", "recall": ".", "induction": " ", "fsm": ";"}[name]
            shown = one.context.rpartition(before)[0].replace(",", "").replace(";", "").split()
            assert len({shown.count(choice.strip()) for choice in one.choices}) == 1


def solved(name):
    """The solver reads the text alone; that it agrees with the maker is the oracle's level."""
    exam = EXAMS[name]
    for group in groups_of(name, items=400):
        for one in group.questions:
            assert exam.solve(one.context, one.choices) == one.answer, one


@every_exam
def test_the_solver_finds_the_right_choice_in_the_text(name):
    solved(name)


@every_exam
def test_an_oracle_that_speaks_in_logits_is_right_every_time(name):
    groups = groups_of(name)
    marks = mark(all_knowing(EXAMS[name], groups), groups)
    assert marks.points.sum() == marks.questions.sum() == marks.exact


@every_exam
def test_uniform_logits_are_at_chance_exactly(name):
    groups = groups_of(name)
    marks = mark(uniform(Bytes()), groups)
    assert marks.points.sum() / marks.questions.sum() == pytest.approx(chance_of(groups), abs=1e-12)


def habits_are_at_chance(name, kind):
    groups = groups_of(name, items=48)
    marks = mark(habit(kind), groups)
    assert marks.points.sum() / marks.questions.sum() == pytest.approx(chance_of(groups), abs=1e-12)


@every_exam
@pytest.mark.parametrize("kind", HABITS)
def test_who_has_but_a_habit_is_at_chance_exactly(name, kind):
    """What a word is, how often and where it stood before: each alone says nothing."""
    if kind == "by distance" and name in ("brackets", "fsm"):
        return  # a bracket more moves all that stood before it; a query names one of the choices
    habits_are_at_chance(name, kind)


@every_exam
def test_more_items_begin_with_the_same_and_a_seed_changes_all(name):
    few, many = groups_of(name, items=32), groups_of(name, items=200)
    assert many[: len(few)] == few
    assert not set(groups_of(name, seed=1)) & set(few)
    assert sum(len(group.questions) for group in many) >= 200


@every_exam
def test_questions_are_short_and_plain(name):
    for group in groups_of(name, items=400):
        for one in group.questions:
            assert one.context.isascii()
            assert max(len(one.context + choice) for choice in one.choices) <= 129


def test_brackets_of_two_kinds_are_one_kind_of_group():
    assert len({group.kind for group in groups_of("brackets", items=400)}) == 6
    assert len({group.kind for group in groups_of("copy", items=400)}) == 25


def test_an_unfair_group_is_not_made():
    asked = [Question(context=text, choices=("a", "b"), right=0) for text in ("x", "y")]
    with pytest.raises(AssertionError, match="right somewhere"):
        grouped(asked)
    with pytest.raises(AssertionError, match="begins"):
        Question(context="x", choices=("a", "ab"), right=0)
