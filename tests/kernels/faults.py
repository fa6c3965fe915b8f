"""Planted faults of the C files: a line of damage each, and the check that must notice."""

from dataclasses import dataclass


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
    Fault("halves round up", "integer.c", "rintf(x[i] / size)", "floorf(x[i] / size + 0.5f)", "activations_are_rounded_as_said"),
    Fault("what is not finite passes for 0", "integer.c", "size = NAN", "size = 1.0f", "activations_are_rounded_as_said"),
    Fault("the lift is half taken back", "integer.c", "w->bits == 8 ? -128 : 1", "w->bits == 8 ? -64 : 1", "int8_is_the_reference", "avx512-vnni"),
    Fault("-128 is read with its sign", "integer_x86.h", "_mm256_maddubs_epi16(size, turned)", "_mm256_maddubs_epi16(turned, size)", "nothing_saturates", "avx2"),
    Fault("16 bits run over", "integer_x86.h", "b + 4 < blocks ? b + 4 : blocks", "b + 16 < blocks ? b + 16 : blocks", "nothing_saturates", "avx2"),
    Fault("zero points are 8", "integer_x86.h", "w->zero ? numbers16(w->zero, w->zero_kind, begin) :", "0 ? numbers16(w->zero, w->zero_kind, begin) :", "int4_is_the_reference", "avx512-vnni"),
    Fault("bytes are read with a sign", "integer_x86.h", "_mm512_cvtepu8_epi32(bytes)", "_mm512_cvtepi8_epi32(bytes)", "int4_is_the_reference", "avx512-vnni"),
    Fault("eight bytes are the first eight", "integer_x86.h", "(const __m128i *)((const uint8_t *)from + at));\n        return _mm256", "(const __m128i *)((const uint8_t *)from + (at & ~15)));\n        return _mm256", "int4_is_the_reference", "avx2"),
    Fault("bytes are read as halves", "integer.c", "if (kind == BYTE) return", "if (0) return", "int4_is_the_reference"),
    Fault("a batch shares its scale", "integer_x86.h", "_mm512_set1_ps(job->size[of])", "_mm512_set1_ps(job->size[g])", "rows_are_their_own", "avx512-vnni"),
    Fault("a row has one scale", "integer_x86.h", "job->size[row * job->w->groups + g]", "job->size[row * job->w->groups]", "int8_is_the_reference", "avx2"),
    Fault("two tiles share their scales", "integer_x86.h", "((tile + t) * w->groups + g) * TILE", "(tile * w->groups + g) * TILE", "int8_is_the_reference", "avx512-vnni"),
    Fault("nothing is left of an activation", "integer.c", "x[i] - size * (float)xq[i]", "0.0f", "refined_products_are_finer"),
    Fault("halves of a product are mixed up", "integer.c", "both[size + i]", "both[2 * i + 1]", "int8_is_the_reference"),
    Fault("the last inputs are lost", "floating_block.h", "if (i < inputs) {", "if (0) {", "floats_are_torchs", "avx2"),
    Fault("the residual is forgotten", "floating.c", "job->onto ? *y + sum : sum", "sum", "floats_are_torchs"),
    Fault("threads leave gaps", "native.c", "first + all->chunk;", "first + all->chunk - 1;", "threads_change_nothing"),
)  # fmt: skip
