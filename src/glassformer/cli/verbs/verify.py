"""`glass verify`: find the subject, run its checks, print the report."""

import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassformer.cli.shell.options import AsJson, Backend, Device, Runs, complete_names
from glassformer.cli.shell.process import check_device, load_by
from glassformer.cli.shell.resolve import find_model
from glassformer.cli.shell.terminal import in_colour, write_file
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.options import option
from glassformer.spec.presets import PRESETS

if TYPE_CHECKING:
    from glasscheck.judgement import Rules
    from glassformer.checks.report import Report, Watch


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Files that the certificate is written to."""

    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="FILE", help="Keep the certificate, as JSON."),
    ] = None
    junit: str | None = option(None, metavar="FILE", help="JUnit XML for a CI server.")
    markdown: str | None = option(None, metavar="FILE", help="A table for a pull request.")
    badge: str | None = option(None, metavar="FILE", help="A badge, as SVG.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """Which checks run, and how a model on disk is computed."""

    only: str | None = option(
        None, metavar="GROUP", help="One group: cache, padding, decoding, ..."
    )
    deep: bool = option(False, help="Also what takes longer: compiled, brute force, full widths.")
    bidirectional: bool = option(
        False, help="The model is meant to look ahead: no check of causality."
    )
    backend: Backend = "native"
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What fails beside bugs, and what is known."""

    strict: bool = option(False, help="Warnings fail too, but for the baseline's.")
    allow_errors: bool = option(False, help="A check that raised fails nothing.")
    require: tuple[str, ...] = option((), metavar="CHECK", help="A check that must have passed.")
    baseline: str | None = option(
        None, metavar="FILE", help="Known limitations, each with a reason and a day, as TOML."
    )
    repro: str | None = option(
        None, metavar="FOLDER", help="A script of plain torch for each failure that calls show."
    )

    def rules(self) -> "Rules":
        """Return these rules; a bad baseline is refused here."""
        from glasscheck.judgement import Rules, baseline_of
        from glassformer.checks.errors import as_ours

        with as_ours():
            return Rules(
                strict=self.strict,
                allow_errors=self.allow_errors,
                require=self.require,
                baseline=() if self.baseline is None else baseline_of(self.baseline),
            )


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
    *,
    checks: Checks,
    judged: Judged,
    files: Files,
    against: str | None = option(
        None, metavar="FILE", help="Compare with a kept certificate: new failures count."
    ),
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Check a model: two ways of computing the same thing must agree.

    Each row is the worst disagreement seen, beside what is allowed. Exit 1 if any check fails or
    could not run; rounding, and limits that the report names, are warnings. With --against, exit 1
    only if a check fails that did not fail before, or one that passed is not there any more.
    Examples:

      glass verify

      glass verify qwen --only cache

      glass verify my_package.models:tiny_model --json

      glass verify my_package.models:tiny_model --out new.json --against old.json
    """
    place, device, backend = model, checks.device, checks.backend
    if model is not None and model not in PRESETS and ":" not in model:
        place = find_model(model, runs=Path(runs), also=PRESETS)
    elif device != "cpu" or backend != "native":
        named = f"--device {device}" if device != "cpu" else f"--backend {backend}"
        raise InputError(f"{named} is for a model on disk", hint="name a run or a model folder")
    one_blas_thread()
    older = _older_of(against)  # a bad file is refused before the checks run
    rules = judged.rules()
    from glassformer.lab.bar import PartsBar

    with PartsBar(model or "glassformer") as progress:
        report = _certificate(place, checks, name=model or "", watch=progress.show, rules=rules)
    for claim, script in report.repros().items() if judged.repro is not None else ():
        name = re.sub("[^a-z0-9]+", "-", claim.lower()).strip("-")
        folder = Path(str(judged.repro))
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / f"{name}.py", script.encode())
    _show(report, files, as_json=as_json, older=older)
    if report.failed if older is None else report.new_failures(older):
        raise typer.Exit(1)


def _certificate(
    model: str | None, checks: Checks, *, name: str, watch: "Watch", rules: "Rules"
) -> "Report":
    """Return the report on a preset, a factory's model, a model on disk, or on glassformer."""
    from glassformer.adapters.folder.origin import is_native
    from glassformer.adapters.folder.paths import folder_of
    from glassformer.adapters.load import load
    from glassformer.checks.preset_subjects import sample_subject
    from glassformer.checks.report import verify as check
    from glassformer.checks.subject import subject_of_factory

    only, deep, backend = checks.only, checks.deep, checks.backend
    if model is None or model in PRESETS:
        subject = None if model is None else sample_subject(model, deep=deep)
        return check(subject, only=only, deep=deep, watch=watch, rules=rules)
    if ":" in model:
        made = subject_of_factory(model, causal=False if checks.bidirectional else None)
        return check(made, only=only, deep=deep, watch=watch, rules=rules)
    device = check_device(checks.device)
    if backend != "native":
        foreign = load_by(model, backend, device=device)
        return check(foreign, name=name, only=only, deep=deep, watch=watch, rules=rules)
    folder = folder_of(model)
    is_foreign = not is_native(folder) and folder.is_dir()
    # compared with transformers too, where it is installed and time does not matter
    compared = deep and is_foreign and importlib.util.find_spec("transformers") is not None
    adapter = load(model, reference=compared, device=device)
    return check(adapter, name=name, only=only, deep=deep, watch=watch, rules=rules)


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


def _show(report: "Report", files: Files, *, as_json: bool, older: dict[str, Any] | None) -> None:
    """Print JSON for scripts, else a table, coloured on a terminal; write what was asked for."""
    if files.out is not None:
        kept = json.dumps(report.to_dict(), allow_nan=False, indent=1)
        write_file(Path(files.out), f"{kept}\n".encode())
    for file, made in (
        (files.junit, report.junit),
        (files.markdown, report.markdown),
        (files.badge, report.badge),
    ):
        if file is not None:
            write_file(Path(file), made().encode())
    changes = None if older is None else report.compare(older)
    if as_json:
        changed = {} if changes is None else {"changes": changes}
        print(json.dumps({**report.to_dict(), **changed}, allow_nan=False))
        return
    typer.echo(report.text(in_colour if sys.stdout.isatty() else lambda text, _: text))
    if changes is not None:
        typer.echo("\nsince the older certificate")
        for line in changes or ["nothing changed"]:
            typer.echo(f"  {line}")
