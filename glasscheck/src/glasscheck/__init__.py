"""Numerical checks of any torch language model: two ways of computing the same thing agree.

    import glasscheck as gc

    gc.verify(model)          a certificate: causality, padding, batches, caches, gradients, files
    gc.diff(port, original)   the first module that differs, and why
    gc.doctor(setup)          mistakes in a training, before it begins

Nothing is imported until it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glasscheck.diagnosis import Diagnosis as Diagnosis
    from glasscheck.diagnosis import doctor as doctor
    from glasscheck.differences import Difference as Difference
    from glasscheck.differences import diff as diff
    from glasscheck.errors import CheckFailed as CheckFailed
    from glasscheck.errors import FileError as FileError
    from glasscheck.errors import InputError as InputError
    from glasscheck.report import Report as Report
    from glasscheck.report import verify as verify
    from glasscheck.setups import Setup as Setup
    from glasscheck.subject import Subject as Subject

__version__ = "0.1.0"  # the only place: pyproject.toml reads it here

_HOME = {
    "verify": "report",
    "diff": "differences",
    "doctor": "diagnosis",
    "Report": "report",
    "Difference": "differences",
    "Diagnosis": "diagnosis",
    "Setup": "setups",
    "Subject": "subject",
    "CheckFailed": "errors",
    "FileError": "errors",
    "InputError": "errors",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"glasscheck has no '{name}'; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(f"glasscheck.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
