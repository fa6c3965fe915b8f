"""Building a task from its spec."""

from pathlib import Path
from typing import assert_never

from glassformer.data.corpus.windows import build_corpus, is_corpus
from glassformer.data.own_code import open_part, running
from glassformer.data.task import Task, check_task
from glassformer.data.tasks.digits import Digits
from glassformer.data.tasks.fsm import Fsm
from glassformer.data.tasks.labelled import Copying, Hops, Recall
from glassformer.data.tasks.seq2seq import Sequences, Translation
from glassformer.data.tasks.text import Text
from glassformer.spec import tasks as spec
from glassformer.spec.checks import check_member
from glassformer.spec.errors import InputError
from glassformer.spec.own import OwnTask


def build_task(task: spec.Task, *, cache: Path | None = None) -> Task:
    """Return the task that a spec describes; `cache` is a folder for the token files of text."""
    check_member("task", task, spec.Task)
    match task:
        case spec.DigitsTask():
            return Digits(task)
        case spec.SequenceTask():
            return Sequences(task)
        case spec.FsmTask():
            return Fsm(task)
        case spec.RecallTask():
            return Recall(task)
        case spec.CopyingTask():
            return Copying(task)
        case spec.HopsTask():
            return Hops(task)
        case spec.TextTask():
            if is_corpus(task):
                return build_corpus(task, cache=cache)
            return Text(task, cache=cache)
        case spec.TranslationTask():
            return Translation(task)
        case spec.FinetuneTask():
            raise InputError(
                "a fine-tuning task is made of its base's tokens",
                hint="glassformer.lab.runs.assemble.assemble(run) builds task and engine together",
            )
        case OwnTask():
            return _own_task(task)
        case _ as unreachable:
            assert_never(unreachable)


def _own_task(part: OwnTask) -> Task:
    """Return a user's task, checked against what every task must offer."""
    kind = open_part(part)
    if not issubclass(kind, Task):
        raise InputError(f"{part.source} is no task", hint="subclass glassformer.data.task.Task")
    with running(part):
        made: Task = kind(**part.options)
        if "name" not in vars(made) and "name" not in vars(kind):
            made.name = part.class_name
        check_task(made)
    return made
