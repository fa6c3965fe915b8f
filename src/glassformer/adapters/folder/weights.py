"""Read the weights of a folder as NumPy arrays, and compare them with what a model needs.

Names and shapes are compared with the plan before any tensor is read (`ConversionReport`), and what
does not fit is refused by name. Files are mapped, not copied: a tensor that is used as it is stored
costs no memory beyond its own. An index may name plain files of its own folder and nothing else; a
pickle is never opened. Imports no torch; `fill` puts the arrays into a model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from glassformer.adapters.folder.files import read_object
from glassformer.adapters.table import Array, Plan, Shape
from glassformer.kernels import c_library, threads
from glassformer.spec.errors import FileError
from glassformer.store.tensors import (
    BFLOAT16,
    DTYPES,
    HEADERS_LIMIT,
    MappedTensors,
    header_length,
    is_finite,
    read_header,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
INDEX_LIMIT = 50_000_000
MOST_FILES = 1_000
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,120}\.safetensors")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
FLOATS = {code: DTYPES[code] for code in ("F64", "F32", "F16", "BF16")}
#: Tables of positions and masks, which older files hold beside their weights; no weight is one.
WHOLE = {code: DTYPES[code] for code in ("I64", "I32", "I8", "U8", "BOOL")}


class Weights(Protocol):
    """Named tensors of a file, a folder or a module."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """By tensor name."""

    @property
    def dtypes(self) -> Mapping[str, np.dtype]:
        """By tensor name."""

    @property
    def where(self) -> str:
        """The path for error messages."""

    def read(self, name: str, *, again: bool = False) -> Array:
        """Read one tensor, to be written to without changing the file.

        `again` maps the file anew, so that earlier pages can be freed.
        """


class FileWeights:
    """Tensors of one or more safetensors files."""

    def __init__(
        self,
        files: Mapping[str, Path],
        *,
        where: str,
        known: Mapping[str, np.dtype] = FLOATS | WHOLE,
    ) -> None:
        self.where = where
        self.files: dict[str, list[str]] = {}
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, np.dtype] = {}
        self._paths: dict[str, Path] = {}
        self._open: dict[Path, MappedTensors] = {}
        for file, path in files.items():
            header = read_header(path)
            self.files[file] = list(header)
            for name, (code, shape) in header.items():
                if name in self.shapes:
                    raise FileError(f"tensor {name} is in two files", where=where)
                if code not in known:
                    raise _no_weight(name, code, where=str(path))
                self.shapes[name], self.dtypes[name] = shape, known[code]
                self._paths[name] = path

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report says about these files: nothing, for weights that are plain numbers."""
        return ()

    def read(self, name: str, *, again: bool = False) -> Array:
        array = self._stored(name, again=again)
        check_finite(name, array, where=str(self._paths[name]))
        return array

    def _stored(self, name: str, *, again: bool = False) -> Array:
        path = self._paths[name]
        if again:
            return MappedTensors(path).read(name)
        if path not in self._open:
            self._open[path] = MappedTensors(path)
        return self._open[path].read(name)


def _no_weight(name: str, dtype: str, *, where: str) -> FileError:
    return FileError(
        f"tensor {name} has dtype {dtype}",
        where=where,
        hint=f"weights are {', '.join(FLOATS)}; quantized ones are not read here",
    )


def check_finite(name: str, array: Array, *, where: str) -> None:
    """Refuse NaN and infinity."""
    plain = array.dtype in (BFLOAT16, DTYPES["F32"]) and array.flags.c_contiguous
    if plain and c_library.available():
        found = c_library.library().glass_finite(
            array.ctypes.data, array.size, array.itemsize, threads.current()
        )
    else:
        found = is_finite(array)
    if not found:
        raise not_finite(name, where=where)


def not_finite(name: str, *, where: str) -> FileError:
    """Return the error of a tensor that is refused."""
    return FileError(f"tensor {name} holds NaN or infinity", where=where)


def folder_files(folder: Path) -> dict[str, Path]:
    """Return the weight files of a Hugging Face folder: one, or those that its index names."""
    single = folder / SINGLE
    if single.is_file():
        return {SINGLE: inside(folder, SINGLE)}
    if (folder / INDEX).is_file():
        return _indexed(folder)
    pickled = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
    if pickled:
        raise FileError(
            f"the weights are a pickle ({pickled[0]}), which can run any code: it is not opened",
            where=str(folder),
            hint="where they come from there is often a model.safetensors too",
        )
    raise FileError(f"there is no {SINGLE} and no {INDEX}", where=str(folder))


def _indexed(folder: Path) -> dict[str, Path]:
    where = str(folder / INDEX)
    index = read_object(folder / INDEX, limit=INDEX_LIMIT).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise FileError(f"{INDEX} has no weight_map", where=where)
    for name in index.values():
        if not isinstance(name, str):
            inside(folder, name)  # refuses it
    names = list(dict.fromkeys(index.values()))
    if len(names) > MOST_FILES:
        raise FileError(f"{len(names)} files, more than {MOST_FILES}", where=where)
    files = {name: inside(folder, name) for name in names}
    size = sum(map(header_length, files.values()))
    if size > HEADERS_LIMIT:
        what = f"{len(files)} files whose headers have {size:,} bytes, more than {HEADERS_LIMIT:,}"
        raise FileError(what, where=where)
    headers = {file: read_header(path) for file, path in files.items()}
    for tensor, file in index.items():
        if tensor not in headers[file]:
            raise FileError(f"tensor {str(tensor)[:80]} is not in {file}", where=where)
    return files


def inside(folder: Path, name: object) -> Path:
    """Return a regular file of this folder; a link may lead to the cache's store, nowhere else."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or ".." in name:
        raise FileError(
            f"{str(name)[:80]!r} is no file of the model's folder",
            where=str(folder),
            hint="an index names plain .safetensors files beside it",
        )
    path = folder / name
    if not path.is_file():
        raise FileError(f"{name} is missing", where=str(folder))
    roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # the Hugging Face cache links into blobs/
        roots.append(folder.resolve().parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(root) for root in roots):
        raise FileError(f"{name} is a link that leads out of the folder", where=str(folder))
    return path


def widest(dtypes: Mapping[str, np.dtype], *, where: str) -> np.dtype:
    """Return the widest precision among the tensors."""
    found = set(dtypes.values())
    if not found:
        raise FileError("the weight files are empty", where=where)
    if found == {DTYPES["F16"], BFLOAT16}:  # neither holds the other
        return DTYPES["F32"]
    return max(found, key=lambda dtype: dtype.itemsize)


SHOWN = 6


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The outcome for each tensor of a file, by its name in the file.

    loaded: became parameters. missing: needed by the config and in no file. unexpected: in a file
    and not in the model. ignored: known to carry nothing. misshapen: with both shapes. tied: copies
    of a tensor that the model shares. notes: anything else about the file.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True if the file holds everything that the model needs, and nothing else."""
        return not (self.missing or self.unexpected or self.misshapen)

    def raise_if_incomplete(self, *, where: str) -> None:
        """Raise unless complete: an unexpected tensor is as suspect as a missing one."""
        if self.complete:
            return
        hint = "the weights belong to another config, or a file is truncated"
        if "lm_head.weight" in self.missing:
            hint = "the config wants an untied head; a tied one needs tie_word_embeddings true"
        elif self.unexpected and not self.missing:
            hint = (
                "a part that this family does not have here, or the weights of another config; "
                "docs/adding-an-architecture.md tells how a tensor gets its row"
            )
        raise FileError(
            f"the weights do not fit the config: {self.faults()}", where=where, hint=hint
        )

    def faults(self) -> str:
        """Return the missing, unexpected and misshapen tensors as text."""
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "misshapen": self.misshapen,
        }
        return "; ".join(f"{word}: {_few(names)}" for word, names in kinds.items() if names)

    def __str__(self) -> str:
        kinds = {"ignored": self.ignored, "tied copies": self.tied}
        extra = "".join(f"; {word}: {_few(names)}" for word, names in kinds.items() if names)
        faults = self.faults()
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{len(self.loaded)} tensors loaded{extra}{'; ' + faults if faults else ''}{notes}"


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def compare(plan: Plan, shapes: Mapping[str, Shape]) -> ConversionReport:
    """Compare the names and shapes of a file with a plan, before any tensor is read."""
    loaded, unexpected, ignored, misshapen, tied = [], [], [], [], []
    for name, shape in shapes.items():
        full = plan.full_name(name)
        if full in plan.entries:
            wanted = plan.entries[full].shape
            if shape == wanted:
                loaded.append(name)
            else:
                misshapen.append(f"{name} {shape} instead of {wanted}")
        elif full in plan.tied:
            wanted = plan.entries[plan.tied[full]].shape
            if shape == wanted:
                tied.append(name)
            else:
                misshapen.append(f"{name} {shape} instead of {wanted}")
        elif full in plan.ignored:
            ignored.append(name)
        else:
            unexpected.append(name)
    there = {plan.full_name(name) for name in shapes}
    missing = [name for name in plan.entries if name not in there]
    return ConversionReport(
        tuple(loaded),
        tuple(missing),
        tuple(unexpected),
        tuple(ignored),
        tuple(misshapen),
        tuple(tied),
    )


def compared(plan: Plan, weights: Weights) -> ConversionReport:
    """Compare weights with a plan; refuse what does not fit, and whole numbers as weights."""
    report = compare(plan, weights.shapes)
    for name, dtype in weights.dtypes.items():
        if dtype not in FLOATS.values() and name not in report.ignored:
            code = next((code for code, each in WHOLE.items() if each == dtype), str(dtype))
            raise _no_weight(name, code, where=weights.where)
    report.raise_if_incomplete(where=weights.where)
    return report


def raise_other_head(name: str, owner: str, *, where: str) -> NoReturn:
    """Refuse a tied tensor which a file holds twice, with other values."""
    raise FileError(
        f"{name} differs from {owner}, and the config says that they are tied",
        where=where,
        hint='if the head was trained by itself, set "tie_word_embeddings": false',
    )
