/* Included by step_parts.h: softmax(q k^T * scale - slope * distance) v over the pages of a memory.

   Queries of one sequence and one key-value head go over its positions together, a tile of pages
   at a time, as many at once as there are registers. What was summed is scaled down whenever a tile
   has a larger score. Each query is summed in an order that its own positions alone decide, so it
   gets the same bits alone, in a prompt and in a batch. */

/* A head's page of 8 bits becomes one of float32, for many queries; few read it as it is. Either way
   a number is its code times its step, so they compute what they would compute from float32 pages
   with the rounded numbers, bit for bit. */
TARGET static void NAME(widen_page)(const struct op *op, const float *from, float *to) {
    int64_t H = op->width, groups = (H + GROUP - 1) / GROUP;
    const int8_t *codes = (const int8_t *)from;
    const float *steps = steps_of(from, H);
    for (int64_t g = 0; g < groups; g++, steps += PAGE)
        for (int64_t h = g * GROUP; h < H && h < (g + 1) * GROUP; h++)
            for (int at = 0; at < PAGE; at += WIDTH)
                NAME(put)(to + h * PAGE + at,
                          WIDEN(codes + h * PAGE + at) * NAME(get)(steps + at, WIDTH), WIDTH);
    from += room_of(op);
    codes = (const int8_t *)from;
    steps = steps_of(from, H);
    to += PAGE * H;
    for (int64_t place = 0; place < PAGE; place++, codes += H, to += H)
        for (int64_t g = 0; g < groups; g++) {
            int64_t h = g * GROUP, end = h + GROUP < H ? h + GROUP : H;
            float step = steps[g * PAGE + place];
            for (; h + WIDTH <= end; h += WIDTH)
                NAME(put)(to + h, WIDEN(codes + h) * FILL(step), WIDTH);
            for (; h < end; h++) to[h] = (float)codes[h] * step;
        }
}

/* sums[r][v] += a(r, k) * VECTOR(v, k), k = from .. to - 1: a number of each row of a, and vectors
   that all rows share. */
#define MULTIPLY(sums, rows, vectors, a, VECTOR, from, to)                                       \
    for (int64_t k = from; k < to; k++) {                                                        \
        lanes line[MOST_VECTORS];                                                                \
        _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) line[v] = VECTOR(v, k);        \
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {                                 \
            lanes factor = FILL((a)[r][k]);                                                      \
            _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++)                            \
                sums[r][v] = FMA(factor, line[v], sums[r][v]);                                   \
        }                                                                                        \
    }

/* Scores of some queries with `vectors` vectors of positions of a tile, from vector `at` on. */
TARGET INLINE void NAME(score)(struct tile *tile, const float *const *q, int rows, int64_t at,
                               int vectors, int64_t H, int rounded) {
    const float *keys[MOST_VECTORS], *steps[MOST_VECTORS];
    const int8_t *codes[MOST_VECTORS];
    lanes sums[HANDFUL][MOST_VECTORS], step[MOST_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
        int64_t place = (at + v) * WIDTH;
        const float *page = tile->keys[place / PAGE];
        keys[v] = page + place % PAGE;
        codes[v] = (const int8_t *)page + place % PAGE;
        steps[v] = steps_of(page, H) + place % PAGE;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r][v] = FILL(0.0f);
    }
#define KEY(v, k) NAME(get)(keys[v] + k * PAGE, WIDTH)
#define ROUNDED_KEY(v, k) (WIDEN(codes[v] + k * PAGE) * step[v])
    for (int64_t h = 0; rounded && h < H; h += GROUP) {
        int64_t end = h + GROUP < H ? h + GROUP : H;
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            step[v] = NAME(get)(steps[v] + h / GROUP * PAGE, WIDTH);
        MULTIPLY(sums, rows, vectors, q, ROUNDED_KEY, h, end)
    }
    if (!rounded) MULTIPLY(sums, rows, vectors, q, KEY, 0, H)
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            NAME(put)(tile->scores[r] + (at + v) * WIDTH, sums[r][v], WIDTH);
}

/* out = out * down + weights times the values of positions from .. to - 1 of a tile, for numbers
   h .. h + vectors * WIDTH - 1 of a head. */
TARGET INLINE void NAME(add_values)(const struct tile *tile, const float (*scores)[TILE],
                                    float *const *out, const float *down, int rows, int64_t h,
                                    int vectors, int64_t H, int64_t from, int64_t to,
                                    int rounded) {
    lanes sums[HANDFUL][MOST_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sums[r][v] = NAME(get)(out[r] + h + v * WIDTH, WIDTH) * FILL(down[r]);
    for (int64_t page = from / PAGE; page * PAGE < to; page++) {
        const float *here = tile->keys[page] + room(H, rounded), *steps = steps_of(here, H);
        int64_t begin = page * PAGE, end = begin + PAGE < to ? begin + PAGE : to;
        int64_t first = begin < from ? from : begin;
        const int8_t *codes = (const int8_t *)here + h;
#define VALUE(v, k) NAME(get)(here + (k - begin) * H + h + v * WIDTH, WIDTH)
#define ROUNDED_VALUE(v, k)                                                                      \
    (WIDEN(codes + (k - begin) * H + v * WIDTH) *                                                \
     FILL(steps[(h + v * WIDTH) / GROUP * PAGE + k - begin]))
        if (rounded) MULTIPLY(sums, rows, vectors, scores, ROUNDED_VALUE, first, end)
        else MULTIPLY(sums, rows, vectors, scores, VALUE, first, end)
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) NAME(put)(out[r] + h + v * WIDTH, sums[r][v], WIDTH);
}

/* All of that for a constant number of queries, so that their sums stay in registers. */
TARGET INLINE void NAME(scores_of)(struct tile *tile, const float *const *q, int rows,
                                   int64_t vectors, int64_t H, int rounded) {
    int64_t at = 0;
    if (rows <= HANDFUL / 2)
        for (; at + 4 <= vectors; at += 4) NAME(score)(tile, q, rows, at, 4, H, rounded);
    for (; at + 2 <= vectors; at += 2) NAME(score)(tile, q, rows, at, 2, H, rounded);
    if (at < vectors) NAME(score)(tile, q, rows, at, 1, H, rounded);
}

TARGET INLINE void NAME(values_of)(const struct tile *tile, const float (*scores)[TILE],
                                   float *const *out, const float *down, int rows, int64_t H,
                                   int64_t from, int64_t to, int rounded) {
    int64_t h = 0;
    if (rows <= HANDFUL / 2)
        for (; h + 4 * WIDTH <= H; h += 4 * WIDTH)
            NAME(add_values)(tile, scores, out, down, rows, h, 4, H, from, to, rounded);
    for (; h + 2 * WIDTH <= H; h += 2 * WIDTH)
        NAME(add_values)(tile, scores, out, down, rows, h, 2, H, from, to, rounded);
    for (; h + WIDTH <= H; h += WIDTH)
        NAME(add_values)(tile, scores, out, down, rows, h, 1, H, from, to, rounded);
    for (int r = 0; r < rows && h < H; r++) { /* what is left of a head fills no vector */
        for (int64_t i = h; i < H; i++) out[r][i] *= down[r];
        for (int64_t s = from; s < to; s++) {
            const float *here = tile->keys[s / PAGE] + room(H, rounded);
            const float *values = here + s % PAGE * H, *steps = steps_of(here, H) + s % PAGE;
            const int8_t *codes = (const int8_t *)here + s % PAGE * H;
            for (int64_t i = h; i < H && !rounded; i++) out[r][i] += scores[r][s] * values[i];
            for (int64_t i = h; i < H && rounded; i++)
                out[r][i] += scores[r][s] * ((float)codes[i] * steps[i / GROUP * PAGE]);
        }
    }
}

#define EACH_NUMBER_OF_ROWS(rows, CALL)                                                          \
    switch (rows) {                                                                              \
        case 1: CALL(1); break;                                                                  \
        case 2: CALL(2); break;                                                                  \
        case 3: CALL(3); break;                                                                  \
        case 4: CALL(4); break;                                                                  \
        case 5: CALL(5); break;                                                                  \
        default: CALL(HANDFUL); break;                                                           \
    }

TARGET static void NAME(all_scores)(struct tile *tile, const float *const *q, int rows,
                                    int64_t vectors, int64_t H) {
#define CALL(n) NAME(scores_of)(tile, q, n, vectors, H, 0)
#define ROUNDED_CALL(n) NAME(scores_of)(tile, q, n, vectors, H, 1)
    if (tile->rounded) EACH_NUMBER_OF_ROWS(rows, ROUNDED_CALL)
    else EACH_NUMBER_OF_ROWS(rows, CALL)
#undef CALL
#undef ROUNDED_CALL
}

TARGET static void NAME(all_values)(const struct tile *tile, const float (*scores)[TILE],
                                    float *const *out, const float *down, int rows, int64_t H,
                                    int64_t from, int64_t to) {
#define CALL(n) NAME(values_of)(tile, scores, out, down, n, H, from, to, 0)
#define ROUNDED_CALL(n) NAME(values_of)(tile, scores, out, down, n, H, from, to, 1)
    if (tile->rounded) EACH_NUMBER_OF_ROWS(rows, ROUNDED_CALL)
    else EACH_NUMBER_OF_ROWS(rows, CALL)
#undef CALL
#undef ROUNDED_CALL
}

/* Scores of a tile with what is not in the product: a cap, a bias by distance, and the positions
   that a query does not attend to. */
TARGET INLINE void NAME(change)(const struct op *op, float *scores, const struct query *query,
                                int64_t tile, int64_t from, int64_t to) {
    for (int64_t at = from / WIDTH * WIDTH; at < to; at += WIDTH) {
        lanes v = NAME(get)(scores + at, WIDTH);
        if (op->cap > 0) v = op->cap * NAME(tanh)(v / op->cap);
        NAME(put)(scores + at, v, WIDTH);
    }
    for (int64_t at = from; at < to && op->weight; at++)
        scores[at] -= query->slope * fabsf((float)(query->at - tile - at));
    for (int64_t at = from / WIDTH * WIDTH; at < from; at++) scores[at] = -INFINITY;
    for (int64_t at = to; at % WIDTH; at++) scores[at] = -INFINITY;
}

/* A query's scores of positions from .. to - 1 of a tile become weights. Returns the factor that
   scales down what was summed before. */
TARGET INLINE float NAME(weigh)(const struct op *op, float *scores, struct query *query,
                                int64_t tile, int64_t from, int64_t to) {
    int64_t first = from / WIDTH * WIDTH, last = (to + WIDTH - 1) / WIDTH * WIDTH;
    lanes most = FILL(-INFINITY), factor = FILL(op->number);
    for (int64_t at = first; at < last; at += WIDTH)
        NAME(put)(scores + at, NAME(get)(scores + at, WIDTH) * factor, WIDTH);
    if (op->cap > 0 || op->weight || from > first || to < last)
        NAME(change)(op, scores, query, tile, from, to);
    for (int64_t at = first; at < last; at += WIDTH) {
        lanes v = NAME(get)(scores + at, WIDTH);
        most = NAME(pick)(v > most, v, most);
    }
    float here = LARGEST(most), down = 1.0f;
    if (here > query->most) {
        down = NAME(exponential)(FILL(query->most - here))[0];
        query->most = here;
    }
    lanes sums = NAME(get)(query->sums, WIDTH) * FILL(down);
    most = FILL(query->most);
    for (int64_t at = first; at < last; at += WIDTH) {
        lanes v = NAME(get)(scores + at, WIDTH);
        v = NAME(pick)(v == FILL(-INFINITY), FILL(0.0f), NAME(exponential)(v - most));
        NAME(put)(scores + at, v, WIDTH);
        sums += v;
    }
    NAME(put)(query->sums, sums, WIDTH);
    return down;
}

/* Some queries of one sequence over a tile that begins at position `begin`. */
TARGET static void NAME(attend_tile)(const struct work *work, struct tile *tile,
                                     struct query *queries, int rows, int64_t begin) {
    const struct op *op = work->op;
    int64_t H = op->width, end = 0, from[HANDFUL], to[HANDFUL];
    const float *q[HANDFUL];
    float *out[HANDFUL], down[HANDFUL];
    int whole_tile = 1;
    for (int r = 0; r < rows; r++) {
        const struct query *query = queries + r;
        q[r] = query->q;
        out[r] = query->out;
        from[r] = query->begin > begin ? query->begin - begin : 0;
        to[r] = query->end - begin < TILE ? query->end - begin : TILE;
        whole_tile &= from[r] == 0 && to[r] == TILE;
        end = to[r] > end ? to[r] : end;
    }
    NAME(all_scores)(tile, q, rows, (end + PAGE - 1) / PAGE * PAGE / WIDTH, H);
    for (int r = 0; r < rows; r++)
        if (from[r] < to[r])
            down[r] = NAME(weigh)(op, tile->scores[r], queries + r, begin, from[r], to[r]);
    if (whole_tile) {
        NAME(all_values)(tile, tile->scores, out, down, rows, H, 0, TILE);
        return;
    }
    /* What a query does not attend to is not multiplied by 0 but left out: it may be no number. */
    for (int r = 0; r < rows; r++)
        if (from[r] < to[r])
            NAME(all_values)(tile, tile->scores + r, out + r, down + r, 1, H, from[r], to[r]);
}

/* Some queries of one sequence and one key-value head, all positions. */
TARGET static void NAME(attend_queries)(const struct work *work, struct query *queries, int count,
                                        int64_t row, int64_t head) {
    const struct op *op = work->op;
    int64_t H = op->width, begin = INT64_MAX, end = 0;
    struct tile tile;
    int widens = op->rounded && count > FEW_QUERIES;
    float wide[widens ? 2 * TILE * H : 1]; /* pages of 8 bits, as float32 */
    for (int n = 0; n < count; n++) {
        struct query *query = queries + n;
        begin = query->begin < begin ? query->begin : begin;
        end = query->end > end ? query->end : end;
        for (int64_t h = 0; h < H; h++) query->out[h] = 0.0f;
    }
    tile.rounded = op->rounded && !widens;
    for (int64_t at = begin / TILE * TILE; at < end; at += TILE) {
        for (int64_t from = at; from < end && from < at + TILE; from += PAGE) {
            const float **keys = tile.keys + (from - at) / PAGE;
            *keys = head_of_page(work, row, from, head);
            if (!widens) continue;
            NAME(widen_page)(op, *keys, wide + 2 * (from - at) * H);
            *keys = wide + 2 * (from - at) * H;
        }
        for (int n = 0; n < count; n += HANDFUL) {
            int rows = count - n < HANDFUL ? count - n : HANDFUL, some = 0;
            for (int r = n; r < n + rows; r++)
                some |= queries[r].begin < at + TILE && queries[r].end > at;
            if (some) NAME(attend_tile)(work, &tile, queries + n, rows, at);
            /* Pages of the next tile come nearer while this one is in use, some with each handful. */
            for (int64_t page = n / HANDFUL; page < TILE / PAGE; page += count / HANDFUL + 1)
                if (at + TILE + page * PAGE < end)
                    fetch(head_of_page(work, row, at + TILE + page * PAGE, head), 2 * room_of(op));
        }
    }
    for (int n = 0; n < count; n++) {
        const struct query *query = queries + n;
        float sum = SUM(NAME(get)(query->sums, WIDTH));
        for (int64_t h = 0; h < H && query->begin < query->end; h++) query->out[h] /= sum;
    }
}

/* Items are pairs of some tokens, side by side, and a key-value head, whose query heads read the
   same keys. */
TARGET static void NAME(attend)(void *data, int64_t first, int64_t last) {
    const struct work *work = data;
    const struct op *op = work->op;
    const struct step *step = work->step;
    int64_t group = op->count / op->groups;
    struct query queries[MOST_QUERIES];
    for (int64_t item = first; item < last; item++) {
        int64_t head = item % op->groups, begin = item / op->groups * work->together;
        int64_t end = begin + work->together < step->n_new ? begin + work->together : step->n_new;
        int count = 0;
        for (int64_t n = begin * group; n < end * group; n++) {
            int64_t m = n / group, own = head * group + n % group;
            struct query *query = queries + count++;
            query->q = row_of(work, op->from, op->from_width, m) + op->first + own * op->width;
            query->out = row_of(work, op->to, op->to_width, m) + own * op->width;
            query->at = step->position[m];
            query->end = op->causal ? query->at + 1 : step->length[op->form][step->row[m]];
            query->begin = op->window && query->end > op->window ? query->end - op->window : 0;
            query->slope = op->weight ? ((const float *)op->weight)[own] : 0.0f;
            /* A sink is a score without a value: it has its share of the sum, and nothing else. */
            query->most = op->bias ? op->bias[own] : -INFINITY;
            memset(query->sums, 0, sizeof(query->sums));
            query->sums[0] = op->bias ? 1.0f : 0.0f;
            int64_t next = (n + 1) / group;
            if (count < MOST_QUERIES && next < end && step->row[next] == step->row[m]) continue;
            NAME(attend_queries)(work, queries, count, step->row[m], head);
            count = 0;
        }
    }
}

#undef MULTIPLY
#undef KEY
#undef ROUNDED_KEY
#undef VALUE
#undef ROUNDED_VALUE
#undef EACH_NUMBER_OF_ROWS
