"""Complete runs by name: a task, a model that fits it, and a training that is known to work.

A run may have parts of the user's own: their task, or overrides that name a part.

    glass train my_task.py:MyTask task.length=9 train.steps=500
    glass train text task.tokenizer=my_words.py:Words train.optimizer=my_lion.py:Lion
    glass train reverse model.position=my_grid.py:Grid

A source that is typed is consent to running it (`data.own_code`), and its file is hashed into the
spec.

`finetune` is the recipe of runs that start from a model that exists. Three epochs unless
`train.steps` says otherwise; the base's weights are hashed into the spec.

    base=MODEL data=FILE                     all parameters train
    base=MODEL data=FILE lora=8              LoRA of rank 8 and alpha 16; lora.alpha=32 changes one
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_args

import numpy as np

from glassformer.data.build_task import build_task
from glassformer.data.own_code import learning_rate, name_part
from glassformer.data.task import HEADS, Task
from glassformer.lab.corpus import built
from glassformer.lab.runs.planned import PlannedRun
from glassformer.spec import presets
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.machines import MachineTable, machine_of, read_machine
from glassformer.spec.model import (
    AnswerHead,
    ClassHead,
    Head,
    ModelSpec,
    NextHead,
    StateHead,
    head_name,
)
from glassformer.spec.own import (
    OwnOptimizer,
    OwnPart,
    OwnPosition,
    OwnSchedule,
    OwnTask,
    OwnTokenizer,
    installed_parts,
    is_source,
)
from glassformer.spec.serialize import from_dict, override, to_dict, to_json
from glassformer.spec.tasks import NAMED_TASKS, FinetuneTask, is_config
from glassformer.spec.tasks import Task as TaskSpec
from glassformer.spec.train import AdamW, CosineSchedule, LoRA, RunSpec, TrainSpec, Tuning


def _sized(make: Callable[..., ModelSpec], **sizes: Any) -> Callable[[Task], ModelSpec]:
    """Return a preset of these sizes, with a task's vocabulary and length."""

    def fitting(task: Task) -> ModelSpec:
        vocab_size, length = task.tokenizer.vocab_size, task.longest()
        return make(vocab_size=vocab_size, max_seq_len=length, **sizes)

    return fitting


_HEADS = {"n_heads": 4, "n_kv_heads": 2}
_modern_model = _sized(presets.modern_lm, d_model=64, d_ff=192, n_layers=3, **_HEADS)
# A token passes through 64 + 2 x 64 units of feed-forward, as many as in `lm-modern`.
_moe_model = _sized(presets.moe, d_model=64, d_ff=64, shared_d_ff=64, n_layers=3, **_HEADS)
_large_model = _sized(presets.budget_lm, dropout=0.2, scale_residual=True)
#: Models of tasks that suggest none: for batches with a source, and for others.
_PAIR = _sized(presets.seq2seq, d_model=64, n_heads=4, d_ff=256, n_layers=2, dropout=0.0)
_SMALL = _sized(presets.modern_lm, d_model=64, d_ff=192, n_layers=2, **_HEADS)


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
    return type(task) is (FinetuneTask if name == FINETUNE else type(named_task(name)))


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
    if name == FINETUNE:
        return plan_finetune(overrides)
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
    what: "str | Path | RunSpec | PlannedRun",
    overrides: Iterable[str] = (),
    *,
    cache: Path | None = None,
) -> PlannedRun:
    """Plan a run from a recipe's name, a TOML or JSON file, or a complete spec, with overrides.

    A run that was planned before keeps what was built for it.
    """
    if isinstance(what, PlannedRun):
        given = list(overrides)
        return what if not given else replace(what, spec=override_parts(what.spec, given))
    if isinstance(what, RunSpec):
        return PlannedRun(spec=override_parts(what, overrides))
    if is_config(what):
        return PlannedRun(spec=read_config(Path(what), overrides))
    return plan_run(str(what), overrides, cache=cache)


def read_config(path: Path, overrides: Iterable[str] = ()) -> RunSpec:
    """Read a run from a TOML or JSON file, such as the config of another run."""
    read = json.loads if path.suffix == ".json" else tomllib.loads
    try:
        data = read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        kind = path.suffix.removeprefix(".").upper()
        raise InputError(f"the file cannot be read as {kind}: {error}", where=str(path)) from error
    task = data.get("task")
    machine = task.get("machine") if isinstance(task, dict) else None
    if isinstance(machine, dict) or (isinstance(machine, str) and machine.endswith(".json")):
        data["task"]["machine"] = to_dict(_machine(machine))
    return override_parts(from_dict(RunSpec, data), overrides)


def load_config(path: str | Path, *overrides: str | Iterable[str]) -> RunSpec:
    """Return the run that a TOML or JSON file, or the folder of a run, describes.

    `glass design -o FILE.toml` and every run write such files; `gf.train` and `gf.sweep` take the
    result. `overrides` as in `gf.override`: `"train.lr=1e-3"`, or lists of them.
    """
    place = Path(path)
    texts = [text for one in overrides for text in ([one] if isinstance(one, str) else one)]
    if place.is_dir():
        place /= "config.json"
    if not is_config(place):
        raise InputError(
            f"{path} is no config", hint="a .toml or .json file, or the folder of a run"
        )
    return read_config(place, texts)


def load_machine(path: str | Path) -> MachineTable:
    """Return a machine from a JSON file: states and edges, or what `glass extract` wrote.

    A task's `machine` may be it, like `task.machine=FILE.json`.
    """
    return read_machine(Path(path))


def named_configs(paths: Sequence[str | Path]) -> dict[str, RunSpec]:
    """Return several configs by the names of their files."""
    names = [Path(path).stem for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two configs are called {name}", hint="rename one of the files")
    return {name: load_config(path) for name, path in zip(names, paths, strict=True)}


T = TypeVar("T")

#: The kind of part that the last word of an override's path stands for.
KINDS: Mapping[str, type[OwnPart]] = {
    "optimizer": OwnOptimizer,
    "schedule": OwnSchedule,
    "tokenizer": OwnTokenizer,
}
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
        made = override(spec, [_named(text) for text in given])
        if isinstance(made, RunSpec) and isinstance(made.train.schedule, OwnSchedule):
            learning_rate(made.train, 0)  # what gives no rate is refused before there is a run
        return made
    rest = [text for text in given if not text.startswith((f"{path}=", f"{path}.options."))]
    made = override(spec, [_named(text) for text in rest])
    options = dict(
        _option(text.removeprefix(f"{path}."))
        for text in given
        if text.startswith(f"{path}.options.")
    )
    from glassformer.nn.position import declared_parameters  # imports torch

    own = name_part(OwnPosition, source, options)
    model = made.model
    own = replace(
        own,
        parameters=declared_parameters(own, max_seq_len=model.max_seq_len, d_model=model.d_model),
    )
    return replace(made, model=replace(model, position=own))


def default_model(task: Task) -> ModelSpec:
    """Return a small model with a task's heads, an encoder-decoder if batches have a source."""
    vocab_size = task.tokenizer.vocab_size
    has_source = task.batch("train", np.arange(1)).source is not None
    model = (_PAIR if has_source else _SMALL)(task)
    kept = model.heads[0]
    return replace(
        model,
        heads=tuple(
            kept if name == head_name(kept) else _head(name, task.heads[name], vocab_size)
            for name in HEADS
            if name in task.heads
        ),
    )


def _head(name: str, size: int, vocab_size: int) -> Head:
    match name:
        case "next":
            return NextHead()
        case "class":
            return ClassHead(num_classes=size)
        case "state":
            return StateHead(num_states=size)
        case _:
            # As many answers as tokens: the answers are tokens, and are shown as such.
            return AnswerHead(num_answers=None if size == vocab_size else size)


def _named(text: str) -> str:
    """Return an override whose value names a part, with the part's spec as the value."""
    path, _, value = text.partition("=")
    last = path.rpartition(".")[2]
    if last == "machine" and (value.endswith(".json") or value.lstrip().startswith("{")):
        return f"{path}={to_json(_machine(value))}"
    kind = KINDS.get(last)
    if kind is None or not is_source(value):
        return text
    # A tokenizer is a word or this one spec, so the spec needs no kind.
    named = {} if kind is OwnTokenizer else {"kind": kind.__name__}
    return f"{path}={json.dumps({**named, **to_dict(name_part(kind, value))})}"


def _machine(given: object) -> MachineTable:
    """Return the machine of a file's name, of JSON, or of the values of a config."""
    if isinstance(given, str) and given.endswith(".json"):
        return read_machine(Path(given))
    if not isinstance(given, str):
        return machine_of(given)
    try:
        data = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the machine is not JSON: {error}", where=given[:80]) from error
    return machine_of(data)


def _option(text: str) -> tuple[str, Any]:
    name, _, value = _plain(text).partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _plain(text: str) -> str:
    return text.removeprefix("task.").removeprefix("options.")


FINETUNE = "finetune"
EPOCHS = 3
#: Usual rates: a correction that starts at zero takes larger steps than weights that are good.
RATE, RATE_OF_LORA = 2e-5, 2e-4
LENGTH = 512
#: Short for the paths of the spec.
SHORT = {"base": "tuning.base", "data": "task.path", "lora": "tuning.lora"}


def spelled_out(overrides: Iterable[str]) -> list[str]:
    """Return `base=`, `data=` and `lora...=` as paths of the spec; the rest unchanged."""
    made = []
    for text in overrides:
        path, equals, value = text.partition("=")
        first, dot, rest = path.partition(".")
        if path == "lora" and value.isdigit():
            made += [f"tuning.lora.rank={value}", f"tuning.lora.alpha={2 * int(value)}"]
            continue
        made.append(f"{SHORT.get(first, first)}{dot}{rest}{equals}{value}")
    return made


def plan_finetune(overrides: Iterable[str]) -> PlannedRun:
    """Return the run that these overrides describe; `base` and `data` must be among them."""
    given = spelled_out(overrides)
    path, data = _last(given, "tuning.base"), _last(given, "task.path")
    if not path or not data:
        raise InputError(
            f"fine-tuning needs {'a base' if not path else 'data'}",
            hint="glass train finetune base=MODEL data=FILE [lora=8]",
        )
    fixed = [text for text in given if text.startswith(("model.", "tuning.sha256"))]
    if fixed:
        raise InputError(
            f"a fine-tuned model keeps its base's spec, and {fixed[0]} changes it",
            hint="leave it out",
        )
    from glassformer.lab.finetune import check_trains, open_base  # imports torch
    from glassformer.models.weights import weights_hash
    from glassformer.quant.contents import is_model_quantized

    base = open_base(path)
    low_rank = any(text.startswith("tuning.lora.") for text in given)
    check_trains(base.model, LoRA() if low_rank else None, where=path)
    spec = RunSpec(
        model=base.model.spec,
        task=FinetuneTask(path=data, length=min(LENGTH, base.model.spec.max_seq_len)),
        train=TrainSpec(
            batch_size=8,
            lr=RATE_OF_LORA if low_rank else RATE,
            schedule=CosineSchedule(warmup=10),
        ),
        tuning=Tuning(
            base=path, sha256=weights_hash(base.model), lora=LoRA() if low_rank else None
        ),
        engine="torch" if is_model_quantized(base.model) else "auto",
    )
    named = ("tuning.base=", "task.path=")
    spec = override(spec, [text for text in given if not text.startswith(named)])
    assert isinstance(spec.task, FinetuneTask)
    if _last(given, "train.steps"):
        return PlannedRun(spec=spec, base=base)
    task = base.task(spec.task)
    steps = _with_steps(spec, task.sizes()["train"], given)
    return PlannedRun(spec=steps, task=task, base=base)


def _last(given: list[str], path: str) -> str:
    """Return the value that is given last for a path."""
    return next(
        (text.partition("=")[2] for text in reversed(given) if text.startswith(f"{path}=")), ""
    )


def _with_steps(spec: RunSpec, rows: int, given: list[str]) -> RunSpec:
    """Train for three epochs, with an evaluation and a checkpoint after each."""
    epoch = max(1, -(-rows // (spec.train.batch_size * spec.train.accumulate)))
    wanted = {"steps": EPOCHS * epoch, "evaluate_every": epoch, "checkpoint_every": epoch}
    return override(
        spec,
        [
            f"train.{name}={value}"
            for name, value in wanted.items()
            if not _last(given, f"train.{name}")
        ],
    )
