"""A model on disk: what format it has, its spec, and its weights by the manifest's names.

`on_disk` recognises a folder or a file, once for everybody: `array_model` reads its arrays for the
native step, `load` fills a torch model from them. Nothing here imports torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from glassformer.adapters.config import Config
from glassformer.adapters.families.known import family_of
from glassformer.adapters.folder.origin import is_native, read_spec
from glassformer.adapters.folder.weights import (
    ConversionReport,
    FileWeights,
    Weights,
    folder_files,
    raise_other_head,
)
from glassformer.adapters.gguf.header import is_gguf
from glassformer.adapters.gguf.tensors import GGUFWeights, plan_of, read_family
from glassformer.adapters.table import Array, Entry, Family, Plan, identity_plan
from glassformer.generation.native.lowering import as_floats
from glassformer.spec.errors import FileError
from glassformer.spec.model import ModelSpec
from glassformer.store.checkpoint import WEIGHTS, is_quantized, verify_folder, verify_sums
from glassformer.store.tensors import BFLOAT16

#: What a checkpoint of LoRA factors holds.
TUNING, FACTORS = "tuning.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file; `large_pages`: tensors are unpacked to memory that is faster to read."""

    path: Path
    large_pages: bool = True
    name = "GGUF file"

    @cached_property
    def weights(self) -> GGUFWeights:
        """The tensors of the file."""
        return GGUFWeights(self.path, large_pages=self.large_pages)

    @cached_property
    def read(self) -> tuple[Family, ModelSpec]:
        """The family that computes the model, and its spec."""
        return read_family(self.path, self.weights)

    @property
    def spec(self) -> ModelSpec:
        """The spec of the model."""
        return self.read[1]

    @property
    def plan(self) -> Plan:
        """Which tensor is which parameter."""
        return plan_of(self.weights, self.spec)


@dataclass(frozen=True)
class LoRAFolder:
    """A checkpoint of LoRA factors, which correct a base."""

    path: Path
    name = "LoRA"


@dataclass(frozen=True)
class QuantizedFolder:
    """A checkpoint of ours whose weights are quantized."""

    path: Path
    name = "quantized"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of ours."""

    path: Path
    name = "checkpoint"

    @cached_property
    def spec(self) -> ModelSpec:
        """The spec of the model."""
        try:
            return read_spec(self.path)
        except FileError:
            verify_folder(self.path)  # names what was changed since it was written
            raise

    @cached_property
    def weights(self) -> FileWeights:
        """Its tensors, after every hash was checked."""
        verify_folder(self.path)
        return FileWeights({WEIGHTS: self.path / WEIGHTS}, where=str(self.path))

    @property
    def plan(self) -> Plan:
        """Parameters by their own names."""
        return identity_plan(self.spec)


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A Hugging Face folder; `family` is None where none of ours reads its config."""

    path: Path
    name = "Hugging Face folder"

    @cached_property
    def config(self) -> Config:
        """Its config.json."""
        verify_sums(self.path, weights=False)
        return Config.of_folder(self.path)

    @cached_property
    def family(self) -> Family | None:
        """The family of ours that reads it."""
        return family_of(self.config)

    @cached_property
    def files(self) -> dict[str, Path]:
        """The files of its weights, after hashes were checked where there are any."""
        verify_sums(self.path)
        return folder_files(self.path)

    @cached_property
    def weights(self) -> FileWeights:
        """Its tensors as they are stored; those of eight or four bits are `folder.scaled`'s."""
        return FileWeights(self.files, where=str(self.path))


OnDisk = GGUFFile | LoRAFolder | QuantizedFolder | Checkpoint | HuggingFaceFolder


def on_disk(path: Path, *, large_pages: bool = True) -> OnDisk:
    """Recognise a folder or a file by its contents; nothing of it is read yet."""
    if is_gguf(path):
        return GGUFFile(path, large_pages)
    if is_native(path):
        if (path / TUNING).is_file() and (path / FACTORS).is_file():
            return LoRAFolder(path)
        return QuantizedFolder(path) if is_quantized(path) else Checkpoint(path)
    if path.is_dir():
        return HuggingFaceFolder(path)
    known = (GGUFFile, LoRAFolder, QuantizedFolder, Checkpoint, HuggingFaceFolder)
    raise FileError("not a model", where=str(path), hint=", ".join(kind.name for kind in known))


# --- weights by the manifest's names --------------------------------------------------------------


def parameters(
    plan: Plan, weights: Weights, name: str, *, changes: bool
) -> Iterator[tuple[str, Array]]:
    """Yield our parameters of one tensor of a file, as they are stored there.

    One that `changes` afterwards, or is copied here, is mapped by itself: closing the map then
    frees the pages that were read. Others stay mapped from their file.
    """
    entry = plan.entries[plan.full_name(name)]
    yield from entry.split(weights.read(name, again=changes or entry.copies)).items()


def check_copies(plan: Plan, weights: Weights, report: ConversionReport) -> None:
    """Require that a tied tensor which a file holds twice has the same values."""
    for name in report.tied:
        entry = plan.entries[plan.tied[plan.full_name(name)]]
        owner = _file_name(plan, report, entry)
        copies, owners = (entry.split(weights.read(one, again=True)) for one in (name, owner))
        if not all(_equal(copies[ours], owners[ours]) for ours in entry.ours):
            raise_other_head(name, entry.theirs, where=weights.where)


def _equal(one: Array, other: Array) -> bool:
    first, second = (as_floats(x) if x.dtype == BFLOAT16 else x for x in (one, other))
    return np.array_equal(first, second)


def _file_name(plan: Plan, report: ConversionReport, entry: Entry) -> str:
    """Return the name that a file has for an entry."""
    return next(name for name in report.loaded if plan.entries[plan.full_name(name)] is entry)
