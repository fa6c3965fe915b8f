"""A laboratory for transformers in which every claim is checked.

    import glassformer as gf

    model = gf.build(gf.preset("qwen"))
    print(gf.verify(model))

Names are found when they are first used: importing the package imports neither torch nor NumPy.
"""

from importlib import import_module
from typing import Any

_DOOR = {
    "Batch": "glassformer.data.batch",
    "GlassError": "glassformer.spec.errors",
    "Inputs": "glassformer.models.inputs",
    "ModelSpec": "glassformer.spec.model",
    "Subject": "glassformer.verify.subject",
    "Taps": "glassformer.nn.taps",
    "build": "glassformer.models.build",
    "count_parameters": "glassformer.spec.manifest",
    "load": "glassformer.adapters.load",
    "manifest": "glassformer.spec.manifest",
    "override": "glassformer.spec.tree",
    "preset": "glassformer.spec.presets",
    "save": "glassformer.adapters.load",
    "trace": "glassformer.nn.taps",
}

#: Packages that can be called: `gf.verify(model)`.
_CALLABLE = ("verify",)

__all__ = sorted((*_DOOR, *_CALLABLE))


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return import_module(f"glassformer.{name}")
    if name not in _DOOR:
        raise AttributeError(f"glassformer has no '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_DOOR[name]), name)


def __dir__() -> list[str]:
    return __all__
