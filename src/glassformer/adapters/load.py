"""Open, build and save models: `load` reads any known format, `build` makes new ones.

What is on disk is recognised, checked and read by `opening`; here a torch model is filled from it.
`load_model` returns our bare model, without the adapter.

`load(folder, backend="transformers")` lets that library compute (`adapters.wrapped`), also what no
adapter of ours reads; `adapt` wraps a module that is already in memory.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, assert_never

import torch
from torch import nn

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.config import Config
from glassformer.adapters.folder.fill import filled
from glassformer.adapters.folder.lora import read_tuning, tuned
from glassformer.adapters.folder.origin import (
    origin_of,
    read_origin,
    read_spec,
)
from glassformer.adapters.folder.paths import folder_of
from glassformer.adapters.folder.scaled import scaled_weights
from glassformer.adapters.gguf.header import is_gguf
from glassformer.adapters.gguf.load import open_gguf
from glassformer.adapters.native import CustomTransformerAdapter, NativeAdapter, TrainingConfig
from glassformer.adapters.opening import (
    Checkpoint,
    GGUFFile,
    HuggingFaceFolder,
    LoRAFolder,
    OnDisk,
    QuantizedFolder,
    on_disk,
)
from glassformer.adapters.registry import adapter_for, adapter_named, reader_of_own
from glassformer.adapters.wrapped import open_with_transformers, open_wrapped, wrapped
from glassformer.byhand.layers import Transformer as HandTransformer
from glassformer.byhand.model import Model as HandModel
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.models.model import Model
from glassformer.models.model import build as build_model
from glassformer.models.weights import dtype_of, load_weights
from glassformer.quant.contents import restored_model
from glassformer.spec.checks import named_options, one_of
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.presets import PRESETS, preset
from glassformer.spec.serialize import override
from glassformer.store.checkpoint import (
    load_quantized,
    verify_sums,
)
from glassformer.store.rundir import RunRef

Backend = Literal["native", "transformers"]


@named_options
def build(
    spec: ModelSpec | str,
    *,
    tokenizer: Tokenizer | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> CustomTransformerAdapter:
    """Return a new model of a spec, or of a preset's name, with weights sampled by its rules.

    It is in eval mode. The weights come from `seed`, from a generator, or from torch's own. On the
    device "meta" nothing is allocated or sampled.
    """
    if seed is not None:
        if generator is not None:
            raise InputError("both a seed and a generator", hint="give one of the two")
        generator = torch.Generator().manual_seed(seed)
    spec = preset(spec) if isinstance(spec, str) else spec
    if not isinstance(spec, ModelSpec):
        raise InputError(
            f"a model is built of a ModelSpec, not of {type(spec).__name__}",
            hint='gf.preset("core") is one; gf.load opens a folder or a file',
        )
    model = build_model(spec, generator=generator, device=device)
    made = CustomTransformerAdapter(model if dtype is None else model.to(dtype))
    return made if tokenizer is None else made.with_tokenizer(tokenizer)


@named_options
def load(
    model_id: str | Path,
    config: TrainingConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    backend: Backend = "native",
    reference: bool = False,
    large_pages: bool = True,
) -> BaseAdapter:
    """Open a run (`RUN`, `RUN@120`), a checkpoint, a Hugging Face folder or a GGUF file.

    The model is in eval mode; weights keep the precision that they are stored in, or get `dtype`.
    `config` brings a training's settings; with one, a preset's name means a new model of it.
    `backend="transformers"` lets that library compute, more slowly, also what no adapter of ours
    reads; `reference=True` opens the folder with it as well, to measure parity against. Weights
    that are unpacked go to memory with large pages, which is faster to read and may be slower to
    get (`kernels.large_pages`).
    """
    one_of("backend", backend, ("native", "transformers"))
    settings = config or TrainingConfig()
    how = Opening(settings, dtype or settings.dtype, device, reference)
    own = reader_of_own(settings.architecture_type)
    if own is not None:
        return _opened_by(own, Path(model_id), how)
    if config is not None and str(model_id) in PRESETS and not Path(model_id).exists():
        adapter: BaseAdapter = _fresh(str(model_id), how)
    else:
        folder = folder_of(model_id)
        if is_gguf(folder) and (reference or backend == "transformers"):
            raise InputError(
                "transformers opens folders here, not GGUF files",
                where=str(folder),
                hint="glass convert FILE DIR --to hf makes a folder of it",
            )
        if backend == "transformers":
            verify_sums(folder)
            adapter = open_wrapped(folder, dtype=how.dtype, device=device)
        else:
            adapter = opened(on_disk(folder, large_pages=large_pages), how)
    wanted = settings.architecture_type
    if wanted is not None and adapter.get_architecture_type() != wanted:
        adapter_named(wanted)
        raise InputError(
            f"this is a {adapter.get_architecture_type()} model, and {wanted} was requested",
            where=str(model_id),
        )
    if isinstance(adapter, NativeAdapter):
        settings.freeze(adapter.model)
    return adapter


def _opened_by(own: type[BaseAdapter], folder: Path, how: "Opening") -> BaseAdapter:
    """Open a folder by a registered adapter that reads its own; it has no spec to adjust."""
    if not folder.is_dir():
        raise FileError("no such folder", where=str(folder))
    settings = how.settings
    if settings.dropout is not None or settings.frozen or settings.overrides or how.reference:
        raise InputError(
            f"a {own.architecture_type} model takes no dropout, frozen, overrides, reference",
            hint="set them on the model that is opened",
        )
    adapter = own.open_folder(folder)
    adapter.origin = folder
    adapter.to(device=how.device, dtype=how.dtype)
    return adapter.eval()


def load_native(path: str | Path, *, device: str = "cpu") -> NativeAdapter:
    """Open a model as `load` does, computed by our own parts."""
    adapter = load(path, device=device)
    assert isinstance(adapter, NativeAdapter)  # every format but backend="transformers" is
    return adapter


def load_model(path: str | Path) -> Model:
    """Return our bare model, without the adapter that `load` puts around it."""
    return load_native(path).model


def read_model_spec(path: str | Path) -> tuple[ModelSpec, str]:
    """Return the spec of a model on disk, and its format in words; no weights are read."""
    found = on_disk(folder_of(path))
    match found:
        case GGUFFile():
            return found.spec, f"a GGUF file of {found.path.stat().st_size:,} bytes"
        case LoRAFolder() | QuantizedFolder() | Checkpoint():
            return read_spec(found.path), f"a {found.name} of ours"
        case HuggingFaceFolder():
            _, family = adapter_for(found.config)
            kind = found.config.data.get("model_type")
            return family.spec_of(found.config), f"a Hugging Face folder ({kind})"
        case _ as unreachable:
            assert_never(unreachable)


#: Anything that computes: a module of ours or of transformers, or a by-hand model.
AnyModel = nn.Module | HandModel | HandTransformer


def adapt(module: AnyModel, *, backend: Backend = "native") -> BaseAdapter:
    """Return anything that computes as a model: where every function takes what it is given.

    One of ours comes as it is; a by-hand model is copied to torch, weight for weight; a live module
    of transformers is converted or wrapped.
    """
    one_of("backend", backend, ("native", "transformers"))
    if isinstance(module, BaseAdapter):
        return module
    if isinstance(module, Model):
        return CustomTransformerAdapter(module)
    if isinstance(module, HandTransformer):
        module = module.model
    if isinstance(module, HandModel):
        model = build_model(module.spec).to(dtype_of(module.params))
        load_weights(model, module.params)
        return CustomTransformerAdapter(model)
    if backend == "transformers":
        return wrapped(module)
    adapter, _ = adapter_for(Config.of_module(module))
    return adapter(module)


def save(model: AnyModel, path: str | Path) -> Path:
    """Write a checkpoint folder that `load` opens; an existing one is never overwritten."""
    folder = Path(path)
    adapt(model).save_checkpoint(folder)
    return folder


# --- formats ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opening:
    """Settings for opening a model: a training's, precision, device, a reference."""

    settings: TrainingConfig
    dtype: torch.dtype | None
    device: str
    reference: bool


def opened(found: OnDisk, how: Opening) -> NativeAdapter:
    """Fill a torch model from what is on disk."""
    match found:
        case GGUFFile():
            return open_gguf(found, how.settings, dtype=how.dtype, device=how.device)
        case LoRAFolder():
            return open_lora(found.path, how)
        case QuantizedFolder():
            return open_quantized(found.path, how)
        case Checkpoint():
            return open_native(found, how)
        case HuggingFaceFolder():
            return open_huggingface(found, how)
        case _ as unreachable:
            assert_never(unreachable)


def open_lora(folder: Path, how: Opening) -> NativeAdapter:
    """Open a checkpoint of LoRA factors: its base with the factors merged in."""
    tuning = read_tuning(folder)
    if tuning is None:
        raise FileError("the checkpoint holds no LoRA", where=str(folder))
    try:
        base = load_native(_found_base(tuning.base, folder))
    except RecursionError as error:
        raise FileError("its base leads back to itself", where=str(folder)) from error
    model = tuned(folder, base.model, tuning)
    return base.with_model(model.to(device=how.device, dtype=how.dtype))


def _found_base(base: str, folder: Path) -> str:
    """Return where a base is: as written, else the same path from a folder above the checkpoint.

    A relative path is from where the run was trained, and a reader may be elsewhere.
    """
    path = RunRef.parse(base).path
    if os.path.exists(path):
        return base
    for above in folder.resolve().parents:
        if (above / path).exists():
            return str(above / base)
    raise InputError(
        f"there is no folder {base}, the base of this LoRA",
        where=str(folder),
        hint="bring it back, or begin in the folder where the run was trained",
    )


def open_quantized(folder: Path, how: Opening) -> NativeAdapter:
    """Open a checkpoint of ours with quantized weights."""
    origin, kind, config = _origin(folder)
    return kind(
        restored_model(*load_quantized(folder)).to(how.device),
        config=config,
        origin=folder,
        kept={} if origin is None else read_origin(origin),
    )


def open_native(found: Checkpoint, how: Opening) -> NativeAdapter:
    """Open a checkpoint of ours; the adapter is that of the model that it was imported from."""
    folder, weights = found.path, found.weights
    origin, kind, config = _origin(folder)
    spec = how.settings.adjusted(found.spec)
    model, report = filled(spec, found.plan, weights, dtype=how.dtype, device=how.device)
    return kind(
        model,
        config=config,
        origin=folder,
        kept={} if origin is None else read_origin(origin),
        report=report,
        reference=_reference(folder, how),
    )


def open_huggingface(found: HuggingFaceFolder, how: Opening) -> NativeAdapter:
    """Open a Hugging Face folder: config to spec, weights to our parameters."""
    folder, config = found.path, found.config
    kind, family = adapter_for(config)  # one that was registered may read it
    spec = how.settings.adjusted(family.spec_of(config))
    quantization = config.data.pop("quantization_config", None)
    weights = scaled_weights(found.files, quantization, where=str(folder))
    model, report = filled(spec, family.plan(spec), weights, dtype=how.dtype, device=how.device)
    kept = read_origin(folder, weights.files)
    if quantization:  # what is held and written from here on is plain
        kept["config.json"] = (json.dumps(config.data, indent=2) + "\n").encode()
    return kind(
        model,
        config=config.data,
        origin=folder,
        kept=kept,
        report=replace(report, notes=weights.notes),
        reference=_reference(folder, how),
    )


def _origin(folder: Path) -> tuple[Path | None, type[NativeAdapter], dict[str, Any] | None]:
    """Return where an import's own files are, its adapter, and its config."""
    origin = origin_of(folder)
    if origin is None:
        return None, CustomTransformerAdapter, None
    config = Config.of_folder(origin)
    return origin, adapter_for(config)[0], config.data


def _reference(folder: Path, how: Opening) -> nn.Module | None:
    return open_with_transformers(folder, dtype=how.dtype) if how.reference else None


def _fresh(name: str, how: Opening) -> CustomTransformerAdapter:
    spec = how.settings.adjusted(override(preset(name), how.settings.overrides))
    return build(spec, seed=how.settings.seed, device=how.device, dtype=how.dtype)
