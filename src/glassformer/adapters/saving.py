"""Model folders of ours, quantized or not: one way to write them."""

from collections.abc import Mapping
from pathlib import Path

from glassformer.models.model import Model
from glassformer.models.state import weights_of
from glassformer.quant.arrays import quantized_arrays
from glassformer.quant.report import is_model_quantized
from glassformer.store.checkpoint import save_checkpoint
from glassformer.store.quantized import save_quantized


def save_model(folder: Path, model: Model, *, files: Mapping[str, bytes] | None = None) -> None:
    """Write a checkpoint folder that `load` opens; one that exists is never overwritten."""
    if is_model_quantized(model):
        quantization, arrays = quantized_arrays(model)
        save_quantized(folder, model.spec, quantization, arrays, files=files)
    else:
        save_checkpoint(folder, model.spec, weights_of(model), files=files)
