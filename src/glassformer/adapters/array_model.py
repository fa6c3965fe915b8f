"""A model on disk as plain arrays, for decoding without torch.

`open_stepper` opens what the native step runs: decoders and encoder-decoders in GGUF files,
checkpoints of ours and Hugging Face folders, in float32 or bfloat16, and what `glass quantize`
wrote in integers that the C routines multiply. What is on disk is recognised, checked and
refused in `opening`, for `load` too. It returns None for what only `load` opens: LoRA, other
schemes, weights of other precisions, parts that are torch modules.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from glassformer.adapters.folder.paths import folder_of
from glassformer.adapters.folder.weights import Weights, compared, widest
from glassformer.adapters.opening import (
    Checkpoint,
    GGUFFile,
    HuggingFaceFolder,
    LoRAFolder,
    QuantizedFolder,
    check_copies,
    on_disk,
    parameters,
)
from glassformer.adapters.table import Entry, Interleaved, Plan, Rows
from glassformer.generation.native.arrays import ArrayStepper
from glassformer.generation.native.lowering import ArraySource, Matrix, as_floats, unknown_part
from glassformer.generation.turns import Turns
from glassformer.kernels import c_library
from glassformer.kernels.integer import RUNS, tiles_of
from glassformer.kernels.packed import PackedMatrix
from glassformer.models.stepping import Stepper
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import FileError
from glassformer.spec.lacking import lacks
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import OwnPosition
from glassformer.spec.quantization import layer_of, logit_layers, targets
from glassformer.store.checkpoint import (
    WEIGHTS,
    describe_quantized,
    load_quantized,
)
from glassformer.store.tensors import BFLOAT16, DTYPES, read_header

#: Return a matrix of a file as it is packed, or None.
Packed = Callable[[str], PackedMatrix | None]


def open_stepper(
    path: str | Path,
    *,
    unpacks: bool = True,
    kv_cache: KVCache = "float",
    in_turns: bool = False,
) -> tuple[ModelSpec, Stepper] | None:
    """Return a model's spec and its native step, or that of a conversation; None where that needs
    torch.

    Packed weights are unpacked to memory with large pages, which is faster to read, or used as they
    are in the file, which is faster to begin with; the numbers that come out are the same.
    """
    if c_library.unavailable():
        return None
    found = open_arrays(folder_of(path), unpacks=unpacks)
    if found is None:
        return None
    spec, arrays = found
    if unknown_part(spec, kv_cache=kv_cache):
        return None
    stepper = ArrayStepper(spec, ArraySource(spec, arrays), kv_cache=kv_cache)
    return spec, Turns(stepper) if in_turns else stepper


def open_arrays(
    folder: Path, *, unpacks: bool = True
) -> tuple[ModelSpec, dict[str, Matrix]] | None:
    """Return a model's spec and its parameters by the manifest's names, or None."""
    found = on_disk(folder, large_pages=unpacks)
    packed: Packed | None = None
    match found:
        case LoRAFolder():
            return None
        case QuantizedFolder():
            return open_quantized(folder)
        case GGUFFile():
            spec, plan = found.spec, found.plan
            packed = None if unpacks else found.weights.read_packed
        case Checkpoint():
            spec, plan = found.spec, found.plan
        case HuggingFaceFolder(family=None):
            return None
        case HuggingFaceFolder(family=family):
            assert family is not None
            if found.config.data.get("quantization_config"):
                return None
            spec = family.spec_of(found.config)
            plan = family.plan(spec)
        case _ as unreachable:
            assert_never(unreachable)
    if not _runs(spec):
        return None
    arrays = read_arrays(plan, found.weights, packed=packed)
    return None if arrays is None else (spec, arrays)


def open_quantized(folder: Path) -> tuple[ModelSpec, dict[str, Matrix]] | None:
    """Return a quantized model's spec and parameters, as `open_arrays` does; its matrices in tiles.

    A folder is described before it is verified: what others run is not read twice.
    """
    with contextlib.suppress(FileError, OSError):  # what follows names the first that is wrong
        if not _runs_quantized(folder):
            return None
    spec, quantization, arrays = load_quantized(folder)
    shapes, heads = {layer_of(p.name): p.shape for p in targets(spec)}, logit_layers(spec)
    made: dict[str, Matrix] = {}
    for layer in quantization.layers:
        outputs, inputs = shapes[layer.name]
        leaves = layer.scheme.parts(outputs, inputs)
        parts = {leaf: arrays.pop(f"{layer.name}.{leaf}") for leaf in leaves}
        refined = layer.name in heads
        made[f"{layer.name}.weight"] = tiles_of(layer.scheme, parts, refined=refined)
        if (bias := arrays.pop(f"{layer.name}.bias", None)) is not None:
            made[f"{layer.name}.bias"] = as_floats(bias)
    target = widest({name: array.dtype for name, array in arrays.items()}, where=str(folder))
    for name, array in arrays.items():
        made[name] = array if array.dtype == target else as_floats(array)
    return spec, made


def _runs_quantized(folder: Path) -> bool:
    """Return whether the C routines run all layers of a checkpoint, and read its other weights."""
    spec, quantization, wanted = describe_quantized(folder)
    if not _runs(spec) or any(any(lacks(layer.scheme, RUNS)) for layer in quantization.layers):
        return False
    layers = {layer.name for layer in quantization.layers}
    codes = {
        code
        for name, (code, _) in read_header(folder / WEIGHTS).items()
        if name in wanted and not wanted[name].dtype and layer_of(name) not in layers
    }
    return codes <= {"F32", "BF16"}


def _runs(spec: ModelSpec) -> bool:
    """Return whether the native step runs a model of this spec from arrays alone."""
    no_module = not isinstance(spec.position, OwnPosition)
    return no_module and "next" in spec.head_names() and not unknown_part(spec)


def read_arrays(
    plan: Plan, weights: Weights, *, packed: Packed | None = None
) -> dict[str, Matrix] | None:
    """Return all parameters in the widest precision among them; None if C does not read that.

    What needs no conversion is mapped from its file; so are the matrices that `packed` returns.
    """
    report = compared(plan, weights)
    used = {name: weights.dtypes[name] for name in report.loaded}
    target = widest(used, where=weights.where)
    if target not in (DTYPES["F32"], BFLOAT16):
        return None
    arrays: dict[str, Matrix] = {}
    for name in report.loaded:
        entry = plan.entries[plan.full_name(name)]
        matrix = None if packed is None or not _by_rows(entry) else packed(name)
        if matrix is not None:
            rows = entry.split(matrix.data)
            arrays |= {ours: replace(matrix, data=data) for ours, data in rows.items()}
            continue
        for ours, part in parameters(plan, weights, name, changes=used[name] != target):
            arrays[ours] = part if used[name] == target else as_floats(part)
    check_copies(plan, weights, report)
    return arrays


def _by_rows(entry: Entry) -> bool:
    """Return whether each row of ours is a row of the file: its bytes can stay together."""
    return isinstance(entry.layout, Rows | Interleaved) and all(
        name.endswith(".weight") for name in entry.ours
    )
