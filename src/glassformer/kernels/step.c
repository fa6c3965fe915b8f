/* One decoding step of a complete model: a flat program of operations over a batch of new tokens.

   generation/fast/native.py makes the program from a model; each operation is a part of the model
   under the same name, reads and writes buffers that have a row for every new token, and is shared
   among threads where that is worth it.

   A new token belongs to a sequence (`row`) and has a position in it. Sequences may be at any
   position and have any number of new tokens: a prompt, one token, or several that are tried.
   Keys and values lie in pages of 16 positions, with all layers of a model in one page; a table
   has the pages of each sequence. Sequences that begin alike share pages, and whoever writes into
   a shared page gets a copy first. Within a page the keys of a head are turned, one component of
   16 positions side by side, so that 16 scores grow at once; values lie position by position.
   Keys and values of 8 bits lie in the same order, a byte each; behind the keys of a head, and
   behind its values, are the steps of their groups, those of 16 positions side by side. */

#include <math.h>
#include <string.h>

#include "native.h"
#include "rounding.h"

#define PAGE 16
#define GROUP 32          /* numbers of a key or a value that share a step, where they have 8 bits */
#define STEADY 8          /* pieces of shared work for each thread */
#define TILE 64           /* positions that a query attends to at a time */
#define HANDFUL 6         /* queries that attend at once: their sums are in registers */
#define MOST_VECTORS 4    /* of each of them */
#define MOST_QUERIES 96   /* that go over the positions together */
#define FEW_QUERIES 12    /* that read pages of 8 bits as they are: more share what was widened */

enum kind {
    EMBED, ADD_POSITION, NORM, PRODUCT, ROTATE, REMEMBER, ATTEND, ACTIVATE, ADJUST,
    ROUTE, GATHER, SCATTER, CHOOSE
};
enum form {
    FLOAT32 = 0, BFLOAT16 = 1, INTEGER = 2, BLOCKS = 3, /* of weights */
    LAYER_NORM = 0, RMS_NORM = 1,             /* of norms */
    RELU = 0, GELU = 1, GELU_TANH = 2, SILU = 3, RELU2 = 4, /* of activations */
    OWN = 0, SOURCE = 1,                      /* of memories */
    CHOSEN = 0, ALL = 1,                      /* of the rows that a feed-forward is added to */
};

struct op {
    int32_t kind, form;
    int32_t from, to;             /* buffers */
    int64_t from_width, to_width; /* numbers in one row of each */
    int64_t first, count, width;  /* pieces of a row: the first number, how many, how wide */
    int64_t groups;               /* key-value heads; numbers of a head that are rotated; of an
                                     integer product a buffer to use, of a mixture its weights */
    int64_t window;               /* positions attended to, or 0 for all */
    int64_t layer;                /* where this layer begins in a page */
    const void *weight;           /* a table, a gain, cos by position, a product's matrix, slopes */
    const float *bias;            /* or sin by position, or sinks by head */
    float number;                 /* eps, or a factor */
    float cap;                    /* c of c tanh(x / c), or 0 */
    int32_t onto, gated, causal;
    int32_t rounded;              /* keys and values have 8 bits */
};

/* Pages: `uses` counts the sequences that hold each, `spare` lists those that nobody does. */
struct memory {
    float *pool;
    int64_t page; /* numbers in one */
    int64_t pages, n_spare;
    int32_t *uses, *spare;
};

struct step {
    const struct op *ops;
    int64_t n_ops;
    float **buffers;
    struct memory *memory[2]; /* the sequences' own, and that of their sources */
    int32_t *table[2];        /* sequences x table_width, -1 where there is no page */
    int64_t table_width[2];
    int64_t *length[2]; /* positions of each sequence */
    int64_t *token, *row, *position;
    int64_t n_new;
    const int64_t *chosen; /* the new tokens whose logits are wanted */
    int64_t n_chosen;
    int32_t threads;
    int32_t failed; /* no memory */
};

struct work {
    const struct step *step;
    const struct op *op;
    int64_t together; /* tokens of one item, of attention */
};

/* One head of one token: its positions are begin .. end - 1. */
struct query {
    const float *q;
    float *out;
    int64_t at, begin, end;
    float slope, most;
    float sums[PAGE]; /* of exp(score - most) */
};

/* Pages of one head, with its values behind the keys, and the scores of some queries. */
struct tile {
    const float *keys[TILE / PAGE];
    int rounded; /* they have 8 bits */
    float scores[HANDFUL][TILE];
};

INLINE float *row_of(const struct work *work, int buffer, int64_t width, int64_t m) {
    return work->step->buffers[buffer] + m * width;
}

/* The room in a page, in floats, of one head's keys, and as much again of its values. */
INLINE int64_t room(int64_t H, int rounded) {
    return rounded ? PAGE * H / 4 + PAGE * ((H + GROUP - 1) / GROUP) : PAGE * H;
}

INLINE int64_t room_of(const struct op *op) { return room(op->width, op->rounded); }

/* Where the steps of the keys, or of the values, of a page of 8 bits begin. */
INLINE const float *steps_of(const float *page, int64_t H) { return page + PAGE * H / 4; }

/* The keys of one head in the page that has this position; its values are behind them. */
INLINE float *head_of_page(const struct work *work, int64_t row, int64_t position, int64_t head) {
    const struct op *op = work->op;
    const struct step *step = work->step;
    int64_t width = step->table_width[op->form];
    int64_t page = step->table[op->form][row * width + position / PAGE];
    const struct memory *memory = step->memory[op->form];
    return memory->pool + page * memory->page + op->layer + head * 2 * room_of(op);
}

INLINE void fetch(const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof(float)) __builtin_prefetch(from + i, 0, 2);
}

INLINE float widened(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

#define PARTS_OF "step_parts.h"
#include "each_width.h"

typedef int64_t (*likeliest_fn)(float *, int64_t, const int64_t *, int64_t, float *);
typedef float (*most_fn)(const float *, int64_t);
typedef float (*log_sum_fn)(const float *, int64_t, float);

#define PARTS(NAME)                                                                              \
    {                                                                                            \
        [EMBED] = NAME##_embed, [ADD_POSITION] = NAME##_add_position, [NORM] = NAME##_norm,      \
        [ROTATE] = NAME##_rotate, [REMEMBER] = NAME##_remember, [ATTEND] = NAME##_attend,        \
        [ACTIVATE] = NAME##_activate, [ADJUST] = NAME##_adjust                                   \
    }
#ifdef GLASS_X86
static const part_fn parts[][CHOOSE + 1] = {PARTS(portable), PARTS(avx2), PARTS(avx512)};
static const likeliest_fn likeliest[] = {portable_likeliest, avx2_likeliest, avx512_likeliest};
static const most_fn most_of[] = {portable_most, avx2_most, avx512_most};
static const log_sum_fn log_sum_of[] = {portable_log_sum, avx2_log_sum, avx512_log_sum};
#else
static const part_fn parts[][CHOOSE + 1] = {PARTS(portable)};
static const likeliest_fn likeliest[] = {portable_likeliest};
static const most_fn most_of[] = {portable_most};
static const log_sum_fn log_sum_of[] = {portable_log_sum};
#endif

/* --- the program ------------------------------------------------------------------------------ */

/* How many numbers an operation goes over, for one row. */
static int64_t amount(const struct step *step, const struct op *op) {
    if (op->kind != ATTEND) return op->from_width > op->to_width ? op->from_width : op->to_width;
    int64_t longest = 0;
    for (int64_t m = 0; m < step->n_new; m++) {
        int64_t end = op->causal ? step->position[m] + 1 : step->length[op->form][step->row[m]];
        longest = end > longest ? end : longest;
    }
    return (op->window && op->window < longest ? op->window : longest) * op->count * op->width;
}

/* Tokens that one item of attention has: few enough that there is work for all threads. */
static int64_t tokens_together(const struct step *step, const struct op *op) {
    int64_t most = MOST_QUERIES * op->groups / op->count;
    int64_t steady = step->n_new * op->groups / (STEADY * step->threads);
    int64_t tokens = steady < most ? steady : most;
    return tokens > 1 ? tokens : 1;
}

static void product(struct step *step, const struct op *op, int64_t rows) {
    const float *x = step->buffers[op->from];
    float *y = step->buffers[op->to] + op->first;
    if (op->form != INTEGER) {
        glass_floating_rows(op->weight, x, y, op->to_width, rows, op->onto, step->threads);
        return;
    }
    /* Integer products write rows one behind another: into a buffer of their own where that is
       not how the rows of the result lie, or where there is something to add them to. */
    int64_t outputs = op->width;
    int apart = op->onto || (rows > 1 && op->to_width != outputs);
    float *plain = apart ? step->buffers[op->groups] : y;
    if (glass_integer(op->weight, op->bias, x, plain, rows, step->threads)) step->failed = 1;
    for (int64_t m = 0; apart && m < rows; m++)
        for (int64_t o = 0; o < outputs; o++) {
            float sum = plain[m * outputs + o];
            y[m * op->to_width + o] = op->onto ? y[m * op->to_width + o] + sum : sum;
        }
}

/* --- a mixture of experts: rows are routed, and each expert reads those that chose it ---------- */

/* Logits become weights: softmax(x) at the `count` largest (of equals the first), 0 elsewhere. */
static void route(float *x, int64_t experts, int64_t count, int normalize) {
    float least = INFINITY, most = x[0], all = 0, chosen = 0;
    int64_t last = -1;
    for (int64_t n = 0; n < count; n++) { /* the next in order of size, then of number */
        int64_t next = -1;
        for (int64_t e = 0; e < experts; e++)
            if ((x[e] < least || (x[e] == least && e > last)) && (next < 0 || x[e] > x[next]))
                next = e;
        if (next >= 0) least = x[next], last = next;
    }
    for (int64_t e = 0; e < experts; e++) most = x[e] > most ? x[e] : most;
    for (int64_t e = 0; e < experts; e++) all += expf(x[e] - most);
    for (int64_t e = 0; e < experts; e++) {
        int left = x[e] < least || (x[e] == least && e > last);
        x[e] = left ? 0.0f : expf(x[e] - most) / all; /* what is no number is chosen, and seen */
        chosen += x[e];
    }
    for (int64_t e = 0; normalize && e < experts; e++) x[e] /= chosen;
}

/* Copies the rows that chose expert `layer`, one behind another. Returns how many. */
static int64_t gather(const struct work *work) {
    const struct op *op = work->op;
    int64_t rows = 0;
    for (int64_t m = 0; m < work->step->n_new; m++) {
        if (row_of(work, (int)op->groups, op->count, m)[op->layer] == 0) continue;
        memcpy(row_of(work, op->to, op->to_width, rows++),
               row_of(work, op->from, op->from_width, m), sizeof(float) * (size_t)op->to_width);
    }
    return rows;
}

/* Adds an expert's rows to those that chose it, times their weights; or all rows, each times the
   sigmoid of its gate. */
static void scatter(const struct work *work) {
    const struct op *op = work->op;
    for (int64_t m = 0, from = 0; m < work->step->n_new; m++) {
        float weight = row_of(work, (int)op->groups, op->count, m)[op->layer];
        float *to = row_of(work, op->to, op->to_width, m);
        if (!op->onto) memset(to, 0, sizeof(float) * (size_t)op->to_width);
        if (op->form == ALL) weight = 1.0f / (1.0f + expf(-weight));
        else if (weight == 0) continue;
        const float *x = row_of(work, op->from, op->from_width, from++);
        for (int64_t i = 0; i < op->to_width; i++) to[i] += weight * x[i];
    }
}

static void run(struct step *step) {
    int64_t rows = step->n_new;
    for (const struct op *op = step->ops; op < step->ops + step->n_ops; op++) {
        struct work work = {step, op, 1};
        if (op->kind == SCATTER) {
            scatter(&work);
            rows = step->n_new;
        } else if (op->kind == GATHER) {
            rows = gather(&work);
        } else if (op->kind == CHOOSE) {
            rows = step->n_chosen;
            for (int64_t m = 0; m < rows; m++)
                memcpy(row_of(&work, op->to, op->to_width, m),
                       row_of(&work, op->from, op->from_width, step->chosen[m]),
                       sizeof(float) * (size_t)op->to_width);
        } else if (rows == 0) {
            continue; /* an expert that nobody chose, or no logits are wanted */
        } else if (op->kind == ROUTE) {
            for (int64_t m = 0; m < rows; m++)
                route(row_of(&work, op->to, op->to_width, m), op->to_width, op->count, op->gated);
        } else if (op->kind == PRODUCT) {
            product(step, op, rows);
        } else {
            int64_t items = rows;
            if (op->kind == ATTEND) {
                work.together = tokens_together(step, op);
                items = (rows + work.together - 1) / work.together * op->groups;
            }
            int64_t chunk = items / (STEADY * step->threads) + 1;
            if (rows * amount(step, op) < SHARED) chunk = items;
            glass_share(parts[glass_variant()][op->kind], &work, items, chunk, step->threads);
        }
    }
}

static void run_once(void *step) { run(step); }

/* Reads the new tokens: their keys and values are remembered, and the last buffer has the logits of
   those that were chosen. 0, or 1 where there was no memory. */
EXPORT int glass_step(struct step *step) {
    step->failed = 0;
    glass_team(run_once, step, step->threads);
    return step->failed;
}

struct greedy {
    struct step *step;
    int64_t count, made;
    const int64_t *closed, *ends;
    int64_t n_closed, n_ends;
    int64_t *tokens; /* count x sequences; -1: no token can be chosen */
    float *logprobs; /* the same, or null */
};

static void run_greedy(void *data) {
    struct greedy *all = data;
    struct step *step = all->step;
    const struct op *head = step->ops + step->n_ops - 1;
    int going = 1;
    while (going && all->made < all->count) {
        int64_t *tokens = all->tokens + all->made * step->n_new;
        float *logprobs = all->logprobs ? all->logprobs + all->made * step->n_new : 0;
        run(step);
        all->made++;
        for (int64_t m = 0; m < step->n_new; m++) {
            float *logits = step->buffers[head->to] + m * head->to_width;
            tokens[m] = likeliest[glass_variant()](logits, head->to_width, all->closed,
                                                   all->n_closed, logprobs ? logprobs + m : 0);
            if (tokens[m] < 0) going = 0;
            for (int64_t e = 0; e < all->n_ends; e++) going &= tokens[m] != all->ends[e];
            step->token[m] = tokens[m];
            step->position[m]++;
        }
        if (step->failed) return;
    }
}

/* Reads one new token of each sequence, then the likeliest after it, and so on: until `count` were
   chosen, or some sequence has an end. Returns how many, or -1 where there was no memory. */
EXPORT int64_t glass_greedy(struct greedy *all) {
    all->step->failed = 0;
    all->made = 0;
    glass_team(run_greedy, all, all->step->threads);
    return all->step->failed ? -1 : all->made;
}

/* The token that a step of `glass_greedy` would choose from these logits, which are closed in
   place; -1: none. `logprob` (or null) gets its log-probability. */
EXPORT int64_t glass_likeliest(float *logits, int64_t count, const int64_t *closed,
                               int64_t n_closed, float *logprob) {
    return likeliest[glass_variant()](logits, count, closed, n_closed, logprob);
}

/* --- pages ------------------------------------------------------------------------------------ */

static void release(struct memory *memory, int32_t page) {
    if (page >= 0 && --memory->uses[page] == 0) memory->spare[memory->n_spare++] = page;
}

/* Makes `more` positions behind the length of each sequence writable. Returns how many pages are
   missing: 0, or the caller adds that many and calls again. */
EXPORT int64_t glass_reserve(struct memory *memory, int32_t *table, int64_t width,
                             const int64_t *length, int64_t n_rows, int64_t more) {
    for (int64_t row = 0; row < n_rows; row++, table += width) {
        int64_t end = (length[row] + more + PAGE - 1) / PAGE;
        for (int64_t p = length[row] / PAGE; p < end; p++) {
            int32_t before = table[p];
            if (before >= 0 && memory->uses[before] == 1) continue;
            if (memory->n_spare == 0) return (n_rows - row) * (end - p);
            table[p] = memory->spare[--memory->n_spare];
            memory->uses[table[p]] = 1;
            if (before >= 0 && p * PAGE < length[row])
                memcpy(memory->pool + table[p] * memory->page,
                       memory->pool + before * memory->page,
                       sizeof(float) * (size_t)memory->page);
            release(memory, before);
        }
    }
    return 0;
}

/* Row i of `after` is what row rows[i] of `before` was; pages of rows that nobody continues are
   spare again. Without `after` (n_rows 0) all rows are given up. */
EXPORT void glass_reorder(struct memory *memory, const int32_t *before, int64_t n_before,
                          int32_t *after, const int64_t *rows, int64_t n_rows, int64_t width) {
    for (int64_t i = 0; i < n_rows; i++)
        for (int64_t p = 0; p < width; p++) {
            int32_t page = before[rows[i] * width + p];
            after[i * width + p] = page;
            if (page >= 0) memory->uses[page]++;
        }
    for (int64_t i = 0; i < n_before * width; i++) release(memory, before[i]);
}

/* --- beams ------------------------------------------------------------------------------------ */

/* Searches in which each item continues as many beams as it has: rows first[i] to first[i + 1]. */
struct beams {
    struct step *step;
    int64_t count, made;
    const int64_t *first;
    int64_t n_items;
    const int64_t *closed, *ends;
    int64_t n_closed, n_ends;
    const double *last;              /* the score that an item's beams must beat, or NaN: any */
    const double *shortest, *longest; /* length penalties: of each step, of each item */
    double *sums;                    /* log-probability of each row */
    int64_t *tokens, *parents;       /* count x rows: what was chosen, and the rows continued */
    double *totals;
    int32_t *table; /* room for a table like the step's */
};

static int among(int64_t token, const int64_t *some, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (token == some[i]) return 1;
    return 0;
}

/* Chooses an item's next beams, best first, of equal candidates the first. 0 where they are not
   simply continued: one ends, the item is done, there are too few, or a logit is no number. */
static int choose(const struct beams *all, int64_t item) {
    const struct op *head = all->step->ops + all->step->n_ops - 1;
    int64_t begin = all->first[item], end = all->first[item + 1], found = 0;
    int64_t here = all->made * all->step->n_new + begin;
    int64_t *tokens = all->tokens + here, *parents = all->parents + here;
    double *totals = all->totals + here, bar = -INFINITY;
    for (int64_t row = begin; row < end; row++) {
        const float *logits = all->step->buffers[head->to] + row * head->to_width;
        float most = most_of[glass_variant()](logits, head->to_width);
        if (!isfinite(most)) return 0;
        float rest = log_sum_of[glass_variant()](logits, head->to_width, most);
        for (int64_t token = 0; token < head->to_width; token++) {
            double total = all->sums[row] + (double)(logits[token] - most - rest);
            if (!(total > bar) || among(token, all->closed, all->n_closed)) continue;
            int64_t at = found < end - begin ? found++ : found - 1;
            for (; at > 0 && totals[at - 1] < total; at--) {
                totals[at] = totals[at - 1];
                tokens[at] = tokens[at - 1];
                parents[at] = parents[at - 1];
            }
            totals[at] = total, tokens[at] = token, parents[at] = row;
            if (found == end - begin) bar = totals[found - 1];
        }
    }
    if (found < end - begin) return 0;
    for (int64_t i = 0; i < found; i++)
        if (among(tokens[i], all->ends, all->n_ends)) return 0;
    double soon = totals[0] / all->shortest[all->made], late = totals[0] / all->longest[item];
    return !(all->last[item] >= (soon > late ? soon : late));
}

static void run_beams(void *data) {
    struct beams *all = data;
    struct step *step = all->step;
    int64_t rows = step->n_new, width = step->table_width[OWN];
    size_t bytes = sizeof(int32_t) * (size_t)(rows * width);
    for (;; all->made++) {
        step->failed |= glass_reserve(step->memory[OWN], step->table[OWN], width,
                                      step->length[OWN], rows, 1) != 0;
        if (step->failed) return;
        run(step);
        for (int64_t m = 0; m < rows; m++) step->position[m] = ++step->length[OWN][m];
        if (step->failed || all->made == all->count) return;
        for (int64_t item = 0; item < all->n_items; item++)
            if (!choose(all, item)) return;
        /* Rows of one item have one length and one source: their pages alone change places. */
        const int64_t *parents = all->parents + all->made * rows;
        glass_reorder(step->memory[OWN], step->table[OWN], rows, all->table, parents, rows, width);
        memcpy(step->table[OWN], all->table, bytes);
        memcpy(step->token, all->tokens + all->made * rows, sizeof(int64_t) * (size_t)rows);
        memcpy(all->sums, all->totals + all->made * rows, sizeof(double) * (size_t)rows);
    }
}

/* Reads one new token of each row, chooses the beams that continue, reads them, and so on: at most
   `count` times, while every item simply continues. The last buffer then has the logits after what
   was read last. Returns how many were chosen, or -1 where there was no memory. */
EXPORT int64_t glass_beams(struct beams *all) {
    all->step->failed = 0;
    all->made = 0;
    glass_team(run_beams, all, all->step->threads);
    return all->step->failed ? -1 : all->made;
}
