/* The kernels of integer.c for x86-64: one or two tiles, and as many rows as registers hold. */

#define FETCH 4096 /* bytes ahead that are fetched, where every weight is read once */

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

AVX512 INLINE void put16(const struct job *job, int64_t row, int rows, int64_t tile, __m512 *acc) {
    const struct integer *w = job->w;
    int64_t out = tile * TILE, left = w->outputs - out;
    __mmask16 some = left >= TILE ? 0xffff : (__mmask16)((1 << left) - 1);
    float *to = job->y + row * w->outputs + out;
    if (w->outer) {
        __m512 outer = _mm512_loadu_ps(w->outer + out);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) acc[r] = _mm512_mul_ps(acc[r], outer);
    }
    if (job->bias) {
        __m512 bias = _mm512_maskz_loadu_ps(some, job->bias + out);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) acc[r] = _mm512_add_ps(acc[r], bias);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++, to += w->outputs) _mm512_mask_storeu_ps(to, some, acc[r]);
}

/* vpdpbusd in its place: from the intrinsic gcc makes two copies of every sum at each step. */
AVX512 INLINE __m512i added4(__m512i sum, __m512i q, __m512i four) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(q), "v"(four));
    return sum;
}

#define APART __attribute__((noinline)) /* registers are dealt out for each by itself */

/* What else the compiler knows of the weights: nothing; or groups of 32, 4 bits that are `fine`; or
   groups of a multiple of 32, 8 bits with scales of float16. */
enum { ANY, FINE, HALVES };

/* A float of this size has steps of 1: its bits plus a sum are those of itself plus the sum. It
   times a float16 is exact, so that (SHIFT + sum) * scale - SHIFT * scale, rounded once, is
   sum * scale as it is rounded by itself. Sums lie below 2^22: 128 * 127 * MOST_SHIFTED. */
#define SHIFT 12582912.0f /* 3 * 2^22; its bits are SHIFTED */
#define MOST_SHIFTED 256

INLINE int shiftable(int64_t group) { return group % 32 == 0 && group <= MOST_SHIFTED; }

#define ROWS_AT_ONCE 6  /* by two tiles: 12 sums of integers and 12 of floats, all in registers */
#define PASSES_KEPT 12  /* passes that meet some groups of a tile before the next groups are read */
#define INPUTS_KEPT 384 /* inputs of those, at most: 12 KiB of int8 weights, in the first cache */

/* Into the first cache; from memory, for a few rows, that is slower than FETCH_LINE. */
#define NEAR(at) _mm_prefetch((const char *)(at), _MM_HINT_T0)

/* `rows` rows by `many` tiles, one or two: with two, each activation that is loaded serves twice.
   Groups `from` to `to` are added to what is kept of the groups before; the last are put into y.
   `fetch`: weights are read ahead. `ahead`: weights of which each group fetches a line, or null.
   `ready`: scales as floats and times SHIFT, or null. */
AVX512 INLINE void part_avx512(const struct job *job, int64_t tile, int many, int64_t row,
                               int rows, int bits, int kind, int64_t from, int64_t to,
                               float *kept, int fetch, const uint8_t *ahead,
                               const float *ready) {
    const struct integer *w = job->w;
    const int per = bits == 8 ? 4 : 8;
    int64_t blocks = kind == ANY ? job->width / per / w->groups : 32 / per;
    int64_t parts = kind == HALVES ? w->group / 32 : 1; /* of a group, of so many blocks each */
    int64_t next = w->groups * parts * blocks * BLOCK;  /* from a tile to the next */
    const uint8_t *at = w->weight + tile * next + from * parts * blocks * BLOCK;
    const int8_t *x = job->xq + row * job->width + from * parts * blocks * per * rows;
    const int32_t *lift = job->sums + row * w->groups + from * rows;
    const float *size = job->size + row * w->groups + from * rows;
    const float *sixteenths = kind == FINE ? job->sixteenths + row * w->groups + from * rows : 0;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 acc[2][ROWS_AT_ONCE];
#pragma GCC unroll 2
    for (int t = 0; t < many; t++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            acc[t][r] = from ? _mm512_loadu_ps(kept + (2 * r + t) * TILE) : _mm512_setzero_ps();
    /* Lines of y are far apart, and a store waits for its line: fetched while sums grow. */
    for (int t = 0; t < many && ready && to == w->groups; t++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            NEAR(job->y + (row + r) * w->outputs + (tile + t) * TILE);
    for (int64_t g = from; g < to; g++, lift += rows, size += rows) {
        if (ahead) {
#pragma GCC unroll 2
            for (int t = 0; t < many; t++) NEAR(ahead + t * next);
            ahead += BLOCK;
        }
        __m512i sums[2][ROWS_AT_ONCE];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            __m512i begin = bits == 8 ? _mm512_set1_epi32(lift[r]) : _mm512_setzero_si512();
#pragma GCC unroll 2
            for (int t = 0; t < many; t++) sums[t][r] = begin;
        }
        for (int64_t part = 0; part < parts; part++) {
            if (fetch)
                for (int64_t b = 0; b < blocks; b++)
#pragma GCC unroll 2
                    for (int t = 0; t < many; t++) FETCH_LINE(at + b * BLOCK + t * next);
#pragma GCC unroll 8
            for (int64_t b = 0; b < blocks; b++, at += BLOCK, x += per * rows) {
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
                    __m512i four = four16(x + 4 * r);
#pragma GCC unroll 2
                    for (int t = 0; t < many; t++) sums[t][r] = added4(sums[t][r], q[t], four);
                    if (bits == 4) {
                        four = four16(x + 4 * (rows + r));
#pragma GCC unroll 2
                        for (int t = 0; t < many; t++)
                            sums[t][r] = added4(sums[t][r], high[t], four);
                    }
                }
            }
        }
        __m512 scale[2], zero[2];
#pragma GCC unroll 2
        for (int t = 0; t < many; t++) {
            int64_t begin = ((tile + t) * w->groups + g) * TILE;
            if (kind == HALVES && ready) {
                const float *both = ready + ((g - from) * 2 + t) * 2 * TILE;
                scale[t] = _mm512_loadu_ps(both), zero[t] = _mm512_loadu_ps(both + TILE);
                continue;
            }
            int32_t stored = kind == FINE ? BYTE : kind == HALVES ? HALF : w->scale_kind;
            scale[t] = numbers16(w->scale, stored, begin);
            if (kind == FINE) zero[t] = numbers16(w->zero, BYTE, begin);
            else if (kind == HALVES) zero[t] = _mm512_mul_ps(_mm512_set1_ps(SHIFT), scale[t]);
            else if (bits == 4)
                zero[t] = w->zero ? numbers16(w->zero, w->zero_kind, begin) : _mm512_set1_ps(8.0f);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            __m512 step = _mm512_set1_ps(size[r]);
#pragma GCC unroll 2
            for (int t = 0; t < many; t++) {
                __m512 scaled;
                if (kind == HALVES) {
                    __m512 sum = _mm512_castsi512_ps(sums[t][r]);
                    scaled = _mm512_fmsub_ps(sum, scale[t], zero[t]);
                } else {
                    __m512 sum = _mm512_cvtepi32_ps(sums[t][r]);
                    if (kind == FINE) {
                        __m512 xsum = _mm512_set1_ps(sixteenths[(g - from) * rows + r]);
                        sum = _mm512_fnmadd_ps(zero[t], xsum, sum);
                    } else if (bits == 4) {
                        __m512 xsum = _mm512_set1_ps((float)lift[r]);
                        sum = _mm512_sub_ps(sum, _mm512_mul_ps(zero[t], xsum));
                    }
                    scaled = _mm512_mul_ps(sum, scale[t]);
                }
                acc[t][r] = _mm512_add_ps(acc[t][r], _mm512_mul_ps(scaled, step));
            }
        }
    }
    if (to == w->groups) {
#pragma GCC unroll 2
        for (int t = 0; t < many; t++) put16(job, row, rows, tile + t, acc[t]);
        return;
    }
#pragma GCC unroll 2
    for (int t = 0; t < many; t++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) _mm512_storeu_ps(kept + (2 * r + t) * TILE, acc[t][r]);
}

/* The same for int8 with one group: blocks `from` to `to`, `many` tiles of one to four, as there is
   room where only integers are summed. */
AVX512 INLINE void whole_avx512(const struct job *job, int64_t tile, int many, int64_t row,
                                int rows, int64_t from, int64_t to, int32_t *kept, int fetch) {
    const struct integer *w = job->w;
    int64_t blocks = job->width / 4, next = blocks * BLOCK;
    const uint8_t *at = w->weight + tile * next + from * BLOCK;
    const int8_t *x = job->xq + row * job->width + from * 4 * rows;
    __m512i sums[4][ROWS_AT_ONCE];
#pragma GCC unroll 4
    for (int t = 0; t < many; t++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            sums[t][r] = from ? _mm512_loadu_si512(kept + (4 * r + t) * TILE)
                              : _mm512_set1_epi32(job->sums[row + r]);
#pragma GCC unroll 2
    for (int64_t b = from; b < to; b++, at += BLOCK, x += 4 * rows) {
        __m512i q[4];
#pragma GCC unroll 4
        for (int t = 0; t < many; t++) {
            if (fetch) FETCH_LINE(at + t * next);
            q[t] = _mm512_loadu_si512(at + t * next);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            __m512i four = four16(x + 4 * r);
#pragma GCC unroll 4
            for (int t = 0; t < many; t++) sums[t][r] = added4(sums[t][r], q[t], four);
        }
    }
    if (to < blocks) {
#pragma GCC unroll 4
        for (int t = 0; t < many; t++)
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
                _mm512_storeu_si512(kept + (4 * r + t) * TILE, sums[t][r]);
        return;
    }
#pragma GCC unroll 4
    for (int t = 0; t < many; t++) {
        __m512 acc[ROWS_AT_ONCE], scale = numbers16(w->scale, w->scale_kind, (tile + t) * TILE);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[t][r]), scale);
            scaled = _mm512_mul_ps(scaled, _mm512_set1_ps(job->size[row + r]));
            acc[r] = _mm512_add_ps(_mm512_setzero_ps(), scaled); /* -0 becomes 0 */
        }
        put16(job, row, rows, tile + t, acc);
    }
}

/* All rows of tiles first .. last - 1, AT_ONCE tiles at a time. Many rows take turns with the
   groups: SOME of ALL groups (or blocks), small enough for the first cache, meet the rows of some
   passes, six at a time. Meanwhile the passes fetch, a line of each group in turn, what the next
   turn reads: the next groups, or the first of the next tiles. With few passes, memory is what is
   waited for. */
#define SIX(DO, ...)                                                                             \
    DO(1, __VA_ARGS__) DO(2, __VA_ARGS__) DO(3, __VA_ARGS__)                                     \
    DO(4, __VA_ARGS__) DO(5, __VA_ARGS__) DO(6, __VA_ARGS__)
#define TURNS(NAME, AT_ONCE, ALL, SOME, NUMBER, READY, EACH)                                     \
    AVX512 static void NAME(void *data, int64_t first, int64_t last) {                           \
        const struct job *job = data;                                                            \
        int64_t all = ALL, turns = job->passes == 1 ? 1 : (all + SOME - 1) / SOME, left;         \
        int64_t some = (all + turns - 1) / turns, few = job->passes <= 2;                        \
        int64_t lines = job->w->bits * job->width * TILE / 8 / BLOCK / all;                      \
        float ready[INPUTS_KEPT / 32 * 2 * 2 * TILE];                                            \
        for (int64_t tile = first; tile < last; tile += left < AT_ONCE ? 1 : AT_ONCE)            \
            for (int64_t begin = 0; begin < job->passes; begin += PASSES_KEPT) {                 \
                NUMBER kept[PASSES_KEPT * ROWS_AT_ONCE * AT_ONCE * TILE];                        \
                int64_t end = begin + PASSES_KEPT;                                               \
                end = end < job->passes ? end : job->passes, left = last - tile;                 \
                for (int64_t from = 0; from < all; from += some) {                               \
                    int64_t to = from + some < all ? from + some : all;                          \
                    int64_t row = pass_begin(job, begin), over = to == all;                      \
                    int64_t after = over && end == job->passes ? tile + AT_ONCE : tile;          \
                    after = (after * all + (over ? 0 : to)) * lines * BLOCK;                     \
                    const uint8_t *ahead = few ? 0 : job->w->weight + after;                     \
                    READY                                                                        \
                    for (int64_t pass = begin, rows; pass < end; pass++, row += rows) {          \
                        NUMBER *at = kept + (pass - begin) * ROWS_AT_ONCE * AT_ONCE * TILE;      \
                        rows = pass_begin(job, pass + 1) - row;                                  \
                        EACH                                                                     \
                        if (ahead) ahead += (to - from) * BLOCK;                                 \
                        if (pass - begin + 1 == lines) ahead = 0;                                \
                    }                                                                            \
                }                                                                                \
            }                                                                                    \
    }
/* What many passes need of the scales of two tiles, in the order they need it. */
AVX512 INLINE void make_ready(const struct job *job, int64_t tile, int64_t left, int64_t from,
                              int64_t to, float *ready) {
    int64_t groups = job->w->groups, next = to < groups ? to - from : 2 * groups - from;
    for (int64_t t = 0; t < 2 && t < left; t++)
        for (int64_t g = from; g < to; g++) {
            float *at = ready + ((g - from) * 2 + t) * 2 * TILE;
            int64_t begin = ((tile + t) * groups + g) * TILE;
            __m512 scale = numbers16(job->w->scale, HALF, begin);
            NEAR((const uint16_t *)job->w->scale + begin + next * TILE); /* for the next turn */
            _mm512_storeu_ps(at, scale);
            _mm512_storeu_ps(at + TILE, _mm512_mul_ps(_mm512_set1_ps(SHIFT), scale));
        }
}

#define ROWS(n, NAME, many)                                                                      \
    case n:                                                                                      \
        NAME##many##n(job, tile, row, from, to, at, few && !pass, ahead, few ? 0 : ready);       \
        break;
#define PART_OF(n, NAME, many, bits, kind)                                                       \
    AVX512 APART static void NAME##many##n(const struct job *job, int64_t tile, int64_t row,     \
                                           int64_t from, int64_t to, float *kept, int fetch,     \
                                           const uint8_t *ahead, const float *ready) {           \
        part_avx512(job, tile, many, row, n, bits, kind, from, to, kept, fetch, ahead, ready);   \
    }
#define PAIRS(NAME, bits, kind)                                                                  \
    SIX(PART_OF, NAME##_, 1, bits, kind)                                                         \
    SIX(PART_OF, NAME##_, 2, bits, kind)                                                         \
    TURNS(NAME, 2, job->w->groups,                                                               \
          (job->w->group < INPUTS_KEPT ? INPUTS_KEPT / job->w->group : 1), float,                \
          if (kind == HALVES && !few) make_ready(job, tile, left, from, to, ready);,             \
          if (left > 1) switch (rows) { SIX(ROWS, NAME##_, 2) }                                  \
          else switch (rows) { SIX(ROWS, NAME##_, 1) })
PAIRS(avx512_int8, 8, ANY)
PAIRS(avx512_halves, 8, HALVES)
PAIRS(avx512_int4, 4, ANY)
PAIRS(avx512_fine, 4, FINE)
#define WHOLE_OF(n, many)                                                                        \
    AVX512 APART static void whole_##many##n(const struct job *job, int64_t tile, int64_t row,   \
                                             int64_t from, int64_t to, int32_t *kept, int fetch, \
                                             const uint8_t *ahead, const float *ready) {         \
        (void)ahead, (void)ready;                                                                \
        whole_avx512(job, tile, many, row, n, from, to, kept, fetch);                            \
    }
SIX(WHOLE_OF, 1)
SIX(WHOLE_OF, 4)
TURNS(avx512_whole, 4, job->width / 4, (INPUTS_KEPT / 4), int32_t, ,
      if (left > 3) switch (rows) { SIX(ROWS, whole_, 4) }
      else switch (rows) { SIX(ROWS, whole_, 1) })

/* --- AVX-512: activations --------------------------------------------------------------------- */

AVX512 INLINE __m512 some16(const float *x, int64_t left) {
    if (left >= 16) return _mm512_loadu_ps(x);
    return _mm512_maskz_loadu_ps((__mmask16)((1 << left) - 1), x);
}

/* Codes into every `together`-th four bytes; up to a multiple of 8, as rows end. */
AVX512 INLINE void put_codes(int8_t *to, int64_t together, __m128i bytes, int64_t left) {
    if (left >= 16 && together == 1) {
        _mm_storeu_si128((__m128i *)to, bytes);
        return;
    }
    _mm_storeu_si32(to, bytes);
    _mm_storeu_si32(to + 4 * together, _mm_shuffle_epi32(bytes, 1));
    if (left <= 8) return;
    _mm_storeu_si32(to + 8 * together, _mm_shuffle_epi32(bytes, 2));
    _mm_storeu_si32(to + 12 * together, _mm_shuffle_epi32(bytes, 3));
}

/* As rounded_by, with a product in the place of most quotients. A product with the inverse is
   within 2^-15 of the quotient; where it lies near a half, and only there, it is divided: each code
   is that of the quotient. Steps so small or large that this might not hold are divided by. */
#define NEAR_HALF (0.5f - 0x1p-12f)

AVX512 INLINE __m512i codes16(__m512 x, float size, float inverse) {
    const __m512i most = _mm512_set1_epi32(127), least = _mm512_set1_epi32(-127);
    if (size > 0x1p-60f && size < 0x1p60f) {
        __m512 step = _mm512_mul_ps(x, _mm512_set1_ps(inverse));
        __m512 off = _mm512_abs_ps(_mm512_reduce_ps(step, _MM_FROUND_TO_NEAREST_INT));
        if (!_mm512_cmp_ps_mask(off, _mm512_set1_ps(NEAR_HALF), _CMP_GE_OQ))
            return _mm512_cvtps_epi32(step);
    }
    if (!(size > 0)) return _mm512_setzero_si512();
    __m512i codes = _mm512_cvtps_epi32(_mm512_div_ps(x, _mm512_set1_ps(size)));
    return _mm512_max_epi32(_mm512_min_epi32(codes, most), least);
}

AVX512 INLINE void rounded16(const struct job *job, int64_t row, const float *x, int64_t group) {
    struct seat seat = seat_of(job, row);
    const __m512i plus = _mm512_set1_epi32(0x7fffffff), finite = _mm512_set1_epi32(0x7f7fffff);
    int64_t groups = job->w->groups;
    for (int64_t first = 0; first < groups; first += 16) {
        int64_t now = groups - first < 16 ? groups - first : 16;
        uint32_t top[16] = {0};
        float size[16], inverse[16];
        for (int64_t g = 0; g < now; g++) {
            const float *from = x + (first + g) * group;
            __m512i most = _mm512_setzero_si512();
            for (int64_t i = 0; i < group; i += 16) {
                __m512i bits = _mm512_castps_si512(some16(from + i, group - i));
                most = _mm512_max_epu32(most, _mm512_and_si512(bits, plus));
            }
            top[g] = _mm512_reduce_max_epu32(most);
        }
        __m512i tops = _mm512_loadu_si512(top);
        __mmask16 strange = _mm512_cmpgt_epu32_mask(tops, finite);
        __m512 sizes = _mm512_div_ps(_mm512_castsi512_ps(tops), _mm512_set1_ps(127.0f));
        sizes = _mm512_mask_mov_ps(sizes, strange, _mm512_set1_ps(NAN));
        _mm512_storeu_ps(size, sizes);
        _mm512_storeu_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1.0f), sizes));
        for (int64_t g = 0; g < now; g++) {
            const float *from = x + (first + g) * group;
            int8_t *to = seat.codes + (first + g) * group * seat.together;
            int64_t at = seat.sums + (first + g) * seat.together;
            __m128i sums = _mm_setzero_si128();
            for (int64_t i = 0; i < group; i += 16) {
                __m512i codes = codes16(some16(from + i, group - i), size[g], inverse[g]);
                __m128i bytes = _mm512_cvtepi32_epi8(codes);
                put_codes(to + i * seat.together, seat.together, bytes, group - i);
                sums = _mm_dpbusd_epi32(sums, _mm_set1_epi8(1), bytes);
            }
            job->size[at] = size[g];
            sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e)); /* the other half */
            sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)); /* the neighbour */
            job->sums[at] = _mm_cvtsi128_si32(sums);
        }
    }
}

AVX512 static void avx512_row(const struct job *job, int64_t row, const float *x) {
    if (job->w->group == 32) rounded16(job, row, x, 32);
    else rounded16(job, row, x, job->w->group);
}
