"""`gf.inspect`, `gf.patch_activations`, `gf.quantize`, `gf.export`: the lens, rounding and other
formats for any model, built or loaded, given texts or token ids."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from glassformer.adapters.folder.export_hf import Exported, export_hf
from glassformer.adapters.gguf.export_gguf import DTYPES, export_gguf
from glassformer.adapters.load import AnyModel, adapt, save
from glassformer.adapters.native import NativeAdapter
from glassformer.data.batch import Batch
from glassformer.lens.capture import tapped_model
from glassformer.lens.heads import HeadName
from glassformer.lens.inspection import Inspection
from glassformer.lens.measure import patching
from glassformer.lens.measure.patching import Metric, Patching, Run, Sites
from glassformer.lens.show.text import Names
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.quant.convert import quantize_model
from glassformer.quant.smooth import quantize_on
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError
from glassformer.spec.quantization import Indivisible, QuantSpec, Tied, quant_spec
from glassformer.spec.schemes import Method, Scheme

Format = Literal["hf", "native", "gguf"]


def export(
    model: AnyModel, path: str | Path, *, to: Format = "hf", dtype: str | None = None
) -> Exported:
    """Write a Hugging Face folder, a GGUF file, or a checkpoint of ours; never overwrite one.

    `dtype` is GGUF's: f32, f16, q8_0, q4_0 or q4_k. What could not be written is in the notes of
    the result.
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


Tokens = Batch | Inputs | Tensor | np.ndarray | Sequence[int]


def inspect(
    model: AnyModel,
    text: str | Tokens,
    *,
    target: str | None = None,
    targets: int | Sequence[int | None] | np.ndarray | Tensor | None = None,
    ablate: Sequence[str | HeadName] = (),
    head: str | None = None,
    words: Sequence[str] | None = None,
    source_words: Sequence[str] | None = None,
    names: Names | Sequence[str] | None = None,
) -> Inspection:
    """Run one sequence and keep everything: attention, logit lens, norms, losses.

    A text: `target` is what should follow; the loss is then of its tokens alone, else of the
    text's own. Token ids, Inputs, or a Batch of one row: `targets` are ids by position, `head` is
    the output head to read; `words`, `source_words` and `names` label the tokens. `ablate`
    switches attention heads off.
    """
    return adapt(model).inspect(
        text,
        target=target,
        targets=targets,
        ablate=ablate,
        head=head,
        words=words,
        source_words=source_words,
        names=names,
    )


def patch_activations(
    model: AnyModel,
    clean: str | Run,
    corrupt: str | Run,
    *,
    sites: Sites = "residual",
    kind: str = "self",
    metric: Metric = "logit_difference",
    answers: tuple[int, int] | None = None,
    position: int | None = None,
    head: str | None = None,
) -> Patching:
    """Measure how much of the clean prediction each activation restores in the corrupt run.

    Activations of the run on `clean` replace those of the run on `corrupt`, one site at a time:
    the residual stream by layer and position, or the output of each attention head. `answers`: ids
    of the right and the wrong answer; without them, what both runs predict at `position`.
    """
    adapter = adapt(model)
    pair = [adapter.inspect(one) if isinstance(one, str) else one for one in (clean, corrupt)]
    return patching.patch_activations(
        tapped_model(adapter),
        *pair,
        sites=sites,
        kind=kind,
        metric=metric,
        answers=answers,
        position=position,
        head=head,
    )


M = TypeVar("M", bound=Model | NativeAdapter)
Bare = TypeVar("Bare", bound=Model)


def quantize(
    model: M,
    *,
    scheme: str | Scheme | None = None,
    bits: float | None = None,
    group: int | None = None,
    symmetric: bool | None = None,
    method: Method | None = None,
    head_bits: int | None = None,
    tied: Tied = "share",
    indivisible: Indivisible = "auto",
    calibrate: "list[torch.Tensor] | None" = None,
    smooth: bool = True,
    select: Callable[[str, nn.Module], bool] | None = None,
    backend: str = "auto",
) -> M:
    """Return a quantized copy; the model itself stays as it is.

    `scheme` is a name, such as "int4", or a value, such as `Int4(group=32)`; `bits` is 8 or 4
    instead of it, or a mean between them (4.5: layers that lose most get 8), which needs
    `calibrate`. `calibrate`: batches of tokens that are like those it will read. With them it is
    done as `glass quantize` does: outliers are smoothed (`smooth=False`: not), and grids are
    searched for by the sizes of inputs (`mse`, the default of 8 bits) or by GPTQ (of 4 bits), which
    takes several times as long. Without, only weights are looked at.
    """
    spec = quant_spec(
        scheme=scheme,
        bits=bits,
        group=group,
        symmetric=symmetric,
        method=method,
        head_bits=head_bits,
        tied=tied,
        indivisible=indivisible,
    )
    if method is None and calibrate is not None:
        spec = replace(spec, method=spec.scheme.calibrated_method)
    if isinstance(model, Model):
        return _quantized(copy.deepcopy(model), spec, calibrate, smooth, select, backend)
    adapter = adapt(model)
    if not isinstance(adapter, NativeAdapter):
        raise InputError(
            f"{type(adapter.model).__name__} is another library's module: layers of ours are "
            "quantized",
            hint='load it with backend="native", where an adapter reads it',
        )
    own = copy.deepcopy(adapter.model)
    made = _quantized(own, spec, calibrate, smooth, select, backend)
    return cast(M, adapter.with_model(made))


@torch.no_grad()
def _quantized(
    model: Bare,
    spec: QuantSpec,
    calibrate: "list[torch.Tensor] | None",
    smooth: bool,
    select: Callable[[str, nn.Module], bool] | None,
    backend: str,
) -> Bare:
    if calibrate is None:
        return quantize_model(model, spec, select=select, backend=backend)
    return quantize_on(model, calibrate, spec, select=select, backend=backend, smoothing=smooth)[0]
