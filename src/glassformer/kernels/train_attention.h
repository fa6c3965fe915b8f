/* Included by train_parts.h: softmax(q k^T * scale) v and its gradient, for short sequences.

   An item is one sequence and one key-value head. Its queries go over all keys in blocks, whose
   weights fit into a core's cache. Backward makes the weights again from each query's largest score
   and the sum of exponentials:

       P = exp(q k^T scale - most) / sum                  dV = P^T dO        dP = dO V^T
       dS = P (dP - sum(dO O)) scale                      dQ = dS K          dK = dS^T Q

   All six products are the same few lines: a number of the left side times a vector of the right
   one, with the sums in registers. */

/* out[r][v] = (onto: what is there) + sum over k of a[r, k] * b[k, v], for `rows` rows and `vectors`
   vectors from column `at` on; the last has `left` numbers. */
TARGET INLINE void NAME(block)(const struct side *a, const float *b, int64_t b_row, float *out,
                               int64_t out_row, int rows, int vectors, int64_t depth, int64_t left,
                               int onto) {
    lanes sums[MOST_ROWS][MOST_WIDE];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            sums[r][v] = FILL(0.0f);
            if (onto)
                sums[r][v] = NAME(get)(out + r * out_row + v * WIDTH, v + 1 < vectors ? WIDTH : left);
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
        for (int v = 0; v < vectors; v++)
            NAME(put)(out + r * out_row + v * WIDTH, sums[r][v], v + 1 < vectors ? WIDTH : left);
}

/* Rows one after another, as many at once as have their sums in registers. */
#define ROWS_OF(vectors, many)                                                                   \
    {                                                                                            \
        int64_t r = 0;                                                                           \
        struct side rest = *a;                                                                   \
        for (; r + many <= rows; r += many, rest.from += many * a->row)                          \
            NAME(block)(&rest, b + at, b_row, out + r * out_row + at, out_row, many, vectors,    \
                        depth, left, onto);                                                      \
        for (; r + 4 <= rows; r += 4, rest.from += 4 * a->row)                                   \
            NAME(block)(&rest, b + at, b_row, out + r * out_row + at, out_row, 4, vectors,       \
                        depth, left, onto);                                                      \
        for (; r < rows; r++, rest.from += a->row)                                               \
            NAME(block)(&rest, b + at, b_row, out + r * out_row + at, out_row, 1, vectors,       \
                        depth, left, onto);                                                      \
    }

/* out (rows, columns) = (onto: what is there) + a (rows, depth) b (depth, columns). Rows of b may be
   read up to the next whole vector; what lies there goes nowhere. */
TARGET static void NAME(product)(const struct side *a, const float *b, int64_t b_row, float *out,
                                 int64_t out_row, int64_t rows, int64_t columns, int64_t depth,
                                 int onto) {
    for (int64_t at = 0; at < columns;) {
        int64_t left = columns - at;
        if (left > 3 * WIDTH) {
            left = left < 4 * WIDTH ? left - 3 * WIDTH : WIDTH;
            ROWS_OF(4, WIDE_ROWS)
            at += 4 * WIDTH;
        } else if (left > WIDTH) {
            left = left < 2 * WIDTH ? left - WIDTH : WIDTH;
            ROWS_OF(2, MOST_ROWS)
            at += 2 * WIDTH;
        } else {
            ROWS_OF(1, MOST_ROWS)
            at += WIDTH;
        }
    }
}

/* Rows of `width` numbers, `stride` apart, that may be read in complete vectors: as they lie, or as
   a copy filled up with zeros. */
TARGET INLINE const float *NAME(padded)(const float *from, int64_t *stride, int64_t rows,
                                        int64_t width, float *to) {
    int64_t full = WHOLE(width);
    if (full == width) return from;
    for (int64_t i = 0; i < rows; i++) {
        memcpy(to + i * full, from + i * *stride, sizeof(float) * (size_t)width);
        for (int64_t h = width; h < full; h++) to[i * full + h] = 0.0f;
    }
    *stride = full;
    return to;
}

/* (rows, width) turned to (width, rows), with rows filled up to complete vectors of zeros. */
TARGET INLINE void NAME(turned)(const float *from, int64_t stride, int64_t rows, int64_t width,
                                float *to) {
    int64_t full = WHOLE(rows), i = 0;
#ifdef GLASS_X86
    for (; i + 4 <= rows; i += 4) {
        int64_t h = 0;
        for (; h + 4 <= width; h += 4) {
            const float *at = from + i * stride + h;
            __m128 a = _mm_loadu_ps(at), b = _mm_loadu_ps(at + stride);
            __m128 c = _mm_loadu_ps(at + 2 * stride), d = _mm_loadu_ps(at + 3 * stride);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(to + h * full + i, a);
            _mm_storeu_ps(to + (h + 1) * full + i, b);
            _mm_storeu_ps(to + (h + 2) * full + i, c);
            _mm_storeu_ps(to + (h + 3) * full + i, d);
        }
        for (; h < width; h++)
            for (int64_t r = i; r < i + 4; r++) to[h * full + r] = from[r * stride + h];
    }
#endif
    for (; i < rows; i++)
        for (int64_t h = 0; h < width; h++) to[h * full + i] = from[i * stride + h];
    for (int64_t h = 0; h < width; h++)
        for (i = rows; i < full; i++) to[h * full + i] = 0.0f;
}

/* Scores of query t become scores that may be attended to: -inf elsewhere, up to `full`. */
TARGET INLINE void NAME(close)(const struct attention *a, float *scores, int64_t b, int64_t n,
                               int64_t t, int64_t keys, int64_t full) {
    if (a->allow) {
        const uint8_t *allow = a->allow + b * a->allow_batch + n * a->allow_head + t * a->allow_row;
        if (a->allow_key == 1)
            for (int64_t s = 0; s < keys; s++) scores[s] = allow[s] ? scores[s] : -INFINITY;
        else
            for (int64_t s = 0; s < keys; s++)
                scores[s] = allow[s * a->allow_key] ? scores[s] : -INFINITY;
    }
    for (int64_t s = a->causal && t + 1 < keys ? t + 1 : keys; s < full; s++) scores[s] = -INFINITY;
}

TARGET INLINE lanes NAME(weight)(lanes score, lanes from) {
    return NAME(pick)(score == FILL(-INFINITY), FILL(0.0f), NAME(exponential)(score - from));
}

TARGET static void NAME(attention_forward)(void *data, int64_t first, int64_t last) {
    struct attention *a = data;
    int64_t T = a->queries, S = a->keys, H = a->width, group = a->heads / a->kv_heads;
    int64_t full = WHOLE(S), wide = WHOLE(H);
    float *own = malloc(sizeof(float) * (size_t)(H * full + S * wide + BLOCK_ROWS * full));
    float *turned = own, *spare = turned + H * full, *scores = spare + S * wide;
    if (!own) {
        a->failed = 1;
        return;
    }
    for (int64_t item = first; item < last; item++) {
        int64_t b = item / a->kv_heads, k = item % a->kv_heads, v_row = a->v.row;
        const float *values = HEAD(v, b, k);
        NAME(turned)(HEAD(k, b, k), a->k.row, S, H, turned);
        values = NAME(padded)(values, &v_row, S, H, spare);
        for (int64_t n = k * group; n < (k + 1) * group; n++)
            for (int64_t t = 0; t < T; t += BLOCK_ROWS) {
                int64_t rows = T - t < BLOCK_ROWS ? T - t : BLOCK_ROWS;
                int64_t keys = a->causal && t + rows < S ? t + rows : S, end = WHOLE(keys);
                struct side q = {HEAD(q, b, n) + t * a->q.row, a->q.row, 1};
                NAME(product)(&q, turned, full, scores, full, rows, end, H, 0);
                for (int64_t r = 0; r < rows; r++) {
                    float *row = scores + r * full;
                    float *kept = a->kept + 2 * ((b * a->heads + n) * T + t + r);
                    lanes most = FILL(-INFINITY), sums = FILL(0.0f), scale = FILL(a->scale);
                    NAME(close)(a, row, b, n, t + r, keys, end);
                    for (int64_t s = 0; s < end; s += WIDTH) {
                        lanes v = *(stored *)(row + s) * scale;
                        most = NAME(pick)(v > most, v, most);
                    }
                    kept[0] = LARGEST(most);
                    most = FILL(kept[0]);
                    for (int64_t s = 0; s < end; s += WIDTH) {
                        lanes v = NAME(weight)(*(stored *)(row + s) * scale, most);
                        *(stored *)(row + s) = v;
                        sums += v;
                    }
                    kept[1] = 1.0f / SUM(sums);
                    sums = FILL(kept[1]);
                    for (int64_t s = 0; s < end; s += WIDTH)
                        *(stored *)(row + s) = *(stored *)(row + s) * sums;
                }
                struct side p = {scores, full, 1};
                NAME(product)(&p, values, v_row, HEAD(out, b, n) + t * a->out.row, a->out.row, rows,
                              H, keys, 0);
            }
    }
    free(own);
}

TARGET static void NAME(attention_backward)(void *data, int64_t first, int64_t last) {
    struct attention *a = data;
    int64_t T = a->queries, S = a->keys, H = a->width, group = a->heads / a->kv_heads;
    int64_t full = WHOLE(S), wide = WHOLE(H);
    float *own = malloc(sizeof(float) * (size_t)(2 * H * full + S * wide + 2 * BLOCK_ROWS * wide +
                                                 2 * BLOCK_ROWS * full));
    float *k_turned = own, *v_turned = k_turned + H * full, *k_spare = v_turned + H * full;
    float *q_spare = k_spare + S * wide, *o_spare = q_spare + BLOCK_ROWS * wide;
    float *weights = o_spare + BLOCK_ROWS * wide, *slopes = weights + BLOCK_ROWS * full;
    if (!own) {
        a->failed = 1;
        return;
    }
    for (int64_t item = first; item < last; item++) {
        int64_t b = item / a->kv_heads, k = item % a->kv_heads, k_row = a->k.row;
        const float *keys_of = NAME(padded)(HEAD(k, b, k), &k_row, S, H, k_spare);
        NAME(turned)(HEAD(k, b, k), a->k.row, S, H, k_turned);
        NAME(turned)(HEAD(v, b, k), a->v.row, S, H, v_turned);
        int onto = 0;
        for (int64_t n = k * group; n < (k + 1) * group; n++)
            /* The last block has every key: it writes where the others add. */
            for (int64_t t = (T - 1) / BLOCK_ROWS * BLOCK_ROWS; t >= 0; t -= BLOCK_ROWS) {
                int64_t rows = T - t < BLOCK_ROWS ? T - t : BLOCK_ROWS;
                int64_t keys = a->causal && t + rows < S ? t + rows : S, end = WHOLE(keys);
                int64_t q_row = a->q.row, o_row = a->d_out.row;
                const float *q_of = HEAD(q, b, n) + t * q_row, *o_of = HEAD(d_out, b, n) + t * o_row;
                struct side q = {q_of, q_row, 1}, o = {o_of, o_row, 1};
                NAME(product)(&q, k_turned, full, weights, full, rows, end, H, 0);
                NAME(product)(&o, v_turned, full, slopes, full, rows, end, H, 0);
                for (int64_t r = 0; r < rows; r++) {
                    float *row = weights + r * full, *slope = slopes + r * full;
                    const float *out = HEAD(out, b, n) + (t + r) * a->out.row;
                    const float *kept = a->kept + 2 * ((b * a->heads + n) * T + t + r);
                    lanes dots = FILL(0.0f), scale = FILL(a->scale);
                    NAME(close)(a, row, b, n, t + r, keys, end);
                    for (int64_t h = 0; h < H; h += WIDTH)
                        dots += NAME(get)(out + h, H - h) * NAME(get)(o_of + r * o_row + h, H - h);
                    lanes most = FILL(kept[0]), share = FILL(kept[1]), all = FILL(SUM(dots));
                    for (int64_t s = 0; s < end; s += WIDTH) {
                        lanes p = NAME(weight)(*(stored *)(row + s) * scale, most) * share;
                        *(stored *)(row + s) = p;
                        *(stored *)(slope + s) = p * (*(stored *)(slope + s) - all) * scale;
                    }
                }
                q_of = NAME(padded)(q_of, &q_row, rows, H, q_spare);
                o_of = NAME(padded)(o_of, &o_row, rows, H, o_spare);
                struct side ds = {slopes, full, 1}, ds_turned = {slopes, 1, full};
                struct side p_turned = {weights, 1, full};
                NAME(product)(&ds, keys_of, k_row, HEAD(d_q, b, n) + t * a->d_q.row, a->d_q.row, rows,
                              H, keys, 0);
                NAME(product)(&ds_turned, q_of, q_row, HEAD(d_k, b, k), a->d_k.row, keys, H, rows, onto);
                NAME(product)(&p_turned, o_of, o_row, HEAD(d_v, b, k), a->d_v.row, keys, H, rows, onto);
                onto = 1;
            }
    }
    free(own);
}

#undef ROWS_OF
