/* Numbers out of GGUF's packed types: blocks of a row with scales of half precision.

   The arithmetic is that of the `gguf` library, operation by operation, so that the bits are too. */

#include <stdatomic.h>
#include <string.h>

#include "native.h"

enum type { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q8_0 = 8, Q4_K = 12, Q6_K = 14 }; /* the format's */
#define CHUNK 1024 /* blocks that a thread takes at a time */

struct job {
    int type;
    const uint8_t *from;
    float *to;
    _Atomic int strange; /* some number is not finite */
};

INLINE float half_at(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    return from_half(half);
}

/* Low nibbles are the first half of a block, high ones the second. */
INLINE void nibbles(const uint8_t *q, float *to, int half, float step, float low) {
    for (int i = 0; i < half; i++) to[i] = step * (float)(q[i] & 15) + low;
    for (int i = 0; i < half; i++) to[half + i] = step * (float)(q[i] >> 4) + low;
}

INLINE void q4_0(const uint8_t *from, float *to) {
    float step = half_at(from);
    for (int i = 0; i < 16; i++) to[i] = step * (float)((from[2 + i] & 15) - 8);
    for (int i = 0; i < 16; i++) to[16 + i] = step * (float)((from[2 + i] >> 4) - 8);
}

INLINE void q5_0(const uint8_t *from, float *to) {
    float step = half_at(from);
    uint32_t high;
    memcpy(&high, from + 2, 4);
    for (int i = 0; i < 32; i++) {
        int low = i < 16 ? from[6 + i] & 15 : from[6 + i - 16] >> 4;
        to[i] = step * (float)((low | (int)(high >> i & 1) << 4) - 16);
    }
}

INLINE void q8_0(const uint8_t *from, float *to) {
    float step = half_at(from);
    const int8_t *q = (const int8_t *)from + 2;
    for (int i = 0; i < 32; i++) to[i] = (float)q[i] * step;
}

/* 8 parts of 32; their steps and lows have 6 bits each, the last four parts' in pieces. */
struct line {
    float step, low;
};

INLINE struct line q4_k_line(const uint8_t *six, int part, struct line coarse) {
    int p = part % 4;
    int step = part < 4 ? six[p] & 63 : (six[8 + p] & 15) | (six[p] >> 2 & 48);
    int low = part < 4 ? six[4 + p] & 63 : six[8 + p] >> 4 | (six[4 + p] >> 2 & 48);
    return (struct line){coarse.step * (float)step, coarse.low * (float)low};
}

INLINE void q4_k(const uint8_t *from, float *to) {
    struct line coarse = {half_at(from), half_at(from + 2)};
    for (int part = 0; part < 8; part++) {
        struct line line = q4_k_line(from + 4, part, coarse);
        const uint8_t *pair = from + 16 + part / 2 * 32;
        for (int i = 0; i < 32; i++)
            to[part * 32 + i] = line.step * (float)(part % 2 ? pair[i] >> 4 : pair[i] & 15) - line.low;
    }
}

/* 16 parts of 16: 4 low bits, 2 high ones, a signed byte for each part's step. */
INLINE void q6_k(const uint8_t *from, float *to) {
    const uint8_t *low = from, *high = from + 128;
    const int8_t *steps = (const int8_t *)from + 192;
    float coarse = half_at(from + 208);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, in = i % 128, quarter = in / 32, at = in % 32;
        int four = low[half * 64 + in % 64] >> (in < 64 ? 0 : 4) & 15;
        int two = high[half * 32 + at] >> (2 * quarter) & 3;
        to[i] = coarse * (float)steps[i / 16] * (float)((four | two << 4) - 32);
    }
}

INLINE void unpack(struct job *job, int64_t first, int64_t last) {
    int strange = 0;
    for (int64_t block = first; block < last; block++) {
        int64_t count = 32;
        float *to = job->to + block * 32;
        switch (job->type) {
            case Q4_0: q4_0(job->from + block * 18, to); break;
            case Q4_1: {
                const uint8_t *from = job->from + block * 20;
                nibbles(from + 4, to, 16, half_at(from), half_at(from + 2));
                break;
            }
            case Q5_0: q5_0(job->from + block * 22, to); break;
            case Q8_0: q8_0(job->from + block * 34, to); break;
            case Q4_K: q4_k(job->from + block * 144, to = job->to + block * 256), count = 256; break;
            case Q6_K: q6_k(job->from + block * 210, to = job->to + block * 256), count = 256; break;
        }
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, to + i, 4);
            strange |= (bits & 0x7f800000u) == 0x7f800000u;
        }
    }
    if (strange) job->strange = 1;
}

static const int block_bytes[] = {[Q4_0] = 18, [Q4_1] = 20, [Q5_0] = 22, [Q8_0] = 34,
                                  [Q4_K] = 144, [Q6_K] = 210};

INLINE int block_numbers(int type) { return type == Q4_K || type == Q6_K ? 256 : 32; }

static void portable_part(void *job, int64_t first, int64_t last) { unpack(job, first, last); }
#ifdef GLASS_X86
AVX2 static void avx2_part(void *job, int64_t first, int64_t last) { unpack(job, first, last); }
#endif

#ifdef GLASS_X86
/* The same operations on eight numbers at once. */
AVX2 INLINE void put8(float *to, __m256i q, float step, float low) {
    __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(q), _mm256_set1_ps(step));
    _mm256_storeu_ps(to, _mm256_add_ps(x, _mm256_set1_ps(low)));
}

AVX2 INLINE void put16(float *to, __m128i q, float step, float low) {
    put8(to, _mm256_cvtepu8_epi32(q), step, low);
    put8(to + 8, _mm256_cvtepu8_epi32(_mm_srli_si128(q, 8)), step, low);
}

/* step * q, of bytes with a sign. */
AVX2 INLINE void product16(float *to, __m128i q, float step) {
    for (int half = 0; half < 2; half++, q = _mm_srli_si128(q, 8)) {
        __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q));
        _mm256_storeu_ps(to + 8 * half, _mm256_mul_ps(x, _mm256_set1_ps(step)));
    }
}

AVX2 INLINE __m128i bytes16(const uint8_t *from) { return _mm_loadu_si128((const __m128i *)from); }
AVX2 INLINE __m128i low16(__m128i q) { return _mm_and_si128(q, _mm_set1_epi8(15)); }
AVX2 INLINE __m128i high16(__m128i q) { return low16(_mm_srli_epi16(q, 4)); }

AVX2 static void avx2_block(int type, const uint8_t *from, float *to) {
    switch (type) {
        case Q4_0: {
            float step = half_at(from);
            __m128i q = bytes16(from + 2), less = _mm_set1_epi8(8);
            product16(to, _mm_sub_epi8(low16(q), less), step);
            product16(to + 16, _mm_sub_epi8(high16(q), less), step);
            return;
        }
        case Q4_1: {
            float step = half_at(from), low = half_at(from + 2);
            __m128i q = bytes16(from + 4);
            put16(to, low16(q), step, low);
            put16(to + 16, high16(q), step, low);
            return;
        }
        case Q5_0: q5_0(from, to); return;
        case Q8_0: {
            float step = half_at(from);
            product16(to, bytes16(from + 2), step);
            product16(to + 16, bytes16(from + 18), step);
            return;
        }
        case Q4_K: {
            struct line coarse = {half_at(from), half_at(from + 2)};
            for (int part = 0; part < 8; part++) {
                struct line line = q4_k_line(from + 4, part, coarse);
                for (int half = 0; half < 2; half++) { /* a q - b is a q + (-b) */
                    __m128i pair = bytes16(from + 16 + part / 2 * 32 + 16 * half);
                    __m128i q = part % 2 ? high16(pair) : low16(pair);
                    put16(to + part * 32 + 16 * half, q, line.step, -line.low);
                }
            }
            return;
        }
        case Q6_K: {
            const int8_t *steps = (const int8_t *)from + 192;
            float coarse = half_at(from + 208);
            for (int part = 0; part < 16; part++) {
                int half = part / 8, quarter = part / 2 % 4, at = part % 2 * 16;
                __m128i four = bytes16(from + half * 64 + quarter % 2 * 32 + at);
                __m128i two = bytes16(from + 128 + half * 32 + at);
                four = quarter < 2 ? low16(four) : high16(four);
                two = _mm_and_si128(_mm_srl_epi16(two, _mm_cvtsi32_si128(2 * quarter)), _mm_set1_epi8(3));
                __m128i six = _mm_or_si128(four, _mm_slli_epi16(two, 4));
                product16(to + part * 16, _mm_sub_epi8(six, _mm_set1_epi8(32)), coarse * (float)steps[part]);
            }
            return;
        }
    }
}

AVX2 static void avx2_rows(int type, const uint8_t *from, float *to, int64_t blocks) {
    int size = block_bytes[type], count = block_numbers(type);
    for (int64_t block = 0; block < blocks; block++) avx2_block(type, from + block * size, to + block * count);
}
#endif

/* Unpacks so many blocks. 0; 1 where some number is not finite; -1 for a type that is not here. */
EXPORT int glass_unpack(int type, const uint8_t *from, float *to, int64_t blocks, int threads) {
    struct job job = {type, from, to, 0};
    part_fn part = portable_part;
    switch (type) {
        case Q4_0: case Q4_1: case Q5_0: case Q8_0: case Q4_K: case Q6_K: break;
        default: return -1;
    }
#ifdef GLASS_X86
    if (glass_variant() != PORTABLE) part = avx2_part;
#endif
    glass_share(part, &job, blocks, CHUNK, threads);
    return job.strange;
}

void glass_unpack_rows(const struct floating *w, int64_t first, int64_t count, float *to) {
    int type = w->form - PACKED;
    int64_t blocks = w->inputs / block_numbers(type);
    struct job job = {type, (const uint8_t *)w->weight + first * blocks * block_bytes[type], to, 0};
#ifdef GLASS_X86
    if (glass_variant() != PORTABLE) {
        avx2_rows(type, job.from, to, count * blocks);
        return;
    }
#endif
    portable_part(&job, 0, count * blocks);
}

struct scales {
    int type;
    const uint8_t *from;
    _Atomic int strange;
};

static void look_at_scales(void *data, int64_t first, int64_t last) {
    struct scales *job = data;
    int size = block_bytes[job->type], both = job->type == Q4_1 || job->type == Q4_K, strange = 0;
    const uint8_t *from = job->from + (job->type == Q6_K ? 208 : 0);
    for (int64_t block = first; block < last; block++) {
        uint16_t half[2];
        memcpy(half, from + block * size, 2);
        memcpy(half + 1, from + block * size + 2 * both, 2);
        strange |= (half[0] & 0x7c00) == 0x7c00 || (half[1] & 0x7c00) == 0x7c00;
    }
    if (strange) job->strange = 1;
}

/* 1 if the scales of all blocks are finite, and so the numbers; 0 if not; -1: another type. */
EXPORT int glass_scales_finite(int type, const uint8_t *from, int64_t blocks, int threads) {
    struct scales job = {type, from, 0};
    switch (type) {
        case Q4_0: case Q4_1: case Q5_0: case Q8_0: case Q4_K: case Q6_K: break;
        default: return -1;
    }
    glass_share(look_at_scales, &job, blocks, 64 * CHUNK, threads);
    return !job.strange;
}

/* --- numbers that are stored as they are ------------------------------------------------------- */

struct numbers {
    const void *from;
    int bytes;           /* 4: float32, 2: bfloat16 */
    _Atomic int strange;
};

INLINE void look(struct numbers *job, int64_t first, int64_t last) {
    int strange = 0;
    if (job->bytes == 4) {
        const uint32_t *bits = job->from;
        for (int64_t i = first; i < last; i++) strange |= (bits[i] & 0x7f800000u) == 0x7f800000u;
    } else {
        const uint16_t *bits = job->from;
        for (int64_t i = first; i < last; i++) strange |= (bits[i] & 0x7f80u) == 0x7f80u;
    }
    if (strange) job->strange = 1;
}

static void portable_look(void *job, int64_t first, int64_t last) { look(job, first, last); }
#ifdef GLASS_X86
AVX2 static void avx2_look(void *job, int64_t first, int64_t last) { look(job, first, last); }
#endif

/* 1 if all of these numbers are finite, else 0. */
EXPORT int glass_finite(const void *from, int64_t count, int bytes, int threads) {
    struct numbers job = {from, bytes, 0};
    part_fn part = portable_look;
#ifdef GLASS_X86
    if (glass_variant() != PORTABLE) part = avx2_look;
#endif
    glass_share(part, &job, count, 64 * CHUNK, threads);
    return !job.strange;
}
