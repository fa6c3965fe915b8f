"""LoRA on disk, in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Names in the file are those of the Hugging Face model that the spec is exported to, so that `peft`
opens it with the exported base; a spec that matches no family keeps our own names. A setting of
PEFT that would change the computation, and that we do not support, is refused by name.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from glassformer.adapters.counterpart import counterpart
from glassformer.adapters.folder.files import SIDECAR_LIMIT, read_object
from glassformer.adapters.opening import FACTORS, TUNING
from glassformer.adapters.table import Rows
from glassformer.models.model import Model
from glassformer.models.weights import dtype_of, load_weights, weights_hash, weights_of
from glassformer.nn.lora import apply_lora, merge
from glassformer.quant.contents import is_model_quantized
from glassformer.quant.convert import dequantize_model
from glassformer.spec.disk import make_folder, replace_file, small_text
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.manifest import stored
from glassformer.spec.model import ModelSpec
from glassformer.spec.serialize import from_json
from glassformer.spec.train import LoRA, Tuning, lora_manifest, lora_targets
from glassformer.store.checkpoint import verify_folder
from glassformer.store.tensors import explain_difference, is_finite, read_tensors, tensor_bytes

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
Arrays = Mapping[str, NDArray[Any]]

#: Settings of PEFT that would compute something else, and the values that mean "not used".
UNUSED: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
}


def module_names(spec: ModelSpec) -> dict[str, str]:
    """Map our projections' names to those of the Hugging Face model, or to themselves.

    Theirs are used where each of our matrices is one of theirs, as it is: factors of a matrix that
    is fused or reordered there would correct something else.
    """
    ours = [name for name, p in stored(spec).items() if p.kind == "matrix"]
    theirs = {name: name for name in ours}
    try:
        plan = counterpart(spec).plan(spec)
    except InputError:  # no Hugging Face model computes this
        pass
    else:
        entries = {name: entry for entry in plan.entries.values() for name in entry.ours}
        held = [entries[name] for name in ours]
        if all(len(one.ours) == 1 and isinstance(one.layout, Rows) for one in held):
            theirs = {name: entries[name].theirs for name in ours}
    return {name.removesuffix(".weight"): theirs[name].removesuffix(".weight") for name in ours}


def peft_files(spec: ModelSpec, lora: LoRA, arrays: Arrays, *, base: str = "") -> dict[str, bytes]:
    """Return the two files of an adapter; `base` is recorded as the model that it belongs to."""
    for name, array in arrays.items():
        if not is_finite(array):
            raise InputError(
                f"{name} holds NaN or infinity, so the adapter is not saved",
                hint="go back to the last checkpoint that was written",
            )
    theirs = module_names(spec)
    made = {PREFIX + _renamed(name, theirs): array for name, array in arrays.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if spec.encoder is None else None,
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _peft_targets(spec, lora, theirs),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    return {
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
        FACTORS: tensor_bytes(made),
    }


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Rename `blocks.0.attn.q_proj.lora_A.weight` by the other name of its projection."""
    projection, leaf, end = name.rsplit(".", 2)
    return f"{names[projection]}.{leaf}.{end}"


def _peft_targets(spec: ModelSpec, lora: LoRA, theirs: Mapping[str, str]) -> list[str]:
    """Return the leaf names if they mean exactly these projections, else the full names."""
    chosen = {theirs[name] for name in lora_targets(spec, lora)}
    leaves = {name.rpartition(".")[2] for name in chosen}
    meant = {name for name in theirs.values() if name.rpartition(".")[2] in leaves}
    return sorted(leaves if meant == chosen else chosen)


def read_peft(folder: Path, spec: ModelSpec) -> tuple[LoRA, dict[str, NDArray[Any]]]:
    """Read the adapter of a folder for a model of this spec: settings, factors by our names."""
    where = str(folder)
    for name in (CONFIG, FACTORS):
        if not (folder / name).is_file():
            raise FileError(f"no {name}, so this is no adapter", where=where)
    config = read_object(folder / CONFIG, limit=SIDECAR_LIMIT)
    if config.get("peft_type") != "LORA":
        raise FileError(
            f"an adapter of kind {str(config.get('peft_type'))[:40]!r}",
            where=where,
            hint="LORA is the kind that is read here",
        )
    for key, unused in UNUSED.items():
        if key in config and config[key] not in unused:
            raise FileError(
                f"{key} is {str(config[key])[:60]}, which is not read here",
                where=where,
                hint="merge the adapter with peft, and load the merged model",
            )
    names = module_names(spec)
    # Ours too: no other family was known for some models when their adapters were written.
    ours = {name: name for name in names} | {theirs: name for name, theirs in names.items()}
    arrays: dict[str, NDArray[Any]] = {}
    for name, array in read_tensors(folder / FACTORS).items():
        projection, _, leaf = name.removeprefix(PREFIX).rpartition(".lora_")
        if not name.startswith(PREFIX) or projection not in ours:
            raise FileError(
                f"{name} corrects nothing that this model has",
                where=where,
                hint="an adapter of this base alone, saved with save_embedding_layers=False",
            )
        arrays[f"{ours[projection]}.lora_{leaf}"] = array
    try:
        lora = LoRA(
            rank=config.get("r", 8),
            alpha=float(config.get("lora_alpha", 8)),
            dropout=float(config.get("lora_dropout") or 0.0),
            targets=tuple(sorted({name.rsplit(".", 2)[0] for name in arrays})),
        )
        wanted = lora_manifest(spec, lora)
    except (InputError, TypeError, ValueError) as error:
        raise FileError(f"{CONFIG}: {error}", where=where) from error
    problems = explain_difference(wanted, {name: a.shape for name, a in arrays.items()})
    if problems:
        raise FileError(f"the adapter does not fit the model: {problems}", where=where)
    return lora, arrays


def save_adapter(model: Model, lora: LoRA, folder: str | Path, *, base: str = "") -> Path:
    """Write a model's LoRA factors in PEFT's format; an existing folder is never overwritten."""
    place = Path(folder)
    arrays = weights_of(model, rules=lora_manifest(model.spec, lora))
    files = peft_files(model.spec, lora, arrays, base=base)
    make_folder(place)
    for name, data in files.items():
        if os.path.lexists(place / name):
            raise InputError(f"{place / name} exists", hint="choose another folder")
        replace_file(place / name, data)
    return place


def load_adapter(model: Model, folder: str | Path) -> LoRA:
    """Add an adapter, ours or PEFT's, to a plain model; `nn.lora.merge` folds it in."""
    lora, arrays = read_peft(Path(folder), model.spec)
    apply_lora(model, lora)
    load_weights(model, arrays, where=str(folder), rules=lora_manifest(model.spec, lora))
    return lora


# --- checkpoints of fine-tuned models -----------------------------------------------------------


def read_tuning(folder: Path) -> Tuning | None:
    """Read how a checkpoint was tuned, if it holds LoRA factors; None for a complete model."""
    path = folder / TUNING
    if not path.is_file() or not (folder / FACTORS).is_file():
        return None
    verify_folder(folder)
    try:
        return from_json(Tuning, small_text(path))
    except (InputError, UnicodeDecodeError) as error:
        raise FileError(f"{TUNING}: {error}", where=str(folder)) from error


def check_base(model: Model, tuning: Tuning, *, where: str) -> None:
    """Refuse a base whose weights are not those that were tuned."""
    if weights_hash(model) != tuning.sha256:
        raise InputError(
            f"the base {tuning.base} is not the one that was fine-tuned: its weights differ",
            where=where,
            hint="bring the base back to where it was",
        )


def tuned(folder: Path, base: Model, tuning: Tuning) -> Model:
    """Return the base with a checkpoint's LoRA factors merged into it: a plain model again.

    It has the precision in which it was tuned, float32 or float64, whatever the base is stored in;
    a quantized base gets the weights that its levels stand for.
    """
    check_base(base, tuning, where=str(folder))
    _, arrays = read_peft(folder, base.spec)
    if is_model_quantized(base):
        dequantize_model(base)
    model = base.to(dtype_of(arrays))
    load_adapter(model, folder)
    merge(model)
    return model.requires_grad_(True).eval()
