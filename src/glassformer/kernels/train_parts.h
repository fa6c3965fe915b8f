/* Included by train.c once for each width of vectors (each_width.h): passes over rows of a training
   step, and the gradient of each. */

#define WHOLE(count) (((count) + WIDTH - 1) / WIDTH * WIDTH)

/* --- dropout ---------------------------------------------------------------------------------- */

typedef uint32_t NAME(words) __attribute__((vector_size(4 * WIDTH)));

/* Numbers at + 0, at + 1, ... of what is dropped or kept: 0 or the factor. */
TARGET INLINE lanes NAME(kept)(const struct drop *drop, uint32_t at) {
    NAME(words) h = {0};
    for (int l = 0; l < WIDTH; l++) h[l] = at + (uint32_t)l;
    h += drop->seed;
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= drop->salt;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    h ^= h >> 16;
    return NAME(pick)((whole)(h >> 8) < drop->limit, FILL(0.0f), FILL(drop->factor));
}

/* --- the loss --------------------------------------------------------------------------------- */

/* Logits of a row become the gradient of its weighted loss: (softmax - wanted) * weight, where
   `wanted` is 1 - smoothing at the target and smoothing / classes everywhere. */
TARGET static void NAME(loss)(void *data, int64_t first, int64_t last) {
    const struct loss *loss = data;
    int64_t V = loss->classes, end = V / WIDTH * WIDTH;
    for (int64_t m = first; m < last; m++) {
        float *row = loss->logits + m * loss->row, weight = loss->weights[m];
        float at_target = row[loss->targets[m]];
        lanes most = FILL(-INFINITY), sums = FILL(0.0f), plain = FILL(0.0f);
        for (int64_t i = 0; i < end; i += WIDTH) {
            lanes v = *(stored *)(row + i);
            most = NAME(pick)(v > most, v, most);
            plain += v;
        }
        float top = LARGEST(most), mean = SUM(plain);
        for (int64_t i = end; i < V; i++) {
            top = larger(row[i], top);
            mean += row[i];
        }
        most = FILL(top);
        for (int64_t i = 0; i < V; i += WIDTH) {
            int64_t left = V - i;
            lanes v = NAME(exponential)(NAME(get)(row + i, left) - most);
            for (int l = (int)left; l < WIDTH; l++) v[l] = 0.0f;
            NAME(put)(row + i, v, left);
            sums += v;
        }
        float sum = SUM(sums), lse = top + logf(sum), share = loss->smoothing / (float)V * weight;
        lanes factor = FILL(weight / sum), less = FILL(share);
        for (int64_t i = 0; i < V; i += WIDTH)
            NAME(put)(row + i, NAME(get)(row + i, V - i) * factor - less, V - i);
        row[loss->targets[m]] -= (1.0f - loss->smoothing) * weight;
        float nll = lse - at_target;
        loss->sums[2 * m] = nll * weight;
        loss->sums[2 * m + 1] = ((1.0f - loss->smoothing) * nll +
                                 loss->smoothing * (lse - mean / (float)V)) * weight;
        if (loss->smoothing == 0.0f) loss->sums[2 * m + 1] = nll * weight;
    }
}

/* --- norms ------------------------------------------------------------------------------------ */

/* y = (x - mean) rate gain + bias, rate = 1 / sqrt(mean((x - mean)^2) + eps); RMSNorm has a mean of
   0. x is what is given, or its sum with scale drop(added), which is written too. */
TARGET static void NAME(norm_forward)(void *data, int64_t first, int64_t last) {
    const struct norm *norm = data;
    const lanes plus = FILL(norm->plus), scale = FILL(norm->scale);
    int64_t D = norm->width;
    for (int64_t m = first; m < last; m++) {
        const float *x = norm->x + m * D;
        lanes sums = FILL(0.0f), mean = FILL(0.0f);
        if (norm->added) {
            for (int64_t i = 0; i < D; i += WIDTH) {
                lanes z = NAME(get)(norm->added + m * D + i, D - i) * scale;
                if (norm->drop.limit) z *= NAME(kept)(&norm->drop, (uint32_t)(m * D + i));
                NAME(put)(norm->sum + m * D + i, NAME(get)(x + i, D - i) + z, D - i);
            }
            x = norm->sum + m * D;
        }
        if (norm->layer) {
            for (int64_t i = 0; i < D; i += WIDTH) sums += NAME(get)(x + i, D - i);
            norm->mean[m] = SUM(sums) / (float)D;
            mean = FILL(norm->mean[m]);
            sums = FILL(0.0f);
        }
        for (int64_t i = 0; i < D; i += WIDTH) {
            lanes v = NAME(get)(x + i, D - i) - mean;
            for (int l = (int)(D - i); l < WIDTH; l++) v[l] = 0.0f;
            sums = FMA(v, v, sums);
        }
        float rate = 1.0f / sqrtf(SUM(sums) / (float)D + norm->eps);
        norm->rate[m] = rate;
        for (int64_t i = 0; i < D; i += WIDTH) {
            lanes gain = NAME(get)(norm->gain + i, D - i) + plus;
            lanes v = (NAME(get)(x + i, D - i) - mean) * FILL(rate) * gain;
            if (norm->bias) v += NAME(get)(norm->bias + i, D - i);
            NAME(put)(norm->y + m * D + i, v, D - i);
        }
    }
}

/* n = (x - mean) rate, g = dy gain:  dx = rate (g - mean(g) - n mean(g n)) + more,
   dgain = sum(dy n),  dbias = sum(dy); RMSNorm has no mean(g).
   An item is a piece of NORM_ROWS rows, with sums of its own. */
TARGET static void NAME(norm_backward)(void *data, int64_t first, int64_t last) {
    const struct norm *norm = data;
    const lanes plus = FILL(norm->plus);
    int64_t D = norm->width;
    for (int64_t piece = first; piece < last; piece++) {
        int64_t begin = piece * NORM_ROWS;
        int64_t end = begin + NORM_ROWS < norm->rows ? begin + NORM_ROWS : norm->rows;
        float *d_gain = norm->d_gain + piece * D;
        float *d_bias = norm->d_bias ? norm->d_bias + piece * D : 0;
        memset(d_gain, 0, sizeof(float) * (size_t)D);
        if (d_bias) memset(d_bias, 0, sizeof(float) * (size_t)D);
        for (int64_t m = begin; m < end; m++) {
            const float *x = norm->x + m * D, *dy = norm->y + m * D;
            lanes rate = FILL(norm->rate[m]), along = FILL(0.0f), sums = FILL(0.0f);
            lanes mean = FILL(norm->layer ? norm->mean[m] : 0.0f);
            for (int64_t i = 0; i < D; i += WIDTH) {
                lanes d = NAME(get)(dy + i, D - i), n = (NAME(get)(x + i, D - i) - mean) * rate;
                lanes g = d * (NAME(get)(norm->gain + i, D - i) + plus);
                along = FMA(g, n, along);
                sums += g;
                NAME(put)(d_gain + i, FMA(d, n, NAME(get)(d_gain + i, D - i)), D - i);
                if (d_bias) NAME(put)(d_bias + i, NAME(get)(d_bias + i, D - i) + d, D - i);
            }
            lanes slope = FILL(SUM(along) / (float)D);
            lanes shift = FILL(norm->layer ? SUM(sums) / (float)D : 0.0f);
            for (int64_t i = 0; i < D; i += WIDTH) {
                lanes g = NAME(get)(dy + i, D - i) * (NAME(get)(norm->gain + i, D - i) + plus);
                lanes n = (NAME(get)(x + i, D - i) - mean) * rate, d = (g - shift - n * slope) * rate;
                if (norm->more) d += NAME(get)(norm->more + m * D + i, D - i);
                NAME(put)(norm->dx + m * D + i, d, D - i);
            }
        }
    }
}

/* --- activations and gates -------------------------------------------------------------------- */

/* A quotient of polynomials, as Eigen has it: the largest error is some units in the last place. */
TARGET INLINE lanes NAME(erf)(lanes x) {
    lanes s, p, most = FILL(1.0f), least = FILL(-1.0f), given = x;
    x = NAME(pick)(x < FILL(-4.0f), FILL(-4.0f), NAME(pick)(x > FILL(4.0f), FILL(4.0f), x));
    s = x * x;
    p = FMA(s, FILL(-2.72614225801306e-10f), FILL(2.77068142495902e-8f));
    p = FMA(p, s, FILL(-2.10102402082508e-6f));
    p = FMA(p, s, FILL(-5.69250639462346e-5f));
    p = FMA(p, s, FILL(-7.34990630326855e-4f));
    p = FMA(p, s, FILL(-2.95459980854025e-3f));
    p = FMA(p, s, FILL(-1.60960333262415e-2f));
    lanes q = FMA(s, FILL(-1.45660718464996e-5f), FILL(-2.13374055278905e-4f));
    q = FMA(q, s, FILL(-1.68282697438203e-3f));
    q = FMA(q, s, FILL(-7.37332916720468e-3f));
    q = FMA(q, s, FILL(-1.42647390514189e-2f));
    x = NAME(pick)(given > FILL(3.92f), most, x * p / q);
    return NAME(pick)(given < FILL(-3.92f), least, x);
}

TARGET INLINE lanes NAME(tangent)(lanes x) {
    x = NAME(pick)(x < FILL(-9.0f), FILL(-9.0f), NAME(pick)(x > FILL(9.0f), FILL(9.0f), x));
    lanes s = x * x, p = FMA(s, FILL(-2.76076847742355e-16f), FILL(2.00018790482477e-13f));
    p = FMA(p, s, FILL(-8.60467152213735e-11f));
    p = FMA(p, s, FILL(5.12229709037114e-8f));
    p = FMA(p, s, FILL(1.48572235717979e-5f));
    p = FMA(p, s, FILL(6.37261928875436e-4f));
    p = FMA(p, s, FILL(4.89352455891786e-3f));
    lanes q = FMA(s, FILL(1.19825839466702e-6f), FILL(1.18534705686654e-4f));
    q = FMA(q, s, FILL(2.26843463243900e-3f));
    q = FMA(q, s, FILL(4.89352518554385e-3f));
    return x * p / q;
}

/* f(x), and where `slope` is given f'(x). */
TARGET INLINE lanes NAME(activation)(int function, lanes x, lanes *slope) {
    const lanes zero = FILL(0.0f);
    lanes s, u;
    switch (function) {
    case SILU: /* x s, s = sigmoid(x) */
        s = NAME(sigmoid)(x);
        if (slope) *slope = s * (1.0f + x * (1.0f - s));
        return x * s;
    case GELU: /* x P(x), P the normal distribution */
        s = FMA(NAME(erf)(x * FILL(0.70710678f)), FILL(0.5f), FILL(0.5f));
        if (slope) *slope = FMA(x * FILL(0.39894228f), NAME(exponential)(x * x * FILL(-0.5f)), s);
        return x * s;
    case GELU_TANH: /* x (1 + tanh u) / 2 = x sigmoid(2 u), 2 u = a (x + b x^3) */
        u = x * x;
        s = NAME(sigmoid)(x * FILL(1.5957691f) * FMA(u, FILL(0.044715f), FILL(1.0f)));
        if (slope) {
            lanes inner = FILL(1.5957691f) * FMA(u, FILL(0.134145f), FILL(1.0f));
            *slope = s * (1.0f + x * (1.0f - s) * inner);
        }
        return x * s;
    case RELU2:
        s = NAME(pick)(x > zero, x, zero);
        if (slope) *slope = s + s;
        return s * s;
    case TANH:
        s = NAME(tangent)(x);
        if (slope) *slope = 1.0f - s * s;
        return s;
    default: /* RELU */
        if (slope) *slope = NAME(pick)(x > zero, FILL(1.0f), zero);
        return NAME(pick)(x > zero, x, zero);
    }
}

/* y = f(gate) up */
TARGET static void NAME(gate_forward)(void *data, int64_t first, int64_t last) {
    const struct gate *job = data;
    int64_t D = job->width;
    for (int64_t m = first; m < last; m++) {
        const float *gate = job->gate + m * job->gate_row, *up = job->up + m * job->up_row;
        for (int64_t i = 0; i < D; i += WIDTH) {
            lanes y = NAME(activation)(job->function, NAME(get)(gate + i, D - i), 0);
            if (job->up) y *= NAME(get)(up + i, D - i);
            NAME(put)(job->y + m * D + i, y, D - i);
        }
    }
}

/* dgate = dy up f'(gate),  dup = dy f(gate) */
TARGET static void NAME(gate_backward)(void *data, int64_t first, int64_t last) {
    const struct gate *job = data;
    int64_t D = job->width;
    for (int64_t m = first; m < last; m++) {
        const float *gate = job->gate + m * job->gate_row, *up = job->up + m * job->up_row;
        for (int64_t i = 0; i < D; i += WIDTH) {
            lanes d = NAME(get)(job->y + m * D + i, D - i), slope;
            lanes y = NAME(activation)(job->function, NAME(get)(gate + i, D - i), &slope);
            if (job->up) {
                slope *= NAME(get)(up + i, D - i);
                NAME(put)(job->d_up + m * job->d_up_row + i, d * y, D - i);
            }
            NAME(put)(job->d_gate + m * job->d_gate_row + i, d * slope, D - i);
        }
    }
}

/* --- sums ------------------------------------------------------------------------------------- */

/* y = x + scale drop(z) */
TARGET static void NAME(sum)(void *data, int64_t first, int64_t last) {
    const struct sum *sum = data;
    const lanes scale = FILL(sum->scale);
    int64_t D = sum->width;
    for (int64_t m = first; m < last; m++)
        for (int64_t i = 0; i < D; i += WIDTH) {
            lanes v = NAME(get)(sum->z + m * sum->z_row + i, D - i) * scale;
            if (sum->drop.limit) v *= NAME(kept)(&sum->drop, (uint32_t)(m * D + i));
            if (sum->x) v += NAME(get)(sum->x + m * sum->x_row + i, D - i);
            NAME(put)(sum->y + m * sum->y_row + i, v, D - i);
        }
}

/* An item is a piece of NORM_ROWS rows, with sums of its own. */
TARGET static void NAME(columns)(void *data, int64_t first, int64_t last) {
    const struct columns *columns = data;
    int64_t D = columns->width;
    for (int64_t piece = first; piece < last; piece++) {
        int64_t begin = piece * NORM_ROWS;
        int64_t end = begin + NORM_ROWS < columns->rows ? begin + NORM_ROWS : columns->rows;
        for (int64_t i = 0; i < D; i += WIDTH) {
            lanes sums = FILL(0.0f);
            for (int64_t m = begin; m < end; m++) sums += NAME(get)(columns->x + m * columns->row + i, D - i);
            NAME(put)(columns->sums + piece * D + i, sums, D - i);
        }
    }
}

#include "train_attention.h"

/* --- rotary positions ------------------------------------------------------------------------- */

/* An item is one token: number i of the first half of each head turns with number i of the second,
   by its angle, or back by it. */
TARGET static void NAME(turn)(void *data, int64_t first, int64_t last) {
    const struct turn *turn = data;
    int64_t half = turn->half, T = turn->length;
    for (int64_t m = first; m < last; m++) {
        const float *cos = turn->cos + (m / T) * turn->batch + (m % T) * half;
        const float *sin = turn->sin + (m / T) * turn->batch + (m % T) * half;
        for (int64_t n = 0; n < turn->heads; n++) {
            const float *x = turn->x.at + (m / T) * turn->x.batch + n * turn->x.head + (m % T) * turn->x.row;
            float *y = turn->y.at + (m / T) * turn->y.batch + n * turn->y.head + (m % T) * turn->y.row;
            for (int64_t i = 0; i < half; i += WIDTH) {
                int64_t left = half - i;
                lanes a = NAME(get)(x + i, left), b = NAME(get)(x + half + i, left);
                lanes c = NAME(get)(cos + i, left), s = NAME(get)(sin + i, left);
                if (turn->back) s = -s;
                NAME(put)(y + i, a * c - b * s, left);
                NAME(put)(y + half + i, b * c + a * s, left);
            }
            for (int64_t i = 2 * half; i < turn->width; i++) y[i] = x[i];
        }
    }
}

/* --- AdamW ------------------------------------------------------------------------------------ */

TARGET INLINE double NAME(sum_of_squares)(const float *g, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; i += 64 * WIDTH) {
        lanes sums = FILL(0.0f);
        int64_t end = i + 64 * WIDTH < count ? i + 64 * WIDTH : count;
        for (int64_t j = i; j < end; j += WIDTH) {
            lanes v = NAME(get)(g + j, end - j);
            sums = FMA(v, v, sums);
        }
        total += (double)SUM(sums);
    }
    return total;
}

/* g = gradient * scale:  m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
   w = w (1 - lr decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps) */
TARGET INLINE void NAME(adam_piece)(const struct adam *adam, int64_t at, int64_t count) {
    const lanes b1 = FILL((float)(1.0 - adam->beta1)), b2 = FILL((float)adam->beta2);
    const lanes more = FILL((float)(1.0 - adam->beta2)), scale = FILL(adam->scale);
    const lanes eps = FILL((float)adam->eps), kept = FILL((float)(1.0 - adam->lr * adam->decay));
    const lanes rate = FILL((float)(adam->lr / (1.0 - pow(adam->beta1, adam->steps))));
    const lanes root = FILL((float)sqrt(1.0 - pow(adam->beta2, adam->steps)));
    const float *g = adam->gradient + at;
    float *w = adam->weight + at, *m = adam->mean + at, *v = adam->square + at;
    for (int64_t i = 0; i < count; i += WIDTH) {
        int64_t left = count - i;
        lanes d = NAME(get)(g + i, left) * scale, mean = NAME(get)(m + i, left);
        lanes square = NAME(get)(v + i, left) * b2 + d * d * more;
        mean = mean + (d - mean) * b1;
        NAME(put)(m + i, mean, left);
        NAME(put)(v + i, square, left);
        lanes below = NAME(root)(square) / root + eps;
        NAME(put)(w + i, NAME(get)(w + i, left) * kept - rate * mean / below, left);
    }
}

TARGET static void NAME(squares)(void *data, int64_t first, int64_t last) {
    const struct adam *adam = data;
    for (int64_t i = first; i < last; i++) {
        int64_t at = i * PIECE, count = at + PIECE < adam->count ? PIECE : adam->count - at;
        adam->sums[i] = NAME(sum_of_squares)(adam->gradient + at, count);
    }
}

TARGET static void NAME(adam)(void *data, int64_t first, int64_t last) {
    const struct adam *adam = data;
    for (int64_t i = first; i < last; i++) {
        int64_t at = i * PIECE, count = at + PIECE < adam->count ? PIECE : adam->count - at;
        NAME(adam_piece)(adam, at, count);
    }
}

#undef WHOLE
