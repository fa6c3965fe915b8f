"""`glass verify`: find the subject, run its checks, print the report."""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassformer.cli.shell.options import AsJson, Backend, Device, Runs, complete_names
from glassformer.cli.shell.process import check_device, load_by
from glassformer.cli.shell.resolve import find_model
from glassformer.cli.shell.terminal import in_colour, write_file
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.presets import PRESETS

if TYPE_CHECKING:
    from glassformer.checks.report import Report, Watch


def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A run, a checkpoint, a Hugging Face folder, a preset, or "
            "package.module:factory or my_model.py:factory. Without it: our own parts and every "
            "preset.",
            autocompletion=complete_names,
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="GROUP", help="One group: cache, padding, decoding, ...")
    ] = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also what takes longer: compiled, brute force, full widths."),
    ] = False,
    bidirectional: Annotated[
        bool,
        typer.Option(
            "--bidirectional", help="The model is meant to look ahead: no check of causality."
        ),
    ] = False,
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="FILE", help="Keep the certificate, as JSON."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare with a kept certificate: new failures count."),
    ] = None,
    junit: Annotated[
        str | None, typer.Option(metavar="FILE", help="JUnit XML for a CI server.")
    ] = None,
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="A table for a pull request.")
    ] = None,
    badge: Annotated[str | None, typer.Option(metavar="FILE", help="A badge, as SVG.")] = None,
    backend: Backend = "native",
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Check a model: two ways of computing the same thing must agree.

    Each row is the worst disagreement seen, beside what is allowed. Exit 1 if any check fails;
    rounding, and limits that the report names, are warnings. With --against, exit 1 only if a
    check fails that did not fail before.
    Examples:

      glass verify

      glass verify qwen --only cache

      glass verify my_package.models:tiny_model --json

      glass verify my_package.models:tiny_model --out new.json --against old.json
    """
    place = model
    if model is not None and model not in PRESETS and ":" not in model:
        place = find_model(model, runs=Path(runs), also=PRESETS)
    elif device != "cpu" or backend != "native":
        named = f"--device {device}" if device != "cpu" else f"--backend {backend}"
        raise InputError(f"{named} is for a model on disk", hint="name a run or a model folder")
    one_blas_thread()
    older = _older_of(against)  # a bad file is refused before the checks run
    from glassformer.cli.shell.progress import Progress

    with Progress(model or "glassformer") as progress:
        report = _certificate(
            place,
            name=model or "",
            only=only,
            deep=deep,
            causal=False if bidirectional else None,
            backend=backend,
            device=device,
            watch=progress.show,
        )
    files = {"out": out, "junit": junit, "markdown": markdown, "badge": badge}
    _show(report, as_json=as_json, files=files, older=older)
    if report.failed if older is None else report.new_failures(older):
        raise typer.Exit(1)


def _certificate(
    model: str | None,
    *,
    name: str = "",
    only: str | None = None,
    deep: bool = False,
    causal: bool | None = None,
    backend: str = "native",
    device: str = "cpu",
    watch: "Watch | None" = None,
) -> "Report":
    """Return the report on a preset, a factory's model, a model on disk, or on glassformer."""
    from glassformer.adapters.folder.origin import is_native
    from glassformer.adapters.folder.paths import folder_of
    from glassformer.adapters.load import load
    from glassformer.checks.preset_subjects import sample_subject
    from glassformer.checks.report import verify as check
    from glassformer.checks.subject import subject_of_factory

    if model is None or model in PRESETS:
        subject = None if model is None else sample_subject(model, deep=deep)
        return check(subject, only=only, deep=deep, watch=watch)
    if ":" in model:
        made = subject_of_factory(model, causal=causal)
        return check(made, only=only, deep=deep, watch=watch)
    if backend != "native":
        foreign = load_by(model, backend, device=check_device(device))
        return check(foreign, name=name, only=only, deep=deep, watch=watch)
    folder = folder_of(model)
    is_foreign = not is_native(folder) and folder.is_dir()
    # compared with transformers too, where it is installed and time does not matter
    compared = deep and is_foreign and importlib.util.find_spec("transformers") is not None
    adapter = load(model, reference=compared, device=check_device(device))
    return check(adapter, name=name, only=only, deep=deep, watch=watch)


def _older_of(against: str | None) -> dict[str, Any] | None:
    """Read an older certificate; None where there is none to compare with."""
    from glasscheck.measure import short

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


def _show(
    report: "Report",
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
            write_file(Path(file), content[kind]().encode())
    changes = None if older is None else report.compare(older)
    if as_json:
        changed = {} if changes is None else {"changes": changes}
        print(json.dumps({**report.to_dict(), **changed}, allow_nan=False))
        return
    typer.echo(report.text(in_colour if sys.stdout.isatty() else _plain))
    if changes is not None:
        typer.echo("\nsince the older certificate")
        for line in changes or ["nothing changed"]:
            typer.echo(f"  {line}")


def _plain(text: str, verdict: str) -> str:
    return text
