"""Write a Hugging Face folder: config, weights under Hugging Face's names, tokenizer.

An imported model is written back byte for byte: its own config and small files unchanged, its
tensors in the files and the order that they came in. A model of ours gets SHA256SUMS beside it, for
the format holds no hash. The folder appears complete or not at all.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from glassformer.adapters.config import Config
from glassformer.adapters.counterpart import counterpart
from glassformer.adapters.folder.origin import LAYOUT, read_layout
from glassformer.adapters.folder.weights import FLOATS, INDEX, NAME, SINGLE
from glassformer.adapters.native import NativeAdapter
from glassformer.adapters.registry import families_that_write
from glassformer.adapters.table import Family, Plan
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.models.weights import array_of, numpy_view, torch_dtype
from glassformer.spec.disk import check_new
from glassformer.spec.errors import GlassError, InputError
from glassformer.spec.manifest import stored
from glassformer.spec.model import ModelSpec
from glassformer.store.checkpoint import SUMS, publishing, sums_text, write_hashed, write_synced
from glassformer.store.tensors import is_finite, tensor_chunks

SHARD_BYTES = 5_000_000_000
CODES = {torch_dtype(dtype): code for code, dtype in FLOATS.items()}


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export: path, architecture, and notes on what could not be written."""

    folder: Path
    model_type: str
    notes: tuple[str, ...] = ()


def export_hf(
    adapter: NativeAdapter, folder: str | Path, *, shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Write a Hugging Face folder; an existing one is never overwritten."""
    place, spec = Path(folder), adapter.spec
    check_new(place)
    first = str((adapter.imported_config or {}).get("model_type", ""))
    family = counterpart(spec, families_that_write(), first=first)
    plan = family.plan(spec)
    files, notes = _small_files(adapter, family)
    files.pop(SUMS, None)  # of the folder that it was imported from
    tensors = Tensors(adapter, plan)
    layout = _layout(adapter, plan, tensors, shard_bytes)
    if len(layout) > 1:
        files[INDEX] = _index(layout, tensors)
    size = sum(map(len, files.values())) + sum(map(tensors.size, plan.entries))
    with publishing(place, size=size) as beside:
        for name in files:  # a sentence model's pooling has a folder of its own
            (beside / name).parent.mkdir(exist_ok=True)
        made = {name: write_hashed(beside / name, [data]) for name, data in files.items()}
        for file, names in layout.items():
            made[file] = write_hashed(beside / file, tensors.chunks(names))
        if adapter.imported_config is None:  # an import goes back as it came, no file more
            write_synced(beside / SUMS, [sums_text(made).encode()])
    return Exported(place, family.model_type, notes)


class Tensors:
    """The tensors by their Hugging Face names, each made when it is written."""

    def __init__(self, adapter: NativeAdapter, plan: Plan) -> None:
        self.own = {name: p.detach() for name, p in adapter.model.named_parameters()}
        if set(self.own) != set(stored(adapter.spec)):
            raise InputError(
                "the model has no plain weights: it is quantized, or carries LoRA",
                hint="quant.dequantize_model or nn.lora.merge first",
            )
        self.plan = plan
        self.dtype = next(iter(self.own.values())).dtype

    def entry(self, name: str) -> Any:
        """Return the plan of a tensor; a tied copy has that of the tensor it repeats."""
        return self.plan.entries[self.plan.tied.get(name, name)]

    def size(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        numbers = 1
        for extent in self.entry(name).shape:
            numbers *= extent
        return numbers * self.dtype.itemsize

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is written; refuse NaN and infinity."""
        entry = self.entry(name)
        tensor: Tensor = entry.layout.join([self.own[ours].cpu() for ours in entry.ours])
        if not is_finite(numpy_view(tensor)):
            raise InputError(f"{entry.ours[0]} holds NaN or infinity, so the model is not written")
        return tensor

    def chunks(self, names: list[str]) -> Iterator[Any]:
        """Return the bytes of a safetensors file, tensor by tensor."""
        described = {name: (CODES[self.dtype], self.entry(name).shape) for name in names}
        return tensor_chunks(described, lambda name: array_of(self.read(name)))


def _small_files(
    adapter: NativeAdapter, family: Family
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return an imported model's own files if they still describe it, else new ones; and notes."""
    kept = {name: data for name, data in adapter.kept.items() if name != LAYOUT}
    dtype = str(next(adapter.model.parameters()).dtype).removeprefix("torch.")
    if kept and _still_true(kept.get("config.json"), family, adapter.spec, dtype):
        return kept, ()
    files, notes = dict(kept), []
    tokenizer = adapter.get_tokenizer()
    config = family.config_of(adapter.spec, dtype=dtype)
    old = adapter.imported_config or {}
    config |= {key: old[key] for key in old if key.endswith("_token_id") and key in config}
    if not kept and tokenizer is not None:
        config |= {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
        files |= _tokenizer_files(tokenizer)
        if not files:
            kind = type(tokenizer).__name__
            notes.append(f"a tokenizer of our kind {kind} has no Hugging Face form: not written")
    files["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    return files, tuple(notes)


def _still_true(data: bytes | None, family: Family, spec: ModelSpec, dtype: str) -> bool:
    """Return whether the imported config.json still describes the model."""
    if data is None:
        return False
    try:
        config = json.loads(data)
        same = family.spec_of(Config(config)) == spec
    except (ValueError, GlassError):
        return False
    said = config.get("dtype", config.get("torch_dtype"))
    return same and config.get("model_type") == family.model_type and said in (None, dtype)


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    if not isinstance(tokenizer, BytePairs):
        return {}
    described = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {
        "tokenizer.json": tokenizer.to_json().encode(),
        "tokenizer_config.json": (json.dumps(described, indent=2) + "\n").encode(),
    }


def _layout(
    adapter: NativeAdapter, plan: Plan, tensors: Tensors, shard_bytes: int
) -> dict[str, list[str]]:
    """Return tensor names by file: the import's own files if they fit, else new shards."""
    known = read_layout(adapter.kept)
    if known is not None:
        held = [name for names in known.values() for name in names]
        right = set(plan.entries) <= set(held) <= set(plan.entries) | set(plan.tied)
        if right and len(held) == len(set(held)) and all(map(NAME.fullmatch, known)):
            return known
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name in sorted(plan.entries):
        if shards[-1] and tensors.size(name) > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= tensors.size(name)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def _index(layout: Mapping[str, list[str]], tensors: Tensors) -> bytes:
    where = {name: file for file, names in layout.items() for name in names}
    total = sum(map(tensors.size, where))
    numbers = total // tensors.dtype.itemsize
    index = {
        "metadata": {"total_parameters": numbers, "total_size": total},
        "weight_map": dict(sorted(where.items())),
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
