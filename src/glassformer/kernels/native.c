/* Which instructions are used, and whose threads.

   The threads are those of the OpenMP runtime that torch itself runs on: its entry point is handed
   in by the caller, so that there is one pool and this file links against none. */

#include "native.h"

#include <sched.h>
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

/* --- a team ------------------------------------------------------------------------------------

   One thread leads and posts work, the others look for it. A piece of work has a number, and its
   number and the next item to do are one word: an item is claimed by exchanging the word, so that
   nobody can claim an item of other work than it has read. The leader goes on when every claimed
   item is done; a thread that claims nothing is never waited for. */

#define SPINS 4000              /* looks at a word before a thread gives way to others */
#define ITEMS ((1ull << 40) - 1) /* the lower bits are the next item, the upper the work's number */

struct team {
    void (*body)(void *data);
    void *data;
    const char *leader;
    _Atomic uint64_t word;
    _Atomic int64_t done;
    _Atomic int over;
    _Atomic(part_fn) part;
    _Atomic(void *) job;
    _Atomic int64_t count, chunk;
    double finished;
};

static _Thread_local struct team *leading = 0;
static _Thread_local int single = 0; /* in a team of one: nothing is shared */

static void wait_a_little(int *looks) {
    if (++*looks < SPINS) {
#ifdef GLASS_X86
        _mm_pause();
#endif
    } else {
        sched_yield();
    }
}

/* Does items of the work in `word` until none is left. */
static void take_part(struct team *team, uint64_t word) {
    uint64_t work = word & ~ITEMS;
    part_fn part = team->part;
    void *job = team->job;
    int64_t count = team->count, chunk = team->chunk;
    while ((word & ~ITEMS) == work && (int64_t)(word & ITEMS) < count) {
        int64_t first = (int64_t)(word & ITEMS);
        int64_t last = first + chunk < count ? first + chunk : count;
        if (!atomic_compare_exchange_weak(&team->word, &word, work | (uint64_t)last)) continue;
        part(job, first, last);
        atomic_fetch_add(&team->done, last - first);
        word = team->word;
    }
}

static void post(struct team *team, part_fn part, void *job, int64_t count, int64_t chunk) {
    uint64_t word = (team->word & ~ITEMS) + ITEMS + 1;
    int looks = 0;
    team->word = word | ITEMS; /* nothing to claim while the work is written down */
    team->part = part;
    team->job = job;
    team->count = count;
    team->chunk = chunk;
    team->done = 0;
    team->word = word;
    take_part(team, word);
    while (team->done < count) wait_a_little(&looks);
}

static void member(void *data) {
    struct team *team = data;
    if (team->leader == &own_byte) {
        leading = team;
        team->body(team->data);
        leading = 0;
        team->finished = now();
        team->over = 1;
        return;
    }
    for (int looks = 0; !team->over; wait_a_little(&looks)) {
        uint64_t word = team->word;
        if ((int64_t)(word & ITEMS) < team->count) {
            take_part(team, word);
            looks = 0;
        }
    }
}

/* On a busy machine a thread may come milliseconds after the others have done its work, and a
   region ends when all have come. If that costs more than it can save, the next calls go alone,
   ever more of them as long as it does not get better. */
static _Atomic int alone = 0, patience = FEWEST_ALONE;

static int goes_alone(int threads) {
    if (!parallel || threads < 2) return 1;
    if (alone <= 0) return 0;
    alone--;
    return 1;
}

static void judge(double waited, double worked) {
    if (waited < WORTH_WAITING + worked) {
        patience = FEWEST_ALONE;
    } else {
        alone = patience;
        if (patience < MOST_ALONE) patience = 2 * patience;
    }
}

void glass_share(part_fn part, void *job, int64_t count, int64_t chunk, int threads) {
    if (count <= chunk || single) {
        part(job, 0, count);
    } else if (leading) {
        post(leading, part, job, count, chunk);
    } else if (goes_alone(threads)) {
        part(job, 0, count);
    } else {
        struct shared all = {part, job, count, chunk, 0, &own_byte, 0};
        double begun = now();
        parallel(region, &all, (unsigned)threads, 0);
        judge(now() - all.finished, all.finished - begun);
    }
}

void glass_team(void (*body)(void *data), void *data, int threads) {
    if (goes_alone(threads)) {
        single = 1;
        body(data);
        single = 0;
        return;
    }
    struct team team = {.body = body, .data = data, .leader = &own_byte, .word = ITEMS};
    double begun = now();
    parallel(member, &team, (unsigned)threads, 0);
    judge(now() - team.finished, team.finished - begun);
}
