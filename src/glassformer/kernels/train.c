/* A training step's passes over memory, each in one go and with its gradient: attention of short
   sequences, the loss, norms, activations and gates, rotary positions, sums with dropout, an
   embedding's gradient, clipping and AdamW.

   training.py calls them on arrays. Every item of shared work is computed in an order of its own,
   so that the number of threads changes no bit. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#define BLOCK_ROWS 24 /* queries whose weights are in the cache together */
#define MOST_ROWS 12  /* rows of a product whose sums are in registers, with one or two vectors each */
#define WIDE_ROWS 6   /* with four */
#define MOST_WIDE 4
#define AHEAD 8       /* rows that are loaded before they are copied */
#define NORM_ROWS 64 /* rows of one piece of a norm's gradient */
#define STEADY 4     /* pieces of shared work for each thread */
#define PIECE (1 << 14) /* numbers that are updated together */

/* A matrix on the left of a product: distances between its rows, and along the sum. */
struct side {
    const float *from;
    int64_t row, deep;
};

/* (B, heads, rows, width) of float32: distances between sequences, heads and rows; the numbers of a
   row lie together. */
struct heads {
    float *at;
    int64_t batch, head, row;
};

/* Number i is dropped if its hash is below a limit, of 2^24; the others are multiplied. A limit of 0
   drops nothing. Nothing is stored: backward computes the hashes again. */
struct drop {
    uint32_t seed, salt;
    int32_t limit;
    float factor;
};

struct attention {
    struct heads q, k, v, out, d_out, d_q, d_k, d_v;
    float *kept;          /* (B, heads, queries, 2): the largest score, 1 / sum */
    const uint8_t *allow; /* or null; 1 = may attend */
    int64_t allow_batch, allow_head, allow_row, allow_key;
    int64_t batch, heads, kv_heads, queries, keys, width;
    float scale;
    int32_t causal, threads, failed;
    const float *bias; /* or null: added to scores, distances between sequences, heads and rows */
    int64_t bias_batch, bias_head, bias_row;
    float *d_bias;      /* or null: (B, heads, queries, keys), all 0 */
    const float *sinks; /* or null: (heads): scores that take part and have no value */
    float *d_sinks;     /* (B, heads) */
    float softcap;      /* 0: none */
    struct drop drop;
};

#define HEAD(name, b, n) (a->name.at + (b) * a->name.batch + (n) * a->name.head)

struct loss {
    float *logits; /* (rows, classes), become their gradient */
    int64_t row, rows, classes;
    const int64_t *targets;
    const float *weights;
    float *sums; /* (rows, 2): plain, smoothed */
    float smoothing;
    int32_t threads;
};

struct norm {
    const float *x, *added, *gain; /* added: or null */
    float *sum, *y;                /* y: backward dy */
    float *rate;
    const float *more; /* what dx is added to, or null */
    float *dx, *d_gain;
    int64_t rows, width;
    float eps;
    int32_t threads, layer; /* layer: LayerNorm, whose rows have a mean */
    float plus, scale;      /* the gain is gain + plus; what is added is multiplied by scale */
    const float *bias;      /* or null */
    float *mean, *d_bias;
    struct drop drop; /* of what is added */
};

enum { SILU, GELU, GELU_TANH, RELU, RELU2, TANH };

struct gate {
    const float *gate, *up; /* up: or null, then y = f(gate) */
    float *y;               /* backward: dy */
    float *d_gate, *d_up;
    int64_t rows, width;
    int64_t gate_row, up_row, d_gate_row, d_up_row; /* distances; rows of y lie together */
    int32_t threads, function;
};

/* y = x + scale drop(z): x or null; rows are so far apart, z_row 0: one for all. */
struct sum {
    const float *x, *z;
    float *y;
    int64_t rows, width, x_row, z_row, y_row;
    float scale;
    int32_t threads;
    struct drop drop;
};

struct columns {
    const float *x;
    float *sums; /* (pieces, width) */
    int64_t rows, width, row;
    int32_t threads;
};

struct turn {
    struct heads x, y;
    const float *cos, *sin; /* (T, half), or one for each sequence, `batch` apart */
    int64_t batch, sequences, heads, length, width, half;
    int32_t back, threads;
};

struct added_rows {
    float *to;         /* (.., width) */
    const float *from; /* (rows, width) */
    const int64_t *index;
    int64_t rows, width;
    float scale;
};

/* Numbers that lie together, and are updated alike. */
struct adam {
    float *weight;
    const float *gradient;
    float *mean, *square;
    double *sums; /* of squares, of each PIECE numbers */
    int64_t count;
    double lr, beta1, beta2, eps, decay, steps;
    float scale;
    int32_t threads;
};

/* C = A B, or C += A B with beta 1: rows of C, or columns, in chunks. `gemm` is cblas_sgemm of a library
   that computes on its caller's thread alone, with integers of 64 bits if `wide`. */
struct product {
    void *gemm;
    const float *a, *b;
    float *c;
    int64_t rows, columns, deep, a_row, b_row, c_row, chunk;
    float beta;
    int32_t a_turned, b_turned, by_columns, wide, threads;
};

/* Memory of our own, in complete lines of the cache, all 0. */
static float *own_memory(int64_t count) {
    size_t size = sizeof(float) * (size_t)((count + 15) / 16 * 16);
    float *own = aligned_alloc(64, size);
    if (own) memset(own, 0, size);
    return own;
}

/* Begins to load rows of `width` numbers, `stride` apart, which are read later. */
INLINE void fetch(const float *from, int64_t stride, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < width; h += 16) __builtin_prefetch(from + i * stride + h);
}

#define PARTS_OF "train_parts.h"
#include "each_width.h"

#ifdef GLASS_X86
#define VARIANTS(part) {portable_##part, avx2_##part, avx512_##part}
#else
#define VARIANTS(part) {portable_##part}
#endif

/* Calls the variant in use; `weight` is how many numbers an item has. */
static void share(const part_fn *variants, void *job, int64_t count, int64_t weight, int threads) {
    int64_t least = SHARED / (weight > 0 ? weight : 1) + 1, chunk = count / (STEADY * threads) + 1;
    glass_share(variants[glass_variant()], job, count, chunk > least ? chunk : least, threads);
}

EXPORT int glass_attention_forward(struct attention *a) {
    static const part_fn variants[] = VARIANTS(attention_forward);
    a->failed = 0;
    share(variants, a, a->batch * a->kv_heads, 4 * a->queries * a->keys, a->threads);
    return a->failed;
}

EXPORT int glass_attention_backward(struct attention *a) {
    static const part_fn variants[] = VARIANTS(attention_backward);
    a->failed = 0;
    share(variants, a, a->batch * a->kv_heads, 8 * a->queries * a->keys, a->threads);
    return a->failed;
}

EXPORT void glass_loss(struct loss *loss) {
    static const part_fn variants[] = VARIANTS(loss);
    share(variants, loss, loss->rows, loss->classes, loss->threads);
}

EXPORT void glass_norm_forward(struct norm *norm) {
    static const part_fn variants[] = VARIANTS(norm_forward);
    share(variants, norm, norm->rows, norm->width, norm->threads);
}

/* The sums of the pieces are added in their order. */
EXPORT void glass_norm_backward(struct norm *norm) {
    static const part_fn variants[] = VARIANTS(norm_backward);
    int64_t pieces = (norm->rows + NORM_ROWS - 1) / NORM_ROWS, D = norm->width;
    share(variants, norm, pieces, NORM_ROWS * D, norm->threads);
    for (int64_t piece = 1; piece < pieces; piece++)
        for (int64_t i = 0; i < D; i++) norm->d_gain[i] += norm->d_gain[piece * D + i];
    for (int64_t piece = 1; norm->d_bias && piece < pieces; piece++)
        for (int64_t i = 0; i < D; i++) norm->d_bias[i] += norm->d_bias[piece * D + i];
}

EXPORT int64_t glass_norm_pieces(int64_t rows) { return (rows + NORM_ROWS - 1) / NORM_ROWS; }

EXPORT void glass_gate_forward(struct gate *gate) {
    static const part_fn variants[] = VARIANTS(gate_forward);
    share(variants, gate, gate->rows, 4 * gate->width, gate->threads);
}

EXPORT void glass_gate_backward(struct gate *gate) {
    static const part_fn variants[] = VARIANTS(gate_backward);
    share(variants, gate, gate->rows, 4 * gate->width, gate->threads);
}

EXPORT void glass_sum(struct sum *sum) {
    static const part_fn variants[] = VARIANTS(sum);
    share(variants, sum, sum->rows, sum->width, sum->threads);
}

/* Sums over the rows, the pieces' in their order. */
EXPORT void glass_columns_sum(struct columns *columns) {
    static const part_fn variants[] = VARIANTS(columns);
    int64_t pieces = (columns->rows + NORM_ROWS - 1) / NORM_ROWS, D = columns->width;
    share(variants, columns, pieces, NORM_ROWS * D, columns->threads);
    for (int64_t piece = 1; piece < pieces; piece++)
        for (int64_t i = 0; i < D; i++) columns->sums[i] += columns->sums[piece * D + i];
}

EXPORT void glass_turn(struct turn *turn) {
    static const part_fn variants[] = VARIANTS(turn);
    share(variants, turn, turn->sequences * turn->length, turn->heads * turn->width, turn->threads);
}

/* to[index[m]] += scale from[m], one after another: rows of `to` may occur again. */
EXPORT void glass_add_rows(struct added_rows *added) {
    for (int64_t m = 0; m < added->rows; m++) {
        float *to = added->to + added->index[m] * added->width;
        const float *from = added->from + m * added->width;
        for (int64_t i = 0; i < added->width; i++) to[i] += from[i] * added->scale;
    }
}

/* The sum of the squares of some numbers, or the update of them by AdamW. */
EXPORT double glass_squares(struct adam *adam) {
    static const part_fn variants[] = VARIANTS(squares);
    int64_t pieces = (adam->count + PIECE - 1) / PIECE;
    double total = 0;
    share(variants, adam, pieces, PIECE, adam->threads);
    for (int64_t i = 0; i < pieces; i++) total += adam->sums[i];
    return total;
}

EXPORT void glass_adam(struct adam *adam) {
    static const part_fn variants[] = VARIANTS(adam);
    share(variants, adam, (adam->count + PIECE - 1) / PIECE, PIECE, adam->threads);
}

/* --- matrix products ---------------------------------------------------------------------------- */

#define ROW_MAJOR 101
#define TURNED(x) ((x) ? 112 : 111)

typedef void (*gemm_64)(int, int, int, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *,
                        int64_t, float, float *, int64_t);
typedef void (*gemm_32)(int, int, int, int32_t, int32_t, int32_t, float, const float *, int32_t, const float *,
                        int32_t, float, float *, int32_t);

static void some_of_a_product(void *data, int64_t first, int64_t last) {
    const struct product *p = data;
    for (int64_t i = first; i < last; i++) {
        int64_t at = i * p->chunk, M = p->rows, N = p->columns, *cut = p->by_columns ? &N : &M;
        const float *a = p->a, *b = p->b;
        float *c = p->c;
        *cut = at + p->chunk < *cut ? p->chunk : *cut - at;
        if (p->by_columns) {
            b += p->b_turned ? at * p->b_row : at;
            c += at;
        } else {
            a += p->a_turned ? at : at * p->a_row;
            c += at * p->c_row;
        }
        if (p->wide)
            ((gemm_64)p->gemm)(ROW_MAJOR, TURNED(p->a_turned), TURNED(p->b_turned), M, N, p->deep, 1.0f, a,
                               p->a_row, b, p->b_row, p->beta, c, p->c_row);
        else
            ((gemm_32)p->gemm)(ROW_MAJOR, TURNED(p->a_turned), TURNED(p->b_turned), (int32_t)M, (int32_t)N,
                               (int32_t)p->deep, 1.0f, a, (int32_t)p->a_row, b, (int32_t)p->b_row, p->beta, c,
                               (int32_t)p->c_row);
    }
}

EXPORT void glass_product(struct product *p) {
    int64_t cut = p->by_columns ? p->columns : p->rows;
    glass_share(some_of_a_product, p, (cut + p->chunk - 1) / p->chunk, 1, p->threads);
}
