"""The certificate of our own models, of parts and presets, and of anyone's models."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

from torch import nn

import glasscheck.report
from glasscheck.foreign import looks_fresh, redraw, refuse_what_cannot_run, untouched
from glasscheck.formats import Case, junit_xml
from glasscheck.judgement import Rules
from glasscheck.report import Style, Watch, counted, plain
from glasscheck.subject import Logits, Subject
from glassformer.adapters.base import BaseAdapter
from glassformer.checks.catalogue import (
    Finding,
    part_checks,
    subject_checks,
    verify_parts,
    verify_subject,
)
from glassformer.checks.errors import as_ours
from glassformer.checks.preset_subjects import sample_subjects
from glassformer.checks.subject import subject_of
from glassformer.kernels.threads import verifying
from glassformer.models.model import Model

__all__ = ["Case", "Report", "Style", "Watch", "junit_xml", "plain", "verify"]


class Report(glasscheck.report.Report):
    """The findings of a verification; printed, and shown in a notebook, as text."""

    __slots__ = ()
    COMMAND: ClassVar[str] = "glass verify"
    PACKAGE: ClassVar[str] = "glassformer"

    def compare(self, older: Mapping[str, Any]) -> list[str]:
        """Return what changed since an older certificate (`to_dict()`)."""
        with as_ours():
            return super().compare(older)

    def new_failures(self, older: Mapping[str, Any]) -> list[Finding]:
        """Return the failures that an older certificate does not have."""
        with as_ours():
            return super().new_failures(older)

    def raise_if_failed(self) -> None:
        """Raise an exception that names the first failure."""
        with as_ours():
            super().raise_if_failed()


def verify(
    thing: object = None,
    *,
    only: str | None = None,
    deep: bool = False,
    name: str = "",
    logits: Logits | None = None,
    vocab_size: int | None = None,
    max_length: int | None = None,
    causal: bool | None = None,
    watch: Watch | None = None,
    rules: Rules | None = None,
) -> Report:
    """Check a model, ours or anyone's; without one, our parts and every preset.

    `logits=lambda tokens, valid: ...` calls a module whose forward has other arguments; `causal`
    tells a model that reads forwards from one that reads both ways, where its config does not.
    `watch(row, done, total)` is called before each row; `rules` say what else fails, and what is
    known. The model comes back as it was: weights, gradients, modes, buffers, random generators.
    """
    rules = rules or Rules()
    if thing is not None:
        module = _module_of(thing)
        if module is not None:
            with as_ours():
                refuse_what_cannot_run(module)
        redrawn = module is not None and not _is_ours(thing) and looks_fresh(module)
        with untouched(module, weights=redrawn) if module is not None else nullcontext():
            if redrawn and module is not None:
                redraw(module)
            subject = subject_of(
                thing,
                name=name,
                logits=logits,
                vocab_size=vocab_size,
                max_length=max_length,
                causal=causal,
            )
            begin = counted(watch, len(subject_checks(subject, only=only, deep=deep)))
            with verifying(subject.parameter_count()):
                skip = rules.skipped(subject.name)
                findings = tuple(
                    verify_subject(subject, only=only, deep=deep, begin=begin, skip=skip)
                )
        with as_ours():
            return Report(findings, redrawn).judged(rules)
    subjects = list(sample_subjects())
    total = len(part_checks(only=only, deep=deep))
    total += sum(len(subject_checks(s, only=only, deep=deep)) for s in subjects)
    total += sum(len(subject_checks(s, only=only)) for s in subjects) if deep else 0
    begin = counted(watch, total)
    with verifying(0):
        findings = tuple(verify_parts(only=only, deep=deep, begin=begin))
        for subject in subjects:
            findings += tuple(verify_subject(subject, only=only, deep=deep, begin=begin))
        if deep:
            for subject in sample_subjects(deep=True):
                findings += tuple(verify_subject(subject, only=only, begin=begin))
    with as_ours():
        return Report(findings).judged(rules)


def _module_of(thing: object) -> nn.Module | None:
    """Return the module whose state a verification must leave as it is."""
    if isinstance(thing, Subject):
        return thing.foreign.module if thing.foreign is not None else thing.model
    if isinstance(thing, BaseAdapter):
        return thing.model  # which has the mode; the adapter shares its tables
    return thing if isinstance(thing, nn.Module) else None


def _is_ours(thing: object) -> bool:
    if isinstance(thing, Subject):
        return thing.foreign is None
    return isinstance(thing, (Model, BaseAdapter))
