/* Included by train.c once for each width of vectors (each_width.h): passes over rows of a training
   step, and the gradient of each. */

#define WHOLE(count) (((count) + WIDTH - 1) / WIDTH * WIDTH)

#include "train_attention.h"

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

/* --- RMSNorm ---------------------------------------------------------------------------------- */

/* y = x * rate * gain, rate = 1 / sqrt(mean(x^2) + eps). x is what is given, or its sum with
   `added`, which is written too. */
TARGET static void NAME(norm_forward)(void *data, int64_t first, int64_t last) {
    const struct norm *norm = data;
    int64_t D = norm->width;
    for (int64_t m = first; m < last; m++) {
        const float *x = norm->x + m * D;
        lanes sums = FILL(0.0f);
        if (norm->added) {
            for (int64_t i = 0; i < D; i += WIDTH) {
                lanes v = NAME(get)(x + i, D - i) + NAME(get)(norm->added + m * D + i, D - i);
                NAME(put)(norm->sum + m * D + i, v, D - i);
            }
            x = norm->sum + m * D;
        }
        for (int64_t i = 0; i < D; i += WIDTH) {
            lanes v = NAME(get)(x + i, D - i);
            sums = FMA(v, v, sums);
        }
        float rate = 1.0f / sqrtf(SUM(sums) / (float)D + norm->eps);
        norm->rate[m] = rate;
        for (int64_t i = 0; i < D; i += WIDTH) {
            lanes v = NAME(get)(x + i, D - i) * FILL(rate) * NAME(get)(norm->gain + i, D - i);
            NAME(put)(norm->y + m * D + i, v, D - i);
        }
    }
}

/* n = x rate, g = dy gain:  dx = rate (g - n mean(g n)) + more,  dgain = sum(dy n).
   An item is a piece of NORM_ROWS rows, with a sum of its own. */
TARGET static void NAME(norm_backward)(void *data, int64_t first, int64_t last) {
    const struct norm *norm = data;
    int64_t D = norm->width;
    for (int64_t piece = first; piece < last; piece++) {
        int64_t begin = piece * NORM_ROWS;
        int64_t end = begin + NORM_ROWS < norm->rows ? begin + NORM_ROWS : norm->rows;
        float *d_gain = norm->d_gain + piece * D;
        memset(d_gain, 0, sizeof(float) * (size_t)D);
        for (int64_t m = begin; m < end; m++) {
            const float *x = norm->x + m * D, *dy = norm->y + m * D;
            lanes rate = FILL(norm->rate[m]), along = FILL(0.0f);
            for (int64_t i = 0; i < D; i += WIDTH) {
                lanes d = NAME(get)(dy + i, D - i), n = NAME(get)(x + i, D - i) * rate;
                along = FMA(d * NAME(get)(norm->gain + i, D - i), n, along);
                NAME(put)(d_gain + i, FMA(d, n, NAME(get)(d_gain + i, D - i)), D - i);
            }
            lanes slope = FILL(SUM(along) / (float)D);
            for (int64_t i = 0; i < D; i += WIDTH) {
                lanes g = NAME(get)(dy + i, D - i) * NAME(get)(norm->gain + i, D - i);
                lanes n = NAME(get)(x + i, D - i) * rate, d = (g - n * slope) * rate;
                if (norm->more) d += NAME(get)(norm->more + m * D + i, D - i);
                NAME(put)(norm->dx + m * D + i, d, D - i);
            }
        }
    }
}

/* --- SwiGLU ----------------------------------------------------------------------------------- */

/* y = gate sigmoid(gate) up */
TARGET static void NAME(gate_forward)(void *data, int64_t first, int64_t last) {
    const struct gate *gate = data;
    for (int64_t i = first; i < last; i += WIDTH) {
        lanes g = NAME(get)(gate->gate + i, last - i), u = NAME(get)(gate->up + i, last - i);
        NAME(put)(gate->y + i, g * NAME(sigmoid)(g) * u, last - i);
    }
}

/* s = sigmoid(gate):  dgate = dy up s (1 + gate (1 - s)),  dup = dy gate s */
TARGET static void NAME(gate_backward)(void *data, int64_t first, int64_t last) {
    const struct gate *gate = data;
    for (int64_t i = first; i < last; i += WIDTH) {
        lanes g = NAME(get)(gate->gate + i, last - i), u = NAME(get)(gate->up + i, last - i);
        lanes d = NAME(get)(gate->y + i, last - i), s = NAME(sigmoid)(g);
        NAME(put)(gate->d_gate + i, d * u * s * (1.0f + g * (1.0f - s)), last - i);
        NAME(put)(gate->d_up + i, d * g * s, last - i);
    }
}

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

TARGET static void NAME(squares)(void *data, int64_t first, int64_t last) {
    const struct update *update = data;
    for (int64_t item = first; item < last; item++) {
        const struct piece *piece = update->pieces + item;
        const float *g = (const float *)update->gradients[piece->of] + piece->begin;
        double total = 0;
        for (int64_t i = 0; i < piece->count; i += 64 * WIDTH) {
            lanes sums = FILL(0.0f);
            int64_t end = i + 64 * WIDTH < piece->count ? i + 64 * WIDTH : piece->count;
            for (int64_t j = i; j < end; j += WIDTH) {
                lanes v = NAME(get)(g + j, end - j);
                sums = FMA(v, v, sums);
            }
            total += (double)SUM(sums);
        }
        update->sums[item] = total;
    }
}

/* g = gradient * scale:  m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
   w = w (1 - lr decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps) */
TARGET static void NAME(adamw)(void *data, int64_t first, int64_t last) {
    const struct update *update = data;
    const lanes b1 = FILL((float)(1.0 - update->beta1)), b2 = FILL((float)update->beta2);
    const lanes more = FILL((float)(1.0 - update->beta2)), scale = FILL(update->scale);
    const lanes eps = FILL((float)update->eps);
    for (int64_t item = first; item < last; item++) {
        const struct piece *piece = update->pieces + item;
        const struct tensor *tensor = update->tensors + piece->of;
        const float *g = (const float *)update->gradients[piece->of] + piece->begin;
        float *w = tensor->weight + piece->begin, *m = tensor->mean + piece->begin;
        float *v = tensor->square + piece->begin;
        const lanes kept = FILL((float)(1.0 - update->lr * tensor->decay));
        const lanes rate = FILL((float)tensor->rate), root = FILL((float)tensor->root);
        for (int64_t i = 0; i < piece->count; i += WIDTH) {
            int64_t left = piece->count - i;
            lanes d = NAME(get)(g + i, left) * scale, mean = NAME(get)(m + i, left);
            lanes square = NAME(get)(v + i, left) * b2 + d * d * more;
            mean = mean + (d - mean) * b1;
            NAME(put)(m + i, mean, left);
            NAME(put)(v + i, square, left);
            lanes below = NAME(root)(square) / root + eps;
            NAME(put)(w + i, NAME(get)(w + i, left) * kept - rate * mean / below, left);
        }
    }
}

#undef WHOLE
