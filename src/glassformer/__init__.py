"""A laboratory for transformers in which every claim is checked.

    import glassformer as gf

    model = gf.build(gf.preset("qwen"))
    print(gf.verify(model))

Names are imported when they are first used: importing the package imports neither torch nor NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glassformer.adapters.load import load as load
    from glassformer.adapters.load import save as save
    from glassformer.adapters.quantize import quantize as quantize
    from glassformer.budget.design import design as design
    from glassformer.checks.report import verify as verify
    from glassformer.checks.subject import Subject as Subject
    from glassformer.data.batch import Batch as Batch
    from glassformer.lab.api import evaluate as evaluate
    from glassformer.lab.api import train as train
    from glassformer.lab.smallbench.examinee import Examinee as Examinee
    from glassformer.lab.smallbench.suite import smallbench as smallbench
    from glassformer.lens.inspection import inspect as inspect
    from glassformer.lens.measure.patching import patch_activations as patch_activations
    from glassformer.models.build import build as build
    from glassformer.models.inputs import Inputs as Inputs
    from glassformer.nn.taps import Taps as Taps
    from glassformer.nn.taps import trace as trace
    from glassformer.spec.errors import GlassError as GlassError
    from glassformer.spec.manifest import count_parameters as count_parameters
    from glassformer.spec.manifest import manifest as manifest
    from glassformer.spec.model import ModelSpec as ModelSpec
    from glassformer.spec.presets import preset as preset
    from glassformer.spec.serialize import override as override
    from glassformer.spec.train import RunSpec as RunSpec

__version__ = "0.1.0"

#: Where each public name is defined; a test compares this table with the imports above.
_HOME = {
    "Batch": "glassformer.data.batch",
    "Examinee": "glassformer.lab.smallbench.examinee",
    "GlassError": "glassformer.spec.errors",
    "Inputs": "glassformer.models.inputs",
    "ModelSpec": "glassformer.spec.model",
    "RunSpec": "glassformer.spec.train",
    "Subject": "glassformer.checks.subject",
    "Taps": "glassformer.nn.taps",
    "build": "glassformer.models.build",
    "count_parameters": "glassformer.spec.manifest",
    "design": "glassformer.budget.design",
    "evaluate": "glassformer.lab.api",
    "inspect": "glassformer.lens.inspection",
    "load": "glassformer.adapters.load",
    "manifest": "glassformer.spec.manifest",
    "override": "glassformer.spec.serialize",
    "patch_activations": "glassformer.lens.measure.patching",
    "preset": "glassformer.spec.presets",
    "quantize": "glassformer.adapters.quantize",
    "save": "glassformer.adapters.load",
    "smallbench": "glassformer.lab.smallbench.suite",
    "trace": "glassformer.nn.taps",
    "train": "glassformer.lab.api",
    "verify": "glassformer.checks.report",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"glassformer has no '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
