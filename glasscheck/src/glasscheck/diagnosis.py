"""`doctor`: look for twenty kinds of mistakes before a training, each with evidence and a fix.

A set-up is what a factory returns. The examinations go from cheap to dear and end at a time limit.
The model, its gradients and modes, the optimizer, the schedule and all random generators are
afterwards what they were before.
"""

import contextlib
import random
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import nn

from glasscheck.errors import CheckFailed, InputError, nearest
from glasscheck.foreign import untouched
from glasscheck.formats import Case, junit_xml
from glasscheck.measure import NotOffered, short
from glasscheck.patients import Patient
from glasscheck.report import Style, plain
from glasscheck.setups import Symptom, Verdict, setup_of
from glasscheck.subject import named
from glasscheck.symptoms import examples, gradients, steps, targets
from glasscheck.threads import threads_for


class Kind(NamedTuple):
    """A kind of mistake and how it is looked for."""

    name: str
    group: str
    look: Callable[[Patient], Symptom]
    trains: bool = False  # left out by --quick


#: The kinds of findings, the cheapest to look for first.
KINDS = (
    Kind("vocabulary", "data", examples.vocabulary),
    Kind("split leak", "data", examples.split_leak),
    Kind("truncation", "data", examples.truncation),
    Kind("rare class", "data", examples.rare_class),
    Kind("optimizer coverage", "optimizer", steps.optimizer_coverage),
    Kind("decay on norms", "optimizer", steps.decay_on_norms),
    Kind("warmup", "optimizer", steps.warmup),
    Kind("initial loss", "loss", targets.initial_loss),
    Kind("target shift", "loss", targets.target_shift),
    Kind("loss mask", "loss", targets.loss_mask),
    Kind("answer in the input", "loss", targets.answer_in_input),
    Kind("mask polarity", "model", targets.mask_polarity),
    Kind("dropout in eval", "model", gradients.dropout_in_eval),
    Kind("dtype range", "model", gradients.dtype_range),
    Kind("frozen or unused", "model", gradients.frozen_or_unused),
    Kind("gradient norms", "model", gradients.gradient_norms),
    Kind("accumulation", "training", gradients.accumulation),
    Kind("learning curve", "training", steps.learning_curve, trains=True),
    Kind("learning rate", "training", steps.learning_rate, trains=True),
    Kind("one batch", "training", steps.one_batch, trains=True),
)


def examine(kind: Kind, p: Patient) -> Symptom:
    """Look for one kind of mistake; what a stranger's code raises is said, never counted."""
    try:
        return kind.look(p)
    except NotOffered as error:
        return Symptom("not offered", str(error))
    except gradients.NoGradient:
        return Symptom("not offered", "the loss has no gradient")
    except Exception as error:  # a stranger's code may raise anything
        return Symptom("raised", f"the set-up raised {short(error)}")


#: Seconds after which no further examination begins, and a training in one of them ends.
SECONDS = 60.0
WIDTH = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one examination: evidence in numbers, and a fix where something is wrong."""

    kind: str
    group: str
    verdict: Verdict
    evidence: str
    fix: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """The findings of all examinations; printed, and shown in a notebook, as text."""

    #: The command, as JUnit's report names it.
    COMMAND: ClassVar[str] = "glasscheck --doctor"

    findings: tuple[Finding, ...]
    name: str = ""

    def of(self, *verdicts: Verdict) -> list[Finding]:
        """Return the findings with one of these verdicts."""
        return [f for f in self.findings if f.verdict in verdicts]

    @property
    def passed(self) -> int:
        """The number of kinds of which there is no sign."""
        return len(self.of("passed"))

    @property
    def failed(self) -> int:
        """The number of mistakes."""
        return len(self.of("mistake"))

    @property
    def warnings(self) -> int:
        """The number of findings that may be meant."""
        return len(self.of("warning"))

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        rows = [{**asdict(f), "seconds": round(f.seconds, 3)} for f in self.findings]
        counts = {"passed": self.passed, "mistakes": self.failed, "warnings": self.warnings}
        return {"name": self.name, **counts, "findings": rows}

    def markdown(self) -> str:
        """Return a table of what is wrong, for a pull request; the rest is counted."""
        lines = [f"**{self._counted()}**", ""]
        found = self.of("mistake", "warning")
        if found:
            lines += ["| | kind | evidence | fix |", "|---|---|---|---|"]
        for f in found:
            cells = (f.verdict, f.kind, f.evidence, f"`{f.fix}`")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines) + "\n"

    def junit(self) -> str:
        """Return JUnit XML: a test for each kind; what was not offered is skipped."""
        return junit_xml(
            self.COMMAND,
            [
                Case(
                    f"{self.name}.{f.group}",
                    f.kind,
                    f.seconds,
                    "failed"
                    if f.verdict == "mistake"
                    else "skipped"
                    if f.verdict in ("not offered", "raised")
                    else f.verdict,
                    f"{f.evidence}. Fix: {f.fix}" if f.fix else f.evidence,
                )
                for f in self.findings
            ],
        )

    def raise_if_failed(self) -> None:
        """Raise an exception that names the first mistake."""
        for f in self.of("mistake"):
            raise CheckFailed(f"{f.kind}: {f.evidence}", where=self.name, hint=f.fix)

    def _counted(self) -> str:
        what = "mistake" if self.failed == 1 else "mistakes"
        more = f", {self.warnings} warning{'s' * (self.warnings > 1)}" if self.warnings else ""
        return f"{self.failed} {what}{more}, {self.passed} of {len(self.findings)} kinds passed"

    def __repr__(self) -> str:
        return self.text()

    def text(self, style: Style = plain) -> str:
        """Return what is wrong, each with its fix, then a line for each kind that passed."""
        lines = []
        for f in self.of("mistake", "warning"):
            verdict = "bug" if f.verdict == "mistake" else "rounding"
            lines += [style(f"{f.verdict}  {f.kind}", verdict), *_wrapped(f.evidence, "  ")]
            lines += [*_wrapped(f.fix, "  fix: ", more="       "), ""]
        width = max(len(f.kind) for f in self.findings)
        for f in self.of("passed"):
            lines.append(f"  {style('passed', 'passed')}  {f.kind.ljust(width)}  {f.evidence}")
        left: dict[str, list[str]] = {}
        for f in self.of("not offered", "raised"):
            left.setdefault(f.evidence, []).append(f.kind)
        if left:
            lines += ["", style("not examined", "not offered")]
        for reason, kinds in left.items():
            said = _wrapped(f"{', '.join(kinds)}: {reason}", "  ", more="    ")
            lines += [style(line, "not offered") for line in said]
        verdict = "bug" if self.failed else "rounding" if self.warnings else "passed"
        return "\n".join([*lines, "", style(self._counted(), verdict)])


def _wrapped(text: str, begin: str, *, more: str | None = None) -> list[str]:
    after = begin if more is None else more
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=begin,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )


def doctor(
    thing: object,
    *,
    quick: bool = False,
    seconds: float = SECONDS,
    only: str | None = None,
    name: str = "",
) -> Diagnosis:
    """Look for mistakes in a training that has not begun.

    `thing`: a `Setup`, a dict with its fields, a module, or `package.module:factory` that returns
    one of these. `quick` leaves out what trains some steps.
    """
    kinds = kinds_of(only, quick=quick, seconds=seconds)
    setup = setup_of(made_of(thing), name=thing) if isinstance(thing, str) else setup_of(thing)
    setup = replace(setup, name=name or setup.name)
    with as_it_was(setup.model):
        return Diagnosis(examined(Patient(setup), kinds, seconds), setup.name)


def kinds_of(only: str | None, *, quick: bool, seconds: float) -> list[Kind]:
    """Return the kinds of findings to look for: all, or those of a name or a group."""
    kinds = [kind for kind in KINDS if not (quick and kind.trains)]
    if only is not None:
        if only not in {k.name for k in KINDS} | {k.group for k in KINDS}:
            known = [k.name for k in KINDS] + [k.group for k in KINDS]
            raise InputError(f"no kind '{only}'", hint=nearest(only, known))
        kinds = [kind for kind in kinds if only in (kind.name, kind.group)]
    if not seconds > 0:
        raise InputError(f"a time limit of {seconds} seconds", hint="a number above 0")
    return kinds


def made_of(reference: str) -> object:
    """Return what `package.module:factory` returns, or the module or set-up of that name."""
    return made_by(named(reference), where=reference)


def made_by(thing: Any, *, where: str) -> object:
    """Return what a factory returns; what is no factory is returned as it is."""
    if not callable(thing) or isinstance(thing, nn.Module):
        return thing
    try:
        return thing()
    except Exception as error:  # a stranger's factory may raise anything
        raise InputError(
            f"the factory raised {short(error)}",
            where=where,
            hint="it is called without arguments and returns a set-up",
        ) from error


def examined(p: Patient, kinds: Iterable[Kind], seconds: float) -> tuple[Finding, ...]:
    """Examine a set-up, kind by kind, until the time is over."""
    begin = time.perf_counter()
    p.deadline = begin + seconds
    findings = []
    with threads_for(sum(q.numel() for q in p.model.parameters())):
        for kind in kinds:
            started = time.perf_counter()
            if started > p.deadline:
                findings.append(Finding(kind.name, kind.group, "not offered", p.out_of_time()))
                continue
            s = examine(kind, p)
            spent = time.perf_counter() - started
            findings.append(Finding(kind.name, kind.group, s.verdict, s.evidence, s.fix, spent))
    return tuple(findings)


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Put back the model and every random generator: torch's, NumPy's and Python's."""
    drawn, numbers = random.getstate(), np.random.get_state()
    try:
        with untouched(model):
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(numbers)
