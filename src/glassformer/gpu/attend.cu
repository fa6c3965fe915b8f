// Attention of one new query per row, for batches that decode on a Hopper GPU. See cuda_attend.py,
// which compiles this file for one shape of heads and launches it.
//
// Four warps of a block attend for one row and one key-value head, whose queries (GROUP, at most 8)
// share the past. Each warp takes every fourth tile of 16 positions, through shared memory of its
// own, with sums of its own: nothing is shared before the end. A block has TOGETHER heads. The past was written before this
// step, so it is copied while the kernel before this one still runs; then the new query, key and
// value are read, normalised and rotated, and the new position is the first that is attended to.
//
// Given by the launcher: HEAD (64 or 128), GROUP, TOGETHER, DEPTH (tiles under way), HALF (float16; bfloat16
// otherwise), NORMED (queries and keys), TURNED (rotary positions).

typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr int WARPS = 4, TILE = 16, QUERIES = 8;
constexpr int OWN = HEAD / 4;         // numbers of a head that a thread holds: a quarter of it
constexpr int WORDS = OWN / 2;        // the same in pairs
constexpr int BESIDE = HEAD / 8;      // numbers of a value that a thread reads from each position
constexpr int PITCH = HEAD * 2 + 16;  // bytes of a position: neighbours lie in other banks
constexpr int STAGE = 2 * TILE * PITCH;
constexpr int PIECES = HEAD / 8;  // of 16 bytes in a head

struct Operands {
    const u16 *query, *fresh;  // of row 0; fresh are keys, then values
    u16 *key, *value;
    const u16 *mask;
    const float *slopes;
    const u16 *query_gain, *key_gain, *cos, *sin;
    const i64 *ends, *places, *slots, *sources;
    const int *lines;
    u16 *out;
    i64 row, kv_row, kv_head;  // numbers from row to row, and from head to head of the memory
    int n_heads, n_kv, n_places, n_mask, window, end_step;
    float scale, eps;
};

__device__ __forceinline__ float low(u32 word) { return number(word & 0xffff); }

__device__ __forceinline__ float high(u32 word) { return number(word >> 16); }

__device__ __forceinline__ void read(u32 (&words)[WORDS], const u16 *from) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
        const uint4 some = *(const uint4 *)(from + 2 * i);
        words[i] = some.x, words[i + 1] = some.y, words[i + 2] = some.z, words[i + 3] = some.w;
    }
}

// sums (16 x 8) += a (16 x 16) b (16 x 8), of which rows 8 to 15 are zeros.
__device__ __forceinline__ void multiply(float (&sums)[2], u32 a, u32 a_beside, u32 b, u32 b_below) {
    float none, nothing;
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, {%0, %1, %9, %9};"
        : "+f"(sums[0]), "+f"(sums[1]), "=f"(none), "=f"(nothing)
        : "r"(a), "r"(a_beside), "r"(0), "r"(b), "r"(b_below), "f"(0.0f));
}

__device__ __forceinline__ float over_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Normalise and rotate a quarter of a head; a neighbour holds the numbers half a head away.
__device__ __forceinline__ void turn(
    u32 (&words)[WORDS], const u16 *gains, const u32 (&cos)[WORDS], const u32 (&sin)[WORDS],
    int quarter, float eps) {
    if (!NORMED && !TURNED) return;
    float rate = 1.0f;
    if (NORMED) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            squares += low(words[i]) * low(words[i]) + high(words[i]) * high(words[i]);
        rate = rsqrtf(over_quad(squares) * (1.0f / HEAD) + eps);
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        const u32 other = __shfl_xor_sync(~0u, words[i], 2);
        float x = low(words[i]), y = high(words[i]), x_other = low(other), y_other = high(other);
        if (NORMED) {
            const u32 gain = *(const u32 *)(gains + quarter * OWN + 2 * i);
            const u32 gain_other = *(const u32 *)(gains + (quarter ^ 2) * OWN + 2 * i);
            x *= rate * low(gain), y *= rate * high(gain);
            x_other *= rate * low(gain_other), y_other *= rate * high(gain_other);
        }
        if (TURNED) {
            x = x * low(cos[i]) + x_other * low(sin[i]);
            y = y * high(cos[i]) + y_other * high(sin[i]);
        }
        words[i] = packed(x, y);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS * TOGETHER) attend(const Operands given) {
    extern __shared__ __align__(16) char all_memory[];
    __shared__ float all_tops[TOGETHER][WARPS][QUERIES], all_totals[TOGETHER][WARPS][QUERIES];
    const int which = threadIdx.x / (32 * WARPS);  // of the block's heads
    const int thread = threadIdx.x % (32 * WARPS), warp = thread / 32, lane = thread % 32;
    const int group = lane / 4, quarter = lane % 4;  // of the queries; of a head
    const int one_of_all = blockIdx.x * TOGETHER + which;
    const int b = one_of_all / given.n_kv, head = one_of_all % given.n_kv;
    char *const memory = all_memory + which * (WARPS * DEPTH * STAGE + WARPS * QUERIES * HEAD * 4);
    auto &tops = all_tops[which], &totals = all_totals[which];
    asm volatile("griddepcontrol.launch_dependents;");

    const int end = (int)given.ends[b * given.end_step], stored = end - 1;
    const i64 slot = given.slots ? given.slots[b] : b;
    const i64 source = given.sources ? given.sources[b] : slot;
    const int lowest = given.window ? max(end - given.window, 0) : 0;
    const int first = lowest / TILE + warp, last = (stored + TILE - 1) / TILE;
    u16 *const keys = given.key + head * given.kv_head, *const values = given.value + head * given.kv_head;
    const u32 ring = (u32)__cvta_generic_to_shared(memory) + warp * DEPTH * STAGE;

    const int piece = lane % PIECES;  // that this thread copies, of some positions of each tile
    auto copy = [&](int tile, int stage) {  // zeros from `stored` on
        int s = tile * TILE + lane / PIECES;
        u32 to = ring + stage * STAGE + lane / PIECES * PITCH + piece * 16;
#pragma unroll 1
        for (int i = 0; i < TILE * PIECES / 32; i++, s += 32 / PIECES, to += 32 / PIECES * PITCH) {
            const int there = min(s, stored - 1), bytes = s < stored ? 16 : 0;
            const i64 line = given.lines ? given.lines[b * given.n_places + there] : slot;
            const i64 at = line * given.kv_row + there * HEAD + piece * 8;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                         "cp.async.cg.shared.global [%3], [%4], 16, %2;"
                         ::"r"(to), "l"(keys + at), "r"(bytes),
                         "r"(to + TILE * PITCH), "l"(values + at) : "memory");
        }
    };
#pragma unroll 1
    for (int n = 0; n < DEPTH; n++) {
        if (first + n * WARPS < last) copy(first + n * WARPS, n);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    u32 cos[WORDS], sin[WORDS];
    if (TURNED) {
        const i64 place = given.places[b];
        read(cos, given.cos + place * HEAD + quarter * OWN);
        read(sin, given.sin + place * HEAD + quarter * OWN);
    }
    const float slope = given.slopes && group < GROUP ? given.slopes[head * GROUP + group] : 0.0f;
    const u16 *const mask = given.mask ? given.mask + source * given.n_mask : nullptr;
    asm volatile("griddepcontrol.wait;" ::: "memory");

    u32 query[WORDS] = {}, key[WORDS], value[WORDS];
    const u16 *const fresh = given.fresh + b * given.row + head * HEAD + quarter * OWN;
    if (group < GROUP)
        read(query, given.query + b * given.row + (i64)(head * GROUP + group) * HEAD + quarter * OWN);
    read(key, fresh);
    read(value, fresh + given.n_kv * HEAD);
    turn(query, given.query_gain, cos, sin, quarter, given.eps);
    turn(key, given.key_gain, cos, sin, quarter, given.eps);

    // sums[j] are numbers j and BESIDE + j of this thread's quarter of its query's result.
    float top = -INFINITY, total = 0.0f, sums[BESIDE][2] = {};
    if (warp == 0) {
        if (lane < 4) {
            const i64 at = slot * given.kv_row + (i64)stored * HEAD + quarter * OWN;
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                *(uint4 *)(keys + at + 2 * i) = make_uint4(key[i], key[i + 1], key[i + 2], key[i + 3]);
                *(uint4 *)(values + at + 2 * i) =
                    make_uint4(value[i], value[i + 1], value[i + 2], value[i + 3]);
            }
        }
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            score += low(query[i]) * low(key[i]) + high(query[i]) * high(key[i]);
        top = over_quad(score) * given.scale;
        if (mask && stored < given.n_mask) top += low(mask[stored]);
        if (top > -INFINITY) {
            total = quarter == 0 ? 1.0f : 0.0f;
#pragma unroll
            for (int i = 0; i < OWN; i++)
                sums[i % BESIDE][i / BESIDE] = i % 2 ? high(value[i / 2]) : low(value[i / 2]);
        }
    }
#pragma unroll 1
    for (int tile = first, stage = 0; tile < last; tile += WARPS) {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
        __syncwarp();
        const char *const here = memory + (warp * DEPTH + stage) * STAGE;
        float scores[2][2];
#pragma unroll
        for (int half = 0; half < 2; half++) {  // eight positions each
            scores[half][0] = scores[half][1] = 0.0f;
            u32 words[WORDS];
            read(words, (const u16 *)(here + (8 * half + group) * PITCH) + quarter * OWN);
#pragma unroll
            for (int i = 0; i < WORDS; i += 2)
                multiply(scores[half], query[i], query[i + 1], words[i], words[i + 1]);
        }
        float most = top;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int s = tile * TILE + i / 2 * 8 + quarter * 2 + i % 2;
            float &score = scores[i / 2][i % 2];
            score *= given.scale;
            if (mask && s < given.n_mask) score += low(mask[s]);
            score -= slope * (stored - s);  // ALiBi: columns are as far apart as their positions
            if (s >= stored || s < lowest) score = -INFINITY;
            most = fmaxf(most, score);
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float base = most == -INFINITY ? 0.0f : most, keep = __expf(top - base);
        top = most;
#pragma unroll
        for (int i = 0; i < 4; i++) scores[i / 2][i % 2] = __expf(scores[i / 2][i % 2] - base);
        total = total * keep + (scores[0][0] + scores[0][1]) + (scores[1][0] + scores[1][1]);
        const u32 weights = packed(scores[0][0], scores[0][1]);
        const u32 weights_beside = packed(scores[1][0], scores[1][1]);
        // Of positions 2 t, 2 t + 1 and those 8 later, numbers j of an eighth of a head, as pairs.
        u32 pairs[4][BESIDE / 2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int position = i / 2 * 8 + quarter * 2 + i % 2;
            const uint4 *from = (const uint4 *)(here + (TILE + position) * PITCH + group * BESIDE * 2);
#pragma unroll
            for (int j = 0; j < BESIDE / 8; j++) {
                const uint4 some = from[j];
                pairs[i][4 * j] = some.x, pairs[i][4 * j + 1] = some.y;
                pairs[i][4 * j + 2] = some.z, pairs[i][4 * j + 3] = some.w;
            }
        }
#pragma unroll
        for (int j = 0; j < BESIDE; j++) {
            const u32 which = j % 2 ? 0x7632 : 0x5410;
            sums[j][0] *= keep, sums[j][1] *= keep;
            multiply(sums[j], weights, weights_beside,
                     __byte_perm(pairs[0][j / 2], pairs[1][j / 2], which),
                     __byte_perm(pairs[2][j / 2], pairs[3][j / 2], which));
        }
        __syncwarp();
        if (tile + DEPTH * WARPS < last) copy(tile + DEPTH * WARPS, stage);
        asm volatile("cp.async.commit_group;" ::: "memory");
        stage = stage + 1 == DEPTH ? 0 : stage + 1;
    }

    // The warps' sums together, in one order.
    total = over_quad(total);
    float *const parts = (float *)(memory + WARPS * DEPTH * STAGE);
    float *const own = parts + (warp * QUERIES + group) * HEAD + quarter * OWN;
#pragma unroll
    for (int i = 0; i < OWN; i++) own[i] = sums[i % BESIDE][i / BESIDE];
    if (quarter == 0) tops[warp][group] = top, totals[warp][group] = total;
    __syncthreads();
    constexpr int EACH = QUERIES * HEAD / (32 * WARPS);  // results of a thread
    const int one = thread * EACH / HEAD, at = thread * EACH % HEAD;
    if (one >= GROUP) return;
    float most = -INFINITY, whole = 0.0f, result[EACH] = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, tops[w][one]);
    const float base = most == -INFINITY ? 0.0f : most;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float share = __expf(tops[w][one] - base);
        whole += share * totals[w][one];
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            const float4 some = *(const float4 *)(parts + (w * QUERIES + one) * HEAD + at + i);
            result[i] += share * some.x, result[i + 1] += share * some.y;
            result[i + 2] += share * some.z, result[i + 3] += share * some.w;
        }
    }
    const float rate = whole == 0.0f ? 0.0f : __fdividef(1.0f, whole);
    u16 *const to = given.out + ((i64)b * given.n_heads + head * GROUP + one) * HEAD + at;
#pragma unroll
    for (int i = 0; i < EACH; i += 4)
        *(uint2 *)(to + i) = make_uint2(packed(result[i] * rate, result[i + 1] * rate),
                                        packed(result[i + 2] * rate, result[i + 3] * rate));
}
