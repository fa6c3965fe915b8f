"""`diff` of models of ours, of adapters, and of modules of any library."""

from torch import Tensor, nn

from glasscheck.differences import Difference, Side, compared
from glassformer.adapters.base import BaseAdapter
from glassformer.checks.errors import as_ours
from glassformer.checks.subject import subject_of
from glassformer.spec.errors import InputError

__all__ = ["Difference", "diff"]


def diff(
    first: object,
    second: object,
    *,
    tokens: Tensor | None = None,
    names: tuple[str, str] = ("A", "B"),
    backward: bool = True,
) -> Difference:
    """Compare two models on the same tokens; name the first module that differs, and why.

    Models of ours and modules of any library; with `backward`, if the forwards agree, also the
    gradients of the weights that the two share. A quantized model stands for the float model of
    exactly its weights.
    """
    modules = (_module_of(first), _module_of(second))

    def sides() -> list[Side]:
        things = zip((first, second), modules, names, strict=True)
        return [_side(thing, module, name) for thing, module, name in things]

    with as_ours():
        return compared(modules, sides, tokens=tokens, names=names, backward=backward)


def _side(thing: object, module: nn.Module, name: str) -> Side:
    """Return one side; of a quantized model, its float twin computes the logits."""
    subject = subject_of(thing, name=name)
    return Side(subject, module if subject.quantized is None else subject.model)


def _module_of(thing: object) -> nn.Module:
    module = thing.model if isinstance(thing, BaseAdapter) else thing
    if not isinstance(module, nn.Module):
        raise InputError(
            f"{type(thing).__name__} is no torch module",
            hint="give modules, or what gf.load returns",
        )
    return module
