"""Which engine trains a run: `auto` settled by what the native one lacks, derived and named."""

from dataclasses import replace

from glassformer.byhand.c_table import C
from glassformer.kernels import c_library
from glassformer.spec.program import program
from glassformer.spec.train import RunSpec, arrays_lack


def native_lacks(run: RunSpec, *, device: str = "cpu", processes: int = 1) -> str:
    """Return why the native engine cannot train a run; empty if it can."""
    if device != "cpu":
        return f"the native engine has no device '{device}'"
    if processes > 1:
        return "the native engine trains in one process"
    if reason := c_library.unavailable():
        return reason
    if lack := arrays_lack(run.train, native=True):
        return lack
    lora = None if run.tuning is None else run.tuning.lora
    for lack in C.lacking(program(run.model, training=True, lora=lora)):
        return f"the native engine has no {lack}"
    return ""


def settled(run: RunSpec, *, device: str = "cpu", processes: int = 1) -> RunSpec:
    """Return the run with its engine: for `auto`, native where nothing is lacking, else torch."""
    if run.engine != "auto":
        return run
    lacks = native_lacks(run, device=device, processes=processes)
    return replace(run, engine="torch" if lacks else "native")
