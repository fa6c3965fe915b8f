"""Tensors of a folder, known by name and shape before any is read, then read one at a time.

Files are mapped, not copied: a tensor that is used as it is stored costs no memory beyond its own.
An index may name plain files of its own folder and nothing else; a pickle is never opened.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from glassformer.adapters.folder.files import read_object
from glassformer.adapters.table import Shape
from glassformer.spec.errors import FileError
from glassformer.store.tensors import read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
INDEX_LIMIT = 50_000_000
MOST_FILES = 1_000
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,120}\.safetensors")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Weights(Protocol):
    """Named tensors of a file, a folder or a module."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """By tensor name."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """By tensor name."""

    @property
    def where(self) -> str:
        """The path for error messages."""

    def read(self, name: str, *, again: bool = False) -> Tensor:
        """Read one tensor; `again` maps the file anew, so that earlier pages can be freed."""


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The parameters of a live module; tied ones occur once."""

    module: nn.Module
    where: str

    @property
    def shapes(self) -> dict[str, Shape]:
        """By the module's own names."""
        return {name: tuple(p.shape) for name, p in self.module.named_parameters()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """By the module's own names."""
        return {name: p.dtype for name, p in self.module.named_parameters()}

    def read(self, name: str, *, again: bool = False) -> Tensor:
        return self.module.get_parameter(name).detach().cpu().clone()


class FileWeights:
    """Tensors of one or more safetensors files."""

    def __init__(self, files: Mapping[str, Path], *, where: str) -> None:
        self.where = where
        self.files: dict[str, list[str]] = {}
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._paths: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file, path in files.items():
            header = read_header(path)
            self.files[file] = list(header)
            for name, (code, shape) in header.items():
                if name in self.shapes:
                    raise FileError(f"tensor {name} is in two files", where=where)
                if code not in FLOATS:
                    raise FileError(
                        f"tensor {name} has dtype {code}",
                        where=str(path),
                        hint=f"weights are {', '.join(FLOATS)}; quantized ones are not read here",
                    )
                self.shapes[name], self.dtypes[name] = shape, FLOATS[code]
                self._paths[name] = path

    def read(self, name: str, *, again: bool = False) -> Tensor:
        path = self._paths[name]
        try:
            if again or path not in self._open:
                file: Any = safe_open(path, framework="pt")
                if not again:
                    self._open[path] = file
            else:
                file = self._open[path]
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise FileError(f"a damaged tensor file: {error}", where=str(path)) from error
        check_finite(name, tensor, where=str(path))
        return tensor


def check_finite(name: str, tensor: Tensor, *, where: str) -> None:
    """Refuse NaN and infinity."""
    if not is_finite(tensor):
        raise FileError(f"tensor {name} holds NaN or infinity", where=where)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite: min and max show it without extra memory."""
    bounds = tensor.aminmax() if tensor.numel() else ()
    return all(math.isfinite(float(bound)) for bound in bounds)


def folder_weights(folder: Path) -> FileWeights:
    """Open the weights of a Hugging Face folder: one file, or those that its index names."""
    single = folder / SINGLE
    if single.is_file():
        files = {SINGLE: inside(folder, SINGLE)}
        return FileWeights(files, where=str(folder))
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


def _indexed(folder: Path) -> FileWeights:
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
    weights = FileWeights({name: inside(folder, name) for name in names}, where=str(folder))
    for tensor, file in index.items():
        if tensor not in weights.files[file]:
            raise FileError(f"tensor {str(tensor)[:80]} is not in {file}", where=where)
    return weights


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


def widest(dtypes: Mapping[str, torch.dtype], *, where: str) -> torch.dtype:
    """Return the widest precision among the tensors."""
    found = set(dtypes.values())
    if not found:
        raise FileError("the weight files are empty", where=where)
    if found == {torch.float16, torch.bfloat16}:  # neither holds the other
        return torch.float32
    return max(found, key=lambda dtype: torch.finfo(dtype).bits)
