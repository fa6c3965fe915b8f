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
    Fault("what is not finite passes for 0", "rounding.h", "size = NAN", "size = 1.0f", "activations_are_rounded_as_said"),
    Fault("the lift is half taken back", "integer.c", "w->bits == 8 ? -128 : 1", "w->bits == 8 ? -64 : 1", "int8_is_the_reference", "avx512-vnni"),
    Fault("-128 is read with its sign", "integer_x86.h", "_mm256_maddubs_epi16(size, turned)", "_mm256_maddubs_epi16(turned, size)", "nothing_saturates", "avx2"),
    Fault("16 bits run over", "integer_x86.h", "b + 4 < blocks ? b + 4 : blocks", "b + 16 < blocks ? b + 16 : blocks", "nothing_saturates", "avx2"),
    Fault("zero points are 8", "integer_x86.h", "w->zero ? numbers16(w->zero, w->zero_kind, begin) :", "0 ? numbers16(w->zero, w->zero_kind, begin) :", "int4_is_the_reference", "avx512-vnni"),
    Fault("sums for sixteenths are whole", "integer.c", "0.0625f * (float)sum", "(float)sum", "int4_of_bytes_is_the_reference", "avx512-vnni"),
    Fault("fine zeros are added", "integer_x86.h", "_mm256_fnmadd_ps(zero, xsum,", "_mm256_fmadd_ps(zero, xsum,", "int4_of_bytes_is_the_reference", "avx2"),
    Fault("bytes are read with a sign", "integer_x86.h", "_mm512_cvtepu8_epi32(bytes)", "_mm512_cvtepi8_epi32(bytes)", "int4_is_the_reference", "avx512-vnni"),
    Fault("eight bytes are the first eight", "integer_x86.h", "(const __m128i *)((const uint8_t *)from + at));\n        __m256 whole", "(const __m128i *)((const uint8_t *)from + (at & ~15)));\n        __m256 whole", "int4_is_the_reference", "avx2"),
    Fault("bytes are read as halves", "integer.c", "if (kind >= BYTE) return", "if (0) return", "int4_is_the_reference"),
    Fault("sixteenths are wholes", "integer_x86.h", "_mm512_mul_ps(whole, _mm512_set1_ps(0.0625f))", "whole", "int4_of_bytes_is_the_reference", "avx512-vnni"),
    Fault("the outer factor forgotten", "integer.c", "w->outer ? acc[l] * w->outer[out] : acc[l]", "acc[l]", "int4_of_bytes_is_the_reference", "portable"),
    Fault("a batch shares its scale", "integer_x86.h", "_mm512_set1_ps(size[r])", "_mm512_set1_ps(size[0])", "rows_are_their_own", "avx512-vnni"),
    Fault("a row has one scale", "integer_x86.h", "job->size[row * job->w->groups + g]", "job->size[row * job->w->groups]", "int8_is_the_reference", "avx2"),
    Fault("two tiles share their scales", "integer_x86.h", "((tile + t) * w->groups + g) * TILE", "(tile * w->groups + g) * TILE", "int8_is_the_reference", "avx512-vnni"),
    Fault("earlier groups are forgotten", "integer_x86.h", "from ? _mm512_loadu_ps(kept + (2 * r + t) * TILE) : _mm512_setzero_ps()", "_mm512_setzero_ps()", "int8_is_the_reference", "avx512-vnni"),
    Fault("sums stay shifted", "integer_x86.h", "_mm512_fmsub_ps(sum, scale[t], zero[t])", "_mm512_mul_ps(sum, scale[t])", "int8_is_the_reference", "avx512-vnni"),
    Fault("rows keep their neighbours' sums", "integer_x86.h", "kept + (pass - begin) * ROWS_AT_ONCE * AT_ONCE * TILE", "kept", "int8_is_the_reference", "avx512-vnni"),
    Fault("a product passes for a quotient", "integer_x86.h", "(0.5f - 0x1p-12f)", "(0.5f + 0x1p-12f)", "products_stand_for_quotients", "avx512-vnni"),
    Fault("rows side by side are mixed up", "integer_x86.h", "_mm_storeu_si32(to + 4 * together,", "_mm_storeu_si32(to + 4,", "int8_is_the_reference", "avx512-vnni"),
    Fault("a longer pass is counted as another", "integer.c", "pass < job->more ? pass : job->more", "0", "int8_is_the_reference", "avx512-vnni"),
    Fault("scales made ready are the first tile's", "integer_x86.h", "((tile + t) * groups + g) * TILE", "(tile * groups + g) * TILE", "int8_is_the_reference", "avx512-vnni"),
    Fault("a row begins anew at every turn", "integer_x86.h", "from ? _mm512_loadu_si512(kept + (4 * r + t) * TILE)", "0 ? _mm512_loadu_si512(kept + (4 * r + t) * TILE)", "int8_is_the_reference", "avx512-vnni"),
    Fault("sums leave the shift", "integer_x86.h", "#define MOST_SHIFTED 256", "#define MOST_SHIFTED 512", "nothing_saturates", "avx512-vnni"),
    Fault("nothing is left of an activation", "integer.c", "x[i] - job->size[at] * (float)seat.codes[i / 4 * 4 * seat.together + i % 4]", "0.0f", "refined_products_are_finer"),
    Fault("halves of a product are mixed up", "integer.c", "both[size + i]", "both[2 * i + 1]", "int8_is_the_reference"),
    Fault("the last inputs are lost", "floating_block.h", "if (i < inputs) {", "if (0) {", "floats_are_torchs", "avx2"),
    Fault("the residual is forgotten", "floating.c", "job->onto ? *y + sum : sum", "sum", "floats_are_torchs"),
    Fault("the bits above four are lost", "packed.c", "two << 4", "two << 3", "packed_numbers_are_the_librarys"),
    Fault("lows of the last parts are the first's", "packed.c", "six[8 + p] >> 4 | (six[4 + p] >> 2 & 48)", "six[4 + p] & 63", "packed_numbers_are_the_librarys"),
    Fault("what is not finite is not noticed", "packed.c", "        }\n    }\n    if (strange) job->strange = 1;", "        }\n    }\n    (void)strange;", "packed_numbers_are_the_librarys"),
    Fault("groups are not added by halves", "grids.c", "sum[i] += sum[i + half]", "sum[i] += sum[2 * half - 1 - i]", "grids_are_the_reference"),
    Fault("a scale is not rounded up", "grids.c", "up ? ceilf(times)", "up ? floorf(times)", "grids_are_the_reference"),
    Fault("errors count alike", "grids.c", "sums[i] += off * off * v[e + i]", "sums[i] += off * off", "grids_are_the_reference"),
    Fault("small halves are lost", "grids.c", "rintf(x * 0x1p24f) * 0x1p-24f", "0", "grids_are_the_reference"),
    Fault("too large a scale is not noticed", "grids.c", "if (!isfinite(grid.scale) || !isfinite(fit.scale)) all->too_large = 1;", "", "grids_are_the_reference"),
    Fault("a fitted grid is not tried", "grids.c", "if (error < least) least = error, best = fit;", "", "grids_are_the_reference"),
    Fault("errors are not carried on", "grids.c", "tile[j * ROWS + l] += mine[l] * row[j]", "tile[j * ROWS + l] += 0 * mine[l] * row[j]", "columns_make_up_for_errors"),
    Fault("errors are carried the wrong way", "grids.c", "by[l] = -(was -", "by[l] = (was -", "columns_make_up_for_errors"),
    Fault("a slope that stays", "grids.c", "if (moved) carry(tile, i, inputs, moment, by);", "(void)moved;", "columns_make_up_for_errors"),
    Fault("rows share the first's grid", "grids.c", "struct grid grid = {grids->scale[at], grids->zero[at]};", "struct grid grid = {grids->scale[0], grids->zero[0]}; (void)at;", "columns_make_up_for_errors"),
    Fault("training scores without their scale", "train_attention.h", "H, a->scale, queries);", "H, 1.0f, queries);", "attention_is_torchs"),
    Fault("gradients of scores without their scale", "train_attention.h", "NAME(scatter)(d_q, &a->scale,", "NAME(scatter)(d_q, &one,", "attention_is_torchs"),
    Fault("the softmax's own part of a gradient is lost", "train_attention.h", "(*(stored *)(slope + s) - all);", "*(stored *)(slope + s);", "attention_is_torchs"),
    Fault("heads of a group forget each other", "train_attention.h", "onto = 1;", "onto = 0;", "attention_is_torchs"),
    Fault("values get the gradient of scores", "train_attention.h", "struct side p_turned = {weights, 1, line};", "struct side p_turned = {slopes, 1, line};", "attention_is_torchs"),
    Fault("a mask is every head's first row", "train_attention.h", "n * a->allow_head + t * a->allow_row", "n * a->allow_head", "attention_is_torchs"),
    Fault("training sees one token ahead", "train_attention.h", "a->causal && t + 1 < keys ? t + 1 : keys", "a->causal && t + 2 < keys ? t + 2 : keys", "attention_reads_no_future"),
    Fault("a sum's gradient is its norm's alone", "train_parts.h", "if (norm->more) d +=", "if (!norm->x) d +=", "sums_have_their_norm"),
    Fault("a norm of one half of a sum", "train_parts.h", "x = norm->sum + m * D;", "", "sums_have_their_norm"),
    Fault("a row of an embedding is written, not added", "train.c", "to[i] += from[i]", "to[i] = from[i]", "embeddings_add_their_rows"),
    Fault("a norm's gradient without its length", "train_parts.h", "(g - n * slope)", "g", "norms_are_torchs"),
    Fault("pieces of a gain are not added", "train.c", "norm->d_gain[i] += norm->d_gain[piece * D + i]", "norm->d_gain[i] += 0 * norm->d_gain[piece * D + i]", "norms_are_torchs"),
    Fault("a gate's slope is its value", "train_parts.h", "d * u * s * (1.0f + g * (1.0f - s))", "d * u * s", "gates_are_torchs"),
    Fault("gradients turn the same way", "train_parts.h", "if (turn->back) s = -s;", "", "rotations_are_the_plain_ones"),
    Fault("what is not rotated is lost", "train_parts.h", "i < turn->width; i++) y[i] = x[i];", "i < turn->width; i++) y[i] = 0;", "rotations_are_the_plain_ones"),
    Fault("every row counts alike", "train_parts.h", "lanes factor = FILL(weight / sum)", "lanes factor = FILL(1.0f / sum)", "losses_are_torchs"),
    Fault("a smoothed target is whole", "train_parts.h", "-= (1.0f - loss->smoothing) * weight", "-= weight", "losses_are_torchs"),
    Fault("the last classes are not summed", "train_parts.h", "for (int l = (int)left; l < WIDTH; l++) v[l] = 0.0f;\n            NAME(put)(row + i, v, left);", "NAME(put)(row + i, v, left);", "losses_are_torchs"),
    Fault("decay is everywhere", "train_parts.h", "update->lr * tensor->decay", "update->lr * update->tensors[0].decay", "updates_are_torchs"),
    Fault("the second moment is not corrected", "train.c", "tensor->root = sqrt(1.0 - pow(update->beta2, step));", "tensor->root = 1.0;", "updates_are_torchs"),
    Fault("clipping is forgotten", "train_parts.h", "NAME(get)(g + i, left) * scale,", "NAME(get)(g + i, left),", "updates_are_torchs"),
    Fault("a norm of the last piece", "train.c", "total += update->sums[i];", "total = update->sums[i];", "updates_are_torchs"),
    Fault("pieces of a gain depend on the threads", "train.c", "share(variants, norm, pieces, NORM_ROWS * D, norm->threads);", "variants[glass_variant()](norm, 0, norm->threads > 1 ? pieces - 1 : pieces);", "threads_change_no_training_bit"),
    Fault("threads leave gaps", "native.c", "first + all->chunk;", "first + all->chunk - 1;", "threads_change_nothing"),
)  # fmt: skip

#: Faults of step.c: `caught_by` is the spec of `tests.generation.checks` whose logits are then
#: wrong, or a check there.
STEP_FAULTS = (
    Fault("an embedding without its scale", "step_parts.h", "to[i] = value * op->number", "to[i] = value", "sinusoidal"),
    Fault("every token at the first position", "step_parts.h", "(const float *)op->weight + work->step->position[m] * op->to_width", "(const float *)op->weight + 0 * op->to_width", "learned"),
    Fault("a norm without the mean", "step_parts.h", "mean = NAME(total)(x, op->width, 0, 0) / width", "mean = 0", "learned"),
    Fault("a norm without its bias", "step_parts.h", "if (bias)\n", "if (0)\n", "learned"),
    Fault("the mean is left in an RMSNorm", "step_parts.h", "if (op->form == LAYER_NORM)", "if (1)", "rotary"),
    Fault("rotated backwards", "step_parts.h", "x[i + half] = b * cos[i] + a * sin[i]", "x[i + half] = b * cos[i] - a * sin[i]", "rotary"),
    Fault("a key in the wrong place", "step_parts.h", "keys[h * PAGE + place] = k[h]", "keys[h * PAGE + place / 2] = k[h]", "none"),
    Fault("a value in the wrong place", "step_parts.h", "values + place * H, v", "values + place / 2 * H, v", "none"),
    Fault("scores without their scale", "step_attention.h", "factor = FILL(op->number)", "factor = FILL(1.0f)", "none"),
    Fault("heads read another group's keys", "step_attention.h", "head_of_page(work, row, from, head)", "head_of_page(work, row, from, op->groups - 1 - head)", "rotary"),
    Fault("a window one too wide", "step_attention.h", "? query->end - op->window : 0", "? query->end - op->window - 1 : 0", "window"),
    Fault("biases of other heads", "step_attention.h", "((const float *)op->weight)[own]", "((const float *)op->weight)[0]", "alibi"),
    Fault("what was summed is not scaled down", "step_attention.h", "NAME(get)(query->sums, WIDTH) * FILL(down)", "NAME(get)(query->sums, WIDTH)", "long_rows_are_uncached"),
    Fault("values that were added are not scaled down", "step_attention.h", "h + v * WIDTH, WIDTH) * FILL(down[r])", "h + v * WIDTH, WIDTH)", "long_rows_are_uncached"),
    Fault("what is left of a head is not scaled down", "step_attention.h", "out[r][i] *= down[r]", "(void)down", "long_rows_are_uncached", "avx2"),
    Fault("a query has the weights of the one before", "step_attention.h", "tile->scores + r, out + r", "tile->scores + (r ? r - 1 : 0), out + r", "none"),
    Fault("a query attends beyond its own position", "step_attention.h", "at % WIDTH; at++) scores[at] = -INFINITY", "at % WIDTH; at++) scores[at] += 0", "long_rows_are_uncached"),
    Fault("what is not attended to counts as nothing", "step_attention.h", "1, H, from[r], to[r])", "1, H, from[r], end)", "what_comes_later_is_not_read"),
    Fault("queries of another sequence go along", "step_attention.h", "next < end && step->row[next] == step->row[m]", "next < end", "none"),
    Fault("the last of a source is not read", "step_attention.h", "step->length[op->form][step->row[m]]", "(step->length[op->form][step->row[m]] - 1)", "encoder"),
    Fault("GELU for ReLU", "step_parts.h", "case GELU: v = NAME(gelu)(v)", "case GELU: v = NAME(pick)(v < zero, zero, v)", "learned"),
    Fault("a gate that is its own factor", "step_parts.h", "NAME(get)(x + op->to_width + i, left)", "NAME(get)(x + i, left)", "rotary"),
    Fault("SiLU is a sigmoid", "step_parts.h", "v = v * NAME(sigmoid)(v)", "v = NAME(sigmoid)(v)", "rotary"),
    Fault("logits of the first tokens", "step.c", "op->from_width, step->chosen[m])", "op->from_width, m)", "none"),
    Fault("the residual stream is overwritten", "step.c", "op->to_width, rows, op->onto,", "op->to_width, rows, 0,", "none"),
    Fault("whole heads are rotated", "step_parts.h", "int64_t half = op->groups / 2;", "int64_t half = op->width / 2;", "neox"),
    Fault("scores without their cap", "step_attention.h", "if (op->cap > 0) v =", "if (0) v =", "gemma"),
    Fault("a sink without its share", "step_attention.h", "query->sums[0] = op->bias ? 1.0f : 0.0f", "query->sums[0] = 0.0f", "scaled"),
    Fault("logits without their cap", "step_parts.h", "if (op->cap > 0) v =", "if (0) v =", "gemma"),
    Fault("a part without its factor", "step_parts.h", "NAME(get)(x + i, left) * op->number", "NAME(get)(x + i, left)", "scaled"),
    Fault("what a part adds replaces the stream", "step_parts.h", "if (op->onto) v += NAME(get)(y + i, left);", "", "gemma"),
    Fault("ReLU is not squared", "step_parts.h", "zero, v * v)", "zero, v)", "parallel-shared"),
    Fault("tanh far from zero only", "step_parts.h", "(x < near) & (x > -near), p * z * x + x, far)", "(x < near) & (x > -near), x, far)", "gemma"),
    Fault("one expert too many", "step.c", "n < count; n++) { /* the next", "n <= count; n++) { /* the next", "moe"),
    Fault("the smallest logits choose", "step.c", "(next < 0 || x[e] > x[next])", "(next < 0 || x[e] < x[next])", "moe"),
    Fault("weights are never normalized", "step.c", "normalize && e < experts", "0 && e < experts", "moe"),
    Fault("weights are always normalized", "step.c", "normalize && e < experts", "e < experts", "moe-post"),
    Fault("an expert reads the first rows", "step.c", "row_of(work, op->from, op->from_width, m), sizeof(float)", "row_of(work, op->from, op->from_width, rows - 1), sizeof(float)", "moe"),
    Fault("an expert's rows go astray", "step.c", "row_of(work, op->from, op->from_width, from++)", "row_of(work, op->from, op->from_width, 0 * from++)", "moe"),
    Fault("experts without weights", "step.c", "to[i] += weight * x[i]", "to[i] += x[i]", "moe"),
    Fault("a gate without its sigmoid", "step.c", "weight = 1.0f / (1.0f + expf(-weight))", "weight = 1.0f", "moe-gated"),
    Fault("a mixture added to what was there", "step.c", "if (!op->onto) memset(", "if (0) memset(", "moe-output"),
    Fault("a shared page is written", "step.c", "if (before >= 0 && memory->uses[before] == 1) continue;", "if (before >= 0) continue;", "native_beams_are_plain"),
    Fault("a page that is not copied", "step.c", "if (before >= 0 && p * PAGE < length[row])", "if (0)", "native_beams_are_plain"),
    Fault("rows keep their places", "step.c", "before[rows[i] * width + p]", "before[(i < n_before ? i : 0) * width + p]", "native_beams_are_plain"),
    Fault("greedy tokens stand still", "step.c", "step->position[m]++", "step->position[m] += 0", "native_runs_are_steps"),
    Fault("closed tokens are chosen", "step_parts.h", "logits[closed[i]] = -INFINITY", "(void)closed", "native_runs_are_steps"),
    Fault("an end is passed over", "step.c", "going &= tokens[m] != all->ends[e]", "going &= tokens[m] != all->ends[0]", "native_runs_are_steps"),
    Fault("log-probabilities of a half", "step_parts.h", "return logf(all)", "return 0.5f * logf(all)", "native_runs_are_steps"),
    Fault("beams lose their sums", "step.c", "all->sums[row] + (double)", "(double)", "native_beam_runs_are_steps"),
    Fault("the last beams first", "step.c", "at > 0 && totals[at - 1] < total", "at > 0 && totals[at - 1] > total", "native_beam_runs_are_steps"),
    Fault("beams take closed tokens", "step.c", "if (!(total > bar) || among(token, all->closed, all->n_closed)) continue;", "if (!(total > bar)) continue;", "native_beam_runs_are_steps"),
    Fault("beams run past an end", "step.c", "if (among(tokens[i], all->ends, all->n_ends)) return 0;", "if (among(tokens[i], all->ends, 0)) return 0;", "native_beam_runs_are_steps"),
    Fault("beams run past their item's end", "step.c", "return !(all->last[item] >= (soon > late ? soon : late));", "(void)soon, (void)late; return 1;", "native_beam_runs_are_steps"),
    Fault("beams keep their pages", "step.c", "all->table, parents, rows, width);", "all->table, step->row, rows, width), (void)parents;", "native_beam_runs_are_steps"),
    Fault("scales of half the range", "rounding.h", "size = top / 127.0f", "size = top / 63.0f", "pages_hold_the_defined_codes"),
    Fault("codes are cut, not rounded", "rounding.h", "rintf(x[i] / size)", "truncf(x[i] / size)", "pages_hold_the_defined_codes"),
    Fault("groups share the first's scale", "step_parts.h", "h += GROUP, steps += PAGE)", "h += GROUP)", "pages_hold_the_defined_codes"),
    Fault("a code in the wrong place", "step_parts.h", "codes[(h + i) * apart]", "codes[(h + i) * apart / 2]", "pages_hold_the_defined_codes"),
    Fault("values rounded as the keys", "step_parts.h", "(op, v, values, place, place * H, 1)", "(op, k, values, place, place * H, 1)", "pages_hold_the_defined_codes"),
    Fault("codes lose their signs", "each_width.h", "(lanes){(p)[0], (p)[1], (p)[2], (p)[3]}", "(lanes){(uint8_t)(p)[0], (uint8_t)(p)[1], (uint8_t)(p)[2], (uint8_t)(p)[3]}", "rounded_attention_is_of_the_rounded_numbers"),
    Fault("keys with another group's scale", "step_attention.h", "steps[v] + h / GROUP * PAGE", "steps[v] + 0 * h", "rounded_attention_is_of_the_rounded_numbers"),
    Fault("values with another position's scale", "step_attention.h", "/ GROUP * PAGE + k - begin]", "/ GROUP * PAGE]", "rounded_attention_is_of_the_rounded_numbers"),
    Fault("the rest of a head with another group's scale", "step_attention.h", "steps[i / GROUP * PAGE]", "steps[0 * i]", "rounded_attention_is_of_the_rounded_numbers"),
    Fault("widened keys with one scale", "step_attention.h", "g < groups; g++, steps += PAGE)", "g < groups; g++)", "rounded_attention_is_of_the_rounded_numbers"),
    Fault("widened values with the keys' scales", "step_attention.h", "    codes = (const int8_t *)from;\n    steps = steps_of(from, H);\n    to +=", "    codes = (const int8_t *)from;\n    steps -= groups * PAGE;\n    to +=", "rounded_attention_is_of_the_rounded_numbers"),
    Fault("numbers that are none are 0", "rounding.h", "size = NAN", "size = 0.0f", "what_is_no_number_stays_none"),
    Fault("a copied page without its last scales", "step.c", "sizeof(float) * (size_t)memory->page);", "sizeof(float) * (size_t)(memory->page - PAGE));", "native_beams_are_plain"),
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
