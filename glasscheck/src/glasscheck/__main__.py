"""The command `glasscheck`: verify, diff and doctor for any torch module, in a shell or in CI."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glasscheck.errors import FileError, GlassError
from glasscheck.settings import settings_of, shard_of

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
    add(
        "models",
        nargs="*",
        metavar="MODULE:FACTORY",
        help="what returns a model; without one, those of [tool.glasscheck] in pyproject.toml",
    )
    add("--only", metavar="GROUP", help="one group of checks: cache, padding, ...")
    add("--deep", action="store_true", help="also what takes longer: compiled, flexible attention")
    add("--bidirectional", action="store_true", help="it is meant to look ahead: no causality")
    add("--call", metavar="JSON", type=json.loads, help="arguments of every call: '{\"n\": 3}'")
    add(
        "--names",
        metavar="JSON",
        type=json.loads,
        help='arguments by role, tokens, mask, cache, labels: \'{"cache": "memo"}\'',
    )
    add("--strict", action="store_true", help="warnings fail too, but for the baseline's")
    add("--allow-errors", action="store_true", help="a check that raised fails nothing")
    add("--require", metavar="CHECK", action="append", default=[], help="it must have passed")
    add("--baseline", metavar="FILE", help="known limitations, each with a reason and a day")
    add("--shard", metavar="I/N", help="the I-th of N parts of all checks")
    add(
        "--repro", metavar="FOLDER", help="a script of plain torch for each failure that calls show"
    )
    add("--times", action="store_true", help="the seconds that each check took")
    add("--json", action="store_true", help="one JSON object for each model")
    add("--out", metavar="FILE", help="keep the certificate, as JSON")
    add("--against", metavar="FILE", help="compare with a kept one: only new failures count")
    add("--junit", metavar="FILE", help="JUnit XML for a CI server")
    add("--sarif", metavar="FILE", help="SARIF for a code host")
    add("--github", action="store_true", help="annotations, as GitHub's workflow commands")
    add("--markdown", metavar="FILE", help="a table for a pull request")
    add("--badge", metavar="FILE", help="a badge, as SVG")
    asked = parser.parse_args(words)
    settings = settings_of(Path.cwd())
    models = asked.models or [model.factory for model in settings.models]
    if not models:
        parser.error("no model: name a factory, or models in [tool.glasscheck] of pyproject.toml")
    older = None if asked.against is None else _read(asked.against)
    shard = shard_of(asked.shard)
    from glasscheck.judgement import Rules, baseline_of
    from glasscheck.report import verify_reference

    baseline = asked.baseline or settings.baseline
    rules = Rules(
        strict=asked.strict or settings.strict,
        allow_errors=asked.allow_errors or settings.allow_errors,
        require=(*settings.require, *asked.require),
        baseline=() if baseline is None else baseline_of(baseline),
    )
    reports, failed = {}, False
    for model in models:
        told = settings.of(model).options()
        told |= {"call": asked.call} if asked.call else {}
        told |= {"names": asked.names} if asked.names else {}
        told |= {"causal": False} if asked.bidirectional else {}
        told |= {"shard": shard} if shard else {}
        only, deep = asked.only or settings.only, asked.deep or settings.deep
        report = verify_reference(model, only=only, deep=deep, rules=rules, **told)
        reports[model] = report
        print(json.dumps(report.to_dict()) if asked.json else report.text())
        if asked.times and not asked.json:
            print("\n".join(report.times()))
        for entry in rules.unneeded(report.findings):
            print(f"the baseline names '{entry.check}', which passes", file=sys.stderr)
        before = _older_of(older, model)
        if before is not None:
            print("\n".join(report.compare(before)), file=sys.stderr)
        failed |= bool(report.failed if before is None else report.new_failures(before))
        if asked.github:
            print(report.annotations(), end="")
        if asked.repro is not None:
            _scripts(report, Path(asked.repro))
    _keep(reports, asked)
    return int(failed)


def _read(name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{name} cannot be read: {error}", hint="what --out wrote") from error
    return found


def _older_of(older: dict[str, Any] | None, model: str) -> dict[str, Any] | None:
    """Return the older certificate of one model, in a file of one or of several."""
    return older if older is None or "models" not in older else older["models"].get(model)


def _keep(reports: "dict[str, Report]", asked: argparse.Namespace) -> None:
    """Write the files that were asked for, of all models together."""
    from glasscheck.formats import badge, junit_xml, sarif

    every = list(reports.values())
    cases = [case for report in every for case in report.cases()]
    kept = {name: report.to_dict() for name, report in reports.items()}
    out = every[0].to_dict() if len(every) == 1 else {"models": kept}
    passed, failed = sum(r.passed for r in every), sum(r.failed for r in every)
    texts: dict[str | None, Callable[[], str]] = {
        asked.out: lambda: json.dumps(out, indent=1) + "\n",
        asked.junit: lambda: junit_xml("glasscheck", cases),
        asked.sarif: lambda: sarif("glasscheck", cases),
        asked.markdown: lambda: (
            "\n".join(f"{name}\n\n{r.markdown()}" for name, r in reports.items())
            if len(every) > 1
            else every[0].markdown()
        ),
        asked.badge: lambda: badge("glasscheck", passed=passed, failed=failed),
    }
    for name, text in texts.items():
        if name is not None:
            Path(name).write_text(text(), encoding="utf-8")


def _scripts(report: "Report", folder: Path) -> None:
    """Write a script for each failure that calls can show."""
    for claim, script in report.repros().items():
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{re.sub(r'[^a-z0-9]+', '-', claim.lower()).strip('-')}.py"
        file.write_text(script, encoding="utf-8")
        print(f"{claim}: {file}", file=sys.stderr)


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
