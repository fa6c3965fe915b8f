"""Open a GGUF file: settings become a spec, tensors a model, the rest small files.

Packing tensors is the `gguf` library's, an optional dependency.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.adapters.config import Config
from glassformer.adapters.folder.fill import filled
from glassformer.adapters.gguf.hf_files import kept_files, why_no_tokenizer
from glassformer.adapters.gguf.tensors import Kind, library
from glassformer.adapters.native import NativeAdapter, TrainingConfig
from glassformer.adapters.opening import GGUFFile
from glassformer.adapters.registry import adapter_for
from glassformer.spec.errors import InputError

F32, F16, Q4_0, Q5_0, Q8_0, Q4_K = 0, 1, 2, 6, 8, 12
CHUNK = 2**22  # numbers that are packed at a time
#: The largest numbers that the written kinds hold: those of a half-precision step, times a number
#: of steps.
HALF = 65504.0
STEPS = {F16: 1, Q4_0: 8, Q5_0: 16, Q8_0: 127, Q4_K: 15 * 63}
LARGEST = {F32: float(np.finfo(np.float32).max)} | {kind: n * HALF for kind, n in STEPS.items()}


def packed(tensor: Tensor, kind: Kind, *, name: str) -> Iterator[NDArray[Any]]:
    """Yield the bytes of a tensor, some rows at a time."""
    gguf = library()
    rows = tensor.reshape(-1, tensor.shape[-1])
    for part in torch.split(rows, max(1, CHUNK // rows.shape[1])):
        numbers = part.to(torch.float64 if part.dtype == torch.float64 else torch.float32)
        largest = float(numbers.abs().max())
        if largest > LARGEST[kind.number]:
            raise InputError(
                f"{name} holds {largest:g}, which is too large for {kind.name}",
                hint="{--dtype f32|dtype='f32'}",
            )
        array = np.ascontiguousarray(numbers.float().numpy())
        if kind.number == Q4_K:
            yield pack_q4_k(array)
            continue
        yield gguf.quants.quantize(array, gguf.GGMLQuantizationType(kind.number))


def pack_q4_k(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return rows as blocks of Q4_K, which the library unpacks and does not pack.

    256 numbers are 8 parts of 32, each `step * q - low` with q in 0..15. The steps and lows of the
    8 parts are 6-bit multiples of two half-precision numbers.
    """
    x = numbers.reshape(-1, 8, 32)
    step, low = _steps_and_lows(x)
    coarse = np.stack([step, low]).max(-1) / np.float32(63)
    coarse = coarse.astype(np.float16)  # (2, blocks): of the steps and of the lows
    wide = coarse.astype(np.float32)[..., None]
    six = np.rint(_over(np.stack([step, low]), wide)).clip(0, 63)
    step, low = six * wide
    q = np.rint(_over(x + low[..., None], step[..., None])).clip(0, 15).astype(np.uint8)
    first, last = np.split(six.astype(np.uint8), 2, axis=-1)  # of parts 0-3 and 4-7
    tops = first | (last >> 4) << 6
    scales = np.concatenate([*tops, (last[0] & 15) | (last[1] & 15) << 4], axis=-1)
    pairs = q.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(x), -1)
    heads = np.ascontiguousarray(coarse.T).view(np.uint8)
    return np.concatenate([heads, scales, nibbles], axis=-1).reshape(len(numbers), -1)


def _over(above: NDArray[np.float32], below: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide; by zero gives zero."""
    return np.divide(above, below, out=np.zeros_like(above), where=below != 0)


def _steps_and_lows(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the steps and lows of parts with the smallest weighted error among 22 roundings.

    Each rounding to 0..15 has a best line through it (weighted least squares, large numbers count
    more); lows below zero are not in the format.
    """
    weight = np.abs(x) + np.sqrt((x * x).mean(-1, keepdims=True))
    bottom = np.minimum(x.min(-1, keepdims=True), 0)
    span = x.max(-1, keepdims=True) - bottom
    best_step, best_low = _over(span, np.full_like(span, 15)), -bottom
    least = np.full_like(span, np.inf)
    for top in (15.0, *np.linspace(14, 16, 21)):
        q = np.rint(_over(np.float32(top) * (x - bottom), span)).clip(0, 15)
        w, wx, wq, wqq, wxq = (
            (weight * part).sum(-1, keepdims=True) for part in (1, x, q, q * q, x * q)
        )
        inside = w * wqq - wq * wq
        step = _over(w * wxq - wx * wq, inside)
        low = _over(wq * wxq - wqq * wx, inside)
        step, low = np.where(low < 0, _over(wxq, wqq), step), np.maximum(low, 0)
        error = (weight * (step * q - low - x) ** 2).sum(-1, keepdims=True)
        better = (error < least) & (step > 0)
        least = np.where(better, error, least)
        best_step, best_low = np.where(better, step, best_step), np.where(better, low, best_low)
    return best_step[..., 0], best_low[..., 0]


# --- the model ------------------------------------------------------------------------------------


def open_gguf(
    found: GGUFFile, settings: TrainingConfig, *, dtype: torch.dtype | None, device: str
) -> NativeAdapter:
    """Open the model of a file; the report notes what was unpacked or could not be read."""
    weights, (family, spec) = found.weights, found.read
    head, adjusted = weights.head, settings.adjusted(spec)
    model, report = filled(adjusted, found.plan, weights, dtype=dtype, device=device)
    kept = kept_files(head)
    stored = str(next(model.parameters()).dtype).removeprefix("torch.")
    ends = json.loads(kept.get("generation_config.json", b"{}")).get("eos_token_id", [None])
    config = family.config_of(spec, dtype=stored) | {"eos_token_id": ends[0]}
    kept["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    notes = []
    if weights.packed_kinds:
        kinds = ", ".join(f"{count} {name}" for name, count in weights.packed_kinds.items())
        notes.append(f"unpacked to {stored}: {kinds}")
    if why := why_no_tokenizer(head):
        notes.append(f"read without a tokenizer: {why}")
    adapter, _ = adapter_for(Config(config))
    return adapter(
        model,
        config=config,
        origin=found.path,
        kept=kept,
        report=replace(report, notes=tuple(notes)),
    )
