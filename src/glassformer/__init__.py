"""A library and command line to train, inspect, test and serve small transformers.

    import glassformer as gf

    model = gf.build(gf.preset("qwen", d_model=64), seed=0)
    print(gf.verify(model))

Names are imported when they are first used: importing the package imports neither torch nor NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glasscheck.setups import Setup as Setup
    from glasscheck.subject import Subject as Subject
    from glassformer import named as named
    from glassformer.adapters.any_model import export as export
    from glassformer.adapters.any_model import inspect as inspect
    from glassformer.adapters.any_model import patch_activations as patch_activations
    from glassformer.adapters.any_model import quantize as quantize
    from glassformer.adapters.embed import embed as embed
    from glassformer.adapters.generate import beam_search as beam_search
    from glassformer.adapters.generate import generate as generate
    from glassformer.adapters.generate import stream_tokens as stream_tokens
    from glassformer.adapters.load import build as build
    from glassformer.adapters.load import load as load
    from glassformer.adapters.load import save as save
    from glassformer.checks.diff import diff as diff
    from glassformer.checks.doctor import doctor as doctor
    from glassformer.checks.report import verify as verify
    from glassformer.data.batch import Batch as Batch
    from glassformer.lab.api import evaluate as evaluate
    from glassformer.lab.api import finetune as finetune
    from glassformer.lab.api import lr_find as lr_find
    from glassformer.lab.api import train as train
    from glassformer.lab.budget_report import design as design
    from glassformer.lab.compare import compare as compare
    from glassformer.lab.corpus import prepare as prepare
    from glassformer.lab.extract import extract as extract
    from glassformer.lab.quantize import compare_precision as compare_precision
    from glassformer.lab.recipes import load_config as load_config
    from glassformer.lab.recipes import load_machine as load_machine
    from glassformer.lab.runs.curves import history as history
    from glassformer.lab.runs.table import runs as runs
    from glassformer.lab.show import show as show
    from glassformer.lab.sweeps.sweep import Sweep as Sweep
    from glassformer.lab.sweeps.sweep import sweep as sweep
    from glassformer.lens.show.diagram import diagram as diagram
    from glassformer.models.inputs import Inputs as Inputs
    from glassformer.nn.taps import Taps as Taps
    from glassformer.nn.taps import trace as trace
    from glassformer.spec.decoding import BeamSpec as BeamSpec
    from glassformer.spec.decoding import DecodeSpec as DecodeSpec
    from glassformer.spec.errors import GlassError as GlassError
    from glassformer.spec.manifest import count_parameters as count_parameters
    from glassformer.spec.manifest import manifest as manifest
    from glassformer.spec.model import ModelSpec as ModelSpec
    from glassformer.spec.presets import preset as preset
    from glassformer.spec.quantization import QuantSpec as QuantSpec
    from glassformer.spec.serialize import override as override
    from glassformer.spec.train import LoRA as LoRA
    from glassformer.spec.train import RunSpec as RunSpec
    from glassformer.spec.train import TrainSpec as TrainSpec
    from glassformer.web.report.document import report as report

__version__ = "0.1.0"  # the only place: pyproject.toml reads it here

#: Where each public name is defined; a test compares this table with the imports above.
_HOME = {
    "Batch": "glassformer.data.batch",
    "BeamSpec": "glassformer.spec.decoding",
    "DecodeSpec": "glassformer.spec.decoding",
    "GlassError": "glassformer.spec.errors",
    "Inputs": "glassformer.models.inputs",
    "LoRA": "glassformer.spec.train",
    "ModelSpec": "glassformer.spec.model",
    "QuantSpec": "glassformer.spec.quantization",
    "RunSpec": "glassformer.spec.train",
    "Setup": "glasscheck.setups",
    "Subject": "glasscheck.subject",
    "Taps": "glassformer.nn.taps",
    "Sweep": "glassformer.lab.sweeps.sweep",
    "TrainSpec": "glassformer.spec.train",
    "beam_search": "glassformer.adapters.generate",
    "build": "glassformer.adapters.load",
    "compare_precision": "glassformer.lab.quantize",
    "compare": "glassformer.lab.compare",
    "count_parameters": "glassformer.spec.manifest",
    "design": "glassformer.lab.budget_report",
    "diagram": "glassformer.lens.show.diagram",
    "diff": "glassformer.checks.diff",
    "doctor": "glassformer.checks.doctor",
    "embed": "glassformer.adapters.embed",
    "evaluate": "glassformer.lab.api",
    "export": "glassformer.adapters.any_model",
    "extract": "glassformer.lab.extract",
    "finetune": "glassformer.lab.api",
    "generate": "glassformer.adapters.generate",
    "history": "glassformer.lab.runs.curves",
    "inspect": "glassformer.adapters.any_model",
    "load": "glassformer.adapters.load",
    "load_config": "glassformer.lab.recipes",
    "load_machine": "glassformer.lab.recipes",
    "lr_find": "glassformer.lab.api",
    "manifest": "glassformer.spec.manifest",
    "override": "glassformer.spec.serialize",
    "patch_activations": "glassformer.adapters.any_model",
    "prepare": "glassformer.lab.corpus",
    "preset": "glassformer.spec.presets",
    "quantize": "glassformer.adapters.any_model",
    "report": "glassformer.web.report.document",
    "runs": "glassformer.lab.runs.table",
    "save": "glassformer.adapters.load",
    "show": "glassformer.lab.show",
    "stream_tokens": "glassformer.adapters.generate",
    "sweep": "glassformer.lab.sweeps.sweep",
    "trace": "glassformer.nn.taps",
    "train": "glassformer.lab.api",
    "verify": "glassformer.checks.report",
}

__all__ = sorted([*_HOME, "named"])


def __getattr__(name: str) -> Any:
    if name == "named":  # the source documents' own names, by module
        return import_module("glassformer.named")
    if name not in _HOME:
        raise AttributeError(f"glassformer has no '{name}'; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
