"""`load(path)`: the one door to models on disk, whoever wrote them; `save`, its inverse.

What a folder says decides which adapter opens it. `load_model` is the bare model, for those who
need no more.
"""

from pathlib import Path

import torch
from torch import nn

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.config import Config
from glassformer.adapters.folder.load_weights import filled
from glassformer.adapters.folder.lora import read_tuning, tuned
from glassformer.adapters.folder.origin import (
    find_tokenizer,
    is_native,
    origin_of,
    read_origin,
    read_spec,
)
from glassformer.adapters.folder.weights import FileWeights, folder_weights
from glassformer.adapters.gguf.header import SUFFIX, is_gguf
from glassformer.adapters.gguf.load import open_gguf
from glassformer.adapters.native import (
    CustomTransformerAdapter,
    NativeAdapter,
    TrainingConfig,
    save_model,
)
from glassformer.adapters.registry import adapter_for, adapter_named
from glassformer.adapters.table import identity_plan, make_plan
from glassformer.adapters.wrapped import Backend, WrappedAdapter, open_with_transformers
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.models.build import build
from glassformer.models.model import Model
from glassformer.quant.arrays import restored_model
from glassformer.spec.checks import one_of
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.presets import PRESETS, preset
from glassformer.spec.serialize import override
from glassformer.store.checkpoint import WEIGHTS, verify_folder
from glassformer.store.quantized import is_quantized, load_quantized
from glassformer.store.run_ref import RunRef
from glassformer.store.rundir import RunDirectory


def load(
    model_id: str | Path,
    config: TrainingConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    backend: Backend = "native",
    reference: bool = False,
) -> BaseAdapter:
    """The model of a run (`RUN@120`), a checkpoint, a Hugging Face folder or a GGUF file.

    It is in eval mode.
    `config` brings a training's settings; with one, a preset's name means a fresh model of it.
    `backend="transformers"` lets that library compute; `reference=True` opens the folder with it
    too, to measure parity against. Weights keep the precision they are stored in.
    """
    one_of("backend", backend, ("native", "transformers"))
    settings = config or TrainingConfig()
    dtype = dtype or settings.dtype
    if config is not None and str(model_id) in PRESETS and not Path(model_id).exists():
        adapter: BaseAdapter = _fresh(str(model_id), config, dtype=dtype, device=device)
    else:
        folder = folder_of(model_id)
        if is_gguf(folder) and (reference or backend == "transformers"):
            raise InputError(
                "transformers opens folders here, not GGUF files",
                where=str(folder),
                hint="glass convert FILE DIR --to hf makes one of it",
            )
        if backend == "transformers":
            adapter = _wrapped(folder, dtype=dtype, device=device)
        else:
            adapter = _opened(folder, settings, dtype=dtype, device=device, reference=reference)
    wanted = settings.architecture_type
    if wanted is not None and adapter.get_architecture_type() != wanted:
        adapter_named(wanted)
        raise InputError(
            f"this is a {adapter.get_architecture_type()} model, and {wanted} was asked for",
            where=str(model_id),
        )
    if isinstance(adapter, NativeAdapter):
        settings.freeze(adapter.model)
    return adapter


def load_model(path: str | Path) -> Model:
    """The bare model that `load` puts into an adapter."""
    adapter = load(path)
    assert isinstance(adapter, NativeAdapter)
    return adapter.model


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that a model came with; without one, tokens have no names."""
    found = find_tokenizer(folder_of(path))
    if found is None:
        raise InputError("the model has no tokenizer", where=str(path), hint="give token ids")
    return found


def adapt(module: nn.Module, *, backend: Backend = "native") -> BaseAdapter:
    """A live transformers module: its config and weights taken over, or the module wrapped."""
    one_of("backend", backend, ("native", "transformers"))
    if isinstance(module, Model):
        return CustomTransformerAdapter(module)
    read = Config.of_module(module)
    adapter, family = adapter_for(read)
    if backend == "native":
        return adapter(module)
    return WrappedAdapter(
        module, spec=family.spec_of(read), architecture_type=adapter.architecture_type
    )


def save(model: BaseAdapter | Model, path: str | Path) -> Path:
    """Write a checkpoint folder that `load` opens; one that exists is never overwritten."""
    folder = Path(path)
    if isinstance(model, BaseAdapter):
        model.save_checkpoint(folder)
    else:
        save_model(folder, model)
    return folder


# --- folders ------------------------------------------------------------------------------------


def folder_of(path: str | Path) -> Path:
    """What a path means: a Hugging Face folder, a GGUF file, or the checkpoint of a run."""
    folder = Path(path)
    if is_gguf(folder):
        return folder
    if folder.suffix.lower() == SUFFIX and not folder.exists():
        raise InputError(f"there is no file {folder}")
    described = (folder / "config.json").is_file() and not is_native(folder)
    is_run = bool(RunDirectory(folder).steps())  # which has a config.json too
    return folder if described and not is_run else checkpoint_of(path)


def checkpoint_of(path: str | Path) -> Path:
    """The checkpoint folder that a path means: itself, or a run's best, `RUN@last`, `RUN@120`."""
    ref = RunRef.parse(path)
    folder = ref.folder
    if not folder.exists():
        raise InputError(f"there is no folder {folder}", hint="give a checkpoint or a run")
    if is_native(folder):
        return folder
    if not ref.directory.steps():
        raise FileError(
            "not a glassformer checkpoint, nor a run with one, nor a Hugging Face folder: "
            "MANIFEST.json and config.json are missing",
            where=str(folder),
            hint="glassformer.save(model, folder) writes one",
        )
    return ref.checkpoint()


def _opened(
    folder: Path,
    settings: TrainingConfig,
    *,
    dtype: torch.dtype | None,
    device: str,
    reference: bool,
) -> NativeAdapter:
    if is_gguf(folder):
        return open_gguf(folder, settings, dtype=dtype, device=device)
    place = origin_of(folder)
    kind: type[NativeAdapter] = CustomTransformerAdapter
    config = None
    if place is not None:
        config = Config.of_folder(place)
        kind, family = adapter_for(config)
    if is_native(folder):
        tuning = read_tuning(folder)
        if tuning is not None:
            try:
                base = load(tuning.base)
            except RecursionError as error:
                raise FileError("its base leads back to itself", where=str(folder)) from error
            assert isinstance(base, NativeAdapter)
            base.model = tuned(folder, base.model, tuning).to(device=device, dtype=dtype)
            return base
        if is_quantized(folder):
            return kind(
                restored_model(*load_quantized(folder)).to(device),
                config=None if config is None else config.data,
                origin=folder,
                kept={} if place is None else read_origin(place),
            )
        verify_folder(folder)
        spec = settings.adjusted(read_spec(folder))
        plan = identity_plan(spec)
        weights = FileWeights({WEIGHTS: folder / WEIGHTS}, where=str(folder))
        layout = None
    else:
        assert config is not None
        spec = settings.adjusted(family.spec_of(config))
        plan = make_plan(family.table, spec)
        weights = folder_weights(folder)
        layout = weights.files
    model, report = filled(spec, plan, weights, dtype=dtype, device=device)
    return kind(
        model,
        config=None if config is None else config.data,
        origin=folder,
        kept={} if place is None else read_origin(place, layout),
        report=report,
        reference=open_with_transformers(folder, dtype=dtype) if reference else None,
    )


def _wrapped(folder: Path, *, dtype: torch.dtype | None, device: str) -> WrappedAdapter:
    config = Config.of_folder(folder)
    adapter, family = adapter_for(config)
    spec = family.spec_of(config)
    folder_weights(folder)  # its limits stand before anyone else opens the files
    return WrappedAdapter(
        open_with_transformers(folder, dtype=dtype).to(device),
        spec=spec,
        architecture_type=adapter.architecture_type,
        origin=folder,
    )


def _fresh(
    name: str, config: TrainingConfig, *, dtype: torch.dtype | None, device: str
) -> CustomTransformerAdapter:
    spec = config.adjusted(override(preset(name), config.overrides))
    generator = torch.Generator().manual_seed(config.seed)
    model = build(spec, generator=generator, device=device)
    return CustomTransformerAdapter(model if dtype is None else model.to(dtype))
