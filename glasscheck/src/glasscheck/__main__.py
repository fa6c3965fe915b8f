"""The command `glasscheck`: verify, diff and doctor for any torch module, in a shell or in CI."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glasscheck.errors import FileError, GlassError

if TYPE_CHECKING:  # which imports torch: --help should not
    from glasscheck.report import Report

ABOUT = """Check a torch model: two ways of computing the same thing must agree.

  glasscheck my_model.py:factory          a certificate; package.module:factory likewise
  glasscheck diff port:a original:b       the first module that differs, and why
  glasscheck doctor training.py:setup     mistakes in a training, before it begins
"""


def main(words: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 if all holds, 1 if something fails, 2 or 3 for bad input."""
    given = [*(sys.argv[1:] if words is None else words)]
    try:
        match given[:1]:
            case ["diff"]:
                code = _diff(given[1:])
            case ["doctor"]:
                code = _doctor(given[1:])
            case _:
                code = _verify(given)
    except GlassError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    raise SystemExit(code)


def _verify(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "glasscheck", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="MODULE:FACTORY", help="what returns a model")
    add("--only", metavar="GROUP", help="one group of checks: cache, padding, ...")
    add("--deep", action="store_true", help="also what takes longer: compiled, flexible attention")
    add("--bidirectional", action="store_true", help="it is meant to look ahead: no causality")
    add("--json", action="store_true", help="one JSON object for each model")
    add("--out", metavar="FILE", help="keep the certificate, as JSON")
    add("--against", metavar="FILE", help="compare with a kept one: only new failures count")
    add("--junit", metavar="FILE", help="JUnit XML for a CI server")
    add("--markdown", metavar="FILE", help="a table for a pull request")
    add("--badge", metavar="FILE", help="a badge, as SVG")
    asked = parser.parse_args(words)
    files = {"out": asked.out, "junit": asked.junit, "markdown": asked.markdown,
             "badge": asked.badge, "against": asked.against}  # fmt: skip
    if len(asked.models) > 1 and any(files.values()):
        parser.error("files are for one model: name one, or leave them out")
    older = None if asked.against is None else _read(asked.against)
    from glasscheck.report import verify_reference

    failed = False
    for model in asked.models:
        report = verify_reference(
            model,
            only=asked.only,
            deep=asked.deep,
            causal=False if asked.bidirectional else None,
        )
        _keep(report, files)
        print(json.dumps(report.to_dict()) if asked.json else report.text())
        if older is not None:
            print("\n".join(report.compare(older)), file=sys.stderr)
        failed |= bool(report.failed if older is None else report.new_failures(older))
    return int(failed)


def _read(name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{name} cannot be read: {error}", hint="what --out wrote") from error
    return found


def _keep(report: "Report", files: dict[str, str | None]) -> None:
    texts = {
        "out": lambda: json.dumps(report.to_dict(), indent=1) + "\n",
        "junit": report.junit,
        "markdown": report.markdown,
        "badge": report.badge,
    }
    for kind, text in texts.items():
        name = files[kind]
        if name is not None:
            Path(name).write_text(text(), encoding="utf-8")


def _diff(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "glasscheck diff", description="Name the first module that differs, and why it may."
    )
    parser.add_argument("first", metavar="MODULE:FACTORY")
    parser.add_argument("second", metavar="MODULE:FACTORY")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    asked = parser.parse_args(words)
    from glasscheck.differences import diff
    from glasscheck.subject import called

    sides = [called(name)[0] for name in (asked.first, asked.second)]
    found = diff(*sides, names=(asked.first, asked.second), backward=not asked.forward)
    print(found)
    return int(not found.same)


def _doctor(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "glasscheck doctor", description="Look for mistakes in a training that has not begun."
    )
    parser.add_argument("setup", metavar="MODULE:FACTORY", help="what returns a training set-up")
    parser.add_argument("--quick", action="store_true", help="nothing that trains some steps")
    parser.add_argument("--only", metavar="KIND", help="one kind, or one group")
    parser.add_argument("--time", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args(words)
    from glasscheck.diagnosis import doctor

    found = doctor(asked.setup, quick=asked.quick, only=asked.only, seconds=asked.time)
    print(json.dumps(found.to_dict()) if asked.json else found.text())
    return int(found.failed > 0)


if __name__ == "__main__":
    main()
