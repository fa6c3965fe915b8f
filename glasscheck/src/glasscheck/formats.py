"""A report in other tools' formats: JUnit XML, SARIF, GitHub's workflow commands, a badge."""

import json
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree import ElementTree


class Case(NamedTuple):
    """A test of a report; its outcome is passed, failed, skipped or warning."""

    owner: str
    name: str
    seconds: float
    outcome: str
    said: str

    @property
    def file(self) -> str:
        """The file of the model's factory, as far as its name tells: `a/b.py` of `a.b:make`."""
        place = self.owner.partition(":")[0]
        if place.endswith(".py"):
            return place
        return f"{place.replace('.', '/')}.py" if ":" in self.owner else "pyproject.toml"


def junit_xml(title: str, cases: Sequence[Case]) -> str:
    """Return JUnit XML of some cases."""
    suite = ElementTree.Element(
        "testsuite",
        name=title,
        tests=str(len(cases)),
        failures=str(sum(case.outcome == "failed" for case in cases)),
        skipped=str(sum(case.outcome == "skipped" for case in cases)),
    )
    for case in cases:
        test = ElementTree.SubElement(
            suite, "testcase", classname=case.owner, name=case.name, time=f"{case.seconds:.4f}"
        )
        match case.outcome:
            case "failed":
                ElementTree.SubElement(test, "failure", message=case.said)
            case "skipped":
                ElementTree.SubElement(test, "skipped", message=case.said)
            case "warning":
                ElementTree.SubElement(test, "system-out").text = case.said
    return ElementTree.tostring(suite, encoding="unicode")


LEVELS = {"failed": "error", "warning": "warning"}


def sarif(tool: str, cases: Sequence[Case]) -> str:
    """Return SARIF 2.1.0: a rule for each check, a result for each failure and warning."""
    shown = [case for case in cases if case.outcome in LEVELS]
    rules = dict.fromkeys(case.name for case in shown)
    results = [
        {
            "ruleId": case.name,
            "level": LEVELS[case.outcome],
            "message": {"text": f"{case.owner}: {case.name}. {case.said}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": case.file},
                        "region": {"startLine": 1},
                    }
                }
            ],
        }
        for case in shown
    ]
    driver = {"name": tool, "rules": [{"id": name} for name in rules]}
    runs = [{"tool": {"driver": driver}, "results": results}]
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": runs}, indent=1) + "\n"


def annotations(cases: Sequence[Case]) -> str:
    """Return GitHub's workflow commands, a line for each failure and warning."""
    return "".join(
        f"::{LEVELS[case.outcome]} file={_property(case.file)},"
        f"title={_property(case.name)}::{_escaped(f'{case.owner}: {case.said}')}\n"
        for case in cases
        if case.outcome in LEVELS
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def badge(label: str, *, passed: int, failed: int) -> str:
    """Return an SVG badge: how many checks passed, or failed."""
    value = f"{failed} failed" if failed else f"{passed} passed"
    colour = "#c0392b" if failed else "#2e7d32"
    left, right = 12 + 7 * len(label), 12 + 7 * len(value)
    width, middle = left + right, left + right / 2
    font = 'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" fill="#fff"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" '
        f'aria-label="{label}: {value}"><title>{label}: {value}</title>'
        f'<clipPath id="round"><rect width="{width}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#round)"><rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/></g>'
        f'<g {font} text-anchor="middle"><text x="{left / 2}" y="14">{label}</text>'
        f'<text x="{middle}" y="14">{value}</text></g></svg>\n'
    )
