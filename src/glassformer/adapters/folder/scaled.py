"""Weights of eight and four bits in safetensors: FP8 and MXFP4, times their scales.

They are multiplied while they are read, by torch, and the report says so.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer.adapters.folder.weights import (
    FLOATS,
    WHOLE,
    FileWeights,
    check_finite,
    folder_files,
)
from glassformer.adapters.table import Array
from glassformer.models.weights import numpy_view, tensor_view
from glassformer.spec.errors import FileError
from glassformer.store.tensors import BFLOAT16, DTYPES, FLOAT8_E4M3

#: Numbers that mean something only with the scales beside them.
SCALED = {code: DTYPES[code] for code in ("F8_E4M3", "U8")}
#: The numbers of four bits in MXFP4, sign in the highest bit (OCP Microscaling Formats, 2023).
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


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
        for name in [name for name, dtype in self.dtypes.items() if dtype == SCALED["U8"]]:
            if name.endswith("_blocks"):
                self._pair_fp4(name.removesuffix("_blocks"))
        for name in [n for n, dtype in self.dtypes.items() if dtype == FLOAT8_E4M3]:
            self._pair_fp8(name)
        for name in [n for n in self.shapes if n.endswith((".input_scale", ".activation_scale"))]:
            self._forget(name)
        for name, dtype in self.dtypes.items():
            if dtype == SCALED["U8"]:
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
        self.dtypes[name] = BFLOAT16
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
        self.dtypes[name] = FLOATS["F32"]
        self._scales[name] = scale
        self.counts["FP8"] += 1

    def read(self, name: str, *, again: bool = False) -> Array:
        if name not in self._scales:
            return super().read(name, again=again)
        if self.dtypes[name] == BFLOAT16:
            tensor = self._fp4(name, again=again)
        else:
            tensor = self._fp8(name, again=again)
        array = numpy_view(tensor.contiguous())
        check_finite(name, array, where=str(self._paths[name]))
        return array

    def _tensor(self, name: str, *, again: bool) -> Tensor:
        return tensor_view(self._stored(name, again=again))

    def _fp4(self, name: str, *, again: bool) -> Tensor:
        packed = self._tensor(f"{name}_blocks", again=again)
        power = self._tensor(self._scales[name], again=again).int() - 127
        table = torch.tensor(FP4, dtype=torch.bfloat16)
        pairs = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
        numbers = torch.ldexp(table[pairs.int()], power[..., None])
        return numbers.to(torch.bfloat16).flatten(-2).transpose(-2, -1).contiguous()

    def _fp8(self, name: str, *, again: bool) -> Tensor:
        tensor = self._tensor(name, again=again).float()
        scale = self._tensor(self._scales[name], again=again).float()
        if self.block is None:
            return tensor * (scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(()))
        tall, wide = self.block
        scale = scale.repeat_interleave(tall, 0)[: len(tensor)]
        return tensor * scale.repeat_interleave(wide, 1)[:, : tensor.shape[1]]


def folder_weights(folder: Path, *, quantization: Mapping[str, Any] | None = None) -> FileWeights:
    """Open the weights of a Hugging Face folder: one file, or those that its index names.

    `quantization` is the config's entry of that name: how weights of few bits are to be read.
    """
    return scaled_weights(folder_files(folder), quantization, where=str(folder))


def scaled_weights(
    files: Mapping[str, Path], quantization: Mapping[str, Any] | None, *, where: str
) -> FileWeights:
    """Open these files as `folder_weights` does."""
    if not quantization:
        return FileWeights(files, where=where)
    if not isinstance(quantization, dict):
        raise FileError("quantization_config is not a table", where=where)
    return ScaledWeights(files, where=where, block=quantized_block(quantization, where=where))


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
