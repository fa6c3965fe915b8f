"""A run that is planned: its spec, what had to be built to find it, and whether the two fit.

torch is not imported: a setting that cannot be is refused before it is.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from glassformer.data.task import Task
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.train import RunSpec

if TYPE_CHECKING:
    from glassformer.lab.finetune import Base


@dataclass(kw_only=True, slots=True)
class PlannedRun:
    """A run's spec, with the task and the base model that had to be built to find it.

    `assemble` takes the base over, since training changes it; a second assembly opens it again.
    """

    spec: RunSpec
    task: Task | None = None
    base: "Base | None" = None


def check_fit(model: ModelSpec, task: Task, *, has_base: bool = False) -> None:
    """Refuse a model that cannot read this task's tokens or has no targets for one of its heads.

    `has_base`: the model is fixed by its base, so the hint is to change the task.
    """
    batch = task.batch("train", np.arange(1, dtype=np.int64))
    tokens = task.tokenizer.vocab_size
    if tokens > model.vocab_size:
        raise InputError(
            f"the task has {tokens} tokens, the model a vocabulary of {model.vocab_size}",
            hint=f"model.vocab_size={tokens}",
        )
    if (batch.source is None) != (model.encoder is None):
        need = "an encoder-decoder" if batch.source is not None else "a decoder without an encoder"
        raise InputError(f"the task '{task.name}' needs {need}")
    for head in model.head_names():
        if head not in task.heads:
            raise InputError(
                f"the task '{task.name}' has no answers for the head '{head}'",
                hint=f"it has answers for: {', '.join(task.heads)}",
            )
        if task.heads[head] > model.head_size(head):
            fields = {"class": "num_classes", "state": "num_states", "answer": "num_answers"}
            at = f"heads.{model.head_names().index(head)}"
            path = f"{at}.{fields[head]}" if head in fields else "vocab_size"
            raise InputError(
                f"the task has {task.heads[head]} answers for the head '{head}', the model "
                f"{model.head_size(head)}",
                hint=f"model.{path}={task.heads[head]}",
            )
    if task.longest() > model.max_seq_len:
        longer = f"model.max_seq_len={task.longest()}"
        raise InputError(
            f"the task has sequences of {task.longest()} tokens, the model a max_seq_len of "
            f"{model.max_seq_len}",
            hint=longer if not has_base else f"task.length={model.max_seq_len}",
        )
