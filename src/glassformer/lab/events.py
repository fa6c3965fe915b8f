"""What happens while a run trains: a step, an evaluation, a checkpoint, an alert."""

from dataclasses import dataclass
from pathlib import Path

from glassformer.lab.evaluate import Evaluation
from glassformer.lab.samples import Sample
from glassformer.train.fit import StepRecord


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation during training; a language model also writes something."""

    step: int
    evaluation: Evaluation
    best: bool
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was written."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that deserves a look."""

    step: int
    kind: str
    message: str


Event = StepRecord | Evaluated | Saved | Alert
