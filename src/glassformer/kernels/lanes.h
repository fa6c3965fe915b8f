/* Included by each_width.h: WIDTH numbers, what is computed of them, and the parts that use it. Then
   all is undefined, for the next width. */

#define lanes NAME(numbers)
#define whole NAME(integers)
#define stored NAME(stored_numbers)
typedef float lanes __attribute__((vector_size(4 * WIDTH)));
typedef int32_t whole __attribute__((vector_size(4 * WIDTH)));
typedef float stored __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

TARGET INLINE lanes NAME(get)(const float *from, int64_t count) {
    lanes all = {0};
    if (count >= WIDTH) return *(const stored *)from;
    memcpy(&all, from, sizeof(float) * (size_t)count);
    return all;
}

TARGET INLINE void NAME(put)(float *to, lanes all, int64_t count) {
    if (count >= WIDTH) *(stored *)to = all;
    else memcpy(to, &all, sizeof(float) * (size_t)count);
}

TARGET INLINE lanes NAME(pick)(whole mask, lanes yes, lanes no) {
    return (lanes)((mask & (whole)yes) | (~mask & (whole)no));
}

/* exp(x) = 2^n exp(r), n whole: Cody and Waite's reduction, Cephes' polynomial. Below -87 it is
   1.6e-38, above 88 it is 1.7e38; NaN stays NaN. */
TARGET INLINE lanes NAME(exponential)(lanes x) {
    const lanes low = (lanes){0} - 87.0f, high = (lanes){0} + 88.0f;
    x = NAME(pick)(x < low, low, x);
    x = NAME(pick)(x > high, high, x);
    lanes shifted = FMA(x, FILL(1.44269504f), FILL(12582912.0f)); /* n in the lowest bits */
    lanes n = shifted - 12582912.0f;
    lanes r = FMA(n, FILL(2.12194440e-4f), FMA(n, FILL(-0.693359375f), x));
    lanes y = FMA(r, FILL(1.9875691500e-4f), FILL(1.3981999507e-3f));
    y = FMA(y, r, FILL(8.3334519073e-3f));
    y = FMA(y, r, FILL(4.1665795894e-2f));
    y = FMA(y, r, FILL(1.6666665459e-1f));
    y = FMA(y, r, FILL(5.0000001201e-1f));
    y = FMA(y, r * r, r) + 1.0f;
    typedef uint32_t bits __attribute__((vector_size(4 * WIDTH)));
    return (lanes)((bits)y + ((bits)shifted << 23));
}

TARGET INLINE lanes NAME(sigmoid)(lanes x) { return 1.0f / (1.0f + NAME(exponential)(-x)); }

TARGET INLINE lanes NAME(root)(lanes x) {
    for (int l = 0; l < WIDTH; l++) x[l] = sqrtf(x[l]);
    return x;
}

#include PARTS_OF

#undef NAME
#undef TARGET
#undef WIDTH
#undef FILL
#undef SUM
#undef LARGEST
#undef WIDEN
#undef FMA
#undef lanes
#undef whole
#undef stored
