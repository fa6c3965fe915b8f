// The likeliest tokens of some rows on a Hopper GPU, without their logits. See cuda_head.py, which
// compiles this file for one width of rows and launches it.
//
//   logits = rate x W^T + bias, rounded to 16 bits        rate = 1 / sqrt(mean(x^2) + eps), or 1
//
// A head over a vocabulary is bound by reading its weights, which is done once: a cluster of BLOCKS
// blocks has all rows, 64 in each, which stay in shared memory; every cluster takes some tiles of
// OUTPUTS weights, of which each block copies a part into the memory of all. One warp copies. GROUPS
// of four warps take turns: one multiplies while the other looks at its logits. A thread keeps, of
// its logits of two rows, the largest, the sum of exponentials, and where the largest open one was;
// together they are what `_look` of triton_choose.py finds.
//
// Given by the launcher: BLOCKS (1 or 2), CHUNKS (of 64 inputs), OUTPUTS, STAGES, GROUPS, HALF
// (float16; bfloat16 otherwise), NORMED, BIASED, and `multiply`, the instruction for these outputs.

constexpr int ROWS = 64, WARPS = 4;  // warps of each group
constexpr int THREADS = 32 * WARPS * GROUPS + 32;
constexpr int X_BYTES = ROWS * CHUNK * 2, WEIGHT_BYTES = OUTPUTS * CHUNK * 2;
constexpr u32 ALL = (1 << BLOCKS) - 1;
constexpr u32 NOTHING = HALF ? 0xfc00fc00u : 0xff80ff80u;  // two numbers, minus infinity
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LOWEST = -1e38f;  // lower than any logit, and finite times LOG2_E

struct Operands {
    const float *squares;  // (n_squares, n_rows): sums of squares of columns of x
    const u16 *bias;
    const unsigned char *flags;  // of tokens, 1 if closed; after the last, 1 if any is
    float *most, *total;         // (n_rows, clusters, GROUPS)
    long long *best;             // the largest open logit, as an integer of the same order; the token
    int n_rows, n_out, n_squares;
    float share, eps;  // 1 / inputs
};

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
    u32 both;
#if HALF
    asm("max.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
#else
    asm("max.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
#endif
    return both;
}

constexpr int PAIRS = OUTPUTS / 8;  // of logits that a thread has of a row and a tile

__device__ __forceinline__ float largest(const u32 (&pairs)[PAIRS]) {
    u32 most = pairs[0];
#pragma unroll
    for (int j = 1; j < PAIRS; j++) most = larger_pair(most, pairs[j]);
    return fmaxf(number(most & 0xffff), number(most >> 16));
}

// What a thread knows of a row, and its logits where the largest open one was, from token `first`.
struct Row {
    float most = LOWEST, total = 0.0f, top = -__int_as_float(0x7f800000);
    int first = 0;
    u32 there[PAIRS] = {};

    __device__ __forceinline__ int token() const {
        int found = 0;
#pragma unroll
        for (int i = 2 * PAIRS - 1; i >= 0; i--)  // of equal ones the first
            if (number(i % 2 ? there[i / 2] >> 16 : there[i / 2] & 0xffff) == top)
                found = first + i / 2 * 8 + i % 2;
        return found;
    }
};

// Read a pair of logits of each eight tokens from `first` on.
__device__ __forceinline__ void look(
    Row &row, u32 (&pairs)[PAIRS], int first, const Operands &given, bool any_closed) {
    float most = largest(pairs);
    const float larger = fmaxf(row.most, most), base = larger * LOG2_E;
    row.total *= power_of_2((row.most - larger) * LOG2_E);
    row.most = larger;
    float totals[2] = {};
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        totals[0] += power_of_2(fmaf(number(pairs[j] & 0xffff), LOG2_E, -base));
        totals[1] += power_of_2(fmaf(number(pairs[j] >> 16), LOG2_E, -base));
    }
    row.total += totals[0] + totals[1];
    if (any_closed) {
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int token = first + 8 * j;  // an even number, as that of all tokens
            if (token >= given.n_out) continue;
            if (given.flags[token] & 1) pairs[j] = (pairs[j] & 0xffff0000u) | (NOTHING & 0xffff);
            if (given.flags[token + 1] & 1) pairs[j] = (pairs[j] & 0xffff) | (NOTHING & 0xffff0000u);
        }
        most = largest(pairs);
    }
    if (most > row.top) {
        row.top = most, row.first = first;
#pragma unroll
        for (int j = 0; j < PAIRS; j++) row.there[j] = pairs[j];
    }
}

// Integers in the order of these numbers.
__device__ __forceinline__ int sortable(float x) {
    const int bits = __float_as_int(x);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) likeliest(
    const __grid_constant__ TensorMap of_x, const __grid_constant__ TensorMap of_weight,
    const Operands given) {
    extern __shared__ char unaligned[];
    __shared__ u64 arrived[CHUNKS], full[STAGES], empty[STAGES], multiplied[GROUPS];
    __shared__ float rates[ROWS];
    const u32 x = (shared_address(unaligned) + 1023) & ~1023u, ring = x + CHUNKS * X_BYTES;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int block = blockIdx.x % BLOCKS, cluster = blockIdx.x / BLOCKS;
    const int clusters = gridDim.x / BLOCKS, tiles = (given.n_out + OUTPUTS - 1) / OUTPUTS;
    const int count = (tiles - cluster + clusters - 1) / clusters * CHUNKS;  // copies of weights

    if (thread == 0) {
        for (int c = 0; c < CHUNKS; c++) make_barrier(&arrived[c], 1);
        for (int g = 0; g < GROUPS; g++) make_barrier(&multiplied[g], WARPS);
        for (int s = 0; s < STAGES; s++) {
            make_barrier(&full[s], 1);
            make_barrier(&empty[s], WARPS * BLOCKS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("griddepcontrol.launch_dependents;");
    if (BLOCKS > 1) meet_cluster(); else __syncthreads();

    if (warp == WARPS * GROUPS) {
        if (lane == 0) {
            const auto copy_weights = [&](int n) {
                const int s = n % STAGES, c = n % CHUNKS, tile = cluster + n / CHUNKS * clusters;
                const u32 to = ring + s * WEIGHT_BYTES + block * (WEIGHT_BYTES / BLOCKS);
                expect(&full[s], WEIGHT_BYTES);
                copy_to(ALL, to, &of_weight, c * CHUNK, tile * OUTPUTS + block * (OUTPUTS / BLOCKS),
                        &full[s]);
            };
#pragma unroll 1
            for (int n = 0; n < count && n < STAGES; n++) copy_weights(n);
            await_inputs();
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c++) {
                expect(&arrived[c], X_BYTES);
                copy(x + c * X_BYTES, &of_x, c * CHUNK, block * ROWS, &arrived[c]);
            }
#pragma unroll 1
            for (int n = STAGES; n < count; n++) {
                await(&empty[n % STAGES], (n / STAGES - 1) & 1);
                copy_weights(n);
            }
        }
        __syncwarp();
    }
    await_inputs();
    if (warp < WARPS * GROUPS) {
        if (NORMED) {
            if (thread < ROWS) {
                const int row = min(block * ROWS + thread, given.n_rows - 1);
                float total = 0.0f;
#pragma unroll 14
                for (int p = 0; p < given.n_squares; p++)
                    total += given.squares[p * given.n_rows + row];
                rates[thread] = rsqrtf(total * given.share + given.eps);
            }
            asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS * GROUPS) : "memory");
        }
        const int group = warp / WARPS, row = warp % WARPS * 16 + lane / 4;
        const float rate = NORMED ? rates[row] : 1.0f, rate_below = NORMED ? rates[row + 8] : 1.0f;
        const bool any_closed = given.flags[given.n_out];
        Row above, below;
#pragma unroll 1
        for (int turn = group; turn * CHUNKS < count; turn += GROUPS) {
            const int tile = cluster + turn * clusters;
            int n = turn * CHUNKS;
            float acc[OUTPUTS / 2] = {};
            // Stages are read in one order: a phase of `full` tells only odd uses from even ones.
            if (GROUPS > 1 && turn > 0)
                await(&multiplied[(turn - 1) % GROUPS], (turn - 1) / GROUPS & 1);
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c++, n++) {
                const u32 stage = ring + n % STAGES * WEIGHT_BYTES;
                await(&arrived[c], 0);
                await(&full[n % STAGES], (n / STAGES) & 1);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < CHUNK / 16; k++)
                    multiply(acc, matrix(x + c * X_BYTES + 32 * k), matrix(stage + 32 * k));
                asm volatile("wgmma.commit_group.sync.aligned;\n"
                             "wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (c > 0 && lane < BLOCKS) arrive_in(lane, &empty[(n - 1) % STAGES]);
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (lane < BLOCKS) arrive_in(lane, &empty[(n - 1) % STAGES]);
            if (GROUPS > 1 && lane == 0) arrive(&multiplied[group]);
#pragma unroll
            for (int i = 0; i < OUTPUTS / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");  // not before
            const int first = tile * OUTPUTS + lane % 4 * 2;
            u32 pairs[PAIRS], pairs_below[PAIRS];
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                float bias[2] = {};
                const bool inside = first + 8 * j < given.n_out;  // an even number
                for (int i = 0; BIASED && inside && i < 2; i++)
                    bias[i] = number(given.bias[first + 8 * j + i]);
                pairs[j] = packed(acc[4 * j] * rate + bias[0], acc[4 * j + 1] * rate + bias[1]);
                pairs_below[j] =
                    packed(acc[4 * j + 2] * rate_below + bias[0], acc[4 * j + 3] * rate_below + bias[1]);
                if (!inside) pairs[j] = pairs_below[j] = NOTHING;
            }
            look(above, pairs, first, given, any_closed);
            look(below, pairs_below, first, given, any_closed);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {  // four threads share a row
            Row &own = half ? below : above;
            float most = own.most, total = own.total;
            long long best = ((long long)sortable(own.top) << 32) | (0x7fffffff - own.token());
#pragma unroll
            for (int beside = 1; beside < 4; beside *= 2) {
                const float other = __shfl_xor_sync(~0u, most, beside), larger = fmaxf(most, other);
                total = total * power_of_2((most - larger) * LOG2_E)
                    + __shfl_xor_sync(~0u, total, beside) * power_of_2((other - larger) * LOG2_E);
                most = larger;
                const long long best_beside = __shfl_xor_sync(~0u, best, beside);
                best = best_beside > best ? best_beside : best;
            }
            const int at_row = block * ROWS + row + 8 * half;
            const int at = (at_row * clusters + cluster) * GROUPS + group;
            if (lane % 4 == 0 && at_row < given.n_rows)
                given.most[at] = most, given.total[at] = total, given.best[at] = best;
        }
    }
    if (BLOCKS > 1)  // no block may end while another copies into its memory or arrives at its barriers
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
                     "barrier.cluster.wait.aligned;" ::: "memory");
}
