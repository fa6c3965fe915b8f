/* What the C files share: variants of the machine's instructions, and work shared among threads. */

#ifndef GLASS_NATIVE_H
#define GLASS_NATIVE_H

#include <stdint.h>
#include <string.h>

/* GLASS_PORTABLE_ONLY leaves out the other variants, for tests of what all have in common. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(GLASS_PORTABLE_ONLY)
#define GLASS_X86 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#endif

/* GLASS_NO_INLINE compiles in a quarter of the time, for tests of what the lines compute. */
#ifdef GLASS_NO_INLINE
#define INLINE static __attribute__((unused))
#else
#define INLINE static inline __attribute__((always_inline))
#endif
#define EXPORT __attribute__((visibility("default")))

/* float32 of the bits of a float16. */
INLINE float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, bits = half & 0x7fffu;
    float value;
    if (bits < 0x0400u) { /* subnormal, or 0: exact as a product */
        value = (float)bits * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = bits >= 0x7c00u ? 0x7f800000u | (bits & 0x3ffu) << 13 : (bits << 13) + 0x38000000u;
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

enum { PORTABLE = 0, AVX2_FMA = 1, AVX512_VNNI = 2 };

/* The variant in use: the best that this machine has, or a lesser one that was asked for. */
int glass_variant(void);

/* A matrix as it lies in the module or the file, and y (+)= x W^T + b of some rows. */
struct floating {
    const void *weight; /* (O, I) */
    const float *bias;  /* (O) or null */
    int64_t outputs, inputs;
    int32_t form; /* 0: float32; 1: bfloat16; above: PACKED + a type of GGUF's blocks */
};

#define PACKED 16 /* types of blocks come behind it, with the format's own numbers */
#define PANEL 32768 /* numbers that are unpacked at once: they stay in the second cache */

/* Unpacks rows of such blocks, one behind another. */
void glass_unpack_rows(const struct floating *w, int64_t first, int64_t count, float *to);

/* `stride` is the distance between rows of y; `onto` adds to what y holds. */
void glass_floating_rows(const struct floating *w, const float *x, float *y, int64_t stride,
                         int64_t rows, int onto, int threads);

struct integer; /* integer.c */
int glass_integer(const struct integer *w, const float *bias, const float *x, float *y,
                  int64_t rows, int threads);
void glass_integer_row(const struct integer *w, int64_t out, float *to);

#define SHARED (1 << 15) /* numbers that one thread does sooner than two begin */

/* A part of the work: items first .. last - 1. */
typedef void (*part_fn)(void *job, int64_t first, int64_t last);

/* Calls `part` until `count` items are done, by so many threads, `chunk` items at a time.
   Every item is done by exactly one thread, whatever their number. */
void glass_share(part_fn part, void *job, int64_t count, int64_t chunk, int threads);

/* Calls `body` once, on this thread, while threads - 1 others stand by: what it shares is taken up
   in a fraction of a microsecond, and a thread that the machine keeps away is not waited for. */
void glass_team(void (*body)(void *data), void *data, int threads);

#endif
