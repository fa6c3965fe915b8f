"""Open a GGUF file: settings become a spec, tensors a model, the rest small files."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from glassformer.adapters.config import Config
from glassformer.adapters.folder.weights import filled
from glassformer.adapters.gguf.config import FACTORS, read_settings, table_of
from glassformer.adapters.gguf.dtypes import GGUFWeights
from glassformer.adapters.gguf.hf_files import kept_files, why_no_tokenizer
from glassformer.adapters.native import NativeAdapter
from glassformer.adapters.registry import adapter_for
from glassformer.adapters.table import Family, make_plan
from glassformer.adapters.training_config import TrainingConfig
from glassformer.spec.errors import FileError
from glassformer.spec.model import ModelSpec


def read_gguf_spec(path: Path) -> ModelSpec:
    """Return the spec of a file's model, from its header alone."""
    return _read_spec(path, GGUFWeights(path))[1]


def _read_spec(path: Path, weights: GGUFWeights) -> tuple[Family, ModelSpec]:
    embedding = weights.shapes.get("token_embd.weight")
    if embedding is None:
        raise FileError("there is no tensor token_embd.weight", where=str(path))
    factors = None
    if FACTORS in weights.shapes:
        if len(weights.shapes[FACTORS]) != 1:
            raise FileError(f"{FACTORS} has the shape {weights.shapes[FACTORS]}", where=str(path))
        factors = weights.read(FACTORS).tolist()
    return read_settings(
        weights.head.metadata,
        tensors=weights.shapes,
        rows=embedding[0],
        factors=factors,
        where=str(path),
    )


def open_gguf(
    path: Path, settings: TrainingConfig, *, dtype: torch.dtype | None, device: str
) -> NativeAdapter:
    """Open the model of a file; the report notes what was unpacked or could not be read."""
    weights = GGUFWeights(path)
    head = weights.head
    family, spec = _read_spec(path, weights)
    plan = make_plan(table_of(str(head.metadata["general.architecture"]), spec), spec)
    model, report = filled(settings.adjusted(spec), plan, weights, dtype=dtype, device=device)
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
        origin=path,
        kept=kept,
        report=replace(report, notes=tuple(notes)),
    )
