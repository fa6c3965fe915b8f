"""What a language model writes: continuations of held-out text, at every evaluation of a run.

The same openings and the same draws each time, so that samples of two steps, or of a run and its
resumption, can be laid side by side.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from glassformer.data.task import Task
from glassformer.generation.stepper import HandStepper, Stepper, TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import FileError
from glassformer.store.rundir import RunDirectory
from glassformer.training.engine import Engine
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import TorchEngine

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
