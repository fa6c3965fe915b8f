"""Every check by name and group, and how they are run to give findings.

A float32 failure is repeated in float64: a difference that shrinks with the precision was
*rounding*, one that stays is a *bug*.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from glassformer.checks.measure import Measure, NotOffered
from glassformer.checks.rows import (
    attention,
    decoding,
    experts,
    invariants,
    layers,
    numpy_parity,
    own_models,
    parts,
    quantization,
)
from glassformer.checks.subject import Subject
from glassformer.spec.errors import InputError, nearest

Verdict = Literal["passed", "bug", "rounding", "failed", "not offered"]

#: Below this share of the float32 gap, the float64 gap says that it was rounding.
ROUNDING_SHARE = 1e-6


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

    @property
    def failed(self) -> bool:
        """True if the claim did not hold, for any reason."""
        return self.verdict in ("bug", "rounding", "failed")


@dataclass(frozen=True, slots=True)
class PartCheck:
    """A claim about our parts alone."""

    name: str
    group: str
    run: Callable[[torch.dtype], Measure]
    deep: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class SubjectCheck:
    """A claim about a model."""

    name: str
    group: str
    run: Callable[[Subject], Measure]
    deep: bool = False


PART_CHECKS = (
    PartCheck(
        "explicit attention = F.scaled_dot_product_attention",
        "attention",
        attention.explicit_attention,
    ),
    PartCheck("explicit attention = fused attention", "attention", attention.fused_is_explicit),
    PartCheck("multi-head = nn.MultiheadAttention", "attention", attention.multi_head),
    PartCheck(
        "attention weights = nn.MultiheadAttention's", "attention", attention.multi_head_weights
    ),
    PartCheck("cross-attention = nn.MultiheadAttention", "attention", attention.cross_attention),
    PartCheck("grouped heads = one head at a time", "attention", attention.grouped_heads),
    PartCheck("q/k-norm, then rotation = by hand", "attention", attention.qk_norm),
    PartCheck("sliding window = one query at a time", "attention", attention.window_by_hand),
    PartCheck("rows that may attend to nothing are zero", "attention", attention.empty_rows),
    PartCheck("scores of 1e4 stay finite", "attention", attention.large_scores),
    PartCheck("encoder layer = nn.TransformerEncoderLayer", "layers", layers.encoder_layers),
    PartCheck("decoder layer = nn.TransformerDecoderLayer", "layers", layers.decoder_layers),
    PartCheck("encoder-decoder = nn.Transformer", "layers", layers.whole_transformer),
    PartCheck("LayerNorm = nn.LayerNorm", "parts", parts.layer_norm),
    PartCheck("RMSNorm = nn.RMSNorm", "parts", parts.rms_norm),
    PartCheck("feed-forward = formula", "parts", parts.feed_forward),
    PartCheck("experts in groups = one token at a time", "experts", experts.grouped_experts),
    PartCheck("balance loss = counted over real tokens", "experts", experts.balance_by_counting),
    PartCheck("no token is dropped", "experts", experts.nobody_is_dropped),
    PartCheck("rotary positions = complex numbers", "positions", parts.rotary_closed_form),
    PartCheck("rotary scores depend on distance only", "positions", parts.rotary_is_relative),
    PartCheck("ALiBi = one query at a time", "positions", attention.alibi_by_hand),
    PartCheck("ALiBi depends on distance only", "positions", parts.alibi_is_relative),
    PartCheck("sinusoids = formula, and no parameter", "positions", parts.sinusoidal_closed_form),
    PartCheck("factorized embedding = U @ V", "parts", parts.factorized_embedding),
    PartCheck("initial weights follow their rule", "parts", parts.initialisation),
    PartCheck(
        "beams of random models = brute force",
        "decoding",
        decoding.searches_are_exact,
        dtypes=(torch.float64,),
    ),
    PartCheck(
        "beams of many random models = brute force",
        "decoding",
        decoding.many_searches_are_exact,
        deep=True,
        dtypes=(torch.float64,),
    ),
)

SUBJECT_CHECKS = (
    SubjectCheck("the future changes no bit of the past", "causality", invariants.causality),
    SubjectCheck("what PAD holds changes no bit", "padding", invariants.padding_content),
    SubjectCheck("more padding on the right changes nothing", "padding", invariants.padding_right),
    SubjectCheck("more padding on the left changes nothing", "padding", invariants.padding_left),
    SubjectCheck("a batch = each sequence alone", "padding", invariants.batch_is_singles),
    SubjectCheck(
        "attention rows sum to 1, none to PAD or future", "padding", invariants.attention_rows
    ),
    SubjectCheck("attention falls where the spec allows", "padding", own_models.attention_pattern),
    SubjectCheck(
        "same input, same bits; no dropout in eval", "determinism", invariants.determinism
    ),
    SubjectCheck("same seed, same weights", "determinism", own_models.same_seed_same_weights),
    SubjectCheck("every parameter gets a gradient", "gradients", invariants.gradient_flow),
    SubjectCheck("cached = uncached, token by token", "cache", invariants.cached_is_full),
    SubjectCheck(
        "growing cache in pieces, reordered = uncached", "cache", own_models.growing_is_fixed
    ),
    SubjectCheck("saved and loaded, same bits", "files", invariants.reloaded),
    SubjectCheck("logits = the reference's", "reference", invariants.like_reference),
    SubjectCheck("parameters = manifest", "names", own_models.conforms_to_manifest),
    SubjectCheck("tied head shares the embedding", "names", own_models.tied),
    SubjectCheck("scores or weights read, same logits", "taps", own_models.explicit_is_fused),
    SubjectCheck("every tap seen, every edit felt, no hook", "taps", own_models.taps_are_named),
    SubjectCheck("every token goes to its experts", "experts", experts.routing_follows_logits),
    SubjectCheck(
        "cross-attention reads the encoder in every layer", "layers", own_models.cross_reads_encoder
    ),
    SubjectCheck("dropout acts where the spec says", "dropout", own_models.dropout_places),
    SubjectCheck("by hand: every tap = torch's", "by hand", numpy_parity.same_results),
    SubjectCheck("by hand: every gradient = autograd's", "by hand", numpy_parity.same_gradients),
    SubjectCheck(
        "by hand: gradients = central differences", "by hand", numpy_parity.gradients_by_differences
    ),
    SubjectCheck(
        "by hand: weights after Adam steps = torch's", "by hand", numpy_parity.same_training
    ),
    SubjectCheck(
        "every way of decoding gives the same tokens", "decoding", decoding.every_way_is_greedy
    ),
    SubjectCheck("every decoding step = uncached", "decoding", decoding.every_step_is_uncached),
    SubjectCheck(
        "every decoding step = uncached, float64", "decoding", decoding.every_wide_step_is_uncached
    ),
    SubjectCheck(
        "a batch decodes as its rows, padded left or right",
        "decoding",
        decoding.a_batch_decodes_as_its_rows,
    ),
    SubjectCheck(
        "top-k of everything = plain sampling", "decoding", decoding.all_kept_is_plain_sampling
    ),
    SubjectCheck("the widest beams = brute force", "decoding", decoding.beams_are_brute_force),
    SubjectCheck(
        "one token a cached step, one run of the encoder", "decoding", decoding.one_token_a_step
    ),
    SubjectCheck(
        "compiled decoding = eager", "compiled", decoding.compiled_steps_are_eager, deep=True
    ),
    SubjectCheck(
        "quantized = rounded weights, every bit", "quantization", quantization.equals_rounded
    ),
    SubjectCheck(
        "dequantized = the weights that were used", "quantization", quantization.dequantizes_exactly
    ),
    SubjectCheck(
        "quantized: a row is the same in any batch", "quantization", quantization.rows_stand_alone
    ),
    SubjectCheck(
        "quantized: saved and loaded, same bits", "quantization", quantization.saves_and_loads
    ),
    SubjectCheck(
        "quantized: backends within their bound", "quantization", quantization.backends_agree
    ),
    SubjectCheck("compiled = eager", "compiled", own_models.compiled_is_eager, deep=True),
)

GROUPS = tuple(dict.fromkeys(check.group for check in (*PART_CHECKS, *SUBJECT_CHECKS)))


def check_group(only: str | None) -> None:
    """Refuse a group that does not exist."""
    if only is not None and only not in GROUPS:
        raise InputError(f"no group of checks '{only}'", hint=nearest(only, GROUPS))


def verify_parts(*, only: str | None = None, deep: bool = False) -> Iterator[Finding]:
    """Check our parts in float32 and float64; `deep` adds slow checks."""
    check_group(only)
    for check in PART_CHECKS:
        if only in (None, check.group) and (deep or not check.deep):
            yield from run_part_check(check)


def run_part_check(check: PartCheck) -> Iterator[Finding]:
    """Run one check of a part in both precisions; float64 decides between rounding and bug."""
    measures = {}
    for dtype in check.dtypes:
        start = time.perf_counter()
        measures[dtype] = (_guarded(check.run, dtype), time.perf_counter() - start)
    wide = measures[torch.float64][0]
    for dtype, (measure, seconds) in measures.items():
        verdict: Verdict = "passed" if measure.holds else "bug"
        if dtype == torch.float32 and not measure.holds:
            verdict = _cause(measure, wide)
        yield _finding(check, "parts", str(dtype), measure, verdict, seconds)


def verify_subject(
    subject: Subject, *, only: str | None = None, deep: bool = False
) -> Iterator[Finding]:
    """Run every check that this subject offers; `deep` adds slow checks."""
    check_group(only)
    for check in SUBJECT_CHECKS:
        if only in (None, check.group) and (deep or not check.deep):
            yield run_subject_check(check, subject)


def run_subject_check(check: SubjectCheck, subject: Subject) -> Finding:
    """Run one check; a failure is repeated in float64 if the subject offers it."""
    start, dtype = time.perf_counter(), _dtype_of(subject)
    try:
        measure = _guarded(check.run, subject)
        verdict: Verdict = "passed"
        if not measure.holds:
            verdict = "bug" if measure.dtype == "float64" else "failed"
            if verdict == "failed" and subject.double is not None and dtype == "torch.float32":
                with contextlib.suppress(NotOffered):  # of the twin alone: it failed all the same
                    verdict = _cause(measure, _guarded(check.run, subject.double()))
    except NotOffered as reason:
        measure, verdict = Measure(0.0, 0.0, subject.size, str(reason)), "not offered"
    return _finding(check, subject.name, dtype, measure, verdict, time.perf_counter() - start)


def _guarded(run: Callable[[Any], Measure], argument: object) -> Measure:
    """Run a check; a model that raises an exception has failed it, with the message as note."""
    try:
        return run(argument)
    except NotOffered:
        raise
    except Exception as error:  # a stranger's model may raise anything
        return Measure(float("inf"), 0.0, note=f"{type(error).__name__}: {error}".split("\n")[0])


def _cause(narrow: Measure, wide: Measure) -> Verdict:
    return "rounding" if wide.holds or wide.worst < ROUNDING_SHARE * narrow.worst else "bug"


def _dtype_of(subject: Subject) -> str:
    for parameter in (subject.parameters or {}).values():
        return str(parameter.dtype)
    return "unknown"


def _finding(
    check: PartCheck | SubjectCheck,
    subject: str,
    dtype: str,
    measure: Measure,
    verdict: Verdict,
    seconds: float,
) -> Finding:
    note = measure.note
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
    )
