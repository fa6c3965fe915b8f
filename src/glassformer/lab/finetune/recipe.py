"""`finetune`: the recipe of runs that start from a model that exists.

    base=MODEL data=FILE                     all parameters train
    base=MODEL data=FILE lora=8              LoRA of rank 8 and alpha 16; lora.alpha=32 changes one

Three epochs unless `train.steps` says otherwise. The base's weights are hashed into the spec.
"""

from collections.abc import Iterable

from glassformer.lab.finetune.base import open_base
from glassformer.lab.runs.assemble import PlannedRun
from glassformer.models.state import weights_hash
from glassformer.spec.errors import InputError
from glassformer.spec.finetune import LoRA, Tuning
from glassformer.spec.serialize import override
from glassformer.spec.tasks import FinetuneTask
from glassformer.spec.train import CosineSchedule, RunSpec, TrainSpec

NAME = "finetune"
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
    base = open_base(path)
    low_rank = any(text.startswith("tuning.lora.") for text in given)
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
