"""Run `glass verify`: find the subject, run its checks, print the report."""

import importlib.util
import json
import sys

import typer

from glassformer.adapters.folder.origin import is_native
from glassformer.adapters.load import folder_of, load
from glassformer.checks.preset_subjects import sample_subject
from glassformer.checks.report import Report, verify
from glassformer.checks.subject import subject_of_factory
from glassformer.cli.shell.process import check_device
from glassformer.spec.presets import PRESETS

COLOURS = {
    "passed": typer.colors.GREEN,
    "not offered": typer.colors.BRIGHT_BLACK,
    "rounding": typer.colors.YELLOW,
    "limit": typer.colors.YELLOW,
    "unclear": typer.colors.YELLOW,
}


def certificate(
    model: str | None,
    *,
    name: str = "",
    only: str | None = None,
    deep: bool = False,
    causal: bool | None = None,
    device: str = "cpu",
) -> Report:
    """Return the report on a preset, a factory's model, a model on disk, or on glassformer."""
    if model is None or model in PRESETS:
        subject = None if model is None else sample_subject(model, deep=deep)
        return verify(subject, only=only, deep=deep)
    if ":" in model:
        return verify(subject_of_factory(model, causal=causal), only=only, deep=deep)
    folder = folder_of(model)
    is_foreign = not is_native(folder) and folder.is_dir()
    # compared with transformers too, where it is installed and time does not matter
    compared = deep and is_foreign and importlib.util.find_spec("transformers") is not None
    adapter = load(model, reference=compared, device=check_device(device))
    return verify(adapter, name=name, only=only, deep=deep)


def show(report: Report, *, as_json: bool) -> None:
    """Print JSON for scripts, else a table, coloured on a terminal."""
    if as_json:
        print(json.dumps(report.to_dict(), allow_nan=False))
    else:
        typer.echo(report.text(coloured if sys.stdout.isatty() else _plain))


def coloured(text: str, verdict: str) -> str:
    """Return the text in the colour of its verdict."""
    return typer.style(text, fg=COLOURS.get(verdict, typer.colors.RED))


def _plain(text: str, verdict: str) -> str:
    return text
