/* Included by floating.c once for each width of vectors and kind of weights.

   NAME(..) names what is made; TARGET, VEC, WIDTH, ROWS (rows at once), LOAD_X, ZERO, FMA, SUM
   and SUM_OF_4 say how; WEIGHT, LOAD and LOAD_SOME are of the weights, LINES the cache lines of one round. */

/* Some outputs of some rows. `ahead` is memory needed soon: it is fetched as the loop goes. */
TARGET INLINE void NAME(block)(const struct job *job, int64_t out, int outs, int64_t row, int rows,
                               const char *ahead, int lines) {
    const struct floating *w = job->w;
    int64_t inputs = w->inputs, i = 0;
    const float *x = job->x + row * inputs;
    const WEIGHT *each[OUTS]; /* past the last output: the first again, which is not written */
    VEC sums[OUTS][ROWS];
#pragma GCC unroll 8
    for (int o = 0; o < outs; o++) {
        each[o] = (const WEIGHT *)w->weight + (out + o < w->outputs ? out + o : out) * inputs;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[o][r] = ZERO();
    }
    for (; i + WIDTH <= inputs; i += WIDTH) {
        VEC xs[ROWS];
#pragma GCC unroll 8
        for (int l = 0; l < lines; l++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) xs[r] = LOAD_X(x + r * inputs + i);
#pragma GCC unroll 8
        for (int o = 0; o < outs; o++) {
            VEC v = LOAD(each[o] + i);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sums[o][r] = FMA(v, xs[r], sums[o][r]);
        }
    }
    if (i < inputs) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float left[WIDTH] = {0};
            memcpy(left, x + r * inputs + i, sizeof(float) * (size_t)(inputs - i));
#pragma GCC unroll 8
            for (int o = 0; o < outs; o++)
                sums[o][r] = FMA(LOAD_SOME(each[o] + i, inputs - i), LOAD_X(left), sums[o][r]);
        }
    }
    if (outs == OUTS && out + OUTS <= w->outputs) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            put4(job, row + r, out, SUM_OF_4(sums[0][r], sums[1][r], sums[2][r], sums[3][r]));
        return;
    }
#pragma GCC unroll 8
    for (int o = 0; o < outs; o++)
        if (out + o < w->outputs)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) put(job, row + r, out + o, SUM(sums[o][r]));
}

/* A panel of outputs stays in the second cache while all rows pass over it, some at a time; each
   pass fetches its share of the next panel, in the order of memory, which is what memory likes.
   A row or two of short length need no panel: one output after another is that order already, and
   what is a page of memory ahead is fetched. */
TARGET static void NAME(part)(void *data, int64_t first, int64_t last) {
    const struct job *job = data;
    int64_t passes = (job->rows + ROWS - 1) / ROWS;
    int64_t row_bytes = job->w->inputs * (int64_t)sizeof(WEIGHT);
    int64_t panel = passes == 1 ? 2 * OUTS : PANEL_BYTES / (row_bytes * OUTS + 1) * OUTS + OUTS;
    if (job->rows <= 2 && row_bytes <= SHORT_BYTES) {
        for (int64_t out = first; out < last; out++) {
            const char *ahead = (const char *)job->w->weight + out * row_bytes + AHEAD;
            if (job->rows == 1) NAME(block)(job, out, 1, 0, 1, ahead, 1);
            else NAME(block)(job, out, 1, 0, 2, ahead, 1);
        }
        return;
    }
    for (int64_t begin = first; begin < last; begin += panel) {
        int64_t end = begin + panel < last ? begin + panel : last;
        const char *next = (const char *)job->w->weight + (begin + panel) * row_bytes;
        for (int64_t pass = 0; pass < passes; pass++) {
            int64_t row = job->rows * pass / passes;
            int64_t rows = job->rows * (pass + 1) / passes - row;
            for (int64_t out = begin; out < end; out += OUTS) {
                const char *ahead = next + (pass * panel + out - begin) / passes * row_bytes;
#define ROWS_ARE(n)                                                                              \
    case n:                                                                                      \
        if (passes == 1) NAME(block)(job, out, OUTS, row, n, ahead, LINES);                      \
        else NAME(block)(job, out, OUTS, row, n, ahead, (LINES + 1) / 2);                        \
        break;
                switch (rows) {
                    ROWS_ARE(1)
                    ROWS_ARE(2)
                    ROWS_ARE(3)
#if ROWS > 3
                    ROWS_ARE(4)
                    ROWS_ARE(5)
                    ROWS_ARE(6)
#endif
                }
#undef ROWS_ARE
            }
        }
    }
}

#undef NAME
#undef WEIGHT
#undef LOAD
#undef LOAD_SOME
#undef LINES
