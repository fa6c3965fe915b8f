"""`SentenceModel`: what a folder of sentence-transformers does around its transformer.

`modules.json` lists the modules in order. The first one cuts texts (`max_seq_length`) and may write
them in lower case or begin them with a prompt; `Pooling` makes one vector of the hidden states;
`Dense`, `LayerNorm` and `Normalize` work on that vector. All of these are computed; another module,
or a setting that would change the vector and is not known here, raises an error that names it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from glassformer.adapters.folder.files import find_sidecar, read_sidecar
from glassformer.adapters.folder.sentence_files import (
    MODULES,
    PROMPTS,
    SETTINGS,
    WEIGHTS,
    modules_of,
)
from glassformer.adapters.folder.weights import FileWeights
from glassformer.adapters.gguf.header import is_gguf
from glassformer.models.weights import tensor_view
from glassformer.nn.heads import read_out
from glassformer.spec.errors import FileError, InputError

# B batch, T length, D d_model

#: Where a vector is read: our words, and those of sentence-transformers.
Pooling = Literal["mean", "first", "last", "max", "mean_sqrt", "weighted_mean"]
POOLINGS: dict[str, Pooling] = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
#: The older spelling, a switch for each, in the order in which vectors are put side by side.
SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": functional.relu,
    "torch.nn.modules.activation.GELU": functional.gelu,
    "torch.nn.modules.activation.SiLU": functional.silu,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
}
#: Settings of the first module that change no vector as it is read here.
HARMLESS = frozenset(("modality_config", "unpad_inputs", "query_length", "document_length"))
IDLE = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
#: The least denominator, as sentence-transformers has it.
LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer on the vector, its activation, and a residual path where there is one."""

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]
    residual: Tensor | Literal["same"] | None = None

    def __call__(self, x_BD: Tensor) -> Tensor:
        out = self.activation(functional.linear(x_BD, self.weight, self.bias))
        match self.residual:
            case None:
                return out
            case "same":
                return out + x_BD
            case weight:
                return out + functional.linear(x_BD, weight)

    def width(self) -> int:
        """Return the length of its vectors."""
        return len(self.weight)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation of the vector."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x_BD: Tensor) -> Tensor:
        return functional.layer_norm(x_BD, self.weight.shape, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Normalize:
    """The vector scaled to length 1."""

    def __call__(self, x_BD: Tensor) -> Tensor:
        return functional.normalize(x_BD, dim=-1)


Step = Dense | LayerNorm | Normalize


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """What is done to a text before the transformer, and to its hidden states after it.

    `poolings` are computed side by side; None: what is usual for the model. `max_length` counts
    tokens with the marks around a text. `prompt` begins every text, and counts for the vector
    unless `pools_prompt` is off.
    """

    max_length: int | None = None
    lower_case: bool = False
    prompt: str = ""
    pools_prompt: bool = True
    poolings: tuple[Pooling, ...] | None = None
    steps: tuple[Step, ...] = ()

    def with_pooling(self, pooling: str | None) -> "SentenceModel":
        """Return the same with another pooling; None changes nothing."""
        if pooling is None:
            return self
        for known in get_args(Pooling):
            if pooling == known:
                return replace(self, poolings=(known,))
        raise InputError(
            f"pooling {pooling!r} is not one of {', '.join(get_args(Pooling))}",
            hint="leave it out for what the model's folder says",
        )

    def vectors(
        self, x_BTD: Tensor, valid_BT: Tensor, *, prompt_tokens: int, normalize: bool
    ) -> Tensor:
        """Return a vector of each row; without `normalize` they keep their lengths at the end."""
        x_BTD = x_BTD.float()
        parts = [
            pooled(x_BTD, valid_BT, pooling=one, skipped=0 if self.pools_prompt else prompt_tokens)
            for one in self.poolings or ("mean",)
        ]
        vector = torch.cat(parts, -1)
        last = len(self.steps)
        while last and isinstance(self.steps[last - 1], Normalize):
            last -= 1
        for step in self.steps[:last]:
            wanted = step.weight.shape[-1] if isinstance(step, Dense | LayerNorm) else None
            if wanted not in (None, vector.shape[-1]):
                raise InputError(
                    f"the folder's {type(step).__name__} reads {wanted} numbers, and pooling "
                    f"makes {vector.shape[-1]}",
                    hint="leave `pooling` out for what the folder says",
                )
            vector = step(vector)
        return Normalize()(vector) if normalize else vector

    def width(self, d_model: int) -> int:
        """Return the length of the vectors of a model of this width."""
        dense = [step.width() for step in self.steps if isinstance(step, Dense)]
        return dense[-1] if dense else d_model * len(self.poolings or ("mean",))


def pooled(x_BTD: Tensor, valid_BT: Tensor, *, pooling: Pooling, skipped: int = 0) -> Tensor:
    """Return one vector of each row, not counting its first `skipped` real tokens."""
    place_BT = valid_BT.cumsum(1)
    seen_BT = valid_BT & (place_BT > skipped)
    match pooling:
        case "mean" | "first" | "last":
            return read_out(x_BTD, seen_BT, readout=pooling)
        case "max":
            return x_BTD.masked_fill(~seen_BT[..., None], -torch.inf).amax(1)
        case "mean_sqrt":
            many_B1 = seen_BT.sum(1, keepdim=True).to(x_BTD.dtype)
            return (x_BTD * seen_BT[..., None]).sum(1) / many_B1.clamp(min=LEAST).sqrt()
        case "weighted_mean":  # by the position in the row, 1 for the first real token
            weight_BT = (place_BT * seen_BT).to(x_BTD.dtype)
            total_B1 = weight_BT.sum(1, keepdim=True).clamp(min=LEAST)
            return (x_BTD * weight_BT[..., None]).sum(1) / total_B1


# --- reading a folder -----------------------------------------------------------------------------


def read_sentence_model(folder: Path) -> SentenceModel:
    """Read what a folder does around its transformer; without such files, nothing."""
    if is_gguf(folder) or not folder.is_dir():
        return SentenceModel()
    found = _settings(folder)
    for path, kind in modules_of(folder):
        match kind:
            case "Transformer":
                if path:
                    raise _refused(folder, f"its Transformer is in the folder '{path}'")
            case "Pooling":
                found = _with_pooling(found, folder, path)
            case "Normalize":
                _only(folder, path, ("module_input_name", "module_output_name"))
                found = replace(found, steps=(*found.steps, Normalize()))
            case "Dense":
                found = replace(found, steps=(*found.steps, _dense(folder, path)))
            case "LayerNorm":
                found = replace(found, steps=(*found.steps, _layer_norm(folder, path)))
            case "Dropout":
                pass  # it does nothing outside training
            case _:
                raise _refused(folder, f"{MODULES} has the module '{kind[:60]}'")
    return found


def _refused(folder: Path, what: str) -> FileError:
    return FileError(
        f"{what}, which is not computed here",
        where=str(folder),
        hint="computed are Transformer, Pooling, Dense, LayerNorm and Normalize, as "
        "sentence-transformers defines them",
    )


def _config(folder: Path, path: str) -> dict[str, Any]:
    return read_sidecar(folder, f"{path}/config.json" if path else "config.json")


def _settings(folder: Path) -> SentenceModel:
    """Read the settings of the first module, and the prompt that begins every text."""
    name = next((name for name in SETTINGS if find_sidecar(folder, name)), SETTINGS[0])
    given = read_sidecar(folder, name)
    limit, lower = given.pop("max_seq_length", None), given.pop("do_lower_case", None)
    if limit is None:  # then the tokenizer's own counts, which is a huge number for "no limit"
        limit = read_sidecar(folder, "tokenizer_config.json").get("model_max_length")
        limit = limit if type(limit) is int and 0 < limit < 2**31 else None
    if limit is not None and not (type(limit) is int and 0 < limit < 2**31):
        raise FileError(f"{name}: max_seq_length is {str(limit)[:40]}", where=str(folder))
    if lower not in (None, True, False):
        raise FileError(f"{name}: do_lower_case is {str(lower)[:40]}", where=str(folder))
    odd = {key: value for key, value in given.items() if value and key not in HARMLESS}
    for key, value in odd.items():
        if value != IDLE.get(key):
            raise _refused(folder, f"{name} sets '{key[:60]}' to {json.dumps(value)[:60]}")
    return SentenceModel(max_length=limit, lower_case=bool(lower), prompt=_prompt(folder))


def _prompt(folder: Path) -> str:
    given = read_sidecar(folder, PROMPTS)
    chosen, prompts = given.get("default_prompt_name"), given.get("prompts") or {}
    if chosen is None:
        return ""
    text = prompts.get(chosen) if isinstance(prompts, dict) and isinstance(chosen, str) else None
    if not isinstance(text, str):
        raise FileError(f"{PROMPTS} has no prompt '{str(chosen)[:60]}'", where=str(folder))
    return text


def _with_pooling(found: SentenceModel, folder: Path, path: str) -> SentenceModel:
    given = _config(folder, path)
    modes = given.get("pooling_mode")
    if modes is None:
        known = [mode for key, mode in SWITCHES.items() if given.get(key)]
        odd = [key for key in given if key.startswith("pooling_mode_") and key not in SWITCHES]
        modes = [*known, *(key for key in odd if given[key])] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not all(isinstance(m, str) and m in POOLINGS for m in modes):
        raise _refused(folder, f"{path}/config.json reads vectors by {str(modes)[:80]}")
    return replace(
        found,
        poolings=tuple(POOLINGS[mode] for mode in modes),
        pools_prompt=bool(given.get("include_prompt", True)),
    )


def _only(folder: Path, path: str, keys: Sequence[str]) -> Mapping[str, Any]:
    """Return a module's settings; it must read and write the vector of the sentence."""
    given = _config(folder, path)
    for key in ("module_input_name", "module_output_name"):
        if given.get(key) not in (None, "sentence_embedding"):
            raise _refused(folder, f"{path} sets '{key}' to {str(given[key])[:60]}")
    odd = next((key for key in given if key not in keys), None)
    if odd is not None:
        raise _refused(folder, f"{path}/config.json sets '{odd[:60]}'")
    return given


def _tensors(folder: Path, path: str) -> dict[str, Tensor]:
    place = find_sidecar(folder, f"{path}/{WEIGHTS}")
    if place is None:
        raise FileError(
            f"{path} has no {WEIGHTS}; its weights are not read from pickled files",
            where=str(folder),
            hint="sentence-transformers' save_pretrained writes safetensors",
        )
    about = place.stat()
    return _read_tensors(place, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=8)
def _read_tensors(place: Path, _changed: int, _size: int) -> dict[str, Tensor]:
    """Read a module's weights; a file that has not changed since is not read again."""
    weights = FileWeights({WEIGHTS: place}, where=str(place))
    return {name: tensor_view(weights.read(name)).float().clone() for name in weights.shapes}


def _dense(folder: Path, path: str) -> Dense:
    keys = ("in_features", "out_features", "bias", "activation_function", "use_residual")
    given = _only(folder, path, (*keys, "module_input_name", "module_output_name"))
    named = given.get("activation_function", "torch.nn.modules.activation.Tanh")
    named = named or "torch.nn.modules.linear.Identity"
    if named not in ACTIVATIONS:
        raise _refused(folder, f"{path} has the activation '{str(named)[:60]}'")
    tensors = _tensors(folder, path)
    into, out = given.get("in_features"), given.get("out_features")
    shapes: dict[str, tuple[Any, ...]] = {"linear.weight": (out, into)}
    if given.get("bias", True):
        shapes["linear.bias"] = (out,)
    if given.get("use_residual") and into != out:
        shapes["residual.weight"] = (out, into)
    _check(folder, path, tensors, shapes)
    residual: Tensor | Literal["same"] | None = None
    if given.get("use_residual"):
        residual = tensors.get("residual.weight", "same")
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), ACTIVATIONS[named], residual)


def _layer_norm(folder: Path, path: str) -> LayerNorm:
    given = _only(folder, path, ("dimension",))
    tensors = _tensors(folder, path)
    shape = (given.get("dimension"),)
    _check(folder, path, tensors, {"norm.weight": shape, "norm.bias": shape})
    return LayerNorm(tensors["norm.weight"], tensors["norm.bias"])


def _check(
    folder: Path, path: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[Any, ...]]
) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != dict(shapes):
        raise FileError(
            f"{path}/{WEIGHTS} has {found}, and its config.json means {dict(shapes)}",
            where=str(folder),
        )
