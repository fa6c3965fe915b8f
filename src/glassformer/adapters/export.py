"""`gf.export`: a model in another program's format."""

from pathlib import Path
from typing import Literal, get_args

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.folder.export_hf import Exported, export_hf
from glassformer.adapters.gguf.export_gguf import DTYPES, export_gguf
from glassformer.adapters.load import adapt, save
from glassformer.adapters.native import NativeAdapter
from glassformer.models.model import Model
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError

Format = Literal["hf", "native", "gguf"]


def export(
    model: BaseAdapter | Model, path: str | Path, *, to: Format = "hf", dtype: str | None = None
) -> Exported:
    """Write a Hugging Face folder, a GGUF file, or a checkpoint of ours; never overwrite one.

    `dtype` is GGUF's: f32, f16 or q8_0. What could not be written is in the result's notes.
    """
    one_of("to", to, get_args(Format))
    if dtype is not None:
        if to != "gguf":
            raise InputError(f"a dtype does not go with {to}", hint="it is for gguf")
        one_of("dtype", dtype, DTYPES)
    adapter = adapt(model)
    if not isinstance(adapter, NativeAdapter):
        raise InputError(
            f"{type(adapter.model).__name__} is written by its own library",
            hint='model.save(folder), or load it with backend="native"',
        )
    match to:
        case "hf":
            return export_hf(adapter, path)
        case "gguf":
            return export_gguf(adapter, path, dtype=dtype or "f32")
        case "native":
            return Exported(save(adapter, path), adapter.get_architecture_type())
