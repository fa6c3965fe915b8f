/* Included by train_parts.h: softmax(q k^T * scale) v and its gradient, for short sequences.

   An item is one sequence and one key-value head. Its queries go over all keys in blocks, whose
   weights fit into a core's cache. Backward makes the weights again from each query's largest score
   and the sum of exponentials:

       P = exp(q k^T scale - most) / sum                  dV = P^T dO        dP = dO V^T
       dS = P (dP - sum(dO O))                            dQ = dS K scale    dK = dS^T (Q scale)

   With M for dropout's 0 and factors, O = (P M) V: P M is what dV has in the place of P, and dP is
   (dO V^T) M. A cap multiplies dS by its slope before dQ and dK; a bias has dS without it.

   Everything is copied to memory of its own first: heads lie far apart, which a cache takes badly,
   and there every row begins with a vector, rows are complete vectors, and their number a multiple
   of four, all filled up with zeros. So all six products are the same few lines: a number of the
   left side times a vector of the right one, with the sums in registers. */

#define QUADS(count) (((count) + 3) / 4 * 4)

/* out[r][v] = (onto: what is there) + sum over k of a[r, k] * b[k, v], for `rows` rows and `vectors`
   vectors. */
TARGET INLINE void NAME(block)(const struct side *a, const float *b, int64_t b_row, float *out,
                               int64_t out_row, int rows, int vectors, int64_t depth, int onto) {
    lanes sums[MOST_ROWS][MOST_WIDE];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            sums[r][v] = FILL(0.0f);
            if (onto) sums[r][v] = *(stored *)(out + r * out_row + v * WIDTH);
        }
    for (int64_t k = 0; k < depth; k++) {
        lanes line[MOST_WIDE];
        const float *number = a->from + k * a->deep;
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) line[v] = *(const stored *)(b + k * b_row + v * WIDTH);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            lanes factor = FILL(number[r * a->row]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sums[r][v] = FMA(factor, line[v], sums[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) *(stored *)(out + r * out_row + v * WIDTH) = sums[r][v];
}

/* The next rows, as many at once as have their sums in registers. */
#define NEXT_ROWS(many, vectors)                                                                 \
    {                                                                                            \
        NAME(block)(&rest, b + at, b_row, out + r * out_row + at, out_row, many, vectors, depth, \
                    onto);                                                                       \
        r += many;                                                                               \
        rest.from += many * a->row;                                                              \
    }

/* out (rows, columns) = (onto: what is there) + a (rows, depth) b (depth, columns): a multiple of
   four rows, and columns of complete vectors. */
TARGET static void NAME(product)(const struct side *a, const float *b, int64_t b_row, float *out,
                                 int64_t out_row, int64_t rows, int64_t columns, int64_t depth,
                                 int onto) {
    for (int64_t at = 0; at < columns;) {
        int64_t left = columns - at, r = 0;
        struct side rest = *a;
        if (left >= 4 * WIDTH) {
            while ((rows - r) % WIDE_ROWS) NEXT_ROWS(4, 4)
            while (r < rows) NEXT_ROWS(WIDE_ROWS, 4)
            at += 4 * WIDTH;
        } else if (left >= 2 * WIDTH) {
            while (rows - r >= MOST_ROWS) NEXT_ROWS(MOST_ROWS, 2)
            if (rows - r == 8) NEXT_ROWS(8, 2)
            if (rows - r == 4) NEXT_ROWS(4, 2)
            at += 2 * WIDTH;
        } else {
            while (rows - r >= MOST_ROWS) NEXT_ROWS(MOST_ROWS, 1)
            if (rows - r == 8) NEXT_ROWS(8, 1)
            if (rows - r == 4) NEXT_ROWS(4, 1)
            at += WIDTH;
        }
    }
}

/* Rows of `width` numbers, `stride` apart, times `factor`, to memory of our own. */
TARGET INLINE void NAME(gather)(const float *from, int64_t stride, int64_t rows, int64_t width,
                                float factor, float *to) {
    int64_t wide = WHOLE(width);
    fetch(from, stride, rows < AHEAD ? rows : AHEAD, width);
    for (int64_t i = 0; i < rows; i++) {
        if (i + AHEAD < rows) fetch(from + (i + AHEAD) * stride, stride, 1, width);
        for (int64_t h = 0; h < width; h += WIDTH)
            *(stored *)(to + i * wide + h) =
                NAME(get)(from + i * stride + h, width - h) * FILL(factor);
    }
    memset(to + rows * wide, 0, sizeof(float) * (size_t)((QUADS(rows) - rows) * wide));
}

/* The reverse; row i times factor[i * apart]. */
TARGET INLINE void NAME(scatter)(const float *from, const float *factor, int64_t apart, int64_t rows,
                                 int64_t width, float *to, int64_t stride) {
    int64_t wide = WHOLE(width);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < width; h += WIDTH)
            NAME(put)(to + i * stride + h,
                      *(const stored *)(from + i * wide + h) * FILL(factor[i * apart]), width - h);
}

/* (rows, wide) turned to (wide, rows), rows of `line` numbers; both sides are our own memory. */
TARGET INLINE void NAME(turned)(const float *from, int64_t rows, int64_t wide, float *to,
                                int64_t line) {
    for (int64_t i = 0; i < QUADS(rows); i += 4)
        for (int64_t h = 0; h < wide; h += 4) {
            const float *at = from + i * wide + h;
#ifdef GLASS_X86
            __m128 a = _mm_load_ps(at), b = _mm_load_ps(at + wide);
            __m128 c = _mm_load_ps(at + 2 * wide), d = _mm_load_ps(at + 3 * wide);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_store_ps(to + h * line + i, a);
            _mm_store_ps(to + (h + 1) * line + i, b);
            _mm_store_ps(to + (h + 2) * line + i, c);
            _mm_store_ps(to + (h + 3) * line + i, d);
#else
            for (int64_t r = 0; r < 4; r++)
                for (int64_t c = 0; c < 4; c++) to[(h + c) * line + i + r] = at[r * wide + c];
#endif
        }
}

/* Scores of query t that a mask excludes become -inf. */
TARGET INLINE void NAME(close)(const struct attention *a, float *scores, int64_t b, int64_t n,
                               int64_t t, int64_t keys) {
    const uint8_t *allow = a->allow + b * a->allow_batch + n * a->allow_head + t * a->allow_row;
    if (a->allow_key == 1)
        for (int64_t s = 0; s < keys; s++) scores[s] = allow[s] ? scores[s] : -INFINITY;
    else
        for (int64_t s = 0; s < keys; s++)
            scores[s] = allow[s * a->allow_key] ? scores[s] : -INFINITY;
}

/* Scores of query t as the softmax has them: capped, with their bias, -inf where a mask excludes. */
TARGET INLINE void NAME(finish)(const struct attention *a, float *scores, int64_t b, int64_t n,
                                int64_t t, int64_t keys) {
    if (a->softcap > 0)
        for (int64_t s = 0; s < keys; s += WIDTH)
            *(stored *)(scores + s) = FILL(a->softcap) * NAME(tangent)(*(stored *)(scores + s) / FILL(a->softcap));
    if (a->bias) {
        const float *bias = a->bias + b * a->bias_batch + n * a->bias_head + t * a->bias_row;
        for (int64_t s = 0; s < keys; s++) scores[s] += bias[s];
    }
    if (a->allow) NAME(close)(a, scores, b, n, t, keys);
}

/* What of a weight is dropped: numbers of its row from key s on. */
TARGET INLINE lanes NAME(spared)(const struct attention *a, int64_t b, int64_t n, int64_t t, int64_t s) {
    return NAME(kept)(&a->drop, (uint32_t)(((b * a->heads + n) * a->queries + t) * a->keys + s));
}

/* How many keys query t may attend to, of the first `keys`. */
INLINE int64_t NAME(reach)(const struct attention *a, int64_t t, int64_t keys) {
    return a->causal && t + 1 < keys ? t + 1 : keys;
}

/* Scores, of which `left` are to be seen: -inf for the others. */
TARGET INLINE lanes NAME(seen)(const float *scores, int64_t left) {
    lanes all = *(const stored *)scores;
    if (left >= WIDTH) return all;
    whole at = {0};
    for (int l = 0; l < WIDTH; l++) at[l] = l;
    return NAME(pick)(at < (int32_t)left, all, FILL(-INFINITY));
}

TARGET INLINE lanes NAME(weight)(lanes score, lanes from) {
    return NAME(pick)(score == FILL(-INFINITY), FILL(0.0f), NAME(exponential)(score - from));
}

TARGET static void NAME(attention_forward)(void *data, int64_t first, int64_t last) {
    struct attention *a = data;
    int64_t T = a->queries, S = a->keys, H = a->width, group = a->heads / a->kv_heads;
    int64_t wide = WHOLE(H), line = WHOLE(S) + WIDTH; /* seldom a power of two */
    float *own = own_memory(wide * line + QUADS(S) * wide + BLOCK_ROWS * (line + 2 * wide));
    float *turned = own, *values = turned + wide * line, *scores = values + QUADS(S) * wide;
    float *queries = scores + BLOCK_ROWS * line, *out = queries + BLOCK_ROWS * wide;
    if (!own) {
        a->failed = 1;
        return;
    }
    for (int64_t item = first; item < last; item++) {
        int64_t b = item / a->kv_heads, k = item % a->kv_heads;
        NAME(gather)(HEAD(k, b, k), a->k.row, S, H, 1.0f, values);
        NAME(turned)(values, S, wide, turned, line);
        NAME(gather)(HEAD(v, b, k), a->v.row, S, H, 1.0f, values);
        for (int64_t n = k * group; n < (k + 1) * group; n++)
            for (int64_t t = 0; t < T; t += BLOCK_ROWS) {
                int64_t rows = T - t < BLOCK_ROWS ? T - t : BLOCK_ROWS, four = QUADS(rows);
                int64_t keys = a->causal && t + rows < S ? t + rows : S, end = WHOLE(keys);
                float *kept = a->kept + 2 * ((b * a->heads + n) * T + t);
                struct side q = {queries, wide, 1}, p = {scores, line, 1};
                NAME(gather)(HEAD(q, b, n) + t * a->q.row, a->q.row, rows, H, a->scale, queries);
                if (t + 2 * BLOCK_ROWS <= T)
                    fetch(HEAD(q, b, n) + (t + rows) * a->q.row, a->q.row, BLOCK_ROWS, H);
                NAME(product)(&q, turned, line, scores, line, four, end, H, 0);
                for (int64_t r = 0; r < rows; r++) {
                    float *row = scores + r * line;
                    int64_t reach = NAME(reach)(a, t + r, keys);
                    lanes most = FILL(-INFINITY), sums = FILL(0.0f);
                    NAME(finish)(a, row, b, n, t + r, keys);
                    for (int64_t s = 0; s < end; s += WIDTH) {
                        lanes v = NAME(seen)(row + s, reach - s);
                        most = NAME(pick)(v > most, v, most);
                    }
                    float top = LARGEST(most);
                    if (a->sinks) top = larger(top, a->sinks[n]);
                    kept[2 * r] = top;
                    most = FILL(kept[2 * r]);
                    for (int64_t s = 0; s < end; s += WIDTH) {
                        lanes v = NAME(weight)(NAME(seen)(row + s, reach - s), most);
                        sums += v;
                        if (a->drop.limit) v *= NAME(spared)(a, b, n, t + r, s);
                        *(stored *)(row + s) = v;
                    }
                    float total = SUM(sums);
                    if (a->sinks) total += NAME(weight)(FILL(a->sinks[n]), most)[0];
                    kept[2 * r + 1] = total > 0.0f ? 1.0f / total : 0.0f; /* 0: nothing is seen */
                }
                NAME(product)(&p, values, wide, out, wide, four, wide, keys, 0);
                NAME(scatter)(out, kept + 1, 2, rows, H, HEAD(out, b, n) + t * a->out.row, a->out.row);
            }
    }
    free(own);
}

TARGET static void NAME(attention_backward)(void *data, int64_t first, int64_t last) {
    struct attention *a = data;
    int64_t T = a->queries, S = a->keys, H = a->width, group = a->heads / a->kv_heads;
    int64_t wide = WHOLE(H), line = WHOLE(S) + WIDTH, all_keys = QUADS(S) * wide;
    float *own = own_memory(2 * wide * line + 3 * all_keys + BLOCK_ROWS * (3 * line + 3 * wide));
    float *k_turned = own, *v_turned = k_turned + wide * line, *k_own = v_turned + wide * line;
    float *d_k = k_own + all_keys, *d_v = d_k + all_keys, *weights = d_v + all_keys;
    float *slopes = weights + BLOCK_ROWS * line, *q_own = slopes + BLOCK_ROWS * line;
    float *o_own = q_own + BLOCK_ROWS * wide, *d_q = o_own + BLOCK_ROWS * wide;
    float *caps = d_q + BLOCK_ROWS * wide; /* slopes of the cap */
    const float one = 1.0f;
    if (!own) {
        a->failed = 1;
        return;
    }
    for (int64_t item = first; item < last; item++) {
        int64_t b = item / a->kv_heads, k = item % a->kv_heads;
        NAME(gather)(HEAD(v, b, k), a->v.row, S, H, 1.0f, k_own);
        NAME(turned)(k_own, S, wide, v_turned, line);
        NAME(gather)(HEAD(k, b, k), a->k.row, S, H, 1.0f, k_own);
        NAME(turned)(k_own, S, wide, k_turned, line);
        int onto = 0;
        for (int64_t n = k * group; n < (k + 1) * group; n++)
            /* The last block has every key: it writes where the others add. */
            for (int64_t t = (T - 1) / BLOCK_ROWS * BLOCK_ROWS; t >= 0; t -= BLOCK_ROWS) {
                int64_t rows = T - t < BLOCK_ROWS ? T - t : BLOCK_ROWS, four = QUADS(rows);
                int64_t keys = a->causal && t + rows < S ? t + rows : S, end = WHOLE(keys);
                struct side q = {q_own, wide, 1}, o = {o_own, wide, 1};
                NAME(gather)(HEAD(q, b, n) + t * a->q.row, a->q.row, rows, H, a->scale, q_own);
                NAME(gather)(HEAD(d_out, b, n) + t * a->d_out.row, a->d_out.row, rows, H, 1.0f, o_own);
                if (t > 0) {
                    int64_t before = t - BLOCK_ROWS;
                    fetch(HEAD(q, b, n) + before * a->q.row, a->q.row, BLOCK_ROWS, H);
                    fetch(HEAD(out, b, n) + before * a->out.row, a->out.row, BLOCK_ROWS, H);
                    fetch(HEAD(d_out, b, n) + before * a->d_out.row, a->d_out.row, BLOCK_ROWS, H);
                }
                NAME(product)(&q, k_turned, line, weights, line, four, end, H, 0);
                NAME(product)(&o, v_turned, line, slopes, line, four, end, H, 0);
                for (int64_t r = 0; r < rows; r++) {
                    float *row = weights + r * line, *slope = slopes + r * line;
                    const float *out = HEAD(out, b, n) + (t + r) * a->out.row;
                    const float *kept = a->kept + 2 * ((b * a->heads + n) * T + t + r);
                    int64_t reach = NAME(reach)(a, t + r, keys);
                    lanes dots = FILL(0.0f);
                    for (int64_t s = 0; a->softcap > 0 && s < end; s += WIDTH) {
                        lanes v = NAME(tangent)(*(stored *)(row + s) / FILL(a->softcap));
                        *(stored *)(caps + r * line + s) = 1.0f - v * v;
                    }
                    NAME(finish)(a, row, b, n, t + r, keys);
                    for (int64_t h = 0; h < H; h += WIDTH)
                        dots += NAME(get)(out + h, H - h) * *(stored *)(o_own + r * wide + h);
                    lanes most = FILL(kept[0]), share = FILL(kept[1]), all = FILL(SUM(dots));
                    for (int64_t s = 0; s < end; s += WIDTH) {
                        lanes p = NAME(weight)(NAME(seen)(row + s, reach - s), most) * share;
                        lanes d = *(stored *)(slope + s), spared = FILL(1.0f);
                        if (a->drop.limit) spared = NAME(spared)(a, b, n, t + r, s);
                        *(stored *)(row + s) = p * spared;
                        d = p * (d * spared - all);
                        if (a->d_bias && s < reach)
                            NAME(put)(a->d_bias + ((b * a->heads + n) * T + t + r) * S + s, d, reach - s);
                        if (a->softcap > 0) d *= *(stored *)(caps + r * line + s);
                        *(stored *)(slope + s) = d;
                    }
                    if (a->sinks) /* no value: its slope is 0 - all */
                        a->d_sinks[b * a->heads + n] -= (NAME(weight)(FILL(a->sinks[n]), most) * share * all)[0];
                }
                struct side ds = {slopes, line, 1}, ds_turned = {slopes, 1, line};
                struct side p_turned = {weights, 1, line};
                NAME(product)(&ds, k_own, wide, d_q, wide, four, wide, keys, 0);
                NAME(scatter)(d_q, &a->scale, 0, rows, H, HEAD(d_q, b, n) + t * a->d_q.row, a->d_q.row);
                NAME(product)(&ds_turned, q_own, wide, d_k, wide, QUADS(keys), wide, rows, onto);
                NAME(product)(&p_turned, o_own, wide, d_v, wide, QUADS(keys), wide, rows, onto);
                onto = 1;
            }
        NAME(scatter)(d_k, &one, 0, S, H, HEAD(d_k, b, k), a->d_k.row);
        NAME(scatter)(d_v, &one, 0, S, H, HEAD(d_v, b, k), a->d_v.row);
    }
    free(own);
}

#undef NEXT_ROWS
#undef QUADS
