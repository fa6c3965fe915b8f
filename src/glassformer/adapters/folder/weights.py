"""Read the weights of a folder into a model: built without memory, then filled tensor by tensor.

Names and shapes are compared with the plan before any tensor is read (`ConversionReport`), and what
does not fit is refused by name. Files are mapped, not copied: a tensor that is used as it is stored
costs no memory beyond its own. An index may name plain files of its own folder and nothing else; a
pickle is never opened. Weights of eight and four bits (FP8, MXFP4) are multiplied by their scales
while they are read, and the report says so.
"""

import json
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
from glassformer.adapters.table import Plan, Shape
from glassformer.models.model import Model, build
from glassformer.nn.position import make_tables
from glassformer.spec.errors import FileError
from glassformer.spec.model import ModelSpec
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
#: Tables of positions and masks, which older files hold beside their weights; no weight is one.
WHOLE = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Numbers that mean something only with the scales beside them.
SCALED = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
#: The numbers of four bits in MXFP4, sign in the highest bit (OCP Microscaling Formats, 2023).
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


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
    """The parameters and stored buffers of a live module; tied ones under each of their names."""

    module: nn.Module
    where: str

    @property
    def shapes(self) -> dict[str, Shape]:
        """By the module's own names."""
        return {name: tuple(tensor.shape) for name, tensor in self._stored().items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """By the module's own names."""
        return {name: tensor.dtype for name, tensor in self._stored().items()}

    def _stored(self) -> dict[str, Tensor]:
        """Return parameters, and the buffers that a checkpoint of the module holds."""
        kept = set(self.module.state_dict())
        buffers = {name: b for name, b in self.module.named_buffers() if name in kept}
        # Under every name: of tied ones the first may be the head's.
        return dict(self.module.named_parameters(remove_duplicate=False)) | buffers

    def read(self, name: str, *, again: bool = False) -> Tensor:
        return self._stored()[name].detach().cpu().clone()


class FileWeights:
    """Tensors of one or more safetensors files."""

    def __init__(
        self,
        files: Mapping[str, Path],
        *,
        where: str,
        known: Mapping[str, torch.dtype] = FLOATS | WHOLE,
    ) -> None:
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
                if code not in known:
                    raise _no_weight(name, code, where=str(path))
                self.shapes[name], self.dtypes[name] = shape, known[code]
                self._paths[name] = path

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report says about these files: nothing, for weights that are plain numbers."""
        return ()

    def read(self, name: str, *, again: bool = False) -> Tensor:
        tensor = self._stored(name, again=again)
        check_finite(name, tensor, where=str(self._paths[name]))
        return tensor

    def _stored(self, name: str, *, again: bool = False) -> Tensor:
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
        return tensor


class ScaledWeights(FileWeights):
    """Weights of eight or four bits as the numbers that they stand for.

    FP8 (E4M3): weight * scale, a scale for the tensor, for each row, or for each block of it
    (`weight_scale`, or `weight_scale_inv`, which in spite of its name is multiplied too): float32.
    MXFP4: 32 numbers of four bits share the scale 2^(e - 127): `X_blocks` (..., rows, G, 16) and
    `X_scales` (..., rows, G) are X (..., 32 G, rows), exact in bfloat16. What a runtime would do to
    activations is not done.
    """

    def __init__(
        self, files: Mapping[str, Path], *, where: str, block: tuple[int, int] | None
    ) -> None:
        super().__init__(files, where=where, known=FLOATS | WHOLE | SCALED)
        self.block = block
        self._scales: dict[str, str] = {}
        self.counts = {"FP8": 0, "MXFP4": 0}
        for name in [name for name, dtype in self.dtypes.items() if dtype == torch.uint8]:
            if name.endswith("_blocks"):
                self._pair_fp4(name.removesuffix("_blocks"))
        for name in [n for n, dtype in self.dtypes.items() if dtype == torch.float8_e4m3fn]:
            self._pair_fp8(name)
        for name in [n for n in self.shapes if n.endswith((".input_scale", ".activation_scale"))]:
            self._forget(name)
        for name, dtype in self.dtypes.items():
            if dtype == torch.uint8:
                raise FileError(f"tensor {name} holds bytes without a meaning", where=where)

    @property
    def notes(self) -> tuple[str, ...]:
        """How many tensors were unpacked, by kind."""
        dtypes = {"FP8": "float32", "MXFP4": "bfloat16"}
        return tuple(
            f"unpacked to {dtypes[kind]}: {count} {kind}"
            for kind, count in self.counts.items()
            if count
        )

    def _forget(self, *names: str) -> None:
        for name in names:
            del self.shapes[name], self.dtypes[name]
            for held in self.files.values():
                if name in held:
                    held.remove(name)

    def _pair_fp4(self, name: str) -> None:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        shape, there = self.shapes[blocks], self.shapes.get(scales)
        if len(shape) < 3 or shape[-1] != 16 or there != shape[:-1] or name in self.shapes:
            raise FileError(f"{blocks} {shape} does not fit {scales} {there}", where=self.where)
        file = next(held for held in self.files.values() if blocks in held)
        file.insert(file.index(blocks), name)
        self._forget(blocks, scales)
        self.shapes[name] = (*shape[:-3], shape[-2] * 32, shape[-3])
        self.dtypes[name] = torch.bfloat16
        self._paths[name] = self._paths[blocks]
        self._scales[name] = scales
        self.counts["MXFP4"] += 1

    def _pair_fp8(self, name: str) -> None:
        leaf = [f"{name}_scale_inv", f"{name}_scale"]
        scale = next((each for each in leaf if each in self.shapes), None)
        shape = self.shapes[name]
        if scale is None or len(shape) != 2:
            raise FileError(f"tensor {name} is of FP8 and has no {leaf[0]}", where=self.where)
        rows, columns = shape
        fits = [(), (1,), (1, 1), (rows,), (rows, 1)]
        if self.block is not None:
            fits = [(-(-rows // self.block[0]), -(-columns // self.block[1]))]
        if self.shapes[scale] not in fits:
            raise FileError(
                f"{scale} has the shape {self.shapes[scale]} for {shape}",
                where=self.where,
                hint="one scale for the tensor, one for each row, or those of weight_block_size",
            )
        self._forget(scale)
        self.dtypes[name] = torch.float32
        self._scales[name] = scale
        self.counts["FP8"] += 1

    def read(self, name: str, *, again: bool = False) -> Tensor:
        if name not in self._scales:
            return super().read(name, again=again)
        if self.dtypes[name] == torch.bfloat16:
            tensor = self._fp4(name, again=again)
        else:
            tensor = self._fp8(name, again=again)
        check_finite(name, tensor, where=str(self._paths[name]))
        return tensor

    def _fp4(self, name: str, *, again: bool) -> Tensor:
        packed = self._stored(f"{name}_blocks", again=again)
        power = self._stored(self._scales[name], again=again).int() - 127
        table = torch.tensor(FP4, dtype=torch.bfloat16)
        pairs = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
        numbers = torch.ldexp(table[pairs.int()], power[..., None])
        return numbers.to(torch.bfloat16).flatten(-2).transpose(-2, -1).contiguous()

    def _fp8(self, name: str, *, again: bool) -> Tensor:
        tensor = self._stored(name, again=again).float()
        scale = self._stored(self._scales[name], again=again).float()
        if self.block is None:
            return tensor * (scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(()))
        tall, wide = self.block
        scale = scale.repeat_interleave(tall, 0)[: len(tensor)]
        return tensor * scale.repeat_interleave(wide, 1)[:, : tensor.shape[1]]


def quantized_block(quantization: Mapping[str, Any], *, where: str) -> tuple[int, int] | None:
    """Return the block that one FP8 scale belongs to; None for a tensor or a row.

    Other methods, and settings of these that would change the numbers, are refused by name.
    """
    method = quantization.get("quant_method")
    block: Any = None
    match method:
        case "mxfp4" | "fbgemm_fp8":
            pass
        case "fp8":
            if quantization.get("fmt", "e4m3") != "e4m3":
                raise _other_format(f"fp8 of the form {quantization['fmt']!r}", where)
            block = quantization.get("weight_block_size")
        case "compressed-tensors":
            groups = quantization.get("config_groups")
            held = groups.values() if isinstance(groups, dict) else ()
            kinds = [each.get("weights") if isinstance(each, dict) else None for each in held]
            eight = [{"num_bits": 8, "type": "float"}.items() <= (k or {}).items() for k in kinds]
            if quantization.get("format") != "float-quantized" or not all(eight):
                raise _other_format(f"compressed-tensors, {quantization.get('format')!r}", where)
            blocks = {json.dumps(kind.get("block_structure")) for kind in kinds if kind}
            if len(blocks) > 1:
                raise _other_format("compressed-tensors with blocks of several sizes", where)
            block = json.loads(blocks.pop()) if blocks else None
        case _:
            raise _other_format(repr(method)[:60], where)
    if block is None:
        return None
    if not isinstance(block, list) or [type(size) for size in block] != [int, int]:
        raise FileError(f"quantization_config has blocks of {str(block)[:40]}", where=where)
    if min(block) < 1:
        raise FileError(f"quantization_config has blocks of {block}", where=where)
    return block[0], block[1]


def _other_format(what: str, where: str) -> FileError:
    return FileError(
        f"the weights are quantized in another format ('quantization_config': {what})",
        where=where,
        hint="FP8 and MXFP4 are read; otherwise take the original weights, and glass quantize",
    )


def _no_weight(name: str, dtype: str, *, where: str) -> FileError:
    return FileError(
        f"tensor {name} has dtype {dtype}",
        where=where,
        hint=f"weights are {', '.join(FLOATS)}; quantized ones are not read here",
    )


def check_finite(name: str, tensor: Tensor, *, where: str) -> None:
    """Refuse NaN and infinity."""
    if not is_finite(tensor):
        raise FileError(f"tensor {name} holds NaN or infinity", where=where)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite: min and max show it without extra memory."""
    bounds = tensor.aminmax() if tensor.numel() else ()
    return all(math.isfinite(float(bound)) for bound in bounds)


def folder_weights(folder: Path, *, quantization: Mapping[str, Any] | None = None) -> FileWeights:
    """Open the weights of a Hugging Face folder: one file, or those that its index names.

    `quantization` is the config's entry of that name: how weights of few bits are to be read.
    """
    single = folder / SINGLE
    if single.is_file():
        return _opened({SINGLE: inside(folder, SINGLE)}, folder, quantization)
    if (folder / INDEX).is_file():
        return _indexed(folder, quantization)
    pickled = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
    if pickled:
        raise FileError(
            f"the weights are a pickle ({pickled[0]}), which can run any code: it is not opened",
            where=str(folder),
            hint="where they come from there is often a model.safetensors too",
        )
    raise FileError(f"there is no {SINGLE} and no {INDEX}", where=str(folder))


def _opened(
    files: Mapping[str, Path], folder: Path, quantization: Mapping[str, Any] | None
) -> FileWeights:
    if not quantization:
        return FileWeights(files, where=str(folder))
    if not isinstance(quantization, dict):
        raise FileError("quantization_config is not a table", where=str(folder))
    block = quantized_block(quantization, where=str(folder))
    return ScaledWeights(files, where=str(folder), block=block)


def _indexed(folder: Path, quantization: Mapping[str, Any] | None) -> FileWeights:
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
    headers = {file: read_header(path) for file, path in files.items()}
    for tensor, file in index.items():
        if tensor not in headers[file]:
            raise FileError(f"tensor {str(tensor)[:80]} is not in {file}", where=where)
    return _opened(files, folder, quantization)


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
        if not dtype.is_floating_point and name not in report.ignored:
            code = next((code for code, each in WHOLE.items() if each == dtype), str(dtype))
            raise _no_weight(name, code, where=weights.where)
    report.raise_if_incomplete(where=weights.where)
    return report


def filled(
    spec: ModelSpec,
    plan: Plan,
    weights: Weights,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> tuple[Model, ConversionReport]:
    """Build a model with these weights, in eval mode and in their precision, or in `dtype`.

    Names and shapes are compared before anything is allocated. A tensor that needs no conversion is
    mapped from its file, so the peak is the weights plus the largest converted tensor.
    """
    report = compared(plan, weights)
    used = {name: weights.dtypes[name] for name in report.loaded}
    target = dtype or widest(used, where=weights.where)
    model = build(spec, device="meta").to(target)
    make_tables(model, device)
    for name in report.loaded:
        changes = used[name] != target or device != "cpu"
        _set(model, plan, weights, name, target=target, device=device, changes=changes)
    for name in report.tied:
        _check_copy(model, plan, weights, name)
    return model.eval(), report


def refill(model: Model, plan: Plan, weights: Weights) -> ConversionReport:
    """Copy weights into an existing model; its parameters stay the same objects."""
    report = compared(plan, weights)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name in report.loaded:
            parts = plan.entries[plan.full_name(name)].split(weights.read(name, again=True))
            for ours, tensor in parts.items():
                own[ours].copy_(tensor)
    for name in report.tied:
        _check_copy(model, plan, weights, name)
    return report


def _set(
    model: Model,
    plan: Plan,
    weights: Weights,
    name: str,
    *,
    target: torch.dtype,
    device: str,
    changes: bool,
) -> None:
    entry = plan.entries[plan.full_name(name)]
    # Converted tensors are copied; closing the map afterwards frees the pages that were read.
    tensor = weights.read(name, again=changes or entry.copies)
    for ours, part in entry.split(tensor).items():
        owner, _, leaf = ours.rpartition(".")
        value = part.to(device=device, dtype=target)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value))


def _check_copy(model: Model, plan: Plan, weights: Weights, name: str) -> None:
    """Require that a tied tensor which the file holds twice has the same values."""
    entry = plan.entries[plan.tied[plan.full_name(name)]]
    own = dict(model.named_parameters())
    copies: dict[str, Tensor] = entry.split(weights.read(name, again=True))
    if not all(torch.equal(copies[ours].to(own[ours]), own[ours]) for ours in entry.ours):
        raise FileError(
            f"{name} differs from {entry.theirs}, and the config says that they are tied",
            where=weights.where,
            hint='if the head was trained by itself, set "tie_word_embeddings": false',
        )
