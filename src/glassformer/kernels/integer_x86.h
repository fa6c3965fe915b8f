/* The kernels of integer.c for x86-64: one or two tiles, and as many rows as registers hold. */

#define FETCH 4096 /* bytes ahead that are fetched */

/* All rows of tiles first .. last - 1, in as few passes as can be, of about the same size. */
#define PART(NAME, TARGET, MOST, CASES)                                                          \
    TARGET static void NAME(void *data, int64_t first, int64_t last) {                           \
        const struct job *job = data;                                                            \
        int64_t passes = (job->rows + MOST - 1) / MOST;                                          \
        for (int64_t tile = first; tile < last; tile++)                                          \
            for (int64_t pass = 0; pass < passes; pass++) {                                      \
                int64_t row = job->rows * pass / passes;                                         \
                switch (job->rows * (pass + 1) / passes - row) { CASES }                         \
            }                                                                                    \
    }
#define FETCH_LINE(at) _mm_prefetch((const char *)(at) + FETCH, _MM_HINT_T1)

/* --- AVX2: vpmaddubsw adds pairs of products in 16 bits. They fit: 2 * 128 * 127, and for 4 bits
   even 8 pairs, 16 * 15 * 127 ------------------------------------------------------------------ */

AVX2 INLINE __m256 numbers8(const void *from, int32_t kind, int64_t at) {
    if (kind == FLOAT) return _mm256_loadu_ps((const float *)from + at);
    if (kind >= BYTE) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)((const uint8_t *)from + at));
        __m256 whole = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
        return kind == BYTE ? whole : _mm256_mul_ps(whole, _mm256_set1_ps(0.0625f));
    }
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)from + at)));
}

AVX2 INLINE __m256i four8(const int8_t *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return _mm256_set1_epi32(word);
}

AVX2 INLINE void put8(const struct job *job, int64_t row, int64_t out, __m256 acc) {
    const struct integer *w = job->w;
    int64_t left = w->outputs - out;
    float *to = job->y + row * w->outputs + out, y[8];
    if (w->outer) acc = _mm256_mul_ps(acc, _mm256_loadu_ps(w->outer + out));
    if (left >= 8) {
        if (job->bias) acc = _mm256_add_ps(acc, _mm256_loadu_ps(job->bias + out));
        _mm256_storeu_ps(to, acc);
        return;
    }
    _mm256_storeu_ps(y, acc);
    for (int64_t l = 0; l < left; l++) to[l] = job->bias ? y[l] + job->bias[out + l] : y[l];
}

/* acc + sum * scale * size, of one group. */
AVX2 INLINE __m256 grown8(const struct job *job, int64_t row, int64_t g, __m256 acc, __m256 sum,
                          __m256 scale) {
    __m256 size = _mm256_set1_ps(job->size[row * job->w->groups + g]);
    return _mm256_add_ps(acc, _mm256_mul_ps(_mm256_mul_ps(sum, scale), size));
}

AVX2 INLINE void int8_avx2(const struct job *job, int64_t tile, int side, int64_t row, int rows) {
    const struct integer *w = job->w;
    int64_t blocks = job->width / 4 / w->groups;
    const uint8_t *at = w->weight + tile * w->groups * blocks * BLOCK + side * 32;
    const int8_t *x = job->xq + row * job->width;
    const __m256i ones = _mm256_set1_epi16(1), top = _mm256_set1_epi8((char)0x80);
    __m256 acc[4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) acc[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < w->groups; g++) {
        __m256i sums[4];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r] = _mm256_setzero_si256();
        for (int64_t b = 0; b < blocks; b++, at += BLOCK, x += 4) {
            FETCH_LINE(at);
            __m256i q = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)at), top);
            __m256i size = _mm256_abs_epi8(q); /* -128 gives 128, and is read without a sign */
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                __m256i turned = _mm256_sign_epi8(four8(x + r * job->width), q);
                __m256i pairs = _mm256_maddubs_epi16(size, turned);
                sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, ones));
            }
        }
        __m256 scale = numbers8(w->scale, w->scale_kind, (tile * w->groups + g) * TILE + side * 8);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            acc[r] = grown8(job, row + r, g, acc[r], _mm256_cvtepi32_ps(sums[r]), scale);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) put8(job, row + r, tile * TILE + side * 8, acc[r]);
}

AVX2 INLINE void int4_avx2(const struct job *job, int64_t tile, int side, int64_t row, int rows,
                           int fine) {
    const struct integer *w = job->w;
    int64_t blocks = w->group / 8;
    const uint8_t *at = w->weight + tile * w->groups * blocks * BLOCK + side * 32;
    const int8_t *x = job->xq + row * job->width;
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    __m256 acc[4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) acc[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < w->groups; g++) {
        __m256i sums[4];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r] = _mm256_setzero_si256();
        for (int64_t b = 0; b < blocks;) {
            __m256i pairs[4];
            int64_t end = b + 4 < blocks ? b + 4 : blocks; /* as many as fit into 16 bits */
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) pairs[r] = _mm256_setzero_si256();
            for (; b < end; b++, at += BLOCK, x += 8) {
                FETCH_LINE(at);
                __m256i both = _mm256_loadu_si256((const __m256i *)at);
                __m256i q0 = _mm256_and_si256(both, low);
                __m256i q1 = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const int8_t *xr = x + r * job->width;
                    __m256i p0 = _mm256_maddubs_epi16(q0, four8(xr));
                    __m256i p1 = _mm256_maddubs_epi16(q1, four8(xr + 4));
                    pairs[r] = _mm256_add_epi16(pairs[r], _mm256_add_epi16(p0, p1));
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs[r], ones));
        }
        int64_t begin = (tile * w->groups + g) * TILE + side * 8;
        __m256 scale = numbers8(w->scale, fine ? BYTE : w->scale_kind, begin), zero;
        if (fine) zero = numbers8(w->zero, BYTE, begin);
        else zero = w->zero ? numbers8(w->zero, w->zero_kind, begin) : _mm256_set1_ps(8.0f);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            if (fine) {
                __m256 xsum = _mm256_set1_ps(job->sixteenths[(row + r) * w->groups + g]);
                __m256 sum = _mm256_fnmadd_ps(zero, xsum, _mm256_cvtepi32_ps(sums[r]));
                acc[r] = grown8(job, row + r, g, acc[r], sum, scale);
                continue;
            }
            __m256 xsum = _mm256_set1_ps((float)job->sums[(row + r) * w->groups + g]);
            __m256 sum = _mm256_sub_ps(_mm256_cvtepi32_ps(sums[r]), _mm256_mul_ps(zero, xsum));
            acc[r] = grown8(job, row + r, g, acc[r], sum, scale);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) put8(job, row + r, tile * TILE + side * 8, acc[r]);
}

#define ROWS8(n) \
    case n: int8_avx2(job, tile, 0, row, n), int8_avx2(job, tile, 1, row, n); break;
#define ROWS4(n) \
    case n: int4_avx2(job, tile, 0, row, n, 0), int4_avx2(job, tile, 1, row, n, 0); break;
#define FINE4(n) \
    case n: int4_avx2(job, tile, 0, row, n, 1), int4_avx2(job, tile, 1, row, n, 1); break;
PART(avx2_int8, AVX2, 4, ROWS8(1) ROWS8(2) ROWS8(3) ROWS8(4))
PART(avx2_int4, AVX2, 4, ROWS4(1) ROWS4(2) ROWS4(3) ROWS4(4))
PART(avx2_fine, AVX2, 4, FINE4(1) FINE4(2) FINE4(3) FINE4(4))
#undef ROWS8
#undef ROWS4
#undef FINE4

/* --- AVX-512 VNNI: vpdpbusd adds four products in 32 bits, and does not saturate ------------- */

AVX512 INLINE __m512 numbers16(const void *from, int32_t kind, int64_t at) {
    if (kind == FLOAT) return _mm512_loadu_ps((const float *)from + at);
    if (kind >= BYTE) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)((const uint8_t *)from + at));
        __m512 whole = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
        return kind == BYTE ? whole : _mm512_mul_ps(whole, _mm512_set1_ps(0.0625f));
    }
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at)));
}

AVX512 INLINE __m512i four16(const int8_t *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return _mm512_set1_epi32(word);
}

AVX512 INLINE void put16(const struct job *job, int64_t row, int64_t tile, __m512 acc) {
    const struct integer *w = job->w;
    int64_t out = tile * TILE, left = w->outputs - out;
    __mmask16 some = left >= TILE ? 0xffff : (__mmask16)((1 << left) - 1);
    if (w->outer) acc = _mm512_mul_ps(acc, _mm512_loadu_ps(w->outer + out));
    if (job->bias) acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(some, job->bias + out));
    _mm512_mask_storeu_ps(job->y + row * w->outputs + out, some, acc);
}

/* vpdpbusd in its place: from the intrinsic gcc makes two copies of every sum at each step. */
AVX512 INLINE __m512i added4(__m512i sum, __m512i q, __m512i four) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(q), "v"(four));
    return sum;
}

/* What else the compiler knows of the weights: nothing; or groups of 32, and 4 bits that are
   `fine`, or 8 bits with scales of float16. */
enum { ANY, FINE, HALVES };

/* A float of this size has steps of 1: its bits plus a sum are those of itself plus the sum. It
   times a float16 is exact, so that (SHIFT + sum) * scale - SHIFT * scale, rounded once, is
   sum * scale as it is rounded by itself. Sums of groups of 32 lie below 2^22. */
#define SHIFT 12582912.0f /* 3 * 2^22; its bits are SHIFTED */

#define ROWS_AT_ONCE 6  /* by two tiles: 12 sums of integers and 12 of floats, all in registers */
#define ROWS_KEPT 48    /* rows that meet some groups of a tile before the next groups are read */
#define INPUTS_KEPT 256 /* inputs of those groups: 8 KiB of int8 weights, in the first cache */

/* `rows` rows by `many` tiles, one or two: with two, each activation that is loaded serves twice.
   Groups `from` to `to` are added to what is kept of the groups before; the last are put into y. */
AVX512 INLINE void part_avx512(const struct job *job, int64_t tile, int many, int64_t row,
                               int rows, int bits, int kind, int64_t from, int64_t to,
                               float *kept, int fetch) {
    const struct integer *w = job->w;
    int64_t per = bits == 8 ? 4 : 8;
    int64_t blocks = kind == ANY ? job->width / per / w->groups : 32 / per;
    int64_t next = w->groups * blocks * BLOCK; /* from a tile to the next */
    const uint8_t *at = w->weight + tile * next + from * blocks * BLOCK;
    const int8_t *x = job->xq + row * job->width + from * blocks * per;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 acc[2][ROWS_AT_ONCE];
#pragma GCC unroll 2
    for (int t = 0; t < many; t++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            acc[t][r] = from ? _mm512_loadu_ps(kept + (2 * r + t) * TILE) : _mm512_setzero_ps();
    for (int64_t g = from; g < to; g++) {
        __m512i sums[2][ROWS_AT_ONCE];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            int32_t lift = bits == 8 ? job->sums[(row + r) * w->groups + g] : 0;
            __m512i begin = _mm512_set1_epi32(lift);
#pragma GCC unroll 2
            for (int t = 0; t < many; t++) sums[t][r] = begin;
        }
        if (fetch)
            for (int64_t b = 0; b < blocks; b++)
#pragma GCC unroll 2
                for (int t = 0; t < many; t++) FETCH_LINE(at + b * BLOCK + t * next);
#pragma GCC unroll 8
        for (int64_t b = 0; b < blocks; b++, at += BLOCK, x += per) {
            __m512i q[2], high[2];
#pragma GCC unroll 2
            for (int t = 0; t < many; t++) {
                q[t] = _mm512_loadu_si512(at + t * next);
                if (bits == 4) {
                    high[t] = _mm512_and_si512(_mm512_srli_epi16(q[t], 4), low);
                    q[t] = _mm512_and_si512(q[t], low);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                __m512i four = four16(x + r * job->width);
#pragma GCC unroll 2
                for (int t = 0; t < many; t++) sums[t][r] = added4(sums[t][r], q[t], four);
                if (bits == 4) {
                    four = four16(x + r * job->width + 4);
#pragma GCC unroll 2
                    for (int t = 0; t < many; t++) sums[t][r] = added4(sums[t][r], high[t], four);
                }
            }
        }
        __m512 scale[2], zero[2];
#pragma GCC unroll 2
        for (int t = 0; t < many; t++) {
            int64_t begin = ((tile + t) * w->groups + g) * TILE;
            int32_t stored = kind == FINE ? BYTE : kind == HALVES ? HALF : w->scale_kind;
            scale[t] = numbers16(w->scale, stored, begin);
            if (kind == FINE) zero[t] = numbers16(w->zero, BYTE, begin);
            else if (kind == HALVES) zero[t] = _mm512_mul_ps(_mm512_set1_ps(SHIFT), scale[t]);
            else if (bits == 4)
                zero[t] = w->zero ? numbers16(w->zero, w->zero_kind, begin) : _mm512_set1_ps(8.0f);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            int64_t of = (row + r) * w->groups + g;
            __m512 size = _mm512_set1_ps(job->size[of]);
#pragma GCC unroll 2
            for (int t = 0; t < many; t++) {
                __m512 scaled;
                if (kind == HALVES) {
                    __m512 sum = _mm512_castsi512_ps(sums[t][r]);
                    scaled = _mm512_fmsub_ps(sum, scale[t], zero[t]);
                } else {
                    __m512 sum = _mm512_cvtepi32_ps(sums[t][r]);
                    if (kind == FINE) {
                        __m512 xsum = _mm512_set1_ps(job->sixteenths[of]);
                        sum = _mm512_fnmadd_ps(zero[t], xsum, sum);
                    } else if (bits == 4) {
                        __m512 xsum = _mm512_set1_ps((float)job->sums[of]);
                        sum = _mm512_sub_ps(sum, _mm512_mul_ps(zero[t], xsum));
                    }
                    scaled = _mm512_mul_ps(sum, scale[t]);
                }
                acc[t][r] = _mm512_add_ps(acc[t][r], _mm512_mul_ps(scaled, size));
            }
        }
    }
#pragma GCC unroll 2
    for (int t = 0; t < many; t++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            if (to < w->groups) _mm512_storeu_ps(kept + (2 * r + t) * TILE, acc[t][r]);
            else put16(job, row + r, tile + t, acc[t][r]);
        }
}

/* All rows of tiles first .. last - 1, two tiles at a time. Many rows take turns with the groups:
   some groups of the weights, small enough for the first cache, meet 48 rows, six at a time. */
#define ROWS(n, many, bits, kind) \
    case n: part_avx512(job, tile, many, row, n, bits, kind, from, to, at, !pass); break;
#define UP_TO_6(many, bits, kind)                                                                \
    ROWS(1, many, bits, kind) ROWS(2, many, bits, kind) ROWS(3, many, bits, kind)                \
    ROWS(4, many, bits, kind) ROWS(5, many, bits, kind) ROWS(6, many, bits, kind)
#define PAIRS(NAME, bits, kind)                                                                  \
    AVX512 static void NAME(void *data, int64_t first, int64_t last) {                           \
        const struct job *job = data;                                                            \
        int64_t groups = job->w->groups, some = INPUTS_KEPT / job->w->group;                     \
        if (some < 1) some = 1;                                                                  \
        if (job->rows <= ROWS_AT_ONCE) some = groups;                                            \
        for (int64_t tile = first; tile < last; tile += 2)                                       \
            for (int64_t begin = 0; begin < job->rows; begin += ROWS_KEPT) {                     \
                float kept[ROWS_KEPT * 2 * TILE];                                                \
                int64_t left = job->rows - begin, now = left < ROWS_KEPT ? left : ROWS_KEPT;     \
                int64_t passes = (now + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;                        \
                for (int64_t from = 0; from < groups; from += some)                              \
                    for (int64_t pass = 0; pass < passes; pass++) {                              \
                        int64_t row = begin + now * pass / passes;                               \
                        int64_t rows = begin + now * (pass + 1) / passes - row;                  \
                        int64_t to = from + some < groups ? from + some : groups;                \
                        float *at = kept + (row - begin) * 2 * TILE;                             \
                        if (tile + 1 < last) switch (rows) { UP_TO_6(2, bits, kind) }            \
                        else switch (rows) { UP_TO_6(1, bits, kind) }                            \
                    }                                                                            \
            }                                                                                    \
    }
PAIRS(avx512_int8, 8, ANY)
PAIRS(avx512_halves, 8, HALVES)
PAIRS(avx512_int4, 4, ANY)
PAIRS(avx512_fine, 4, FINE)
