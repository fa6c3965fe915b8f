"""Run `glass doctor`: examine a training, print the diagnosis, write it to a file."""

import json
import sys
from pathlib import Path

from glassformer.checks.doctor import Diagnosis, doctor
from glassformer.cli.actions.verify import coloured
from glassformer.cli.shell.output import ending_of, write_file
from glassformer.cli.shell.process import check_device

ENDINGS = ("json", "md", "xml")


def examined(
    what: str, overrides: list[str], *, quick: bool, seconds: float, only: str | None, device: str
) -> Diagnosis:
    """Look for mistakes in a task, a config, or what a factory returns."""
    return doctor(
        what,
        overrides=overrides,
        quick=quick,
        seconds=seconds,
        only=only,
        device=check_device(device),
    )


def show(found: Diagnosis, *, as_json: bool, target: Path | None) -> None:
    """Print JSON for scripts, else the diagnosis in words; write the file of `-o`."""
    if as_json:
        print(json.dumps(found.to_dict(), allow_nan=False))
    else:
        print(found.text(coloured) if sys.stdout.isatty() else found.text())
    if target is not None:
        match ending_of(target, ENDINGS):
            case "md":
                content = found.markdown()
            case "xml":
                content = found.junit()
            case _:
                content = json.dumps(found.to_dict(), indent=1)
        write_file(target, content.encode())
