"""What fails a run: a project's rules beside the verdicts, and its baseline of known limitations.

A baseline is a TOML file. Each entry names a check, why it is put up with, and until when; after
that day the check counts again. `skip = true` leaves it out altogether:

    [[known]]
    check = "THE NAME OF A CHECK"
    model = "my_package.models:tiny"   # or "*", the default: any
    reason = "we never pack"
    until = 2027-06-30
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from glasscheck.catalogue import EXPLAINED, Finding
from glasscheck.errors import FileError, InputError, nearest
from glasscheck.measure import Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A check that a project puts up with until a day, for a model or for all."""

    check: str
    reason: str
    until: date
    model: str = "*"
    skip: bool = False

    def concerns(self, model: str, check: str) -> bool:
        """True if the entry is about this check of this model."""
        return self.check == check and fnmatchcase(model, self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What counts as a failure.

    `strict`: warnings count too; `allow_errors`: a check that raised does not; `require`: checks
    that must have passed, asked for or not; `baseline`: known limitations, each with its day.
    """

    strict: bool = False
    allow_errors: bool = False
    require: tuple[str, ...] = ()
    baseline: tuple[Known, ...] = ()
    today: date | None = None  # the day to judge by, if not this one

    def skipped(self, model: str) -> dict[str, str]:
        """Return the checks of a model that are left out, each with its reason."""
        return {
            k.check: f"{k.reason} (until {k.until})"
            for k in self._valid()
            if k.skip and fnmatchcase(model, k.model)
        }

    def judged(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """Return the findings, each failing or put up with as the rules say."""
        names = {f.name for f in findings}
        for name in self.require:
            if name not in names:
                raise InputError(f"no check '{name}' to require", hint=nearest(name, names))
        return tuple(self._judge(f) for f in findings)

    def judged_alone(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """Return some of a report's findings as the rules see them; the others may be elsewhere."""
        return tuple(self._judge(f) for f in findings)

    def _judge(self, f: Finding) -> Finding:
        passed = f.verdict == "passed"
        if f.name in self.require and not passed:
            return replace(f, judged="fails", note=_joined("required, and not passed", f.note))
        if passed or f.verdict == "not offered":
            return f
        for k in self.baseline:
            if k.concerns(f.subject, f.name):
                if k in self._valid():
                    return replace(f, judged="known", note=f"{k.reason} (until {k.until})")
                f = replace(f, note=_joined(f"its baseline entry ended on {k.until}", f.note))
        if f.verdict == "error" and self.allow_errors:
            return replace(f, judged="allowed")
        if self.strict and f.verdict in ("limit", "unclear", "rounding"):
            return replace(f, judged="fails")
        return f

    def _valid(self) -> list[Known]:
        today = self.today or date.today()
        return [k for k in self.baseline if k.until >= today]

    def unneeded(self, findings: Iterable[Finding]) -> list[Known]:
        """Return the entries of the baseline whose check passed: they can go."""
        passed = [f for f in findings if f.verdict == "passed"]
        return [k for k in self.baseline if any(k.concerns(f.subject, f.name) for f in passed)]


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def baseline_of(file: str | Path) -> tuple[Known, ...]:
    """Read a baseline; every entry needs a check, a reason and a day."""
    try:
        told = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(
            f"{file} cannot be read: {error}", hint="a TOML file of [[known]]"
        ) from error
    return tuple(_entry(one, file) for one in told.get("known", []))


def _entry(told: Mapping[str, Any], file: str | Path) -> Known:
    """Return an entry, or refuse one that lacks a reason or a day."""
    kinds = {"check": str, "reason": str, "until": date, "model": str, "skip": bool}
    for name in told:
        if name not in kinds:
            raise InputError(
                f"a baseline has no '{name}'", where=str(file), hint=nearest(name, kinds)
            )
    for name, kind in kinds.items():
        if name in ("check", "reason", "until") and not told.get(name):
            raise InputError(
                f"an entry without '{name}': {dict(told)}",
                where=str(file),
                hint="a known limitation has a check, a reason and a day: until = 2027-06-30",
            )
        if name in told and not isinstance(told[name], kind):
            raise InputError(f"'{name}' is not a {kind.__name__}: {told[name]!r}", where=str(file))
    return Known(**told)


def lost(
    older: Mapping[tuple[str, str, str], Mapping[str, Any]], findings: Sequence[Finding]
) -> list[Finding]:
    """Return the rows that an older certificate passed and that are gone, or not asked any more."""
    now = {(f.subject, f.name): f for f in findings}
    missing = []
    for (subject, name, dtype), was in older.items():
        f = now.get((subject, name))
        explained = f is not None and (f.ran or f.note.startswith(EXPLAINED))
        if was["verdict"] == "passed" and not explained and (f is None or not f.failed):
            note = "it passed before, and is gone" if f is None else f"it passed before: {f.note}"
            empty = Measure(0.0, 0.0)
            missing.append(
                Finding(name, was["group"], subject, dtype, empty.size, 0.0, 0.0, "not offered",
                        note, judged="fails")
            )  # fmt: skip
    return missing
