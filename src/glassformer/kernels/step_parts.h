/* Included by step.c once for each width of vectors (each_width.h): the parts of a model, for some
   rows each. */

/* --- WIDTH numbers ---------------------------------------------------------------------------- */

/* x/2 (1 + erf(x / sqrt(2))), with erfc(z) = t (a1 + t (a2 + ..)) exp(-z^2) for z >= 0,
   t = 1 / (1 + p z): Abramowitz and Stegun, 7.1.26, wrong by 1.5e-7 at most. */
TARGET INLINE lanes NAME(gelu)(lanes x) {
    const lanes zero = {0};
    lanes z = NAME(pick)(x < zero, -x, x) * 0.70710678f;
    lanes t = 1.0f / (1.0f + 0.3275911f * z);
    lanes p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    lanes tail = 0.5f * p * t * NAME(exponential)(-z * z); /* of the normal distribution */
    return x * NAME(pick)(x < zero, tail, 1.0f - tail);
}

TARGET INLINE lanes NAME(gelu_tanh)(lanes x) {
    return x * NAME(sigmoid)(1.5957691216f * (x + 0.044715f * x * x * x));
}

/* tanh(x): Cephes' polynomial near 0, where the other form would lose digits. */
TARGET INLINE lanes NAME(tanh)(lanes x) {
    const lanes near = (lanes){0} + 0.625f;
    lanes z = x * x, far = 2.0f * NAME(sigmoid)(2.0f * x) - 1.0f;
    lanes p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return NAME(pick)((x < near) & (x > -near), p * z * x + x, far);
}

/* --- rows ------------------------------------------------------------------------------------- */

TARGET static void NAME(embed)(void *data, int64_t first, int64_t last) {
    const struct work *work = data;
    const struct op *op = work->op;
    for (int64_t m = first; m < last; m++) {
        float *to = row_of(work, op->to, op->to_width, m);
        int64_t at = work->step->token[m] * op->to_width;
        const float *wide = (const float *)op->weight + at;
        const uint16_t *half = (const uint16_t *)op->weight + at;
        if (op->form == INTEGER) glass_integer_row(op->weight, work->step->token[m], to);
        if (op->form == BLOCKS) glass_unpack_rows(op->weight, work->step->token[m], 1, to);
        for (int64_t i = 0; i < op->to_width; i++) {
            float value = op->form >= INTEGER ? to[i] : 0.0f;
            if (op->form == FLOAT32) value = wide[i];
            if (op->form == BFLOAT16) value = widened(half[i]);
            to[i] = value * op->number;
        }
    }
}

TARGET static void NAME(add_position)(void *data, int64_t first, int64_t last) {
    const struct work *work = data;
    const struct op *op = work->op;
    for (int64_t m = first; m < last; m++) {
        float *to = row_of(work, op->to, op->to_width, m);
        const float *table = (const float *)op->weight + work->step->position[m] * op->to_width;
        for (int64_t i = 0; i < op->to_width; i++) to[i] += table[i];
    }
}

/* sum(x - shift), or of its squares. */
TARGET INLINE float NAME(total)(const float *x, int64_t count, float shift, int squares) {
    lanes sums = {0};
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        lanes v = NAME(get)(x + i, WIDTH) - shift;
        sums += squares ? v * v : v;
    }
    float sum = SUM(sums);
    for (; i < count; i++) sum += squares ? (x[i] - shift) * (x[i] - shift) : x[i] - shift;
    return sum;
}

/* LayerNorm: (x - mean) / sqrt(var + eps) * gain + bias.  RMSNorm: x / sqrt(mean x^2 + eps) * gain */
TARGET static void NAME(norm)(void *data, int64_t first, int64_t last) {
    const struct work *work = data;
    const struct op *op = work->op;
    const float *gain = op->weight, *bias = op->bias;
    for (int64_t m = first; m < last; m++)
        for (int64_t piece = 0; piece < op->count; piece++) {
            int64_t at = op->first + piece * op->width;
            const float *x = row_of(work, op->from, op->from_width, m) + at;
            float *y = row_of(work, op->to, op->to_width, m) + at;
            float mean = 0, width = (float)op->width;
            if (op->form == LAYER_NORM) mean = NAME(total)(x, op->width, 0, 0) / width;
            float scale = 1.0f / sqrtf(NAME(total)(x, op->width, mean, 1) / width + op->number);
            for (int64_t i = 0; i < op->width; i++) y[i] = (x[i] - mean) * scale * gain[i];
            if (bias)
                for (int64_t i = 0; i < op->width; i++) y[i] += bias[i];
        }
}

/* Heads turned by their token's angles: number i of the first half with number i of the second. */
TARGET static void NAME(rotate)(void *data, int64_t first, int64_t last) {
    const struct work *work = data;
    const struct op *op = work->op;
    int64_t half = op->groups / 2; /* of the numbers of a head that are turned */
    for (int64_t m = first; m < last; m++) {
        const float *cos = (const float *)op->weight + work->step->position[m] * half;
        const float *sin = op->bias + work->step->position[m] * half;
        for (int64_t piece = 0; piece < op->count; piece++) {
            float *x = row_of(work, op->to, op->to_width, m) + op->first + piece * op->width;
            for (int64_t i = 0; i < half; i++) {
                float a = x[i], b = x[i + half];
                x[i] = a * cos[i] - b * sin[i];
                x[i + half] = b * cos[i] + a * sin[i];
            }
        }
    }
}

/* y (+)= number x, or with a cap c: c tanh(number x / c). */
TARGET static void NAME(adjust)(void *data, int64_t first, int64_t last) {
    const struct work *work = data;
    const struct op *op = work->op;
    for (int64_t m = first; m < last; m++) {
        const float *x = row_of(work, op->from, op->from_width, m);
        float *y = row_of(work, op->to, op->to_width, m);
        for (int64_t i = 0; i < op->to_width; i += WIDTH) {
            int64_t left = op->to_width - i;
            lanes v = NAME(get)(x + i, left) * op->number;
            if (op->cap > 0) v = op->cap * NAME(tanh)(v / op->cap);
            if (op->onto) v += NAME(get)(y + i, left);
            NAME(put)(y + i, v, left);
        }
    }
}

/* A key, or a value, in 8 bits: its numbers go `apart` bytes from each other, and its steps behind
   all codes of the page. */
TARGET INLINE void NAME(remember_rounded)(const struct op *op, const float *x, float *to, int64_t place,
                                          int64_t first, int64_t apart) {
    int8_t *codes = (int8_t *)to + first, group[GROUP];
    float *steps = to + PAGE * op->width / 4 + place;
    for (int64_t h = 0; h < op->width; h += GROUP, steps += PAGE) {
        int64_t count = op->width - h < GROUP ? op->width - h : GROUP;
        *steps = rounded_group(x + h, count, group);
        for (int64_t i = 0; i < count; i++) codes[(h + i) * apart] = group[i];
    }
}

/* Keys and values of the new tokens go into their rows' pages: `count` heads of each. */
TARGET static void NAME(remember)(void *data, int64_t first, int64_t last) {
    const struct work *work = data;
    const struct op *op = work->op;
    int64_t H = op->width;
    for (int64_t m = first; m < last; m++) {
        const float *k = row_of(work, op->from, op->from_width, m) + op->first;
        const float *v = k + op->count * H;
        int64_t place = work->step->position[m] % PAGE;
        for (int64_t head = 0; head < op->count; head++, k += H, v += H) {
            float *keys = head_of_page(work, work->step->row[m], work->step->position[m], head);
            float *values = keys + room_of(op);
            if (op->rounded) {
                NAME(remember_rounded)(op, k, keys, place, place, PAGE);
                NAME(remember_rounded)(op, v, values, place, place * H, 1);
                continue;
            }
            for (int64_t h = 0; h < H; h++) keys[h * PAGE + place] = k[h];
            memcpy(values + place * H, v, sizeof(float) * (size_t)H);
        }
    }
}

#include "step_attention.h"

/* --- feed-forward ----------------------------------------------------------------------------- */

TARGET static void NAME(activate)(void *data, int64_t first, int64_t last) {
    const struct work *work = data;
    const struct op *op = work->op;
    for (int64_t m = first; m < last; m++) {
        const float *x = row_of(work, op->from, op->from_width, m);
        float *y = row_of(work, op->to, op->to_width, m);
        const lanes zero = {0};
        for (int64_t i = 0; i < op->to_width; i += WIDTH) {
            int64_t left = op->to_width - i;
            lanes v = NAME(get)(x + i, left);
            switch (op->form) {
                case RELU: v = NAME(pick)(v < zero, zero, v); break;
                case RELU2: v = NAME(pick)(v < zero, zero, v * v); break;
                case GELU: v = NAME(gelu)(v); break;
                case GELU_TANH: v = NAME(gelu_tanh)(v); break;
                case SILU: v = v * NAME(sigmoid)(v); break;
            }
            /* gated: times the second half of the row */
            if (op->gated) v *= NAME(get)(x + op->to_width + i, left);
            NAME(put)(y + i, v, left);
        }
    }
}

/* --- choosing --------------------------------------------------------------------------------- */

/* The largest logit, or NaN where one is. */
TARGET static float NAME(most)(const float *logits, int64_t count) {
    lanes best = (lanes){0} - INFINITY;
    whole wrong = {0};
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        lanes v = NAME(get)(logits + i, WIDTH);
        wrong |= v != v;
        best = NAME(pick)(v > best, v, best);
    }
    float most = LARGEST(best);
    for (int l = 0; l < WIDTH; l++)
        if (wrong[l]) return NAN;
    for (; i < count; i++) {
        if (logits[i] != logits[i]) return NAN;
        most = logits[i] > most ? logits[i] : most;
    }
    return most;
}

/* The logarithm of the sum of exponentials, less the largest logit. */
TARGET static float NAME(log_sum)(const float *logits, int64_t count, float most) {
    lanes sums = {0};
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        sums += NAME(exponential)(NAME(get)(logits + i, WIDTH) - most);
    float all = SUM(sums);
    for (; i < count; i++) all += expf(logits[i] - most);
    return logf(all);
}

/* The first of the likeliest tokens, or -1 where that has no finite logit or one is no number;
   `logprob` (or null) gets its log-probability among all tokens, closed ones too. */
TARGET static int64_t NAME(likeliest)(float *logits, int64_t count, const int64_t *closed,
                                      int64_t n_closed, float *logprob) {
    int64_t i, at = 0;
    float most = NAME(most)(logits, count), all = 0;
    if (most != most) return -1;
    if (logprob) all = most + NAME(log_sum)(logits, count, most);
    if (n_closed) {
        for (i = 0; i < n_closed; i++) logits[closed[i]] = -INFINITY;
        for (i = 0, most = -INFINITY; i < count; i++) most = logits[i] > most ? logits[i] : most;
    }
    if (!(most > -INFINITY && most < INFINITY)) return -1;
    while (logits[at] != most) at++;
    if (logprob) *logprob = logits[at] - all;
    return at;
}
