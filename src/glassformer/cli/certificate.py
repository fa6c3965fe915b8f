"""What `glass verify` does: find the subject, ask, show."""

import json
import sys

import typer

from glassformer.adapters.load import load
from glassformer.spec.presets import PRESETS
from glassformer.verify.report import Report, verify
from glassformer.verify.samples import sample_subject
from glassformer.verify.subject import subject_of_factory

COLOURS = {
    "passed": typer.colors.GREEN,
    "not offered": typer.colors.BRIGHT_BLACK,
    "rounding": typer.colors.YELLOW,
}


def certificate(model: str | None, *, only: str | None, deep: bool, causal: bool) -> Report:
    """The report on a preset, a factory's model, a checkpoint, or on ourselves."""
    if model is None:
        return verify(only=only, deep=deep)
    if model in PRESETS:
        return verify(sample_subject(model, deep=deep), only=only, deep=deep)
    if ":" in model:
        return verify(subject_of_factory(model, causal=causal), only=only, deep=deep)
    return verify(load(model), name=model, only=only, deep=deep)


def show(report: Report, *, as_json: bool) -> None:
    """JSON for scripts, else a table; coloured on a terminal."""
    if as_json:
        print(json.dumps(report.to_dict(), allow_nan=False))
    else:
        typer.echo(report.text(_coloured if sys.stdout.isatty() else _plain))


def _coloured(text: str, verdict: str) -> str:
    return typer.style(text, fg=COLOURS.get(verdict, typer.colors.RED))


def _plain(text: str, verdict: str) -> str:
    return text
