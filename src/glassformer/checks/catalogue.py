"""The checks of our parts and of our own models, beside those of any model in `glasscheck`.

A float32 failure is repeated in float64: a difference that shrinks with the precision was
*rounding*, one that stays is a *bug*. Only a bug fails.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from glasscheck import catalogue
from glasscheck.catalogue import (
    Begin,
    Finding,
    SubjectCheck,
    Verdict,
    check_group,
    finding_of,
    run_subject_check,
)
from glasscheck.measure import Measure, short
from glasscheck.rows import invariants
from glasscheck.subject import Subject
from glassformer.checks.errors import as_ours
from glassformer.checks.rows import (
    attention,
    decoding,
    layers,
    numpy_parity,
    own_models,
    parts,
    processes,
    quantization,
    training_step,
)

__all__ = ["Begin", "Finding", "SubjectCheck", "Verdict", "run_subject_check"]

#: Below this share of the float32 gap, the float64 gap says that it was rounding: our parts compute
#: in one precision throughout.
PARTS_SHARE = 1e-6


@dataclass(frozen=True, slots=True)
class PartCheck:
    """A claim about our parts alone."""

    name: str
    group: str
    run: Callable[[torch.dtype], Measure]
    deep: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)


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

#: Rows of our own models.
OWN_CHECKS = (
    SubjectCheck(
        "attention rows sum to 1, none to PAD or future",
        "padding",
        invariants.attention_rows,
        of="ours",
    ),
    SubjectCheck(
        "attention falls where the spec allows", "padding", own_models.attention_pattern, of="ours"
    ),
    SubjectCheck(
        "same seed, same weights", "determinism", own_models.same_seed_same_weights, of="ours"
    ),
    SubjectCheck(
        "growing cache in pieces, reordered = uncached",
        "cache",
        own_models.growing_is_fixed,
        of="ours",
    ),
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
        "native LoRA = plain torch with the sum in its weights",
        "training",
        training_step.native_lora_is_plain,
        of="ours",
    ),
    SubjectCheck(
        "native Muon = a polynomial of singular values",
        "training",
        training_step.native_muon_is_plain,
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
)

#: Rows of any model, then of ours, then of live modules of others.
SUBJECT_CHECKS = (
    *(check for check in catalogue.SUBJECT_CHECKS if check.of == "any"),
    *OWN_CHECKS,
    *(check for check in catalogue.SUBJECT_CHECKS if check.of != "any"),
)

GROUPS = tuple(dict.fromkeys([*(c.group for c in PART_CHECKS), *(c.group for c in SUBJECT_CHECKS)]))


def part_checks(*, only: str | None = None, deep: bool = False) -> list[PartCheck]:
    """Return the checks of our parts; `deep` adds slow ones."""
    with as_ours():
        check_group(only, GROUPS)
    return [c for c in PART_CHECKS if only in (None, c.group) and (deep or not c.deep)]


def subject_checks(
    subject: Subject, *, only: str | None = None, deep: bool = False
) -> list[SubjectCheck]:
    """Return the checks that concern a subject, the row that explains others first."""
    with as_ours():
        check_group(only, GROUPS)
    in_group = [check for check in SUBJECT_CHECKS if only in (None, check.group)]
    return catalogue.subject_checks(subject, deep=deep, checks=in_group)


def verify_subject(
    subject: Subject,
    *,
    only: str | None = None,
    deep: bool = False,
    begin: Begin | None = None,
    skip: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """Run every check that this subject offers; `deep` adds slow checks, `skip` leaves some out."""
    chosen = subject_checks(subject, only=only, deep=deep)
    yield from catalogue.verify_subject(subject, deep=deep, begin=begin, skip=skip, checks=chosen)


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
        yield finding_of(check, "parts", str(dtype), measure, verdict, seconds)


def _cause(narrow: Measure, wide: Measure) -> Verdict:
    return "rounding" if wide.holds or wide.worst < PARTS_SHARE * narrow.worst else "bug"


def _part_measure(check: PartCheck, dtype: torch.dtype) -> Measure:
    """Run a check of ours; an exception is a failure, with the message as note."""
    try:
        return check.run(dtype)
    except Exception as error:
        return Measure(float("inf"), 0.0, note=short(error))
