"""Model folders of ours, quantized or not: one way to write them.

`NativeAdapter`: any architecture that a `ModelSpec` can say, computed by our own parts.

A Hugging Face config becomes a spec and its weights our parameters, so that verify, trace, caches,
beams, quantization and training apply unchanged. Subclasses add a name and their families.

`CustomTransformerAdapter`: our own checkpoints, runs and presets.

`TrainingConfig`: what a training brings to a model when it is loaded, as source 002 has it.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from glassformer.adapters.base import BaseAdapter, valid_of
from glassformer.adapters.config import Config
from glassformer.adapters.family import Family
from glassformer.adapters.folder.files import ORIGIN
from glassformer.adapters.folder.load_weights import ConversionReport, filled, refill
from glassformer.adapters.folder.origin import is_native, read_spec
from glassformer.adapters.folder.weights import FileWeights, ModuleWeights, Weights, folder_weights
from glassformer.adapters.table import identity_plan, make_plan
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.stepper import TorchStepper
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.models.state import weights_of
from glassformer.nn.taps import Taps
from glassformer.quant.arrays import quantized_arrays
from glassformer.quant.status import is_model_quantized
from glassformer.spec.checks import at_least, one_of, probability, spec
from glassformer.spec.errors import InputError
from glassformer.spec.init import NormalInit
from glassformer.spec.manifest import stored
from glassformer.spec.model import Dropout, ModelSpec
from glassformer.spec.serialize import to_dict
from glassformer.store.checkpoint import WEIGHTS, save_checkpoint, verify_folder
from glassformer.store.quantized import save_quantized


def save_model(folder: Path, model: Model, *, files: Mapping[str, bytes] | None = None) -> None:
    """Write a checkpoint folder that `load` opens; one that exists is never overwritten."""
    if is_model_quantized(model):
        quantization, arrays = quantized_arrays(model)
        save_quantized(folder, model.spec, quantization, arrays, files=files)
    else:
        save_checkpoint(folder, model.spec, weights_of(model), files=files)


# B batch, T length, V vocab


def _computed(spec: ModelSpec) -> ModelSpec:
    """What a spec computes in the end: not how it was drawn, nor its dropout in training."""
    encoder = spec.encoder
    return replace(
        spec,
        decoder=replace(spec.decoder, dropout=Dropout()),
        encoder=None if encoder is None else replace(encoder, dropout=Dropout()),
        init=NormalInit(),
    )


class NativeAdapter(BaseAdapter):
    """Our `Model`, whatever it was before.

    `model` is one of ours, or a live transformers module: then its config and weights are taken
    over, and it stays as `reference`. `kept` holds the small files of an import, by name.
    """

    model: Model
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
        if not isinstance(model, Model):
            reference, read = model, Config.of_module(model)
            model, report, config = *self._taken_over(reference, read), read.data
            kept = {"config.json": (json.dumps(config, indent=2, default=str) + "\n").encode()}
        super().__init__(
            model, spec=model.spec, origin=origin, tokenizer=tokenizer, reference=reference
        )
        self.config = config
        self.kept = kept or {}
        self.report = report or ConversionReport(loaded=tuple(stored(model.spec)))

    @classmethod
    def _taken_over(cls, module: nn.Module, read: Config) -> tuple[Model, ConversionReport]:
        family = cls.family_of(read)
        spec = family.spec_of(read)
        return filled(spec, make_plan(family.table, spec), ModuleWeights(module, read.where))

    @classmethod
    def family_of(cls, config: Config) -> Family:
        """The family of a config's model_type among this adapter's."""
        kind = config.any("model_type", default="")
        for family in cls.families:
            if family.model_type == kind:
                return family
        known = ", ".join(family.model_type for family in cls.families)
        raise InputError(
            f"{cls.__name__} does not read model_type '{str(kind)[:60]}'",
            where=config.where,
            hint=f"it reads: {known}" if known else "it reads glassformer's own checkpoints",
        )

    # --- source 002's methods ---------------------------------------------------------------------

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the next token; a model without that head gives its first one's."""
        if self.spec.encoder is not None:
            raise InputError(
                "an encoder-decoder needs a source beside its tokens",
                hint="call adapter.model with a Batch or Inputs",
            )
        inputs = Inputs(input_ids, valid_of(input_ids, attention_mask))
        answers = self.model(inputs)
        logits: Tensor = answers.get("next", next(iter(answers.values())))
        return logits

    def get_config(self) -> dict[str, Any]:
        """config.json of an imported model as it came, else our spec as plain data."""
        return to_dict(self.spec) if self.config is None else dict(self.config)

    def save_checkpoint(self, path: str | Path) -> None:
        """A native checkpoint: an import's own files lie in `origin/`, as they came."""
        save_model(Path(path), self.model, files=self.files())

    def files(self) -> dict[str, bytes]:
        """What goes into a checkpoint beside spec and weights: a tokenizer, an import's files."""
        if self.kept:
            return {f"{ORIGIN}/{name}": data for name, data in self.kept.items()}
        tokenizer = self.get_tokenizer()
        return {} if tokenizer is None else {"tokenizer.json": tokenizer.to_json().encode()}

    def load_checkpoint(self, path: str | Path) -> None:
        """From a checkpoint of ours or a Hugging Face folder of the same architecture."""
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
            found, weights = family.spec_of(read), folder_weights(folder)
            plan = make_plan(family.table, found)
        if _computed(found) != _computed(self.spec):
            raise InputError(
                "the checkpoint is of another architecture",
                where=str(folder),
                hint="glassformer.load(folder) opens it as what it is",
            )
        self.report = refill(self.model, plan, weights)
        self.origin = folder

    # --- what decoding and tracing need -----------------------------------------------------------

    def stepper(self) -> TorchStepper:
        """With a cache."""
        return TorchStepper(self.model)

    @property
    def scoped_taps(self) -> Taps | None:
        """For `glassformer.trace`: taps are the model's."""
        return self.model.scoped_taps

    @scoped_taps.setter
    def scoped_taps(self, taps: Taps | None) -> None:
        """Set by `trace` for the time of its block."""
        self.model.scoped_taps = taps


class CustomTransformerAdapter(NativeAdapter):
    """Any `Model` of ours: the five presets, and whatever else a `ModelSpec` says."""

    architecture_type = "custom-transformer"


Precision = Literal["float32", "float64", "bfloat16", "float16"]


@spec
class TrainingConfig:
    """Settings that the files do not decide; None leaves what they say.

    architecture_type: which adapter it must be. dropout: one rate in every place. precision: of the
    weights. frozen: patterns of parameters that stay as they are (`embed.*`). overrides and seed:
    for a preset, whose weights are drawn: `decoder.layers.count=2`.
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
        if self.precision is not None:
            one_of("precision", self.precision, get_args(Precision))

    @property
    def dtype(self) -> torch.dtype | None:
        """The precision as torch's."""
        return None if self.precision is None else getattr(torch, self.precision)

    def adjusted(self, model: ModelSpec) -> ModelSpec:
        """The spec with this training's dropout."""
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
        """Switch off the gradients of what is frozen; a pattern that names nothing is refused."""
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
