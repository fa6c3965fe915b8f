"""A laboratory for transformers in which every claim is checked.

    import glassformer as gf

    model = gf.build(gf.preset("qwen"))
    print(gf.verify(model))

Names are found when they are first used: importing the package imports neither torch nor NumPy.
Where a function has a package's name (`gf.verify`, `gf.train`), the package can be called.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_DOOR = {
    "Batch": "glassformer.data.batch",
    "Examinee": "glassformer.lab.smallbench.examinee",
    "GlassError": "glassformer.spec.errors",
    "Inputs": "glassformer.models.inputs",
    "ModelSpec": "glassformer.spec.model",
    "RunSpec": "glassformer.spec.train",
    "Subject": "glassformer.verify.subject",
    "Taps": "glassformer.nn.taps",
    "build": "glassformer.models.build",
    "count_parameters": "glassformer.spec.manifest",
    "design": "glassformer.spec.design",
    "evaluate": "glassformer.lab.session",
    "load": "glassformer.adapters.load",
    "look": "glassformer.lens.look",
    "manifest": "glassformer.spec.manifest",
    "override": "glassformer.spec.tree",
    "patch": "glassformer.lens.patching",
    "preset": "glassformer.spec.presets",
    "quantize": "glassformer.adapters.quantized",
    "save": "glassformer.adapters.load",
    "smallbench": "glassformer.lab.smallbench.suite",
    "trace": "glassformer.nn.taps",
}

#: Packages that can be called, and the function that answers.
_CALLS = {"train": "glassformer.lab.session", "verify": "glassformer.verify.report"}

__all__ = sorted((*_DOOR, *_CALLS))


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_CALLS[name]), name)(*arguments, **options)


class _Door(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # The import system hangs each subpackage on its parent, whoever asked for it first.
        if name in _CALLS and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door


def __getattr__(name: str) -> Any:
    if name in _CALLS:
        return import_module(f"glassformer.{name}")
    if name not in _DOOR:
        raise AttributeError(f"glassformer has no '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_DOOR[name]), name)


def __dir__() -> list[str]:
    return __all__
