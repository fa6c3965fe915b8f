/* y (+)= x W^T + b for a few rows of float32, with W as it lies: row-major, float32, bfloat16, or
   packed in GGUF's blocks, which gives the bits of the float32 that they stand for.

   Reading W once is what it costs, so four outputs are computed together, for as many rows as there
   are registers. Each output of each row is summed in one order, whatever the rows beside it:
   a row alone and in a batch give the same bits. */

#include <string.h>

#include "native.h"

#define OUTS 4 /* outputs computed together */
#define PANEL_BYTES (1 << 16)
#define SHORT_BYTES (1 << 13)
#define AHEAD 4096 /* bytes that are fetched before they are needed */

struct job {
    const struct floating *w;
    const float *x; /* (B, I) */
    float *y;       /* (B, O), rows `stride` apart */
    int64_t stride, rows;
    int onto; /* add to what y holds */
};

INLINE float widened(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

INLINE void put(const struct job *job, int64_t row, int64_t out, float sum) {
    const struct floating *w = job->w;
    float *y = job->y + row * job->stride + out;
    if (w->bias) sum += w->bias[out];
    *y = job->onto ? *y + sum : sum;
}

/* --- portable --------------------------------------------------------------------------------- */

#define LANES 16 /* partial sums that a compiler can keep in vectors of any width */

static float dot(const struct floating *w, int64_t out, const float *x) {
    float lanes[LANES] = {0}, sum = 0;
    const float *wide = (const float *)w->weight + out * w->inputs;
    const uint16_t *half = (const uint16_t *)w->weight + out * w->inputs;
    int64_t i = 0;
    for (; i + LANES <= w->inputs; i += LANES)
        for (int l = 0; l < LANES; l++)
            lanes[l] += (w->form ? widened(half[i + l]) : wide[i + l]) * x[i + l];
    for (int l = 0; i < w->inputs; i++, l++)
        lanes[l] += (w->form ? widened(half[i]) : wide[i]) * x[i];
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    return sum;
}

static void portable(void *data, int64_t first, int64_t last) {
    const struct job *job = data;
    for (int64_t out = first; out < last; out++)
        for (int64_t row = 0; row < job->rows; row++)
            put(job, row, out, dot(job->w, out, job->x + row * job->w->inputs));
}

#ifdef GLASS_X86

/* Four outputs of one row at once. */
AVX2 INLINE void put4(const struct job *job, int64_t row, int64_t out, __m128 sums) {
    float *y = job->y + row * job->stride + out;
    if (job->w->bias) sums = _mm_add_ps(sums, _mm_loadu_ps(job->w->bias + out));
    _mm_storeu_ps(y, job->onto ? _mm_add_ps(_mm_loadu_ps(y), sums) : sums);
}

/* --- AVX2 and FMA: 4 outputs x 3 rows in 16 registers ----------------------------------------- */

AVX2 INLINE __m256 wide8(const uint16_t *from) {
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

AVX2 INLINE __m256 some8(const float *from, int64_t count) {
    float all[8] = {0};
    memcpy(all, from, sizeof(float) * count);
    return _mm256_loadu_ps(all);
}

AVX2 INLINE __m256 some_wide8(const uint16_t *from, int64_t count) {
    uint16_t all[8] = {0};
    memcpy(all, from, sizeof(uint16_t) * count);
    return wide8(all);
}

AVX2 INLINE float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

/* sum8 of four vectors: the same additions in the same order, fewer instructions. */
AVX2 INLINE __m128 sum8_of_4(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    ab = _mm256_add_ps(ab, _mm256_permute_ps(ab, 0x4e));
    cd = _mm256_add_ps(cd, _mm256_permute_ps(cd, 0x4e));
    ab = _mm256_add_ps(ab, _mm256_permute_ps(ab, 0xb1));
    cd = _mm256_add_ps(cd, _mm256_permute_ps(cd, 0xb1));
    __m256 all = _mm256_unpacklo_ps(ab, cd); /* a c a c, b d b d */
    return _mm_unpacklo_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

#define TARGET AVX2
#define VEC __m256
#define WIDTH 8
#define ROWS 3
#define LOAD_X _mm256_loadu_ps
#define SUM sum8
#define SUM_OF_4 sum8_of_4
#define FMA _mm256_fmadd_ps
#define ZERO _mm256_setzero_ps

#define NAME(what) avx2_float32_##what
#define WEIGHT float
#define LOAD _mm256_loadu_ps
#define LOAD_SOME some8
#define LINES 2
#include "floating_block.h"
#define NAME(what) avx2_bfloat16_##what
#define WEIGHT uint16_t
#define LOAD wide8
#define LOAD_SOME some_wide8
#define LINES 1
#include "floating_block.h"
#undef TARGET
#undef VEC
#undef WIDTH
#undef ROWS
#undef LOAD_X
#undef SUM
#undef SUM_OF_4
#undef FMA
#undef ZERO

/* --- AVX-512: 4 outputs x 6 rows in 32 registers ---------------------------------------- */

AVX512 INLINE __m512 wide16(const uint16_t *from) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

AVX512 INLINE __m512 some16(const float *from, int64_t count) {
    return _mm512_maskz_loadu_ps((__mmask16)((1 << count) - 1), from);
}

AVX512 INLINE __m512 some_wide16(const uint16_t *from, int64_t count) {
    uint16_t all[16] = {0};
    memcpy(all, from, sizeof(uint16_t) * count);
    return wide16(all);
}

/* _mm512_reduce_add_ps of four vectors: the same additions in the same order. */
AVX512 INLINE __m128 sum16_of_4(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
    const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, v));
}

#define TARGET AVX512
#define VEC __m512
#define WIDTH 16
#define ROWS 6
#define LOAD_X _mm512_loadu_ps
#define SUM _mm512_reduce_add_ps
#define SUM_OF_4 sum16_of_4
#define FMA _mm512_fmadd_ps
#define ZERO _mm512_setzero_ps

#define NAME(what) avx512_float32_##what
#define WEIGHT float
#define LOAD _mm512_loadu_ps
#define LOAD_SOME some16
#define LINES 4
#include "floating_block.h"
#define NAME(what) avx512_bfloat16_##what
#define WEIGHT uint16_t
#define LOAD wide16
#define LOAD_SOME some_wide16
#define LINES 2
#include "floating_block.h"

#endif

static part_fn part_of(int bfloat16) {
#ifdef GLASS_X86
    if (glass_variant() == AVX2_FMA) return bfloat16 ? avx2_bfloat16_part : avx2_float32_part;
    if (glass_variant() == AVX512_VNNI) return bfloat16 ? avx512_bfloat16_part : avx512_float32_part;
#endif
    (void)bfloat16;
    return portable;
}

/* Packed weights: some outputs are unpacked, and are then an ordinary matrix. */
static void packed(void *data, int64_t first, int64_t last) {
    const struct job *job = data;
    const struct floating *w = job->w;
    int64_t panel = PANEL / w->inputs / OUTS * OUTS;
    float numbers[PANEL] __attribute__((aligned(64)));
    for (int64_t out = first; out < last; out += panel) {
        int64_t count = out + panel < last ? panel : last - out;
        struct floating some = {numbers, w->bias ? w->bias + out : 0, count, w->inputs, 0};
        struct job here = {&some, job->x, job->y + out, job->stride, job->rows, job->onto};
        glass_unpack_rows(w, out, count, numbers);
        part_of(0)(&here, 0, count);
    }
}

void glass_floating_rows(const struct floating *w, const float *x, float *y, int64_t stride,
                         int64_t rows, int onto, int threads) {
    struct job job = {w, x, y, stride, rows, onto};
    part_fn part = w->form > PACKED ? packed : part_of(w->form);
    int64_t chunk = w->outputs / threads / 4, least = SHARED / w->inputs;
    chunk = ((chunk < least ? least : chunk) / OUTS + 1) * OUTS;
    glass_share(part, &job, w->outputs, chunk, threads);
}

EXPORT void glass_floating(const struct floating *w, const float *x, float *y, int64_t rows,
                           int onto, int threads) {
    glass_floating_rows(w, x, y, w->outputs, rows, onto, threads);
}
