"""Run `glass verify`: find the subject, run its checks, print the report."""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from glassformer.adapters.folder.origin import is_native
from glassformer.adapters.load import folder_of, load
from glassformer.checks.measure import short
from glassformer.checks.preset_subjects import sample_subject
from glassformer.checks.report import Report, verify
from glassformer.checks.subject import subject_of_factory
from glassformer.cli.shell.process import check_device
from glassformer.spec.errors import FileError, InputError
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


def older_of(against: str | None) -> dict[str, Any] | None:
    """Read an older certificate; None where there is none to compare with."""
    if against is None:
        return None
    try:
        older = json.loads(Path(against).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"no certificate '{against}'", where="--against") from error
    except (OSError, ValueError) as error:
        raise FileError(f"not a certificate: {short(error)}", where=against) from error
    if not isinstance(older, dict) or not isinstance(older.get("checks"), list):
        raise FileError("not a certificate: it has no list of checks", where=against)
    return older


def show(
    report: Report,
    *,
    as_json: bool,
    files: Mapping[str, str | None] | None = None,
    older: dict[str, Any] | None = None,
) -> None:
    """Print JSON for scripts, else a table, coloured on a terminal; write what was asked for."""
    content = {
        "out": lambda: json.dumps(report.to_dict(), allow_nan=False, indent=1) + "\n",
        "junit": report.junit,
        "markdown": report.markdown,
        "badge": report.badge,
    }
    for kind, file in (files or {}).items():
        if file is not None:
            _write(Path(file), content[kind]())
    changes = None if older is None else report.compare(older)
    if as_json:
        changed = {} if changes is None else {"changes": changes}
        print(json.dumps({**report.to_dict(), **changed}, allow_nan=False))
        return
    typer.echo(report.text(coloured if sys.stdout.isatty() else _plain))
    if changes is not None:
        typer.echo("\nsince the older certificate")
        for line in changes or ["nothing changed"]:
            typer.echo(f"  {line}")


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}", where=str(file)) from error


def coloured(text: str, verdict: str) -> str:
    """Return the text in the colour of its verdict."""
    return typer.style(text, fg=COLOURS.get(verdict, typer.colors.RED))


def _plain(text: str, verdict: str) -> str:
    return text
