/* Included by step.c once for each width of vectors: the parts of a model, for some rows each.

   NAME(..) names what is made, TARGET says for which machine. The lines are the same for all: 16
   numbers are added and multiplied side by side, in as many instructions as the machine needs. */

/* --- 16 numbers ------------------------------------------------------------------------------- */

TARGET INLINE lanes NAME(get)(const float *from, int64_t count) {
    lanes all = {0};
    memcpy(&all, from, sizeof(float) * (size_t)(count < PAGE ? count : PAGE));
    return all;
}

TARGET INLINE void NAME(put)(float *to, lanes all, int64_t count) {
    memcpy(to, &all, sizeof(float) * (size_t)(count < PAGE ? count : PAGE));
}

TARGET INLINE lanes NAME(pick)(whole mask, lanes yes, lanes no) {
    return (lanes)((mask & (whole)yes) | (~mask & (whole)no));
}

TARGET INLINE float NAME(sum)(lanes v) {
    for (int half = PAGE / 2; half; half /= 2)
        for (int l = 0; l < half; l++) v[l] += v[l + half];
    return v[0];
}

TARGET INLINE float NAME(largest)(lanes v) {
    for (int half = PAGE / 2; half; half /= 2)
        for (int l = 0; l < half; l++) v[l] = v[l + half] > v[l] ? v[l + half] : v[l];
    return v[0];
}

/* exp(x) = 2^n exp(r), n whole: Cody and Waite's reduction, Cephes' polynomial. Below -87 it is
   1.6e-38, above 88 it is 1.7e38; NaN stays NaN. */
TARGET INLINE lanes NAME(exponential)(lanes x) {
    const lanes low = (lanes){0} - 87.0f, high = (lanes){0} + 88.0f;
    x = NAME(pick)(x < low, low, x);
    x = NAME(pick)(x > high, high, x);
    lanes shifted = x * 1.44269504f + 12582912.0f; /* n in the lowest bits */
    lanes n = shifted - 12582912.0f;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    typedef uint32_t bits __attribute__((vector_size(4 * PAGE)));
    return (lanes)((bits)y + ((bits)shifted << 23));
}

TARGET INLINE lanes NAME(sigmoid)(lanes x) { return 1.0f / (1.0f + NAME(exponential)(-x)); }

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
        for (int64_t i = 0; i < op->to_width; i++) {
            float value = op->form == INTEGER ? to[i] : 0.0f;
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
    for (; i + PAGE <= count; i += PAGE) {
        lanes v = NAME(get)(x + i, PAGE) - shift;
        sums += squares ? v * v : v;
    }
    float sum = NAME(sum)(sums);
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
        for (int64_t i = 0; i < op->to_width; i += PAGE) {
            int64_t left = op->to_width - i;
            lanes v = NAME(get)(x + i, left) * op->number;
            if (op->cap > 0) v = op->cap * NAME(tanh)(v / op->cap);
            if (op->onto) v += NAME(get)(y + i, left);
            NAME(put)(y + i, v, left);
        }
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
            float *values = keys + PAGE * H;
            for (int64_t h = 0; h < H; h++) keys[h * PAGE + place] = k[h];
            memcpy(values + place * H, v, sizeof(float) * (size_t)H);
        }
    }
}

/* --- attention -------------------------------------------------------------------------------- */

/* out += weights of 16 positions times their values; `used` of the positions count. */
TARGET INLINE void NAME(add_values)(float *out, const float *weights, const float *values,
                                    int64_t H, int used) {
    int64_t h = 0;
    for (; h + 2 * PAGE <= H; h += 2 * PAGE) {
        lanes a = NAME(get)(out + h, PAGE), b = NAME(get)(out + h + PAGE, PAGE);
        for (int s = 0; s < used; s++) {
            a += weights[s] * NAME(get)(values + s * H + h, PAGE);
            b += weights[s] * NAME(get)(values + s * H + h + PAGE, PAGE);
        }
        NAME(put)(out + h, a, PAGE);
        NAME(put)(out + h + PAGE, b, PAGE);
    }
    for (; h < H; h++)
        for (int s = 0; s < used; s++) out[h] += weights[s] * values[s * H + h];
}

/* softmax(q k^T * scale - slope * distance) v of one query head over positions begin .. end - 1,
   page by page: what was summed is scaled down whenever a larger score is found. */
TARGET INLINE void NAME(attend_head)(const struct work *work, const float *q, float *out,
                                     int64_t m, int64_t head, int64_t begin, int64_t end) {
    const struct op *op = work->op;
    int64_t H = op->width, row = work->step->row[m], at = work->step->position[m];
    float slope = op->weight ? ((const float *)op->weight)[head] : 0.0f;
    /* A sink is a score without a value: it has its share of the sum, and nothing else. */
    float most = op->bias ? op->bias[head] : -INFINITY;
    lanes sums = {op->bias ? 1.0f : 0.0f};
    for (int64_t h = 0; h < H; h++) out[h] = 0.0f;
    for (int64_t from = begin / PAGE * PAGE; from < end; from += PAGE) {
        const float *keys = head_of_page(work, row, from, head / (op->count / op->groups));
        lanes a = {0}, b = {0}, c = {0}, d = {0}; /* four chains, so that none waits for itself */
        int64_t h = 0;
        for (; h + 4 <= H; h += 4) {
            a += q[h] * NAME(get)(keys + h * PAGE, PAGE);
            b += q[h + 1] * NAME(get)(keys + (h + 1) * PAGE, PAGE);
            c += q[h + 2] * NAME(get)(keys + (h + 2) * PAGE, PAGE);
            d += q[h + 3] * NAME(get)(keys + (h + 3) * PAGE, PAGE);
        }
        for (; h < H; h++) a += q[h] * NAME(get)(keys + h * PAGE, PAGE);
        lanes scores = ((a + b) + (c + d)) * op->number;
        if (op->cap > 0) scores = op->cap * NAME(tanh)(scores / op->cap);
        int first = from < begin ? (int)(begin - from) : 0;
        int used = end - from < PAGE ? (int)(end - from) : PAGE;
        if (op->weight)
            for (int l = 0; l < PAGE; l++) scores[l] -= slope * fabsf((float)(at - from - l));
        for (int l = 0; l < PAGE; l++)
            if (l < first || l >= used) scores[l] = -INFINITY;
        float here = NAME(largest)(scores);
        if (here > most) {
            float down = NAME(exponential)((lanes){0} + (most - here))[0];
            if (most > -INFINITY) {
                sums *= down;
                for (int64_t i = 0; i < H; i++) out[i] *= down;
            }
            most = here;
        }
        lanes weights = NAME(exponential)(scores - most);
        for (int l = 0; l < PAGE; l++)
            if (l < first || l >= used) weights[l] = 0.0f;
        sums += weights;
        NAME(add_values)(out, (const float *)&weights, keys + PAGE * H, H, used);
    }
    float sum = NAME(sum)(sums);
    for (int64_t h = 0; h < H && begin < end; h++) out[h] /= sum;
}

/* Items are pairs of a token and a key-value head, whose query heads read the same keys. */
TARGET static void NAME(attend)(void *data, int64_t first, int64_t last) {
    const struct work *work = data;
    const struct op *op = work->op;
    const struct step *step = work->step;
    int64_t group = op->count / op->groups;
    for (int64_t item = first; item < last; item++) {
        int64_t m = item / op->groups, head = item % op->groups * group;
        int64_t end = op->causal ? step->position[m] + 1 : step->length[op->form][step->row[m]];
        int64_t begin = op->window && end > op->window ? end - op->window : 0;
        const float *q = row_of(work, op->from, op->from_width, m) + op->first;
        float *out = row_of(work, op->to, op->to_width, m);
        for (int64_t n = head; n < head + group; n++)
            NAME(attend_head)(work, q + n * op->width, out + n * op->width, m, n, begin, end);
    }
}

/* --- feed-forward ----------------------------------------------------------------------------- */

TARGET static void NAME(activate)(void *data, int64_t first, int64_t last) {
    const struct work *work = data;
    const struct op *op = work->op;
    for (int64_t m = first; m < last; m++) {
        const float *x = row_of(work, op->from, op->from_width, m);
        float *y = row_of(work, op->to, op->to_width, m);
        const lanes zero = {0};
        for (int64_t i = 0; i < op->to_width; i += PAGE) {
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
    for (; i + PAGE <= count; i += PAGE) {
        lanes v = NAME(get)(logits + i, PAGE);
        wrong |= v != v;
        best = NAME(pick)(v > best, v, best);
    }
    float most = NAME(largest)(best);
    for (int l = 0; l < PAGE; l++)
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
    for (; i + PAGE <= count; i += PAGE)
        sums += NAME(exponential)(NAME(get)(logits + i, PAGE) - most);
    float all = NAME(sum)(sums);
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

#undef NAME
#undef TARGET
