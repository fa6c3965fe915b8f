"""Adapters around our own models: any architecture that a `ModelSpec` can express.

A Hugging Face config becomes a spec and its weights become our parameters, so that verify, trace,
caches, beams, quantization and training apply unchanged. `NativeAdapter` is their base; subclasses
add a name and the families that they read. `CustomTransformerAdapter` holds a model of any spec:
what `gf.build` returns, our own checkpoints, runs and presets. `save_model` writes their folders.
`TrainingConfig` holds the settings that a training brings to a model when it is loaded.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from glassformer.adapters.base import BaseAdapter, valid_of
from glassformer.adapters.config import Config
from glassformer.adapters.executors import fastest_stepper
from glassformer.adapters.folder.files import ORIGIN
from glassformer.adapters.folder.fill import ModuleWeights, filled, refill
from glassformer.adapters.folder.origin import is_native, read_spec
from glassformer.adapters.folder.scaled import folder_weights
from glassformer.adapters.folder.weights import ConversionReport, FileWeights, Weights
from glassformer.adapters.table import Family, identity_plan
from glassformer.data.batch import Batch
from glassformer.data.tokenizers.own import tokenizer_files
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.native.stepper import NativeStepper, unavailable
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.turns import Turns
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.models.stepping import Stepper
from glassformer.models.weights import weights_of
from glassformer.nn.cache import Cache
from glassformer.nn.taps import Taps
from glassformer.quant.contents import is_model_quantized, quantized_arrays
from glassformer.spec.checks import at_least, probability, spec
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.init import NormalInit
from glassformer.spec.manifest import stored
from glassformer.spec.model import Dropout, ModelSpec
from glassformer.spec.serialize import to_dict
from glassformer.store.checkpoint import WEIGHTS, save_checkpoint, save_quantized, verify_folder

Precision = Literal["float32", "float64", "bfloat16", "float16"]


@spec
class TrainingConfig:
    """Settings of a training; None keeps what the files say.

    architecture_type: the adapter that is expected. dropout: one rate everywhere. precision: of the
    weights. frozen: patterns of parameters without gradients (`embed.*`). overrides and seed: for
    a preset's name, which means a new model: `decoder.layers.count=2`.
    """

    architecture_type: str | None = None
    dropout: float | None = None
    precision: Precision | None = None
    frozen: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        if self.dropout is not None:
            probability("dropout", self.dropout)

    @property
    def dtype(self) -> torch.dtype | None:
        """The precision as a torch dtype."""
        return None if self.precision is None else getattr(torch, self.precision)

    def adjusted(self, model: ModelSpec) -> ModelSpec:
        """Return the spec with this training's dropout."""
        if self.dropout is None:
            return model
        rates = Dropout.from_number(self.dropout)
        encoder = model.encoder
        return replace(
            model,
            decoder=replace(model.decoder, dropout=rates),
            encoder=None if encoder is None else replace(encoder, dropout=rates),
        )

    def freeze(self, model: Model) -> None:
        """Freeze the parameters that match; a pattern that matches none is refused."""
        names = stored(model.spec)
        own = dict(model.named_parameters())
        for pattern in self.frozen:
            found = [name for name in names if fnmatchcase(name, pattern)]
            if not found:
                raise InputError(
                    f"no parameter is named '{pattern}'",
                    hint=f"names look like {next(iter(names))}",
                )
            for name in found:
                own[name].requires_grad_(False)


def save_model(folder: Path, model: Model, *, files: Mapping[str, bytes] | None = None) -> None:
    """Write a checkpoint folder, quantized or not, that `load` opens; never overwrite one."""
    if is_model_quantized(model):
        quantization, arrays = quantized_arrays(model)
        save_quantized(folder, model.spec, quantization, arrays, files=files)
    else:
        save_checkpoint(folder, model.spec, weights_of(model), files=files)


def _inference(spec: ModelSpec) -> ModelSpec:
    """Return the spec without what inference does not depend on: initialisation and dropout."""
    encoder = spec.encoder
    return replace(
        spec,
        decoder=replace(spec.decoder, dropout=Dropout()),
        encoder=None if encoder is None else replace(encoder, dropout=Dropout()),
        init=NormalInit(),
    )


class NativeAdapter(BaseAdapter):
    """One of our models behind the common contract.

    `model` is one of ours (bare, or in another adapter), or a live transformers module: then its
    config and weights are converted, and the module is kept as `reference`. `kept` holds the small
    files of an imported model, by name.
    """

    families: ClassVar[tuple[Family, ...]] = ()

    def __init__(
        self,
        model: nn.Module,
        *,
        config: dict[str, Any] | None = None,
        origin: Path | None = None,
        tokenizer: Tokenizer | None = None,
        reference: nn.Module | None = None,
        kept: dict[str, bytes] | None = None,
        report: ConversionReport | None = None,
    ) -> None:
        if isinstance(model, NativeAdapter):
            model = model.model
        if not isinstance(model, Model):
            reference, read = model, Config.of_module(model)
            model, report, config = *self._taken_over(reference, read), read.data
            kept = {"config.json": (json.dumps(config, indent=2, default=str) + "\n").encode()}
        super().__init__(
            model, spec=model.spec, origin=origin, tokenizer=tokenizer, reference=reference
        )
        self.imported_config = config
        self.kept = kept or {}
        self.report = report or ConversionReport(loaded=tuple(stored(model.spec)))

    @classmethod
    def _taken_over(cls, module: nn.Module, read: Config) -> tuple[Model, ConversionReport]:
        family = cls.family_of(read)
        spec = family.spec_of(read)
        return filled(spec, family.plan(spec, live=True), ModuleWeights(module, read.where))

    @classmethod
    def family_of(cls, config: Config) -> Family:
        """The family of a config's model_type among this adapter's."""
        kind, family = config.any("model_type", default=""), Family.of(cls.families, config)
        if family is not None:
            return family
        known = ", ".join(family.model_type for family in cls.families)
        raise InputError(
            f"{cls.__name__} does not read model_type '{str(kind)[:60]}'",
            where=config.where,
            hint=f"it reads: {known}" if known else "it reads glassformer's own checkpoints",
        )

    @property
    def model(self) -> Model:
        """Our model, as training engines, verify, quantization and the lens take it."""
        model = super().model
        assert isinstance(model, Model)
        return model

    @property
    def spec(self) -> ModelSpec:
        """The spec of our model, which quantization may have untied."""
        return self.model.spec

    @spec.setter
    def spec(self, spec: ModelSpec) -> None:
        """Set the spec of our model."""
        self.model.spec = spec

    def with_model(self, model: Model) -> Self:
        """Return a copy of this adapter that holds another model, for the same text."""
        twin = copy.copy(self)
        twin._hold(model)
        return twin

    # --- logits -----------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: "Tensor | np.ndarray | Batch | Inputs",
        attention_mask: Tensor | None = None,
        *,
        valid: Tensor | None = None,
        head: str | None = None,
        cache: Cache | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Return one head's logits: (B, T, V), or (B, V) of an answer head.

        Without `head` it is the one that predicts the next token, or else the first. The masks are
        (B, T), True or 1 for real tokens. A Batch or Inputs brings its own masks; an
        encoder-decoder needs one, for its source. With a cache, the tokens continue it.
        """
        inputs: Batch | Inputs
        if isinstance(input_ids, Batch | Inputs):
            if attention_mask is not None or valid is not None:
                raise InputError("a Batch or Inputs has its own mask", hint="leave out the other")
            inputs = input_ids
        else:
            if self.spec.encoder is not None:
                raise InputError(
                    "an encoder-decoder needs a source beside its tokens",
                    hint="give a Batch with `source`, or Inputs(tokens, source_BS=source)",
                )
            tokens = torch.as_tensor(input_ids)
            inputs = Inputs(tokens, valid_of(tokens, attention_mask, valid))
        answers = self.forward_heads(inputs, cache=cache, taps=taps)
        if head is None:
            head = "next" if "next" in answers else next(iter(answers))
        if head not in answers:
            raise InputError(f"no head '{head}'", hint=nearest(head, answers))
        return answers[head]

    def forward_heads(
        self,
        inputs: "Batch | Inputs | Tensor | np.ndarray",
        *,
        cache: Cache | None = None,
        taps: Taps | None = None,
    ) -> dict[str, Tensor]:
        """Return the logits of every head by its name, as the model inside gives them."""
        heads: dict[str, Tensor] = self.model(inputs, cache=cache, taps=taps)
        return heads

    def hidden_states(self, inputs: Inputs) -> Tensor:
        """Return the states (B, T, D) after the last norm."""
        return self.model.hidden(self.model.inputs(inputs))

    # --- files ------------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Return config.json of an imported model as it came, or our spec as plain data."""
        config = self.imported_config
        return to_dict(self.spec) if config is None else dict(config)

    def save_checkpoint(self, path: str | Path) -> None:
        """Write a native checkpoint; the files of an imported model go to `origin/` unchanged."""
        save_model(Path(path), self.model, files=self.files())

    def files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint beside spec and weights: tokenizer, imported files."""
        if self.kept:
            return {f"{ORIGIN}/{name}": data for name, data in self.kept.items()}
        tokenizer = self.get_tokenizer()
        return {} if tokenizer is None else tokenizer_files(tokenizer)

    def load_checkpoint(self, path: str | Path) -> None:
        """Copy weights from a checkpoint or a Hugging Face folder of the same architecture."""
        folder = Path(path)
        weights: Weights
        if is_native(folder):
            verify_folder(folder)
            plan = identity_plan(self.spec)
            weights = FileWeights({WEIGHTS: folder / WEIGHTS}, where=str(folder))
            found = read_spec(folder)
        else:
            read = Config.of_folder(folder)
            family = self.family_of(read)
            found = family.spec_of(read)
            weights = folder_weights(folder, quantization=read.data.get("quantization_config"))
            plan = family.plan(found)
        if _inference(found) != _inference(self.spec):
            raise InputError(
                "the checkpoint is of another architecture",
                where=str(folder),
                hint="glassformer.load(folder) opens it as a model of its own",
            )
        self.report = refill(self.model, plan, weights)
        self.origin = folder

    # --- what decoding and tracing need -----------------------------------------------------------

    def stepper(self) -> Stepper:
        """Return the fastest stepper with a cache."""
        return fastest_stepper(self.model)

    def chat_stepper(
        self, *, prompt_cache: Path | None = None, kv_cache: KVCache = "float"
    ) -> Stepper:
        """Return a stepper that does not read again what a turn shares with the last one."""
        reason = unavailable(self.model, kv_cache=kv_cache)
        if reason and prompt_cache is not None:
            raise InputError(f"prompts are kept by the native step, and there is none: {reason}")
        if reason:
            return Turns(TorchStepper(self.model, cache="growing", kv_cache=kv_cache))
        return Turns(NativeStepper(self.model, prompt_cache=prompt_cache, kv_cache=kv_cache))

    @property
    def scoped_taps(self) -> Taps | None:
        """The taps of the model inside; `gf.trace` sets them for the time of its block."""
        return self.model.scoped_taps

    @scoped_taps.setter
    def scoped_taps(self, taps: Taps | None) -> None:
        """Set the taps of the model inside."""
        self.model.scoped_taps = taps


class CustomTransformerAdapter(NativeAdapter):
    """A model of any `ModelSpec`, without a Hugging Face family."""

    architecture_type = "custom-transformer"
