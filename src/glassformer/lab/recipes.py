"""Complete runs by name: a task, a model that fits it, and a training that is known to work."""

import json
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast, get_args

from glassformer.data.build_task import build_task
from glassformer.data.task import Task
from glassformer.lab.corpus import built
from glassformer.lab.finetune import recipe as finetune
from glassformer.lab.own_parts import (
    TRAINING,
    default_model,
    override_parts,
    own_source,
    plan_own_task,
)
from glassformer.lab.runs.assemble import PlannedRun
from glassformer.spec import presets
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import OwnTask, installed_parts, is_source, name_part
from glassformer.spec.serialize import from_dict, override
from glassformer.spec.tasks import NAMED_TASKS, FinetuneTask
from glassformer.spec.tasks import Task as TaskSpec
from glassformer.spec.train import AdamW, CosineSchedule, RunSpec, TrainSpec


def _modern_model(task: Task) -> ModelSpec:
    return presets.modern_lm(
        vocab_size=task.tokenizer.vocab_size,
        d_model=64,
        d_ff=192,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        max_seq_len=task.longest(),
    )


def _moe_model(task: Task) -> ModelSpec:
    # A token passes through 64 + 2 x 64 units of feed-forward, as many as in `lm-modern`.
    return presets.moe(
        vocab_size=task.tokenizer.vocab_size,
        d_model=64,
        d_ff=64,
        shared_d_ff=64,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        max_seq_len=task.longest(),
    )


def _large_model(task: Task) -> ModelSpec:
    return presets.budget_lm(
        vocab_size=task.tokenizer.vocab_size,
        max_seq_len=task.longest(),
        dropout=0.2,
        scale_residual=True,
    )


#: A few minutes on two cores for 0.3 M parameters: ten times through the manuals.
LM_TRAINING = TrainSpec(
    steps=2_000,
    batch_size=16,
    lr=3e-3,
    schedule=CosineSchedule(warmup=100),
    optimizer=AdamW(beta2=0.95, weight_decay=0.1),
    evaluate_every=250,
    checkpoint_every=500,
)
#: For a GPU. The manuals are small for 10 M parameters, so the best checkpoint comes early.
LARGE_LM_TRAINING = replace(
    LM_TRAINING,
    batch_size=32,
    lr=1e-3,
    precision="bf16",
    evaluate_every=50,
    patience=6,
)


class Recipe(NamedTuple):
    """A task, with a model and a training where they are not those that the task suggests."""

    task: TaskSpec
    model: Callable[[Task], ModelSpec] | None = None
    train: TrainSpec | None = None


_TEXT_TASK = NAMED_TASKS["text"]
RECIPES: dict[str, Recipe] = {
    **{name: Recipe(task) for name, task in NAMED_TASKS.items()},
    "lm": Recipe(_TEXT_TASK, train=LM_TRAINING),
    "lm-modern": Recipe(_TEXT_TASK, _modern_model, LM_TRAINING),
    "lm-moe": Recipe(_TEXT_TASK, _moe_model, LM_TRAINING),
    "lm-10m": Recipe(
        override(_TEXT_TASK, ["vocab_size=16000", "length=256"]), _large_model, LARGE_LM_TRAINING
    ),
}


def named_task(name: str) -> TaskSpec:
    """Return the task of a recipe."""
    if name not in RECIPES:
        raise InputError(f"no task '{name}'", hint=nearest(name, [*RECIPES, *installed_parts()]))
    return RECIPES[name].task


def built_task(task: "Task | TaskSpec | str") -> Task:
    """Return a task: as it is, of its spec, by a recipe's name, or of a user's `file.py:Name`."""
    if isinstance(task, str):
        source = None if task in RECIPES else own_source(task)
        task = named_task(task) if source is None else name_part(OwnTask, source, {})
    if isinstance(task, get_args(TaskSpec)):
        return build_task(cast(TaskSpec, task))
    return cast(Task, task)


def trains_on(name: str, task: TaskSpec) -> bool:
    """Return True if a run on `task` may be one of the recipe, or of the source, of that name."""
    source = None if name in RECIPES else own_source(name)
    if source is not None:
        return isinstance(task, OwnTask) and task.source == source
    return type(task) is (FinetuneTask if name == finetune.NAME else type(named_task(name)))


def usual_name(what: str) -> str:
    """Return a run's default name: the recipe's, the class's or the config file's."""
    if is_source(what):
        return what.rpartition(":")[2]
    return Path(what).stem if what.endswith((".toml", ".json")) else what


def recipe(name: str, overrides: Iterable[str] = (), *, cache: Path | None = None) -> RunSpec:
    """Return the spec of a run by name; to train it, `plan_run` keeps what was built."""
    return plan_run(name, overrides, cache=cache).spec


def plan_run(name: str, overrides: Iterable[str] = (), *, cache: Path | None = None) -> PlannedRun:
    """Plan a run by name. Overrides of `task.` come first, so that the model is made for that task.

    `cache` is a folder where a text keeps its token files.
    """
    if name == finetune.NAME:
        return finetune.plan_finetune(overrides)
    source = None if name in RECIPES else own_source(name)
    if source is not None:
        return plan_own_task(source, overrides)
    task_spec = named_task(name)
    ours = [text.removeprefix("task.") for text in overrides if text.startswith("task.")]
    task_spec = override_parts(task_spec, ours)
    task = built(task_spec, cache=cache)
    _, model_for, train = RECIPES[name]
    made = task.model() if model_for is None else model_for(task)
    spec = RunSpec(
        model=made or default_model(task),
        task=task_spec,
        train=train or task.training() or TRAINING,
    )
    rest = [text for text in overrides if not text.startswith("task.")]
    return PlannedRun(spec=override_parts(spec, rest), task=task)


def planned_run(
    what: "str | Path | RunSpec", overrides: Iterable[str] = (), *, cache: Path | None = None
) -> PlannedRun:
    """Plan a run from a recipe's name, a TOML or JSON file, or a complete spec, with overrides."""
    if isinstance(what, RunSpec):
        return PlannedRun(spec=override_parts(what, overrides))
    if is_config(what):
        return PlannedRun(spec=read_config(Path(what), overrides))
    return plan_run(str(what), overrides, cache=cache)


def is_config(what: str | Path) -> bool:
    """Return True if this names a file, not a recipe."""
    return str(what).endswith((".toml", ".json"))


def read_config(path: Path, overrides: Iterable[str] = ()) -> RunSpec:
    """Read a run from a TOML or JSON file, such as the config of another run."""
    read = json.loads if path.suffix == ".json" else tomllib.loads
    try:
        data = read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        kind = path.suffix.removeprefix(".").upper()
        raise InputError(f"the file cannot be read as {kind}: {error}", where=str(path)) from error
    return override_parts(from_dict(RunSpec, data), overrides)
