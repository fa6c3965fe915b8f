"""What a run keeps of its probes: the same few validation examples, seen at its evaluations.

A folder of small files, `probes/step-000200.safetensors`, together at most 20 MB. Where more would
come, those stay whose number among the evaluations has few binary digits: the first ones all, then
ever fewer, evenly on a scale of logarithms. Which ones stay follows from the step alone, so that a
run that was killed leaves the same files as one that was not.

What a language model writes: continuations of held-out text, at every evaluation of a run.

The same openings and the same draws each time, so that samples of two steps, or of a run and its
resumption, can be laid side by side.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from glassformer.byhand.model import Model as HandModel
from glassformer.data.task import Task
from glassformer.generation.stepper import HandStepper, Stepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.lens.measure.probes import Probes
from glassformer.lens.measure.snapshot import max_bytes, size_limits, snapshot
from glassformer.models.model import Model
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import FileError
from glassformer.spec.train import TrainSpec
from glassformer.spec.units import plain_digits
from glassformer.store.rundir import STEP, RunDirectory
from glassformer.training.engine import Engine
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import TorchEngine

#: Bytes of all probes of a run.
CAP = 20_000_000
FOLDER = "probes"


def probe(directory: RunDirectory, engine: Engine, task: Task, train: TrainSpec, step: int) -> None:
    """Look at the examples and keep what was seen, where a run asks for it."""
    if train.probes:
        seen = take_probes(engine, task, examples=train.probes, step=step)
        answers = engine.spec.head_size(seen.head)
        keep_probes(directory, seen, every=train.evaluate_every, vocab_size=answers)


def take_probes(engine: Engine, task: Task, *, examples: int, step: int) -> Probes:
    """The fixed examples, spread over the validation split, as the model sees them now."""
    size = task.sizes()["val"]
    count = min(examples, size_limits(engine.spec)[0])
    rows = np.unique(np.arange(count) * size // count)
    known = task.tokenizer.vocab_size

    def name(i: int) -> str:
        return task.tokenizer.decode([i]) if i < known else f"#{i}"

    batch = task.batch("val", rows)
    return snapshot(_model(engine), batch, names=name, examples=rows, step=step)


def keep_probes(directory: RunDirectory, probes: Probes, *, every: int, vocab_size: int) -> None:
    """Write them, and thin what is there; numbers that are not finite are not kept."""
    if not np.isfinite(probes.norms_BRT).all() or not np.isfinite(probes.losses_BT).all():
        return
    most = CAP // max_bytes(probes, vocab_size)
    stay = kept_steps(probes.step, every=every, most=most)
    for step, file in probe_files(directory).items():
        if step not in stay:
            file.unlink()
    directory.write(f"{FOLDER}/{STEP.format(probes.step)}.safetensors", probes.to_bytes())


def probe_files(directory: RunDirectory) -> dict[int, Path]:
    """The run's files of probes by step, ascending."""
    found = (directory.folder / FOLDER).glob("step-*.safetensors")
    numbered = ((plain_digits(file.stem.removeprefix("step-")), file) for file in found)
    return dict(sorted((n, file) for n, file in numbered if n is not None))


def forget_probes(directory: RunDirectory, *, after: int) -> None:
    """Remove what a resumed run will see again."""
    for step, file in probe_files(directory).items():
        if step > after:
            file.unlink()


def kept_steps(step: int, *, every: int, most: int) -> set[int]:
    """Which evaluations stay after the one at `step`: at most `most`, the newest among them.

    What stays later is part of what stays now, and of what comes after: files that an earlier life
    of the run has removed are never asked for again.
    """
    number = step // every
    digits = max(
        (d for d in range(1, number.bit_length() + 1) if len(_kept(step, every, d)) <= most),
        default=0,
    )
    return _kept(step, every, digits)


def _kept(step: int, every: int, digits: int) -> set[int]:
    """Steps whose evaluation has a number of at most so many significant binary digits, and this.

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


def _model(engine: Engine) -> Model | HandModel:
    assert isinstance(engine, (TorchEngine, NumpyEngine))
    return engine.model


COUNT = 3
#: Tokens of an opening and of its continuation, where the model's context has room for both.
OPENING, LENGTH = 16, 64


@dataclass(frozen=True, slots=True)
class Sample:
    """A held-out opening, and how the model goes on."""

    opening: str
    text: str


def write_samples(engine: Engine, task: Task) -> tuple[Sample, ...]:
    """Some continuations, spread over the held-out part; none unless a task is running text."""
    if not task.is_running_text:
        return ()
    windows = task.sizes()["val"]
    rows = np.unique(np.arange(COUNT) * windows // COUNT)
    opening = min(OPENING, int(task.lengths("val")[rows].min()) - 1)
    ids = task.batch("val", rows).tokens[:, :opening].tolist()
    spec = DecodeSpec(max_new_tokens=LENGTH, temperature=0.8, top_p=0.95)
    made = generate_batch(
        engine_stepper(engine), ids, spec=spec, tokenizer=task.tokenizer, logprobs=False
    )
    return tuple(
        Sample(task.tokenizer.decode(begun), one.text) for begun, one in zip(ids, made, strict=True)
    )


def keep_samples(directory: RunDirectory, step: int, samples: tuple[Sample, ...]) -> None:
    """A line for each in the run's folder, in a file of this step's own; no file for none."""
    if samples:
        lines = (json.dumps(asdict(sample)) for sample in samples)
        directory.write(f"samples/step-{step:06d}.jsonl", "".join(f"{line}\n" for line in lines))


def read_samples(path: Path) -> tuple[Sample, ...]:
    """What `keep_samples` wrote."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        return tuple(Sample(str(one["opening"]), str(one["text"])) for one in found)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FileError(
            "the samples cannot be read", where=str(path), hint="delete the file"
        ) from error


def engine_stepper(engine: Engine) -> Stepper:
    """How an engine's model is asked for one token after another."""
    if isinstance(engine, NumpyEngine):
        return HandStepper(engine.model)
    assert isinstance(engine, TorchEngine)
    return TorchStepper(engine.model)
