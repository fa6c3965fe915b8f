/* Which instructions are used, and whose threads.

   The threads are those of the OpenMP runtime that torch itself runs on: its entry point is handed
   in by the caller, so that there is one pool and this file links against none. */

#include "native.h"

#include <stdatomic.h>
#include <time.h>

#define WORTH_WAITING 200e-6 /* seconds */
#define FEWEST_ALONE 16
#define MOST_ALONE 4096

#ifndef GLASS_SOURCE
#define GLASS_SOURCE ""
#endif

typedef void (*parallel_fn)(void (*region)(void *), void *data, unsigned threads, unsigned flags);

static parallel_fn parallel = 0;
static int best = -1, forced = -1;

/* The digest of the sources that this file was compiled from. */
EXPORT const char *glass_source(void) { return GLASS_SOURCE; }

/* GOMP_parallel of the runtime in use, or null: one thread. */
EXPORT void glass_use_threads_of(void *entry) { parallel = (parallel_fn)entry; }

static int find_best(void) {
#ifdef GLASS_X86
    __builtin_cpu_init();
    /* F16C came before AVX2 in every processor; not every compiler can ask for it. */
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return PORTABLE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni"))
        return AVX512_VNNI;
    return AVX2_FMA;
#else
    return PORTABLE;
#endif
}

EXPORT int glass_best_variant(void) {
    if (best < 0) best = find_best();
    return best;
}

/* -1: the best. Returns what is in use from now on; more than the machine has is not given. */
EXPORT int glass_force_variant(int variant) {
    forced = variant;
    return glass_variant();
}

EXPORT int glass_variant(void) {
    int have = glass_best_variant();
    return forced >= 0 && forced < have ? forced : have;
}

/* --- threads --------------------------------------------------------------------------------- */

struct shared {
    part_fn part;
    void *job;
    int64_t count, chunk;
    _Atomic int64_t next;
    const char *caller; /* whose thread-local byte this is */
    double finished;    /* when the caller found nothing more to do */
};

static _Thread_local char own_byte;

static double now(void) {
    struct timespec time;
    timespec_get(&time, TIME_UTC);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void region(void *data) {
    struct shared *all = data;
    for (;;) {
        int64_t first = atomic_fetch_add(&all->next, all->chunk);
        if (first >= all->count) break;
        int64_t last = first + all->chunk;
        all->part(all->job, first, last < all->count ? last : all->count);
    }
    if (all->caller == &own_byte) all->finished = now();
}

/* On a busy machine a thread may come milliseconds after the others have done its work, and a
   region ends when all have come. If that costs more than it can save, the next calls go alone,
   ever more of them as long as it does not get better. */
static _Atomic int alone = 0, patience = FEWEST_ALONE;

void glass_share(part_fn part, void *job, int64_t count, int64_t chunk, int threads) {
    if (!parallel || threads < 2 || count <= chunk || alone > 0) {
        if (threads > 1 && alone > 0) alone--;
        part(job, 0, count);
        return;
    }
    struct shared all = {part, job, count, chunk, 0, &own_byte, 0};
    double begun = now();
    parallel(region, &all, (unsigned)threads, 0);
    double waited = now() - all.finished, worked = all.finished - begun;
    if (waited < WORTH_WAITING + worked) {
        patience = FEWEST_ALONE;
    } else {
        alone = patience;
        if (patience < MOST_ALONE) patience = 2 * patience;
    }
}
