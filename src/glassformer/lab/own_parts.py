"""Runs with parts of the user's own: a plan for their task, and overrides that name a part.

    glass train my_task.py:MyTask task.length=9 train.steps=500
    glass train text task.tokenizer=my_words.py:Words train.optimizer=my_lion.py:Lion
    glass train reverse model.position=my_grid.py:Grid

A source that is typed is consent to running it (`spec.own_code`), and its file is hashed into the
spec.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from glassformer.data.build_task import build_task
from glassformer.data.task import HEADS, Task
from glassformer.lab.runs.assemble import PlannedRun
from glassformer.nn.position import declared_parameters
from glassformer.spec import presets
from glassformer.spec.model import AnswerHead, ClassHead, Head, ModelSpec, NextHead, StateHead
from glassformer.spec.own import (
    OwnOptimizer,
    OwnPart,
    OwnPosition,
    OwnTask,
    OwnTokenizer,
    installed_parts,
    is_source,
    name_part,
)
from glassformer.spec.serialize import override, to_dict
from glassformer.spec.train import AdamW, CosineSchedule, RunSpec, TrainSpec

T = TypeVar("T")

#: The kind of part that the last word of an override's path stands for.
KINDS: Mapping[str, type[OwnPart]] = {"optimizer": OwnOptimizer, "tokenizer": OwnTokenizer}
#: Training of a task that suggests none.
TRAINING = TrainSpec(
    steps=1_000,
    batch_size=64,
    lr=2e-3,
    schedule=CosineSchedule(warmup=100),
    optimizer=AdamW(beta2=0.98),
)


def own_source(what: str) -> str | None:
    """Return the source of a user's task: as typed, or by the name of an installed part."""
    return what if is_source(what) else installed_parts().get(what)


def plan_own_task(source: str, overrides: Iterable[str]) -> PlannedRun:
    """Return the run on a user's task; `task.` overrides are options of its class."""
    given = list(overrides)
    options = dict(_option(text) for text in given if text.startswith("task."))
    part = name_part(OwnTask, source, options)
    task = build_task(part)
    spec = RunSpec(
        model=task.model() or default_model(task), task=part, train=task.training() or TRAINING
    )
    rest = [text for text in given if not text.startswith("task.")]
    return PlannedRun(spec=override_parts(spec, rest), task=task)


def own_task_overrides(overrides: Iterable[str]) -> list[str]:
    """Return `task.length=9` as a path of the spec, `task.options.length=9`."""
    return [
        text if not text.startswith("task.") else f"task.options.{_plain(text)}"
        for text in overrides
    ]


def override_parts(spec: T, overrides: Iterable[str]) -> T:
    """Apply `override`, where a value may name a part: `train.optimizer=my_lion.py:Lion`.

    A position is named last, when the size of the model that it declares its parameters for is
    known.
    """
    given = list(overrides)
    path = "model.position"
    source = next((t.partition("=")[2] for t in reversed(given) if t.startswith(f"{path}=")), "")
    if not is_source(source) or not isinstance(spec, RunSpec):
        return override(spec, [_named(text) for text in given])
    rest = [text for text in given if not text.startswith((f"{path}=", f"{path}.options."))]
    made = override(spec, [_named(text) for text in rest])
    options = dict(
        _option(text.removeprefix(f"{path}."))
        for text in given
        if text.startswith(f"{path}.options.")
    )
    own = name_part(OwnPosition, source, options)
    model = made.model
    own = replace(
        own,
        parameters=declared_parameters(own, max_seq_len=model.max_seq_len, d_model=model.d_model),
    )
    return replace(made, model=replace(model, position=own))


def default_model(task: Task) -> ModelSpec:
    """Return a small model with a task's heads, an encoder-decoder if batches have a source."""
    vocab_size, length = task.tokenizer.vocab_size, task.longest()
    first = task.batch("train", np.arange(1))
    if first.source is not None:
        return presets.seq2seq(
            vocab_size=vocab_size,
            d_model=64,
            n_heads=4,
            d_ff=256,
            n_layers=2,
            max_seq_len=length,
            dropout=0.0,
        )
    model = presets.modern_lm(
        vocab_size=vocab_size,
        d_model=64,
        d_ff=192,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        max_seq_len=length,
    )
    return replace(
        model, heads=tuple(_head(name, task.heads[name]) for name in HEADS if name in task.heads)
    )


def _head(name: str, size: int) -> Head:
    match name:
        case "next":
            return NextHead()
        case "class":
            return ClassHead(num_classes=size)
        case "state":
            return StateHead(num_states=size)
        case _:
            return AnswerHead()


def _named(text: str) -> str:
    """Return an override whose value names a part, with the part's spec as the value."""
    path, _, value = text.partition("=")
    kind = KINDS.get(path.rpartition(".")[2])
    if kind is None or not is_source(value):
        return text
    # A tokenizer is a word or this one spec, so the spec needs no kind.
    named = {} if kind is OwnTokenizer else {"kind": kind.__name__}
    return f"{path}={json.dumps({**named, **to_dict(name_part(kind, value))})}"


def _option(text: str) -> tuple[str, Any]:
    name, _, value = _plain(text).partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _plain(text: str) -> str:
    return text.removeprefix("task.").removeprefix("options.")
