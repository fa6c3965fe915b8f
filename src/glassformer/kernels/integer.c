/* Products of int8 activations with int8 or 4-bit weights; int_matmul.py states the arithmetic.

   Weights lie in tiles of 16 outputs. A block of 64 bytes has, for each of the 16 in turn, 4 inputs
   of int8 (stored plus 128), or 8 of 4 bits: inputs 0-3 in the low nibbles, 4-7 in the high ones.
   So 16 sums grow side by side, none is ever added across a vector, and a group's sum is exact
   before it meets its scale: every variant gives the same bits, for any number of rows.

   Activations are scaled by the groups of the weights: one scale a row where int8 has one group. A
   refined product adds the one with what rounding left of the activations, rounded in its turn: some
   15 bits, for about the same traffic of weights where rows are few. Heads have it. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"
#include "rounding.h"

#define TILE 16
#define BLOCK 64

struct integer {
    const uint8_t *weight;    /* tiles x blocks x 64 */
    const void *scale, *zero; /* tiles x groups x 16; zero may be null: 8 everywhere */
    const float *outer;       /* tiles x 16, or null: a factor of all scales of an output */
    int64_t outputs, inputs, groups, group; /* inputs = groups x group */
    int32_t bits, scale_kind, zero_kind;    /* an enum kind each */
    int32_t refined;                        /* activations are rounded twice */
};

/* float32, float16, uint8, uint8 that counts sixteenths; int_matmul.py has the same order */
enum kind { FLOAT, HALF, BYTE, SIXTEENTHS };

struct job {
    const struct integer *w;
    const float *bias;   /* outputs, or null */
    const float *x;      /* rows x inputs */
    float *y;            /* rows x outputs */
    float *rest;         /* rows / 2 x inputs, or null: what rounding leaves, for refined products */
    int64_t rows, width; /* width: inputs, padded with zeros to a multiple of 8 */
    int64_t passes;      /* rows are taken in so many passes, and lie side by side within each */
    int64_t few, more;   /* rows of a pass; the first `more` passes have one row more */
    int8_t *xq;          /* passes x width / 4 x rows of the pass x 4 */
    int32_t *sums;       /* passes x groups x rows of the pass: sums of xq; for int8 times -128,
                            which undoes the lift, plus SHIFTED where sums of products begin so */
    float *size;         /* as sums: what one step of xq is worth */
    float *sixteenths;   /* as sums, or null: sums / 16, where weights are fine */
    int32_t begin;       /* SHIFTED, or 0 */
    void (*rounded)(const struct job *job, int64_t row, const float *x);
};

/* The first row of a pass. */
INLINE int64_t pass_begin(const struct job *job, int64_t pass) {
    return pass * job->few + (pass < job->more ? pass : job->more);
}

INLINE int64_t pass_of(const struct job *job, int64_t row) {
    int64_t long_ones = job->more * (job->few + 1);
    return row < long_ones ? row / (job->few + 1) : job->more + (row - long_ones) / job->few;
}

/* Scales of a byte, zeros that count sixteenths, and groups so short that a zero times a sum has no
   more than 24 bits: then it is exact, and may be subtracted in the same instruction. */
INLINE int fine(const struct integer *w) {
    return w->scale_kind == BYTE && w->zero && w->zero_kind == SIXTEENTHS && w->group <= 256;
}

/* --- activations ------------------------------------------------------------------------------ */

/* Where a row is written: from `sums` on every `together`-th number, from `codes` on every
   `together`-th four of them. */
struct seat {
    int64_t together, sums;
    int8_t *codes;
};

INLINE struct seat seat_of(const struct job *job, int64_t row) {
    int64_t pass = pass_of(job, row), first = pass_begin(job, pass);
    int64_t together = pass_begin(job, pass + 1) - first;
    int8_t *codes = job->xq + first * job->width + 4 * (row - first);
    return (struct seat){together, first * job->w->groups + row - first, codes};
}

/* Here a pass is a row: codes lie one behind another. */
INLINE void rounded_by(const struct job *job, int64_t row, const float *x, int64_t group) {
    int8_t *codes = job->xq + row * job->width;
    for (int64_t g = 0; g < job->w->groups; g++, x += group, codes += group) {
        int64_t at = row * job->w->groups + g;
        int32_t sum = 0;
        job->size[at] = rounded_group(x, group, codes);
        for (int64_t i = 0; i < group; i++) sum += codes[i];
        job->sums[at] = sum;
    }
    memset(codes, 0, (size_t)(job->width - job->w->inputs));
}

/* A length that the compiler knows is a loop without ends to look after. */
INLINE void rounded_row(const struct job *job, int64_t row, const float *x) {
    if (job->w->group == 32) rounded_by(job, row, x, 32);
    else if (job->w->group == 64) rounded_by(job, row, x, 64);
    else rounded_by(job, row, x, job->w->group);
}

static void portable_row(const struct job *job, int64_t row, const float *x) {
    rounded_row(job, row, x);
}

/* The integers of x into row `row`; what they leave of x into rest, unless that is null. */
static void quantize_row(const struct job *job, int64_t row, const float *x, float *rest) {
    const struct integer *w = job->w;
    struct seat seat = seat_of(job, row);
    int32_t times = w->bits == 8 ? -128 : 1;
    job->rounded(job, row, x);
    for (int64_t g = 0; g < w->groups; g++) {
        int64_t at = seat.sums + g * seat.together;
        int32_t sum = job->sums[at];
        job->sums[at] = times * sum + job->begin;
        if (job->sixteenths) job->sixteenths[at] = 0.0625f * (float)sum;
        for (int64_t i = g * w->group; rest && i < (g + 1) * w->group; i++)
            rest[i] = x[i] - job->size[at] * (float)seat.codes[i / 4 * 4 * seat.together + i % 4];
    }
}

static void quantize(void *data, int64_t first, int64_t last) {
    const struct job *job = data;
    int64_t inputs = job->w->inputs, half = job->rows / 2;
    for (int64_t row = first; row < last; row++) {
        float *rest = job->rest ? job->rest + row * inputs : 0;
        quantize_row(job, row, job->x + row * inputs, rest);
        if (rest) quantize_row(job, half + row, rest, 0);
    }
}

/* --- portable --------------------------------------------------------------------------------- */

INLINE float number(const void *from, int32_t kind, int64_t at) {
    if (kind >= BYTE) return ((const uint8_t *)from)[at] * (kind == BYTE ? 1.0f : 0.0625f);
    return kind == HALF ? from_half(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

/* Sums wrap, as those of vectors do: q + 128 may leave 32 bits on the way, the answer does not. */
INLINE void add_block(uint32_t *sums, const uint8_t *at, const int8_t *x, int bits) {
    for (int l = 0; l < TILE; l++)
        for (int j = 0; j < 4; j++) {
            int q = at[4 * l + j];
            sums[l] += (uint32_t)(bits == 8 ? q * x[j] : (q & 15) * x[j] + (q >> 4) * x[j + 4]);
        }
}

INLINE void tiles(const struct job *job, int64_t first, int64_t last, int bits) {
    const struct integer *w = job->w;
    int64_t per = bits == 8 ? 4 : 8, blocks = job->width / per / w->groups;
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t row = 0; row < job->rows; row++) {
            const uint8_t *at = w->weight + tile * blocks * w->groups * BLOCK;
            const int8_t *x = job->xq + row * job->width;
            float acc[TILE] = {0};
            for (int64_t g = 0; g < w->groups; g++) {
                uint32_t sums[TILE] = {0};
                int32_t xsum = job->sums[row * w->groups + g];
                int64_t begin = (tile * w->groups + g) * TILE;
                for (int64_t b = 0; b < blocks; b++, at += BLOCK, x += per)
                    add_block(sums, at, x, bits);
                float size = job->size[row * w->groups + g];
                for (int l = 0; l < TILE; l++) {
                    float scale = number(w->scale, w->scale_kind, begin + l), sum;
                    if (bits == 8) {
                        sum = (float)(int32_t)(sums[l] + (uint32_t)xsum);
                    } else {
                        float zero = w->zero ? number(w->zero, w->zero_kind, begin + l) : 8.0f;
                        sum = (float)(int32_t)sums[l] - zero * (float)xsum;
                    }
                    acc[l] = acc[l] + sum * scale * size;
                }
            }
            for (int64_t l = 0, out = tile * TILE; l < TILE && out < w->outputs; l++, out++) {
                float y = w->outer ? acc[l] * w->outer[out] : acc[l];
                job->y[row * w->outputs + out] = job->bias ? y + job->bias[out] : y;
            }
        }
}

static void portable_int8(void *job, int64_t first, int64_t last) { tiles(job, first, last, 8); }
static void portable_int4(void *job, int64_t first, int64_t last) { tiles(job, first, last, 4); }

#define SHIFTED 0x4b400000 /* the bits of a float whose last place is 1; integer_x86.h */

#ifdef GLASS_X86
#include "integer_x86.h"
/* The same lines as portable_row, for wider vectors. */
AVX2 static void avx2_row(const struct job *job, int64_t row, const float *x) {
    rounded_row(job, row, x);
}
#endif

static int product(const struct integer *w, const float *bias, const float *x, float *y,
                   int64_t rows, int threads, float *rest) {
    int64_t given = rest ? rows / 2 : rows;
    struct job job = {.w = w, .bias = bias, .x = x, .y = y, .rest = rest, .rows = rows};
    job.width = (w->inputs + 7) / 8 * 8, job.passes = rows, job.rounded = portable_row;
    part_fn by_tiles = w->bits == 8 ? portable_int8 : portable_int4;
#ifdef GLASS_X86
    if (glass_variant() == AVX2_FMA) {
        job.rounded = avx2_row, by_tiles = w->bits == 8 ? avx2_int8 : avx2_int4;
        if (w->bits == 4 && fine(w)) by_tiles = avx2_fine;
    }
    if (glass_variant() == AVX512_VNNI) {
        job.rounded = avx512_row, by_tiles = w->bits == 8 ? avx512_int8 : avx512_int4;
        job.passes = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        if (w->bits == 4 && fine(w) && w->group == 32) by_tiles = avx512_fine;
        if (w->bits == 8 && w->groups == 1) by_tiles = avx512_whole;
        else if (w->bits == 8 && w->scale_kind == HALF && shiftable(w->group))
            by_tiles = avx512_halves, job.begin = SHIFTED;
    }
#endif
    job.few = rows / job.passes, job.more = rows % job.passes;
    int64_t many = rows * w->groups;
    int8_t *room = malloc((size_t)(rows * job.width + 12 * many));
    if (room) {
        job.sums = (int32_t *)room, job.size = (float *)(job.sums + many);
        if (w->bits == 4 && fine(w)) job.sixteenths = job.size + many;
        job.xq = room + 12 * many;
        int64_t count = (w->outputs + TILE - 1) / TILE, chunk = count / threads / 16 * 4 + 4;
        int64_t least = SHARED / (TILE * w->inputs) + 1; /* less is not worth a thread */
        glass_share(quantize, &job, given, given * w->inputs < SHARED ? given : 4, threads);
        glass_share(by_tiles, &job, count, chunk < least ? (least + 3) / 4 * 4 : chunk, threads);
    }
    free(room);
    return !room;
}

#define AT_ONCE 16 /* rows of a refined product, whose two halves are kept until they are added */

/* 0, or 1 where there was no memory. */
EXPORT int glass_integer(const struct integer *w, const float *bias, const float *x, float *y,
                         int64_t rows, int threads) {
    if (!w->refined) return product(w, bias, x, y, rows, threads, 0);
    int64_t most = rows < AT_ONCE ? rows : AT_ONCE;
    float *rest = malloc((size_t)(most * w->inputs) * sizeof(float));
    float *both = malloc((size_t)(2 * most * w->outputs) * sizeof(float));
    int failed = !rest || !both;
    for (int64_t row = 0; row < rows && !failed; row += most) {
        int64_t now = rows - row < most ? rows - row : most, size = now * w->outputs;
        failed = product(w, 0, x + row * w->inputs, both, 2 * now, threads, rest);
        for (int64_t i = 0; i < size && !failed; i++) {
            float sum = both[i] + both[size + i];
            y[row * w->outputs + i] = bias ? sum + bias[i % w->outputs] : sum;
        }
    }
    free(rest);
    free(both);
    return failed;
}

/* One row of the matrix as float32: of an embedding table, what a token looks up. */
void glass_integer_row(const struct integer *w, int64_t out, float *to) {
    int64_t per = w->bits == 8 ? 4 : 8, tile = out / TILE, lane = out % TILE;
    int64_t blocks = (w->inputs + 7) / 8 * 8 / per;
    for (int64_t i = 0; i < w->inputs; i++) {
        uint8_t byte = w->weight[(tile * blocks + i / per) * BLOCK + 4 * lane + i % 4];
        int64_t at = (tile * w->groups + i / w->group) * TILE + lane;
        float zero = w->zero ? number(w->zero, w->zero_kind, at) : 8.0f;
        float value = (float)byte - 128.0f;
        if (w->bits == 4) value = (float)(i % 8 < 4 ? byte & 15 : byte >> 4) - zero;
        value = value * number(w->scale, w->scale_kind, at);
        to[i] = w->outer ? value * w->outer[out] : value;
    }
}
