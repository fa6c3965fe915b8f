"""Every check by name and group, and how they are run to give findings.

A float32 failure is repeated in float64: a difference that shrinks with the precision was
*rounding*, one that stays is a *bug*. Only a bug fails; rounding, a limit that the note names, and
a difference whose cause cannot be told are warnings.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, assert_never

import torch

from glassformer.checks.measure import BEYOND_DOUBT, LARGEST, Measure, NotOffered, short
from glassformer.checks.rows import (
    attention,
    decoding,
    foreign_cache,
    foreign_calls,
    foreign_slopes,
    foreign_training,
    invariants,
    layers,
    numpy_parity,
    own_models,
    parts,
    processes,
    quantization,
    training_step,
)
from glassformer.checks.subject import Subject
from glassformer.spec.errors import InputError, nearest

Verdict = Literal["passed", "bug", "rounding", "limit", "unclear", "raised", "not offered"]
#: Verdicts that a report counts as warnings.
WARNINGS = ("rounding", "limit", "unclear")

#: Below this share of the float32 gap, the float64 gap says that it was rounding. Some modules
#: compute norms and positions in float32 whatever their weights are, so it is no smaller.
ROUNDING_SHARE = 0.1
#: The same for our parts, which compute in one precision throughout.
PARTS_SHARE = 1e-6


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
    """A claim about a model.

    `of` says whose: ours (also what has no module), another library's, of those only decoders
    (with or without an encoder), or only those with a source.
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
    PartCheck("experts in groups = one token at a time", "experts", parts.grouped_experts),
    PartCheck("balance loss = counted over real tokens", "experts", parts.balance_by_counting),
    PartCheck("no token is dropped", "experts", parts.nobody_is_dropped),
    PartCheck("rotary positions = complex numbers", "positions", parts.rotary_closed_form),
    PartCheck("rotary scores depend on distance only", "positions", parts.rotary_is_relative),
    PartCheck("ALiBi = one query at a time", "positions", attention.alibi_by_hand),
    PartCheck("ALiBi depends on distance only", "positions", parts.alibi_is_relative),
    PartCheck("relative biases = one query at a time", "positions", attention.relative_by_hand),
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
        "trained together = trained alone",
        "stacked",
        own_models.together_is_alone,
    ),
    PartCheck(
        "trained together = trained alone, every preset",
        "stacked",
        own_models.every_preset_together_is_alone,
        deep=True,
        dtypes=(torch.float64,),
    ),
    PartCheck(
        "trained by two processes = by one",
        "training",
        processes.processes_are_one,
        deep=True,
    ),
    PartCheck(
        "beams of many random models = brute force",
        "decoding",
        decoding.many_searches_are_exact,
        deep=True,
        dtypes=(torch.float64,),
    ),
)

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
    SubjectCheck(
        "attention rows sum to 1, none to PAD or future",
        "padding",
        invariants.attention_rows,
        of="ours",
    ),
    SubjectCheck(
        "attention falls where the spec allows", "padding", own_models.attention_pattern, of="ours"
    ),
    SubjectCheck(FIRST, "determinism", invariants.determinism),
    SubjectCheck(
        "same seed, same weights", "determinism", own_models.same_seed_same_weights, of="ours"
    ),
    SubjectCheck("every parameter gets a gradient", "gradients", invariants.gradient_flow),
    SubjectCheck(CACHED, "cache", invariants.cached_is_full),
    SubjectCheck(
        "growing cache in pieces, reordered = uncached",
        "cache",
        own_models.growing_is_fixed,
        of="ours",
    ),
    SubjectCheck("saved and loaded, same bits", "files", invariants.reloaded),
    SubjectCheck("logits = the reference's", "reference", invariants.like_reference),
    SubjectCheck("parameters = manifest", "names", own_models.conforms_to_manifest, of="ours"),
    SubjectCheck("tied head shares the embedding", "names", own_models.tied, of="ours"),
    SubjectCheck(
        "scores or weights read, same logits", "taps", own_models.explicit_is_fused, of="ours"
    ),
    SubjectCheck(
        "every tap seen, every edit felt, no hook", "taps", own_models.taps_are_named, of="ours"
    ),
    SubjectCheck(
        "every token goes to its experts", "experts", parts.routing_follows_logits, of="ours"
    ),
    SubjectCheck(
        "cross-attention reads the encoder in every layer",
        "layers",
        own_models.cross_reads_encoder,
        of="ours",
    ),
    SubjectCheck(
        "dropout acts where the spec says", "dropout", own_models.dropout_places, of="ours"
    ),
    SubjectCheck("by hand: every tap = torch's", "by hand", numpy_parity.same_results, of="ours"),
    SubjectCheck(
        "by hand: every gradient = autograd's", "by hand", numpy_parity.same_gradients, of="ours"
    ),
    SubjectCheck(
        "by hand: gradients = central differences",
        "by hand",
        numpy_parity.gradients_by_differences,
        of="ours",
    ),
    SubjectCheck(
        "by hand: weights after Adam steps = torch's",
        "by hand",
        numpy_parity.same_training,
        of="ours",
    ),
    SubjectCheck(
        "a training step = plain torch, its update the formula",
        "training",
        training_step.step_is_plain,
        of="ours",
    ),
    SubjectCheck(
        "a native training step = plain torch, its update the formula",
        "training",
        training_step.native_step_is_plain,
        of="ours",
    ),
    SubjectCheck(
        "every way of decoding gives the same tokens",
        "decoding",
        decoding.every_way_is_greedy,
        of="ours",
    ),
    SubjectCheck(
        "every decoding step = uncached", "decoding", decoding.every_step_is_uncached, of="ours"
    ),
    SubjectCheck(
        "every decoding step = uncached, float64",
        "decoding",
        decoding.every_wide_step_is_uncached,
        of="ours",
    ),
    SubjectCheck(
        "a batch decodes as its rows, padded left or right",
        "decoding",
        decoding.a_batch_decodes_as_its_rows,
        of="ours",
    ),
    SubjectCheck(
        "top-k of everything = plain sampling",
        "decoding",
        decoding.all_kept_is_plain_sampling,
        of="ours",
    ),
    SubjectCheck(
        "the widest beams = brute force", "decoding", decoding.beams_are_brute_force, of="ours"
    ),
    SubjectCheck(
        "one token a cached step, one run of the encoder",
        "decoding",
        decoding.one_token_a_step,
        of="ours",
    ),
    SubjectCheck(
        "native step = plain step", "decoding", decoding.native_steps_are_plain, of="ours"
    ),
    SubjectCheck(
        "8-bit cache = all read again, rounded",
        "decoding",
        decoding.rounded_steps_are_uncached,
        of="ours",
    ),
    SubjectCheck(
        "8-bit cache: native step = torch step",
        "decoding",
        decoding.native_rounded_steps_are_torchs,
        of="ours",
    ),
    SubjectCheck(
        "served in company = alone, bit for bit",
        "decoding",
        decoding.company_changes_nothing,
        of="ours",
    ),
    SubjectCheck(
        "guesses read ahead change no token",
        "decoding",
        decoding.speculation_changes_nothing,
        of="ours",
    ),
    SubjectCheck(
        "prompts kept on disk change no bit",
        "decoding",
        decoding.kept_prompts_change_nothing,
        of="ours",
    ),
    SubjectCheck(
        "quantized = rounded weights, every bit",
        "quantization",
        quantization.equals_rounded,
        of="ours",
    ),
    SubjectCheck(
        "dequantized = the weights that were used",
        "quantization",
        quantization.dequantizes_exactly,
        of="ours",
    ),
    SubjectCheck(
        "quantized: a row is the same in any batch",
        "quantization",
        quantization.rows_stand_alone,
        of="ours",
    ),
    SubjectCheck(
        "quantized: saved and loaded, same bits",
        "quantization",
        quantization.saves_and_loads,
        of="ours",
    ),
    SubjectCheck(
        "quantized: backends within their bound",
        "quantization",
        quantization.backends_agree,
        of="ours",
    ),
    SubjectCheck(
        "compiled = eager", "compiled", own_models.compiled_is_eager, deep=True, of="ours"
    ),
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

GROUPS = tuple(dict.fromkeys(check.group for check in (*PART_CHECKS, *SUBJECT_CHECKS)))


def check_group(only: str | None) -> None:
    """Refuse a group that does not exist."""
    if only is not None and only not in GROUPS:
        raise InputError(f"no group of checks '{only}'", hint=nearest(only, GROUPS, cutoff=0.7))


Begin = Callable[[str], None]  # called with the name of each row before it runs


def part_checks(*, only: str | None = None, deep: bool = False) -> list[PartCheck]:
    """Return the checks of our parts; `deep` adds slow ones."""
    check_group(only)
    return [c for c in PART_CHECKS if only in (None, c.group) and (deep or not c.deep)]


def subject_checks(
    subject: Subject, *, only: str | None = None, deep: bool = False
) -> list[SubjectCheck]:
    """Return the checks that concern a subject, the row that explains others first."""
    check_group(only)
    chosen = [
        check
        for check in SUBJECT_CHECKS
        if only in (None, check.group) and (deep or not check.deep) and check.concerns(subject)
    ]
    return sorted(chosen, key=lambda check: check.name != FIRST)


def verify_parts(
    *, only: str | None = None, deep: bool = False, begin: Begin | None = None
) -> Iterator[Finding]:
    """Check our parts in float32 and float64; `deep` adds slow checks."""
    for check in part_checks(only=only, deep=deep):
        if begin is not None:
            begin(check.name)
        yield from run_part_check(check)


def run_part_check(check: PartCheck) -> Iterator[Finding]:
    """Run one check of a part in both precisions; float64 decides between rounding and bug."""
    measures = {}
    for dtype in check.dtypes:
        start = time.perf_counter()
        measures[dtype] = (_part_measure(check, dtype), time.perf_counter() - start)
    wide = measures[torch.float64][0]
    for dtype, (measure, seconds) in measures.items():
        verdict: Verdict = "passed" if measure.holds else "bug"
        if dtype == torch.float32 and not measure.holds:
            verdict = _cause(measure, wide)
        yield _finding(check, "parts", str(dtype), measure, verdict, seconds)


def _cause(narrow: Measure, wide: Measure) -> Verdict:
    return "rounding" if wide.holds or wide.worst < PARTS_SHARE * narrow.worst else "bug"


def _part_measure(check: PartCheck, dtype: torch.dtype) -> Measure:
    """Run a check of ours; an exception is a failure, with the message as note."""
    try:
        return check.run(dtype)
    except Exception as error:
        return Measure(float("inf"), 0.0, note=short(error))


def verify_subject(
    subject: Subject,
    *,
    only: str | None = None,
    deep: bool = False,
    begin: Begin | None = None,
) -> Iterator[Finding]:
    """Run every check that this subject offers; `deep` adds slow checks."""
    causes: dict[str, str] = {}  # of rows that failed, or were not asked for that reason
    for check in subject_checks(subject, only=only, deep=deep):
        if begin is not None:
            begin(check.name)
        cause = causes.get(FIRST) or causes.get(check.after)
        if cause is not None:
            causes[check.name] = cause
            reason = Measure(0.0, 0.0, subject.size, f"not asked, as '{cause}' does not hold")
            yield _finding(check, subject.name, _dtype_of(subject), reason, "not offered", 0.0)
            continue
        finding = run_subject_check(check, subject)
        if finding.failed or finding.explains:
            causes[check.name] = check.name
        yield finding


def run_subject_check(check: SubjectCheck, subject: Subject) -> Finding:
    """Run one check; a failure is repeated in float64 if the subject offers it."""
    start, dtype = time.perf_counter(), _dtype_of(subject)
    try:
        measure = _within_chance(subject, check.run(subject))
        verdict = _verdict(check, subject, measure, dtype)
    except NotOffered as reason:
        measure, verdict = Measure(0.0, 0.0, subject.size, str(reason)), "not offered"
    except Exception as error:  # a stranger's model may raise anything
        measure = Measure(float("inf"), 0.0, subject.size, f"the model raised {short(error)}")
        verdict = "raised" if subject.model is None else "bug"  # ours has no excuse
    return _finding(check, subject.name, dtype, measure, verdict, time.perf_counter() - start)


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
