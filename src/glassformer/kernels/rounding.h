/* Numbers as 8-bit codes and one step: activations of integer products, keys and values of a step. */

#ifndef GLASS_ROUNDING_H
#define GLASS_ROUNDING_H

#include <math.h>

#include "native.h"

/* x is about step * codes: step = max |x| / 127, and codes are x / step, halves rounded to even.
   Returns the step, NaN where a number is not finite; codes are 0 where the step is 0 or NaN. */
INLINE float rounded_group(const float *x, int64_t count, int8_t *codes) {
    uint32_t most = 0; /* bits of |x| order as |x| does, infinities and NaN above all */
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    float top, size;
    memcpy(&top, &most, 4);
    size = top / 127.0f;
    if (most >= 0x7f800000u) size = NAN;
    if (size > 0)
        for (int64_t i = 0; i < count; i++) {
            float step = rintf(x[i] / size);
            step = step > 127.0f ? 127.0f : step < -127.0f ? -127.0f : step;
            codes[i] = (int8_t)step;
        }
    else memset(codes, 0, (size_t)count);
    return size;
}

#endif
