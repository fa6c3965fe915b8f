/* What the C files share: variants of the machine's instructions, and work shared among threads. */

#ifndef GLASS_NATIVE_H
#define GLASS_NATIVE_H

#include <stdint.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GLASS_X86 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

enum { PORTABLE = 0, AVX2_FMA = 1, AVX512_VNNI = 2 };

/* The variant in use: the best that this machine has, or a lesser one that was asked for. */
int glass_variant(void);

#define SHARED (1 << 15) /* numbers that one thread does sooner than two begin */

/* A part of the work: items first .. last - 1. */
typedef void (*part_fn)(void *job, int64_t first, int64_t last);

/* Calls `part` until `count` items are done, by so many threads, `chunk` items at a time.
   Every item is done by exactly one thread, whatever their number. */
void glass_share(part_fn part, void *job, int64_t count, int64_t chunk, int threads);

#endif
