/* Includes PARTS_OF, through lanes.h, once for each width of vectors.

   NAME(..) names what is made, TARGET says for which machine. The lines are the same for all: WIDTH
   numbers are added and multiplied side by side. FILL(x) is x in all of them, FMA(a, b, c) is
   a b + c, rounded once where the machine can; SUM and LARGEST are of all numbers of a vector;
   WIDEN is WIDTH bytes, with their signs, as numbers. */

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors pass between inlined functions only */
INLINE float larger(float a, float b) { return a > b ? a : b; }

#ifdef GLASS_X86
AVX2 INLINE float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

AVX2 INLINE float largest8(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
#endif

#define NAME(what) portable_##what
#define TARGET
#define WIDTH 4
#define FILL(x) ((x) - (lanes){0})
#define FMA(a, b, c) ((a) * (b) + (c))
#define SUM(v) ((v)[0] + (v)[2] + ((v)[1] + (v)[3]))
#define LARGEST(v) larger(larger((v)[0], (v)[2]), larger((v)[1], (v)[3]))
#define WIDEN(p) ((lanes){(p)[0], (p)[1], (p)[2], (p)[3]})
#include "lanes.h"

#ifdef GLASS_X86
#define NAME(what) avx2_##what
#define TARGET AVX2
#define WIDTH 8
#define FILL _mm256_set1_ps
#define FMA _mm256_fmadd_ps
#define SUM sum8
#define LARGEST largest8
#define WIDEN(p) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#include "lanes.h"

#define NAME(what) avx512_##what
#define TARGET AVX512
#define WIDTH 16
#define FILL _mm512_set1_ps
#define FMA _mm512_fmadd_ps
#define SUM _mm512_reduce_add_ps
#define LARGEST _mm512_reduce_max_ps
#define WIDEN(p) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#include "lanes.h"
#endif
