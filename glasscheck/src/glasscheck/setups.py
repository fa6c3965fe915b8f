"""`Setup`: a training set-up of ours or of anyone, what is found in its batches, and `Symptom`."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from glasscheck.errors import InputError
from glasscheck.foreign import MASK_ARGUMENTS, TOKEN_ARGUMENTS

# B batch, T length

TOKEN_KEYS = ("decoder_input_ids", "tgt", *TOKEN_ARGUMENTS, "inputs")
MASK_KEYS = ("decoder_attention_mask", *MASK_ARGUMENTS)
LABEL_KEYS = ("labels", "targets", "target", "label", "y")
IGNORED = -100


@dataclass(kw_only=True)
class Setup:
    """What a training is made of. Only the model is needed: what is missing is not examined.

    `loss(model, batch)` returns the scalar that is differentiated; without it the model is called
    with the batch and returns its loss. `schedule` is a torch scheduler, or a function from the
    step (counted from 0) to the learning rate. `step_loss(model, batches)` is the complete loss of
    a step of several batches. `evaluate(model, batch)` returns the number that evaluation reports.
    """

    model: nn.Module
    batches: Iterable[Any] | None = None
    val_batches: Iterable[Any] | None = None
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    schedule: Any = None
    steps: int | None = None
    accumulate: int = 1
    step_loss: Callable[[nn.Module, Sequence[Any]], Tensor] | None = None
    evaluate: Callable[[nn.Module, Any], Any] | None = None
    tokenizer: Any = None
    prompt: Callable[[Any], Tensor] | None = None  # True at tokens of the prompt, (B, T)
    autocast: torch.dtype | None = None
    clip: float | None = None
    curve: Sequence[float] = ()  # losses of an earlier training, one a step
    entropy: float | None = None  # nats a target: no model can be better
    frozen: tuple[str, ...] = ()  # beginnings of names of parameters that are meant to stay
    name: str = ""


def setup_of(thing: object, *, name: str = "") -> Setup:
    """Make a set-up of a model, a dict or any object with a `Setup`'s attributes."""
    match thing:
        case Setup():
            return dataclasses.replace(thing, name=thing.name or name)
        case nn.Module():
            return Setup(model=thing, name=name or type(thing).__name__)
    known = {f.name for f in dataclasses.fields(Setup)}
    if isinstance(thing, Mapping):
        unknown = sorted(set(thing) - known)
        if unknown:
            raise InputError(
                f"a set-up has no {', '.join(map(str, unknown))}",
                hint=f"it has {', '.join(sorted(known))}",
            )
        found = dict(thing)
    else:
        found = {key: getattr(thing, key) for key in known if hasattr(thing, key)}
    if not isinstance(found.get("model"), nn.Module):
        raise InputError(
            f"a {type(thing).__name__} is no training set-up",
            where=name,
            hint="return a module, a dict with `model`, or glasscheck.Setup",
        )
    return Setup(**{"name": name, **found})


# --- what an examination returns ------------------------------------------------------------------

Verdict = Literal["passed", "mistake", "warning", "not offered", "raised"]


@dataclass(frozen=True, slots=True)
class Symptom:
    """What one examination found."""

    verdict: Verdict
    evidence: str
    fix: str = ""


def passed(evidence: str) -> Symptom:
    """Return that there is no sign of it."""
    return Symptom("passed", evidence)


def mistake(evidence: str, fix: str) -> Symptom:
    """Return that something is wrong."""
    return Symptom("mistake", evidence, fix)


def warning(evidence: str, fix: str) -> Symptom:
    """Return something that may be meant."""
    return Symptom("warning", evidence, fix)


def shown(row: Sequence[int], tokenizer: Any) -> str:
    """Return the beginning of an example as text, or its ids."""
    ids = list(row[:8])
    decode = getattr(tokenizer, "decode", None)
    try:
        return repr(decode(ids)) if callable(decode) else str(ids)
    except Exception:  # a stranger's tokenizer may raise anything
        return str(ids)


def listed(names: Sequence[str]) -> str:
    """Return the first names and the number of others, with the verb: `a, b and 3 more are`."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more} {'is' if len(names) == 1 else 'are'}"


# --- finding things in what others return ---------------------------------------------------------


def first_batches(batches: Iterable[Any] | None, count: int) -> list[Any]:
    """Return the first batches of a list or a loader."""
    if batches is None:
        return []
    try:
        return list(islice(iter(batches), count))
    except TypeError as error:
        raise InputError(
            f"batches is a {type(batches).__name__}", hint="give a list or a DataLoader"
        ) from error


def mapped(thing: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with every leaf changed."""
    match thing:
        case Mapping():
            return {key: mapped(value, change) for key, value in thing.items()}
        case tuple() | list():
            return type(thing)(mapped(value, change) for value in thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        changed = {
            f.name: mapped(getattr(thing, f.name), change) for f in dataclasses.fields(thing)
        }
        return dataclasses.replace(thing, **changed)
    return change(thing)


def cut(batch: Any, rows: int) -> Any:
    """Return the first rows of a batch of any kind."""
    ids = ids_in(batch)
    count = 0 if ids is None else len(ids)

    def first(x: Any) -> Any:
        is_array = isinstance(x, (Tensor, np.ndarray)) and x.ndim > 0 and len(x) == count
        return x[:rows] if is_array else x

    return mapped(batch, first)


def is_ids(value: Any) -> bool:
    """Return True for whole numbers of shape (B, T)."""
    kinds = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype in kinds


def _named(batch: Any, names: Sequence[str]) -> Any:
    for name in names:
        value = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if isinstance(value, (Tensor, np.ndarray)):
            return torch.as_tensor(value)
    return None


def ids_in(batch: Any, *, encoder: bool = False) -> Tensor | None:
    """Return the token ids of a batch: by name, or the first two-dimensional whole numbers."""
    names = TOKEN_KEYS[1:] if encoder else TOKEN_KEYS
    found = _named(batch, names) if not isinstance(batch, (tuple, list, Tensor)) else None
    if found is None:
        leaves = batch if isinstance(batch, (tuple, list)) else [batch]
        found = next((x for x in leaves if is_ids(x)), None)
    return cast("Tensor | None", found)


def labels_in(batch: Any) -> Tensor | None:
    """Return the labels of a batch: by name, or the second of a pair."""
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        second = batch[-1]
        return second if isinstance(second, Tensor) and not second.is_floating_point() else None
    return cast("Tensor | None", _named(batch, LABEL_KEYS))


def mask_in(batch: Any) -> Tensor | None:
    """Return the mask of a batch by name: True = real token."""
    if isinstance(batch, (tuple, list)):
        return None
    found = _named(batch, MASK_ARGUMENTS)
    return found.bool() if isinstance(found, Tensor) and found.ndim == 2 else None


def _leaves(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [v for v in result.values() if isinstance(v, Tensor)]
    if isinstance(result, (tuple, list)):
        return [v for v in result if isinstance(v, Tensor)]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return [v for v in vars(result).values() if isinstance(v, Tensor)]
    return []


def logits_in(result: Any) -> Tensor | None:
    """Return the logits of a model's result: by name, or the first with two axes or more."""
    named = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    if isinstance(named, Tensor):
        return named
    return next((t for t in _leaves(result) if t.ndim >= 2 and t.is_floating_point()), None)


def loss_in(result: Any) -> Tensor | None:
    """Return the loss of a model's result: by name, or the first single number."""
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(named, Tensor):
        return named
    scalars = (t for t in _leaves(result) if t.numel() == 1 and t.is_floating_point())
    return next(scalars, None)
