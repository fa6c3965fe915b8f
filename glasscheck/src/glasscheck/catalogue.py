"""Every check by name and group, and how they are run to give findings.

A float32 failure is repeated in float64: a difference that shrinks with the precision was
*rounding*, one that stays is a *bug*. A bug fails, and so does an *error*: a row that could not run
is no pass. Rounding, a limit that the note names, and a difference whose cause cannot be told are
warnings.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, assert_never

import torch

from glasscheck.errors import InputError, nearest
from glasscheck.measure import BEYOND_DOUBT, LARGEST, Measure, NotOffered, short
from glasscheck.rows import (
    batches,
    foreign_cache,
    foreign_calls,
    foreign_slopes,
    foreign_training,
    invariants,
    outputs,
)
from glasscheck.subject import Subject
from glasscheck.witness import witness

Verdict = Literal["passed", "bug", "rounding", "limit", "unclear", "error", "not offered"]
#: What a project's rules make of a finding: a failure after all, or one that is put up with.
Judged = Literal["", "fails", "known", "allowed"]
#: Verdicts that a report counts as failures, and as warnings.
FAILURES = ("bug", "error")
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
    judged: Judged = ""
    repro: str = ""  # lines of plain torch that show a failure

    @property
    def failed(self) -> bool:
        """True if the claim does not hold, or could not be tried, and no rule puts up with it."""
        return self.judged == "fails" or (self.verdict in FAILURES and not self.judged)

    @property
    def warned(self) -> bool:
        """True if the claim does not hold as it stands, and that fails nothing."""
        return not self.failed and (self.verdict in WARNINGS or bool(self.judged))

    @property
    def ran(self) -> bool:
        """True if the row was tried and gave a measure."""
        return self.verdict not in ("not offered", "error")

    @property
    def word(self) -> str:
        """The verdict as a report prints it."""
        return "known limitation" if self.judged == "known" else self.verdict


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
    after: str | tuple[str, ...] = ()  # the rows whose failure explains this one's
    of: Literal["any", "ours", "foreign", "decoder", "source"] = "any"

    @property
    def before(self) -> tuple[str, ...]:
        """The rows that run first, as their failure would explain this one's."""
        return (FIRST, *((self.after,) if isinstance(self.after, str) else self.after))

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


#: How the note of a row begins whose failure another one explains.
EXPLAINED = "not asked, as"
#: Rows that explain others when they fail.
FIRST = "same input, same bits; no dropout in eval"
FUTURE = "the future changes no bit of the past"
ALONE = "rows of one length, no mask = each alone"
PREFIX = "logits of every prefix = prefix of the logits"
PAD_HOLDS = "what PAD holds changes no bit"
EXTRAS = "attentions, hidden states, a cache read, same logits"
CACHED = "cached = uncached, token by token"
WITHOUT_CACHE = "generate: cache on = off"
LIKELIEST = "generate = the likeliest token of each forward"
CHUNKS = "a prompt in chunks = at once"
REORDERED = "cache reordered = those rows uncached"

SUBJECT_CHECKS = (
    SubjectCheck(FUTURE, "causality", invariants.causality),
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
    SubjectCheck(ALONE, "batches", batches.without_a_mask),
    SubjectCheck(
        "a batch permuted = its logits permuted", "batches", batches.permuted, after=ALONE
    ),
    SubjectCheck(PREFIX, "batches", batches.prefixes, after=FUTURE),
    SubjectCheck(
        "a long row: its prefixes = its beginning", "long rows", batches.long_prefixes, after=PREFIX
    ),
    SubjectCheck(
        "a long row in a batch = alone", "long rows", batches.long_batches, after=(ALONE, PAD_HOLDS)
    ),
    SubjectCheck(FIRST, "determinism", invariants.determinism),
    SubjectCheck("every parameter gets a gradient", "gradients", invariants.gradient_flow),
    SubjectCheck(CACHED, "cache", invariants.cached_is_full, after=FUTURE),
    SubjectCheck(
        "a long row through the cache = at once",
        "long rows",
        batches.long_cache,
        after=(CACHED, CHUNKS),
    ),
    SubjectCheck("saved and loaded, same bits", "files", invariants.reloaded),
    SubjectCheck("logits = the reference's", "reference", invariants.like_reference),
    SubjectCheck(
        EXTRAS,
        "calls",
        foreign_calls.extras_change_nothing,
        of="foreign",
    ),
    SubjectCheck(
        "a call leaves its arguments as they were", "calls", batches.arguments_stay, of="foreign"
    ),
    SubjectCheck(
        "a mask of booleans = of numbers",
        "calls",
        batches.kinds_of_masks,
        of="foreign",
        after=PAD_HOLDS,
    ),
    SubjectCheck(
        "attentions sum to 1, none to PAD or the future",
        "outputs",
        outputs.attention_sums,
        of="foreign",
        after=(FUTURE, EXTRAS),
    ),
    SubjectCheck(
        "hidden states end in the logits", "outputs", outputs.hidden_states_end, of="foreign"
    ),
    SubjectCheck(
        "positions with a gap change the logits", "calls", outputs.gaps_count, of="foreign"
    ),
    SubjectCheck("segments do not leak", "calls", outputs.segments_apart, of="foreign"),
    SubjectCheck(
        "the config's window is the window in effect",
        "long rows",
        outputs.window_in_effect,
        of="decoder",
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
        "gradients on = off", "calls", foreign_calls.gradients_change_nothing, of="foreign"
    ),
    SubjectCheck(
        "ids cut out of a table = the same ids", "calls", foreign_calls.layout_of_ids, of="foreign"
    ),
    SubjectCheck("a deep copy = the model", "files", foreign_calls.copies_agree, of="foreign"),
    SubjectCheck(
        "float64 = float32, within its bits",
        "kernels",
        foreign_calls.double_precision,
        of="foreign",
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
        LIKELIEST,
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
        "generate: where a row has ended, the others go on",
        "generate",
        foreign_cache.some_rows_end,
        of="decoder",
        after=WITHOUT_CACHE,
    ),
    SubjectCheck(
        "generate: every penalty at once = its formula",
        "generate",
        foreign_cache.generates_with_processors,
        of="decoder",
        after=(WITHOUT_CACHE, LIKELIEST),
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
        "loss of a long row = cross entropy by hand",
        "long rows",
        foreign_training.long_loss_by_hand,
        of="foreign",
        after="loss = cross entropy by hand",
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
        "gradients of a long row = central differences",
        "long rows",
        foreign_slopes.long_gradients_by_differences,
        of="foreign",
        after="gradients = central differences",
    ),
    SubjectCheck(
        "gradient checkpointing on = off", "training", foreign_training.checkpointed, of="foreign"
    ),
    SubjectCheck("packed = each sequence alone", "training", foreign_training.packed, of="foreign"),
    SubjectCheck(
        "save_pretrained and back, same bits", "files", foreign_training.saved_folder, of="foreign"
    ),
    SubjectCheck(
        "tied weights are one tensor after reloading",
        "names",
        foreign_training.ties_reloaded,
        of="foreign",
        after="saved and loaded, same bits",
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


class Examination:
    """The checks of one subject, each run once, and not at all where its cause is known."""

    def __init__(
        self,
        subject: Subject,
        checks: Sequence[SubjectCheck],
        *,
        skip: Mapping[str, str] | None = None,
    ) -> None:
        self.subject, self.checks = subject, {check.name: check for check in checks}
        self.skip = skip or {}
        self._findings: dict[str, Finding] = {}
        self._causes: dict[str, str] = {}  # of rows that failed, or were not asked for that reason

    def finding(self, name: str, *, begin: Begin | None = None) -> Finding:
        """Return the finding of a check; the rows that would explain its failure run first."""
        if name not in self._findings:
            check = self.checks[name]
            for before in check.before:
                if before in self.checks and before != name:
                    self.finding(before, begin=begin)
            if begin is not None:
                begin(name)
            self._findings[name] = self._found(check)
        return self._findings[name]

    def _found(self, check: SubjectCheck) -> Finding:
        causes = (self._causes.get(before) for before in check.before)
        cause = next(filter(None, causes), "")
        reason = f"{EXPLAINED} '{cause}' does not hold" if cause else ""
        reason = f"skipped: {self.skip[check.name]}" if check.name in self.skip else reason
        if reason:
            if cause:
                self._causes[check.name] = cause
            measure = Measure(0.0, 0.0, self.subject.size, reason)
            dtype = dtype_of(self.subject)
            return finding_of(check, self.subject.name, dtype, measure, "not offered", 0.0)
        finding = run_subject_check(check, self.subject)
        if finding.verdict == "bug" or finding.explains:
            self._causes[check.name] = check.name
        return finding


def verify_subject(
    subject: Subject,
    *,
    only: str | None = None,
    deep: bool = False,
    begin: Begin | None = None,
    skip: Mapping[str, str] | None = None,
    shard: tuple[int, int] | None = None,
    checks: Sequence[SubjectCheck] = SUBJECT_CHECKS,
) -> Iterator[Finding]:
    """Run every check that this subject offers; `deep` adds slow checks.

    Those in `skip` are not run: the reason stands in their place. Of `shard=(3, 8)` every eighth
    check from the third on is yielded; what would explain its failure runs too.
    """
    chosen = subject_checks(subject, only=only, deep=deep, checks=checks)
    examination = Examination(subject, chosen, skip=skip)
    part, parts = shard or (1, 1)
    for check in chosen[part - 1 :: parts]:
        yield examination.finding(check.name, begin=begin)


def run_subject_check(check: SubjectCheck, subject: Subject) -> Finding:
    """Run one check; a failure is repeated in float64 if the subject offers it."""
    start, dtype = time.perf_counter(), dtype_of(subject)
    try:
        measure = _within_batch_rounding(subject, _within_chance(subject, check.run(subject)))
        verdict = _verdict(check, subject, measure, dtype)
    except NotOffered as reason:
        measure, verdict = Measure(0.0, 0.0, subject.size, str(reason)), "not offered"
    except Exception as error:  # a stranger's model may raise anything
        measure = Measure(float("inf"), 0.0, subject.size, f"the model raised {short(error)}")
        verdict = "error" if subject.model is None else "bug"  # a library's own has no excuse
    seconds = time.perf_counter() - start
    finding = finding_of(check, subject.name, dtype, measure, verdict, seconds)
    return with_witness(finding, check.run, subject) if verdict == "bug" else finding


def with_witness(finding: Finding, run: Callable[[Subject], Measure], subject: Subject) -> Finding:
    """Add to a failure the lines that repeat it, and the first module that differs."""
    seen = witness(run, subject)
    if seen is None:
        return finding
    place = f"first module that differs: {seen.module}" if seen.module else ""
    note = "; ".join(filter(None, (finding.note, place)))
    return replace(finding, note=note, repro=seen.script)


def _within_chance(subject: Subject, measure: Measure) -> Measure:
    """Excuse a gap that another seed makes too, in a model that hashes or samples at random."""
    seeds = max(subject.chance, default=0.0)
    if measure.holds or measure.limit or measure.worst > seeds:
        return measure
    return replace(measure, limit=f"no more than another seed changes: {seeds:.1e}")


#: How far rounding of inputs to 8 bits, by the largest of a batch, may move logits.
EIGHT_BITS = 0.3


def _within_batch_rounding(subject: Subject, measure: Measure) -> Measure:
    """Excuse a gap of layers whose inputs are rounded by the largest number of their batch."""
    foreign = subject.foreign
    if measure.holds or measure.limit or foreign is None or measure.worst > EIGHT_BITS:
        return measure
    for name, part in foreign.module.named_modules():
        if "quantized.dynamic" in type(part).__module__:
            limit = f"{name} rounds its inputs by the largest of all that are computed together"
            return replace(measure, limit=limit)
    return measure


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
