"""Planted faults of the C files: a line of damage each, and the check that must notice."""

import atexit
import contextlib
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from glassformer.kernels.build import COMPILERS, HEADERS, HERE, SOURCES

#: Quick to compile; what is asked of the kernels does not depend on optimization.
PLAIN = ("-O0", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-DGLASS_NO_INLINE")
INCLUDED_BY = {
    "floating_block.h": ("floating.c",),
    "integer_x86.h": ("integer.c",),
    "rounding.h": ("integer.c", "step.c"),
    "each_width.h": ("step.c", "train.c"),
    "step_parts.h": ("step.c",),
    "step_attention.h": ("step.c",),
    "train_parts.h": ("train.c",),
    "train_attention.h": ("train.c",),
}


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in one C file."""

    name: str
    file: str
    old: str
    new: str
    caught_by: str
    needs: str = "portable"  # the variant that runs the damaged line


FAULTS = (
    Fault("halves round up", "rounding.h", "rintf(x[i] / size)", "floorf(x[i] / size + 0.5f)", "activations_are_rounded_as_said"),
    Fault("the lift is half taken back", "integer.c", "w->bits == 8 ? -128 : 1", "w->bits == 8 ? -64 : 1", "int8_is_the_reference", "avx512-vnni"),
    Fault("-128 is read with its sign", "integer_x86.h", "_mm256_maddubs_epi16(size, turned)", "_mm256_maddubs_epi16(turned, size)", "nothing_saturates", "avx2"),
    Fault("zero points are 8", "integer_x86.h", "w->zero ? numbers16(w->zero, w->zero_kind, begin) :", "0 ? numbers16(w->zero, w->zero_kind, begin) :", "int4_is_the_reference", "avx512-vnni"),
    Fault("sums for sixteenths are whole", "integer.c", "0.0625f * (float)sum", "(float)sum", "int4_of_bytes_is_the_reference", "avx512-vnni"),
    Fault("a batch shares its scale", "integer_x86.h", "_mm512_set1_ps(size[r])", "_mm512_set1_ps(size[0])", "rows_are_their_own", "avx512-vnni"),
    Fault("a product passes for a quotient", "integer_x86.h", "(0.5f - 0x1p-12f)", "(0.5f + 0x1p-12f)", "products_stand_for_quotients", "avx512-vnni"),
    Fault("nothing is left of an activation", "integer.c", "x[i] - job->size[at] * (float)seat.codes[i / 4 * 4 * seat.together + i % 4]", "0.0f", "refined_products_are_finer"),
    Fault("the last inputs are lost", "floating_block.h", "if (i < inputs) {", "if (0) {", "floats_are_torchs", "avx2"),
    Fault("the bits above four are lost", "packed.c", "two << 4", "two << 3", "packed_numbers_are_the_librarys"),
    Fault("groups are not added by halves", "grids.c", "sum[i] += sum[i + half]", "sum[i] += sum[2 * half - 1 - i]", "grids_are_the_reference"),
    Fault("errors are not carried on", "grids.c", "tile[j * ROWS + l] += mine[l] * row[j]", "tile[j * ROWS + l] += 0 * mine[l] * row[j]", "columns_make_up_for_errors"),
    Fault("training scores without their scale", "train_attention.h", "H, a->scale, queries);", "H, 1.0f, queries);", "attention_of_arrays"),
    Fault("training sees one token ahead", "train_attention.h", "a->causal && t + 1 < keys ? t + 1 : keys", "a->causal && t + 2 < keys ? t + 2 : keys", "attention_of_arrays"),
    Fault("dropped weights count in the sum", "train_attention.h", "if (a->drop.limit) spared = NAME(spared)(a, b, n, t + r, s);", "", "attention_of_arrays"),
    Fault("a cap without its slope", "train_attention.h", "if (a->softcap > 0) d *= *(stored *)(caps + r * line + s);", "", "attention_of_arrays"),
    Fault("a query that sees nothing divides by 0", "train_attention.h", "total > 0.0f ? 1.0f / total : 0.0f", "1.0f / total", "attention_of_arrays"),
    Fault("a sink takes no part in the sum", "train_attention.h", "if (a->sinks) total +=", "if (0) total +=", "attention_of_arrays"),
    Fault("LayerNorm's gradient keeps its mean", "train_parts.h", "d = (g - shift - n * slope) * rate", "d = (g - n * slope) * rate", "norms_of_arrays"),
    Fault("a norm's padding counts", "train_parts.h", "for (int l = (int)(D - i); l < WIDTH; l++) v[l] = 0.0f;", "", "norms_of_arrays"),
    Fault("the tail of erf", "train_parts.h", "FILL(-1.45660718464996e-5f)", "FILL(-1.5e-5f)", "activations_of_arrays"),
    Fault("sums of columns of the first piece", "train.c", "columns->sums[i] += columns->sums[piece * D + i]", "columns->sums[i] += 0 * columns->sums[piece * D + i]", "sums_of_arrays"),
    Fault("every row drops alike", "train_parts.h", "NAME(kept)(&sum->drop, (uint32_t)(m * D + i))", "NAME(kept)(&sum->drop, (uint32_t)i)", "dropouts_of_arrays"),
    Fault("arrays turn forward only", "train_parts.h", "if (turn->back) s = -s;", "if (0) s = -s;", "rotations_of_arrays"),
    Fault("a smoothed loss of arrays is plain", "train_parts.h", "loss->smoothing * (lse - mean / (float)V)) * weight;", "0 * (lse - mean / (float)V)) * weight;", "losses_of_arrays"),
    Fault("decay of the first slice everywhere", "train_parts.h", "adam->lr * adam->decay", "adam->lr * 0.1", "updates_of_arrays"),
    Fault("pieces of columns depend on the threads", "train.c", "share(variants, columns, pieces, NORM_ROWS * D, columns->threads);", "variants[glass_variant()](columns, 0, columns->threads > 1 ? pieces - 1 : pieces);", "threads_change_no_bit_of_arrays"),
    Fault("a sum's gradient is its norm's alone", "train_parts.h", "if (norm->more) d +=", "if (!norm->x) d +=", "norms_of_arrays"),
    Fault("a row of an embedding is written, not added", "train.c", "to[i] += from[i] * added->scale", "to[i] = from[i] * added->scale", "sums_of_arrays"),
    Fault("a norm's gradient without its length", "train_parts.h", "(g - shift - n * slope)", "g", "norms_of_arrays"),
    Fault("a gate's slope is its value", "train_parts.h", "*slope = s * (1.0f + x * (1.0f - s));", "*slope = s;", "activations_of_arrays"),
    Fault("gradients turn the same way", "train_parts.h", "if (turn->back) s = -s;", "", "rotations_of_arrays"),
    Fault("every row counts alike", "train_parts.h", "lanes factor = FILL(weight / sum)", "lanes factor = FILL(1.0f / sum)", "losses_of_arrays"),
    Fault("pieces of a gain depend on the threads", "train.c", "share(variants, norm, pieces, NORM_ROWS * D, norm->threads);", "variants[glass_variant()](norm, 0, norm->threads > 1 ? pieces - 1 : pieces);", "threads_change_no_bit_of_arrays"),
    Fault("threads leave gaps", "native.c", "first + all->chunk;", "first + all->chunk - 1;", "threads_change_nothing"),
)  # fmt: skip

#: Faults of step.c: `caught_by` is the spec of `tests.generation.checks` whose logits are then
#: wrong, or a check there.
STEP_FAULTS = (
    Fault("an embedding without its scale", "step_parts.h", "to[i] = value * op->number", "to[i] = value", "sinusoidal"),
    Fault("every token at the first position", "step_parts.h", "(const float *)op->weight + work->step->position[m] * op->to_width", "(const float *)op->weight + 0 * op->to_width", "learned"),
    Fault("the mean is left in an RMSNorm", "step_parts.h", "if (op->form == LAYER_NORM)", "if (1)", "rotary"),
    Fault("a key in the wrong place", "step_parts.h", "keys[h * PAGE + place] = k[h]", "keys[h * PAGE + place / 2] = k[h]", "none"),
    Fault("a window one too wide", "step_attention.h", "? query->end - op->window : 0", "? query->end - op->window - 1 : 0", "window"),
    Fault("biases of other heads", "step_attention.h", "((const float *)op->weight)[own]", "((const float *)op->weight)[0]", "alibi"),
    Fault("what was summed is not scaled down", "step_attention.h", "NAME(get)(query->sums, WIDTH) * FILL(down)", "NAME(get)(query->sums, WIDTH)", "long_rows_are_uncached"),
    Fault("what is not attended to counts as nothing", "step_attention.h", "1, H, from[r], to[r])", "1, H, from[r], end)", "what_comes_later_is_not_read"),
    Fault("the last of a source is not read", "step_attention.h", "step->length[op->form][step->row[m]]", "(step->length[op->form][step->row[m]] - 1)", "encoder"),
    Fault("whole heads are rotated", "step_parts.h", "int64_t half = op->groups / 2;", "int64_t half = op->width / 2;", "neox"),
    Fault("scores without their cap", "step_attention.h", "if (op->cap > 0) v =", "if (0) v =", "gemma"),
    Fault("a sink without its share", "step_attention.h", "query->sums[0] = op->bias ? 1.0f : 0.0f", "query->sums[0] = 0.0f", "scaled"),
    Fault("ReLU is not squared", "step_parts.h", "zero, v * v)", "zero, v)", "parallel-shared"),
    Fault("one expert too many", "step.c", "n < count; n++) { /* the next", "n <= count; n++) { /* the next", "moe"),
    Fault("weights are always normalized", "step.c", "normalize && e < experts", "e < experts", "moe-post"),
    Fault("a gate without its sigmoid", "step.c", "weight = 1.0f / (1.0f + expf(-weight))", "weight = 1.0f", "moe-gated"),
    Fault("a mixture added to what was there", "step.c", "if (!op->onto) memset(", "if (0) memset(", "moe-output"),
    Fault("a shared page is written", "step.c", "if (before >= 0 && memory->uses[before] == 1) continue;", "if (before >= 0) continue;", "native_beams_are_plain"),
    Fault("greedy tokens stand still", "step.c", "step->position[m]++", "step->position[m] += 0", "native_runs_are_steps"),
    Fault("beams lose their sums", "step.c", "all->sums[row] + (double)", "(double)", "native_beam_runs_are_steps"),
    Fault("scales of half the range", "rounding.h", "size = top / 127.0f", "size = top / 63.0f", "pages_hold_the_defined_codes"),
    Fault("codes lose their signs", "each_width.h", "(lanes){(p)[0], (p)[1], (p)[2], (p)[3]}", "(lanes){(uint8_t)(p)[0], (uint8_t)(p)[1], (uint8_t)(p)[2], (uint8_t)(p)[3]}", "rounded_attention_is_of_the_rounded_numbers"),
    Fault("numbers that are none are 0", "rounding.h", "size = NAN", "size = 0.0f", "what_is_no_number_stays_none"),
    Fault("heads of 8 bits as far apart as floats", "step.c", "op->layer + head * 2 * room_of(op)", "op->layer + head * 2 * room(op->width, 0) / 4", "rounded_is_uncached"),
    Fault("a team leaves gaps", "native.c", "int64_t last = first + chunk < count ? first + chunk : count;", "int64_t last = first + chunk < count ? first + chunk - 1 : count;", "threads_change_no_step", "avx2"),
)  # fmt: skip


@contextlib.contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Fill torch's new tensors: what a damaged line leaves out is never there by chance.

    Memory that an earlier check gave back may hold the very numbers that should be written.
    """
    before = torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@functools.cache
def _objects(*flags: str) -> dict[str, Path]:
    """Every source, compiled once."""
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    for name in SOURCES:
        _compile(*flags, "-c", str(HERE / name), to=place / f"{name}.o")
    return {name: place / f"{name}.o" for name in SOURCES}


def _compile(*arguments: str, to: Path) -> None:
    compiler = next(name for name in COMPILERS if shutil.which(name))
    subprocess.run([compiler, *PLAIN, *arguments, "-o", str(to)], check=True, capture_output=True)


def damaged_library(fault: Fault, place: Path) -> Path:
    """The library with this fault in it; only the file that has it is compiled again.

    A fault that the portable variant shows is compiled and checked in that alone: a third of the
    time.
    """
    for name in SOURCES + HEADERS:
        shutil.copy(HERE / name, place / name)
    text = (place / fault.file).read_text()
    assert text.count(fault.old) == 1, f"the line to damage is gone: {fault.old}"
    (place / fault.file).write_text(text.replace(fault.old, fault.new))
    sources = INCLUDED_BY.get(fault.file, (fault.file,))
    flags = ("-DGLASS_PORTABLE_ONLY",) if fault.needs == "portable" else ()
    made = [str(path) for name, path in _objects(*flags).items() if name not in sources]
    for source in sources:
        _compile(*flags, "-c", str(place / source), to=place / f"{source}.o")
        made.append(str(place / f"{source}.o"))
    _compile("-shared", *made, "-lm", to=place / "damaged.so")
    return place / "damaged.so"
