/* The grid of least squared error of each group of a matrix, and GPTQ's passes over its columns;
   quant/schemes.py states the arithmetic.

   For each share of a group's range: the grid over it, the levels nearest to the weights, the grid
   fitted to those levels by least squares; of all these, the one with the least error. A sum over a
   group is 32 sums of every 32nd entry, which are then added by halves: so torch can do the same
   additions, and every variant gives the same bits. */

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#define LANES 32
#define SHORT 128 /* entries of a group whose copy fits the stack */

struct grids {
    const float *weight;      /* outputs x inputs */
    const float *count;       /* inputs: what the squared error of each counts */
    const float *unit;        /* outputs, or null: what scales are whole multiples of, up to 255 */
    const float *share;       /* the shares of a range that are tried */
    float *scale, *zero;      /* outputs x groups */
    int64_t outputs, inputs, groups, shares;
    float lowest, highest, middle;
    int32_t symmetric;        /* the zero is the middle level */
    int32_t half;             /* scales are float16 */
    _Atomic int32_t too_large; /* some scale is too large for float16 */
    _Atomic int32_t no_memory;
};

struct grid {
    float scale, zero;
};

/* The nearest float16, as float32; infinite from 65,520 on. */
INLINE float as_half(float x) {
    uint32_t bits;
    if (x < 0x1p-14f) return rintf(x * 0x1p24f) * 0x1p-24f;
    if (x >= 65520.0f) return INFINITY;
    memcpy(&bits, &x, 4);
    bits += 0x0fffu + (bits >> 13 & 1);
    bits &= ~0x1fffu;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float clamped(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

INLINE float by_halves(float *sum) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

/* A scale that can be stored: the next above if `up`, else the nearest. */
INLINE float storable(const struct grids *all, float scale, float unit, int up) {
    if (all->unit) {
        float times = scale / unit;
        return clamped(up ? ceilf(times) : rintf(times), 1.0f, 255.0f) * unit;
    }
    if (all->half) scale = as_half(scale);
    return scale > 0 ? scale : 1.0f;
}

INLINE float storable_zero(const struct grids *all, float zero) {
    if (all->unit) return clamped(rintf(zero * 16.0f), 0.0f, 255.0f) / 16.0f;
    return clamped(rintf(zero), all->lowest, all->highest);
}

INLINE float level(const struct grids *all, float x, struct grid grid) {
    float at = all->unit ? rintf(x / grid.scale + grid.zero) : rintf(x / grid.scale) + grid.zero;
    return clamped(at, all->lowest, all->highest);
}

/* The grid of least squared error for the levels that `grid` gives. */
INLINE struct grid fitted(const struct grids *all, const float *x, const float *v, int64_t size,
                          struct grid grid, float unit) {
    float sums[4][LANES] = {{0}}, above, below, found;
    if (all->unit && !all->symmetric) { /* a line through (level, weight); first its zero */
        float total, mean, at, slope;
        for (int64_t e = 0; e < size; e += LANES)
            for (int i = 0; i < LANES; i++) {
                sums[0][i] += v[e + i];
                sums[1][i] += v[e + i] * x[e + i];
                sums[2][i] += v[e + i] * level(all, x[e + i], grid);
            }
        total = by_halves(sums[0]), mean = by_halves(sums[1]) / total;
        at = by_halves(sums[2]) / total;
        memset(sums, 0, sizeof sums);
        for (int64_t e = 0; e < size; e += LANES)
            for (int i = 0; i < LANES; i++) {
                float q = level(all, x[e + i], grid), off = v[e + i] * (q - at);
                sums[0][i] += off * x[e + i];
                sums[1][i] += off * q;
            }
        slope = by_halves(sums[0]) / by_halves(sums[1]);
        found = at - mean / slope;
        memset(sums, 0, sizeof sums);
        for (int64_t e = 0; e < size; e += LANES) {
            float zero = storable_zero(all, isfinite(found) && slope > 0 ? found : grid.zero);
            for (int i = 0; i < LANES; i++) {
                float units = level(all, x[e + i], grid) - zero, pull = units * v[e + i];
                sums[2][i] += pull * x[e + i];
                sums[3][i] += pull * units;
            }
        }
        grid.zero = storable_zero(all, isfinite(found) && slope > 0 ? found : grid.zero);
    } else {
        for (int64_t e = 0; e < size; e += LANES)
            for (int i = 0; i < LANES; i++) {
                float units = level(all, x[e + i], grid) - grid.zero, pull = units * v[e + i];
                sums[2][i] += pull * x[e + i];
                sums[3][i] += pull * units;
            }
    }
    above = by_halves(sums[2]), below = by_halves(sums[3]);
    found = above / below;
    grid.scale = storable(all, isfinite(found) && found > 0 ? found : grid.scale, unit, 0);
    return grid;
}

INLINE float error_of(const struct grids *all, const float *x, const float *v, int64_t size,
                      struct grid grid) {
    float sums[LANES] = {0};
    for (int64_t e = 0; e < size; e += LANES)
        for (int i = 0; i < LANES; i++) {
            float off = (level(all, x[e + i], grid) - grid.zero) * grid.scale - x[e + i];
            sums[i] += off * off * v[e + i];
        }
    return by_halves(sums);
}

INLINE struct grid searched(struct grids *all, const float *x, const float *v, int64_t size,
                            float unit) {
    float low = 0, high = 0, least = INFINITY;
    struct grid best = {1.0f, all->middle};
    for (int64_t i = 0; i < size; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    for (int64_t s = 0; s < all->shares; s++) {
        struct grid grid, fit;
        float error;
        if (all->symmetric) {
            float reach = (-low > high ? -low : high) * all->share[s];
            grid.scale = storable(all, reach / (all->highest - all->middle), unit, 1);
            grid.zero = all->middle;
        } else {
            float from = low * all->share[s], to = high * all->share[s];
            grid.scale = storable(all, (to - from) / (all->highest - all->lowest), unit, 1);
            grid.zero = storable_zero(all, all->lowest - from / grid.scale);
        }
        error = error_of(all, x, v, size, grid);
        if (s == 0 || error < least) least = error, best = grid;
        fit = fitted(all, x, v, size, grid, unit);
        error = error_of(all, x, v, size, fit);
        if (error < least) least = error, best = fit;
        if (!isfinite(grid.scale) || !isfinite(fit.scale)) all->too_large = 1;
    }
    return best;
}

INLINE void rows(struct grids *all, int64_t first, int64_t last) {
    int64_t group = all->inputs / all->groups, padded = (group + LANES - 1) / LANES * LANES;
    float stack[2 * SHORT], *heap = padded > SHORT ? malloc(2 * (size_t)padded * 4) : 0;
    float *x = heap ? heap : stack, *v = x + padded;
    if (padded > SHORT && !heap) {
        all->no_memory = 1;
        return;
    }
    for (int64_t row = first; row < last; row++) {
        float unit = all->unit ? all->unit[row] : 1.0f;
        for (int64_t g = 0; g < all->groups; g++) {
            struct grid best;
            memset(x, 0, 2 * (size_t)padded * 4); /* what is beyond the group counts nothing */
            memcpy(x, all->weight + row * all->inputs + g * group, (size_t)group * 4);
            memcpy(v, all->count + g * group, (size_t)group * 4);
            best = padded == LANES ? searched(all, x, v, LANES, unit)
                                   : searched(all, x, v, padded, unit);
            all->scale[row * all->groups + g] = best.scale;
            all->zero[row * all->groups + g] = best.zero;
        }
    }
    free(heap);
}

static void portable_part(void *job, int64_t first, int64_t last) { rows(job, first, last); }
#ifdef GLASS_X86
AVX2 static void avx2_part(void *job, int64_t first, int64_t last) { rows(job, first, last); }
AVX512 static void avx512_part(void *job, int64_t first, int64_t last) { rows(job, first, last); }
#endif

/* Finds every scale and zero. 1 where a scale is too large for float16, -1 without memory. */
EXPORT int glass_grids(struct grids *all, int threads) {
    part_fn part = portable_part;
#ifdef GLASS_X86
    if (glass_variant() == AVX2_FMA) part = avx2_part;
    if (glass_variant() == AVX512_VNNI) part = avx512_part;
#endif
    glass_share(part, all, all->outputs, 16, threads);
    return all->no_memory ? -1 : all->too_large;
}

/* --- GPTQ -------------------------------------------------------------------------------------

   Rows of a matrix do not depend on each other: 16 of them go through the columns side by side, in
   a copy that lies column by column. */

#define ROWS 16

struct columns {
    struct grids grids;  /* weights, what they are, and where scales and zeros are */
    const float *factor; /* inputs x inputs: of the inverse, upper; or null: go over levels again */
    const float *moment; /* inputs x inputs, where levels are gone over again */
    const float *slope;  /* outputs x inputs: (rounded - wanted) moment, then */
    float *level;        /* outputs x inputs */
};

/* All later columns of `tile` change by so much of each row, times an entry of the matrix's row. */
INLINE void carry(float *tile, int64_t i, int64_t inputs, const float *row, const float *by) {
    float mine[ROWS];
    memcpy(mine, by, sizeof mine);
    for (int64_t j = i + 1; j < inputs; j++)
        for (int l = 0; l < ROWS; l++) tile[j * ROWS + l] += mine[l] * row[j];
}

/* Rounds one column after another; those after it make up for the error. */
INLINE void corrected(struct columns *all, float *tile, int64_t first, int64_t rows, float *x) {
    struct grids *grids = &all->grids;
    int64_t inputs = grids->inputs, width = inputs / grids->groups;
    int64_t padded = (width + LANES - 1) / LANES * LANES;
    struct grid grid[ROWS];
    float by[ROWS] = {0};
    for (int64_t i = 0; i < inputs; i++) {
        const float *factor = all->factor + i * inputs;
        for (int64_t l = 0; i % width == 0 && l < rows; l++) {
            float unit = grids->unit ? grids->unit[first + l] : 1.0f;
            int64_t at = (first + l) * grids->groups + i / width;
            for (int64_t e = 0; e < padded; e++) {
                x[e] = e < width ? tile[(i + e) * ROWS + l] : 0;
                x[padded + e] = e < width ? grids->count[e] : 0;
            }
            grid[l] = padded == LANES ? searched(grids, x, x + padded, LANES, unit)
                                      : searched(grids, x, x + padded, padded, unit);
            grids->scale[at] = grid[l].scale;
            grids->zero[at] = grid[l].zero;
        }
        for (int64_t l = 0; l < rows; l++) {
            float was = tile[i * ROWS + l], q = level(grids, was, grid[l]);
            by[l] = -(was - (q - grid[l].zero) * grid[l].scale) / factor[i];
            all->level[(first + l) * inputs + i] = q;
        }
        carry(tile, i, inputs, factor, by);
    }
}

/* Rounds each column to its best level, given the others. */
INLINE void rounded_again(struct columns *all, float *tile, int64_t first, int64_t rows) {
    const struct grids *grids = &all->grids;
    int64_t inputs = grids->inputs, width = inputs / grids->groups;
    float by[ROWS] = {0};
    for (int64_t i = 0; i < inputs; i++) {
        const float *moment = all->moment + i * inputs;
        int moved = 0;
        for (int64_t l = 0; l < rows; l++) {
            int64_t at = (first + l) * grids->groups + i / width;
            struct grid grid = {grids->scale[at], grids->zero[at]};
            float *q = all->level + (first + l) * inputs + i;
            float before = (*q - grid.zero) * grid.scale;
            *q = level(grids, before - tile[i * ROWS + l] / moment[i], grid);
            by[l] = (*q - grid.zero) * grid.scale - before;
            moved |= by[l] != 0;
        }
        if (moved) carry(tile, i, inputs, moment, by);
    }
}

INLINE void tiles(struct columns *all, int64_t from, int64_t to) {
    int64_t inputs = all->grids.inputs, outputs = all->grids.outputs;
    size_t numbers = (size_t)(inputs * ROWS + 2 * (inputs + LANES));
    float *tile = malloc(numbers * sizeof *tile);
    if (!tile) {
        all->grids.no_memory = 1;
        return;
    }
    for (int64_t t = from; t < to; t++) {
        int64_t first = t * ROWS, rows = outputs - first < ROWS ? outputs - first : ROWS;
        const float *source = (all->factor ? all->grids.weight : all->slope) + first * inputs;
        memset(tile, 0, numbers * sizeof *tile);
        for (int64_t l = 0; l < rows; l++)
            for (int64_t i = 0; i < inputs; i++) tile[i * ROWS + l] = source[l * inputs + i];
        if (all->factor) corrected(all, tile, first, rows, tile + inputs * ROWS);
        else rounded_again(all, tile, first, rows);
    }
    free(tile);
}

static void portable_tiles(void *job, int64_t from, int64_t to) { tiles(job, from, to); }
#ifdef GLASS_X86
AVX2 static void avx2_tiles(void *job, int64_t from, int64_t to) { tiles(job, from, to); }
AVX512 static void avx512_tiles(void *job, int64_t from, int64_t to) { tiles(job, from, to); }
#endif

/* One pass over all columns. 1 where a scale is too large for float16, -1 without memory, else 0. */
EXPORT int glass_columns(struct columns *all, int threads) {
    part_fn part = portable_tiles;
#ifdef GLASS_X86
    if (glass_variant() == AVX2_FMA) part = avx2_tiles;
    if (glass_variant() == AVX512_VNNI) part = avx512_tiles;
#endif
    glass_share(part, all, (all->grids.outputs + ROWS - 1) / ROWS, 1, threads);
    return all->grids.no_memory ? -1 : all->grids.too_large;
}
