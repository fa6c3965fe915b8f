"""Every check by name and group, and how they are run to give findings.

A float32 failure is repeated in float64: a difference that shrinks with the precision was
*rounding*, one that stays is a *bug*. Only a bug fails; rounding, a limit that the note names, and
a difference whose cause cannot be told are warnings.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, assert_never

import torch

from glasscheck.errors import InputError, nearest
from glasscheck.measure import BEYOND_DOUBT, LARGEST, Measure, NotOffered, short
from glasscheck.rows import (
    foreign_cache,
    foreign_calls,
    foreign_slopes,
    foreign_training,
    invariants,
)
from glasscheck.subject import Subject

Verdict = Literal["passed", "bug", "rounding", "limit", "unclear", "raised", "not offered"]
#: Verdicts that a report counts as warnings.
WARNINGS = ("rounding", "limit", "unclear")

#: Below this share of the float32 gap, the float64 gap says that it was rounding. Some modules
#: compute norms and positions in float32 whatever their weights are, so it is no smaller.
ROUNDING_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the certificate."""

    name: str
    group: str
    subject: str
    dtype: str
    size: str
    worst: float
    tolerance: float
    verdict: Verdict
    note: str = ""
    seconds: float = 0.0
    explains: bool = False  # rows after it would not hold for the same reason

    @property
    def failed(self) -> bool:
        """True if the claim does not hold, and not for rounding or a limit that the note names."""
        return self.verdict == "bug"

    @property
    def warned(self) -> bool:
        """True if the claim does not hold as it stands, and that is no evidence of a bug."""
        return self.verdict in WARNINGS


class Claim(Protocol):
    """What every check has: a name, a group, and a function with a sentence about it."""

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> str: ...

    @property
    def run(self) -> Callable[..., Any]: ...


@dataclass(frozen=True, slots=True)
class SubjectCheck:
    """A claim about a model.

    `of` says whose: any; of a library with own rows ("ours", also what has no module); a live
    module ("foreign"), of those only decoders (with or without an encoder), or only those with a
    source.
    """

    name: str
    group: str
    run: Callable[[Subject], Measure]
    deep: bool = False
    after: str = ""  # the row whose failure explains this one's
    of: Literal["any", "ours", "foreign", "decoder", "source"] = "any"

    def concerns(self, subject: Subject) -> bool:
        """True if the claim can be made about this kind of model."""
        kind = "" if subject.foreign is None else subject.foreign.kind
        match self.of:
            case "any":
                return True
            case "ours":
                return not kind
            case "foreign":
                return bool(kind)
            case "decoder":
                return kind in ("decoder", "encoder-decoder")
            case "source":
                return kind == "encoder-decoder"
        assert_never(self.of)


#: Rows that explain others when they fail.
FIRST = "same input, same bits; no dropout in eval"
PAD_HOLDS = "what PAD holds changes no bit"
CACHED = "cached = uncached, token by token"
WITHOUT_CACHE = "generate: cache on = off"
CHUNKS = "a prompt in chunks = at once"
REORDERED = "cache reordered = those rows uncached"

SUBJECT_CHECKS = (
    SubjectCheck("the future changes no bit of the past", "causality", invariants.causality),
    SubjectCheck(PAD_HOLDS, "padding", invariants.padding_content),
    SubjectCheck(
        "more padding on the right changes nothing",
        "padding",
        invariants.padding_right,
        after=PAD_HOLDS,
    ),
    SubjectCheck(
        "more padding on the left changes nothing",
        "padding",
        invariants.padding_left,
        after=PAD_HOLDS,
    ),
    SubjectCheck(
        "a batch = each sequence alone", "padding", invariants.batch_is_singles, after=PAD_HOLDS
    ),
    SubjectCheck(FIRST, "determinism", invariants.determinism),
    SubjectCheck("every parameter gets a gradient", "gradients", invariants.gradient_flow),
    SubjectCheck(CACHED, "cache", invariants.cached_is_full),
    SubjectCheck("saved and loaded, same bits", "files", invariants.reloaded),
    SubjectCheck("logits = the reference's", "reference", invariants.like_reference),
    SubjectCheck(
        "attentions, hidden states, a cache read, same logits",
        "calls",
        foreign_calls.extras_change_nothing,
        of="foreign",
    ),
    SubjectCheck("a mask of ones = no mask", "calls", foreign_calls.ones_are_no_mask, of="foreign"),
    SubjectCheck(
        "positions given = positions counted",
        "calls",
        foreign_calls.positions_are_counted,
        of="foreign",
    ),
    SubjectCheck(
        "embeddings given = token ids", "calls", foreign_calls.embeddings_are_tokens, of="foreign"
    ),
    SubjectCheck(
        "the last logits alone = all of them, cut",
        "calls",
        foreign_calls.last_logits_alone,
        of="foreign",
    ),
    SubjectCheck(
        "a call leaves nothing behind", "calls", foreign_calls.nothing_is_left_behind, of="foreign"
    ),
    SubjectCheck(
        "training mode without dropout = eval mode",
        "calls",
        foreign_calls.training_mode_without_dropout,
        of="foreign",
    ),
    SubjectCheck(
        "fused attention = eager attention", "kernels", foreign_calls.kernels_agree, of="foreign"
    ),
    SubjectCheck(
        "bfloat16, float16 = float32, within their bits",
        "kernels",
        foreign_calls.half_precision,
        of="foreign",
    ),
    SubjectCheck(
        "a compiled module = the module",
        "compiled",
        foreign_calls.compiled_is_eager,
        deep=True,
        of="foreign",
    ),
    SubjectCheck(
        "flexible attention = eager attention",
        "kernels",
        foreign_calls.flex_is_eager,
        deep=True,
        of="foreign",
    ),
    SubjectCheck(
        "quantized layers = their dequantized weights",
        "quantization",
        foreign_calls.quantized_is_dequantized,
        of="foreign",
    ),
    SubjectCheck("GPU = CPU", "kernels", foreign_calls.devices_agree, of="foreign"),
    SubjectCheck("source PAD changes nothing", "source", foreign_calls.source_padding, of="source"),
    SubjectCheck(
        "every position reads the source", "source", foreign_calls.source_is_read, of="source"
    ),
    SubjectCheck("encoded once = encoded anew", "source", foreign_calls.encoded_once, of="source"),
    SubjectCheck(CHUNKS, "cache", foreign_cache.in_chunks, of="decoder", after=CACHED),
    SubjectCheck(
        REORDERED,
        "cache",
        foreign_cache.reordered,
        of="decoder",
        after=CACHED,
    ),
    SubjectCheck(
        "past the sliding window, cached = uncached",
        "cache",
        foreign_cache.past_the_window,
        of="decoder",
        after=CACHED,
    ),
    SubjectCheck(
        "past the stated context, cached = uncached",
        "cache",
        foreign_cache.past_the_length,
        of="decoder",
        after=CACHED,
    ),
    SubjectCheck(
        "generate = the likeliest token of each forward",
        "generate",
        foreign_cache.generates_the_likeliest,
        of="decoder",
        after=CACHED,
    ),
    SubjectCheck(
        WITHOUT_CACHE, "generate", foreign_cache.generates_without_cache, of="decoder", after=CACHED
    ),
    SubjectCheck(
        "generate: a batch = each prompt alone",
        "generate",
        foreign_cache.generates_in_a_batch,
        of="decoder",
        after=PAD_HOLDS,
    ),
    SubjectCheck(
        "generate: beams, cache on = off",
        "generate",
        foreign_cache.beams_without_cache,
        of="decoder",
        after=REORDERED,
    ),
    SubjectCheck(
        "generate: static cache = growing cache",
        "generate",
        foreign_cache.static_is_dynamic,
        of="decoder",
        after=WITHOUT_CACHE,
    ),
    SubjectCheck(
        "generate: a second turn = from the start",
        "generate",
        foreign_cache.second_turn,
        of="decoder",
        after=CHUNKS,
    ),
    SubjectCheck(
        "loss = cross entropy by hand", "training", foreign_training.loss_by_hand, of="foreign"
    ),
    SubjectCheck(
        "loss of a padded batch = its rows'",
        "training",
        foreign_training.padding_in_the_loss,
        of="foreign",
        after=PAD_HOLDS,
    ),
    SubjectCheck(
        "gradients accumulated = one batch's",
        "training",
        foreign_training.accumulated,
        of="foreign",
    ),
    SubjectCheck(
        "gradients = central differences",
        "gradients",
        foreign_slopes.gradients_by_differences,
        of="foreign",
    ),
    SubjectCheck(
        "gradient checkpointing on = off", "training", foreign_training.checkpointed, of="foreign"
    ),
    SubjectCheck("packed = each sequence alone", "training", foreign_training.packed, of="foreign"),
    SubjectCheck(
        "save_pretrained and back, same bits", "files", foreign_training.saved_folder, of="foreign"
    ),
    SubjectCheck("tied weights are one tensor", "names", foreign_training.tied, of="foreign"),
    SubjectCheck(
        "adapters merged = beside the weights",
        "names",
        foreign_training.adapters_merged,
        of="foreign",
    ),
)


def check_group(only: str | None, groups: Sequence[str]) -> None:
    """Refuse a group that does not exist."""
    if only is not None and only not in groups:
        raise InputError(f"no group of checks '{only}'", hint=nearest(only, groups, cutoff=0.7))


Begin = Callable[[str], None]  # called with the name of each row before it runs


def subject_checks(
    subject: Subject,
    *,
    only: str | None = None,
    deep: bool = False,
    checks: Sequence[SubjectCheck] = SUBJECT_CHECKS,
) -> list[SubjectCheck]:
    """Return the checks that concern a subject, the row that explains others first."""
    check_group(only, groups_of(checks))
    chosen = [
        check
        for check in checks
        if only in (None, check.group) and (deep or not check.deep) and check.concerns(subject)
    ]
    return sorted(chosen, key=lambda check: check.name != FIRST)


def groups_of(checks: Sequence[SubjectCheck]) -> tuple[str, ...]:
    """Return the groups of some checks, in their order."""
    return tuple(dict.fromkeys(check.group for check in checks))


def verify_subject(
    subject: Subject,
    *,
    only: str | None = None,
    deep: bool = False,
    begin: Begin | None = None,
    checks: Sequence[SubjectCheck] = SUBJECT_CHECKS,
) -> Iterator[Finding]:
    """Run every check that this subject offers; `deep` adds slow checks."""
    causes: dict[str, str] = {}  # of rows that failed, or were not asked for that reason
    for check in subject_checks(subject, only=only, deep=deep, checks=checks):
        if begin is not None:
            begin(check.name)
        cause = causes.get(FIRST) or causes.get(check.after)
        if cause is not None:
            causes[check.name] = cause
            reason = Measure(0.0, 0.0, subject.size, f"not asked, as '{cause}' does not hold")
            yield finding_of(check, subject.name, dtype_of(subject), reason, "not offered", 0.0)
            continue
        finding = run_subject_check(check, subject)
        if finding.failed or finding.explains:
            causes[check.name] = check.name
        yield finding


def run_subject_check(check: SubjectCheck, subject: Subject) -> Finding:
    """Run one check; a failure is repeated in float64 if the subject offers it."""
    start, dtype = time.perf_counter(), dtype_of(subject)
    try:
        measure = _within_chance(subject, check.run(subject))
        verdict = _verdict(check, subject, measure, dtype)
    except NotOffered as reason:
        measure, verdict = Measure(0.0, 0.0, subject.size, str(reason)), "not offered"
    except Exception as error:  # a stranger's model may raise anything
        measure = Measure(float("inf"), 0.0, subject.size, f"the model raised {short(error)}")
        verdict = "raised" if subject.model is None else "bug"  # a library's own has no excuse
    return finding_of(check, subject.name, dtype, measure, verdict, time.perf_counter() - start)


def _within_chance(subject: Subject, measure: Measure) -> Measure:
    """Excuse a gap that another seed makes too, in a model that hashes or samples at random."""
    seeds = max(subject.chance, default=0.0)
    if measure.holds or measure.limit or measure.worst > seeds:
        return measure
    return replace(measure, limit=f"no more than another seed changes: {seeds:.1e}")


def _verdict(check: SubjectCheck, subject: Subject, measure: Measure, dtype: str) -> Verdict:
    """Decide what a measure means; a bug needs evidence."""
    if measure.holds:
        return "passed"
    if measure.limit:
        return "limit"
    if measure.worst <= measure.rounding:
        return "rounding"
    if measure.evident or measure.dtype == "float64" or not math.isfinite(measure.worst):
        return "bug"
    bar = max(measure.tolerance, measure.rounding)
    if subject.double is not None and dtype == "torch.float32":
        try:
            wide = check.run(subject.double())
        except Exception:  # the twin alone: it failed all the same, and its size must decide
            pass
        else:
            shrank = wide.holds or wide.worst < ROUNDING_SHARE * measure.worst
            # no arithmetic loses a hundredth: what float64 mends is then a bug of float32
            return "rounding" if shrank and measure.worst <= LARGEST[torch.float32] else "bug"
    return "bug" if measure.worst > BEYOND_DOUBT * bar else "unclear"


def dtype_of(subject: Subject) -> str:
    """Return the precision of a subject's first parameter."""
    for parameter in (subject.parameters or {}).values():
        return str(parameter.dtype)
    return "unknown"


def finding_of(
    check: Claim,
    subject: str,
    dtype: str,
    measure: Measure,
    verdict: Verdict,
    seconds: float,
) -> Finding:
    """Return a row of the certificate: a claim, and what it measured."""
    note = measure.note
    if verdict == "limit":
        note = measure.limit
    if verdict not in ("passed", "not offered") and not note:
        note = (check.run.__doc__ or "").strip().split("\n")[0]
    return Finding(
        check.name,
        check.group,
        subject,
        measure.dtype or dtype.removeprefix("torch."),
        measure.size,
        measure.worst,
        measure.tolerance,
        verdict,
        note,
        seconds,
        measure.explains,
    )
