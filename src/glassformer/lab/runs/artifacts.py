"""Artifacts that a run keeps from its evaluations: probes of its activations, samples of its text.

Probes record the same few validation examples each time, in `probes/step-000200.safetensors`, 20 MB
at most together. If more would come, evaluations whose number has few significant binary digits
stay: all of the first, then ever fewer, evenly on a logarithmic scale. The choice follows from the
step alone, so a run that was killed leaves the same files. Samples continue the same held-out
openings with the same random numbers, so that those of two steps or two runs can be compared.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from glassformer.byhand.model import Model as HandModel
from glassformer.data.task import Task
from glassformer.generation.stepper import HandStepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.gpu.derived_step import lacks
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.lens.measure.probes import Probes
from glassformer.lens.measure.snapshot import max_bytes, size_limits, snapshot
from glassformer.models.model import Model
from glassformer.models.stepping import Stepper
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.disk import small_text
from glassformer.spec.errors import FileError
from glassformer.spec.units import plain_digits
from glassformer.store.rundir import STEP, RunDirectory
from glassformer.training.distributed import DistributedEngine
from glassformer.training.engine import Engine
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.stacked import Member
from glassformer.training.torch_engine import TorchEngine

#: Bytes of all probes of a run.
CAP = 20_000_000
FOLDER = "probes"


def take_probes(engine: Engine, task: Task, *, examples: int, step: int) -> Probes:
    """Return the model's activations on the fixed examples, spread over the validation split."""
    return probe_models(engine_model(engine), task, examples=examples, step=step)


def probe_models(model: Model | HandModel, task: Task, *, examples: int, step: int) -> Probes:
    """Return a model's probes."""
    size = task.sizes()["val"]
    count = min(examples, size_limits(model.spec)[0])
    rows = np.unique(np.arange(count) * size // count)
    known = task.tokenizer.vocab_size

    def name(i: int) -> str:
        return task.tokenizer.decode([i]) if i < known else f"#{i}"

    batch = task.batch("val", rows)
    return snapshot(model, batch, names=name, examples=rows, step=step)


def keep_probes(directory: RunDirectory, probes: Probes, *, every: int, vocab_size: int) -> None:
    """Write probes and thin the older ones; numbers that are not finite are not kept."""
    if not np.isfinite(probes.norms_BRT).all() or not np.isfinite(probes.losses_BT).all():
        return
    most = CAP // max_bytes(probes, vocab_size)
    stay = kept_steps(probes.step, every=every, most=most)
    for step, file in probe_files(directory).items():
        if step not in stay:
            directory.remove(f"{FOLDER}/{file.name}")
    directory.write(f"{FOLDER}/{STEP.format(probes.step)}.safetensors", probes.to_bytes())


def probe_files(directory: RunDirectory) -> dict[int, Path]:
    """Return the run's probe files by step, ascending."""
    found = (directory.folder / FOLDER).glob("step-*.safetensors")
    numbered = ((plain_digits(file.stem.removeprefix("step-")), file) for file in found)
    return dict(sorted((n, file) for n, file in numbered if n is not None))


def forget_probes(directory: RunDirectory, *, after: int) -> None:
    """Remove the probes that a resumed run will record again."""
    for step, file in probe_files(directory).items():
        if step > after:
            directory.remove(f"{FOLDER}/{file.name}")


def kept_steps(step: int, *, every: int, most: int) -> set[int]:
    """Return the evaluations that stay after the one at `step`: at most `most`, with the newest.

    What stays later is part of what stays now and of what comes after: files that the run removed
    before it was resumed are never needed again.
    """
    number = step // every
    digits = max(
        (d for d in range(1, number.bit_length() + 1) if len(_kept(step, every, d)) <= most),
        default=0,
    )
    return _kept(step, every, digits)


def _kept(step: int, every: int, digits: int) -> set[int]:
    """Return the steps whose evaluation number has at most `digits` significant bits, and `step`.

    Octave by octave: between two powers of two, equal distances.
    """
    number = step // every
    octaves = range(1, number.bit_length() + 1) if digits else ()
    return {step}.union(
        *(
            range(
                every << length - 1,
                min(every << length, every * number + 1),
                every << max(0, length - digits),
            )
            for length in octaves
        )
    )


def engine_model(engine: Engine) -> Model | HandModel:
    """Return an engine's model; a stack lends one, with the weights of this member."""
    engine = engine.inner if isinstance(engine, DistributedEngine) else engine
    assert isinstance(engine, (TorchEngine, NumpyEngine, Member))
    return engine.model


COUNT = 3
#: Tokens of an opening and of its continuation, where the model's context has room for both.
OPENING, LENGTH = 16, 64


@dataclass(frozen=True, slots=True)
class Sample:
    """A held-out opening, and the model's continuation."""

    opening: str
    text: str


def sample_stepper(engine: Engine, task: Task) -> Stepper | None:
    """Return what writes a run's samples, to be kept; None unless the task is running text."""
    return engine_stepper(engine) if task.is_running_text else None


def write_samples(stepper: Stepper | None, task: Task) -> tuple[Sample, ...]:
    """Return continuations, spread over the held-out part; none without a stepper."""
    if stepper is None:
        return ()
    windows = task.sizes()["val"]
    rows = np.unique(np.arange(COUNT) * windows // COUNT)
    opening = min(OPENING, int(task.lengths("val")[rows].min()) - 1)
    ids = task.batch("val", rows).tokens[:, :opening].tolist()
    spec = DecodeSpec(max_new_tokens=LENGTH, temperature=0.8, top_p=0.95)
    made = generate_batch(
        stepper,
        ids,
        spec=spec,
        tokenizer=task.tokenizer,
        rows=[*range(len(ids))],
        logprobs=False,
    )
    return tuple(
        Sample(task.tokenizer.decode(begun), one.text) for begun, one in zip(ids, made, strict=True)
    )


def keep_samples(directory: RunDirectory, step: int, samples: tuple[Sample, ...]) -> None:
    """Write a line for each sample to this step's own file in the run's folder, if there is any."""
    if samples:
        lines = (json.dumps(asdict(sample)) for sample in samples)
        directory.write(f"samples/step-{step:06d}.jsonl", "".join(f"{line}\n" for line in lines))


def read_samples(path: Path) -> tuple[Sample, ...]:
    """Read what `keep_samples` wrote."""
    try:
        lines = small_text(path).splitlines()
        found = [json.loads(line) for line in lines]
        return tuple(Sample(str(one["opening"]), str(one["text"])) for one in found)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FileError(
            "the samples cannot be read", where=str(path), hint="delete the file"
        ) from error


def engine_stepper(engine: Engine) -> Stepper:
    """Return a stepper that decodes with an engine's model, token by token.

    On a GPU it is the recorded one; it notices that the weights have changed.
    """
    if isinstance(engine, NumpyEngine):
        return HandStepper(engine.model)
    if isinstance(engine, DistributedEngine):
        return TorchStepper(engine.inner.model) if engine.sharded else engine_stepper(engine.inner)
    assert isinstance(engine, (TorchEngine, Member))
    cached = engine.device.type == "cpu" or lacks(engine.model.spec)
    return TorchStepper(engine.model) if cached else RecordedStepper(engine.model)
