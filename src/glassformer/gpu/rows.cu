// Products of some rows on a Hopper GPU: a batch that decodes. See cuda_rows.py, which compiles this
// file for one shape of tile and launches it.
//
//   out = activation(rate x W^T + bias) + residual        rate = 1 / sqrt(mean(x^2) + eps), or 1
//
// A product of so few rows is bound by what the multiprocessors read from the second-level cache: a
// tile of R rows and O outputs reads R + O numbers for R O multiplications. So tiles are large, and
// the SPLITS blocks of a cluster share the inputs of one tile. Each multiplies its part of them, and
// leaves its sums in its shared memory; then each adds up some rows of all blocks, in one order.
//
// A block has one warp that copies (the tensor memory accelerator, into a ring of STAGES) and one
// warpgroup of four warps for each 64 rows that multiplies. The weights of the first stages are
// copied while the kernel before this one still runs (programmatic dependent launch).
//
// Given by the launcher: ROWS (64 or 128), OUTPUTS (a multiple of 16, at most 256), SPLITS, STAGES,
// HALF (float16; bfloat16 otherwise), ACTIVATION, NORMED, BIASED, ONTO (a residual), GAINED (the
// next norm's gain), and `multiply`, the instruction for these outputs.

enum { NOTHING, GATE, RELU, GELU };

constexpr int WARPS = ROWS / 16;  // that multiply
constexpr int THREADS = 32 * WARPS + 32 + ROWS;
constexpr int X_BYTES = ROWS * CHUNK * 2, WEIGHT_BYTES = OUTPUTS * CHUNK * 2;
constexpr int PITCH = OUTPUTS + 8;  // of a row of sums: neighbouring rows lie in other banks
constexpr int UNIT = ACTIVATION == GATE ? 16 : 8;  // sums that make 8 results, 16 bytes
constexpr int UNITS = OUTPUTS / UNIT;
constexpr int SLICE = (ROWS + SPLITS - 1) / SPLITS;  // rows that a block adds up

struct Operands {
    const float *squares;  // (n_squares, n_rows): sums of squares of columns of x
    const u16 *bias, *residual, *gain;
    u16 *out, *gained;
    float *made;  // (tiles, n_rows): sums of squares of each tile's columns of out
    int n_rows, n_in, n_out, n_squares;
    float share, eps;  // 1 / n_in
};

__device__ __forceinline__ float activate(float x) {
    if (ACTIVATION == RELU) return fmaxf(x, 0.0f);
    if (ACTIVATION == GELU) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    return x;
}

// --- the product ----------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1) product_of_rows(
    const __grid_constant__ TensorMap of_x, const __grid_constant__ TensorMap of_weight,
    const Operands given) {
    extern __shared__ char unaligned[];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ float rates[SLICE], tile_squares[SLICE * UNITS];
    const u32 ring = (shared_address(unaligned) + 1023) & ~1023u;  // the same in each block
    float *sums = (float *)(unaligned + (ring - shared_address(unaligned)));

    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int part = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS;
    const int first_row = blockIdx.y * ROWS, first_output = tile * OUTPUTS;
    const int chunks = (given.n_in + CHUNK - 1) / CHUNK;
    const int begin = part * chunks / SPLITS, count = (part + 1) * chunks / SPLITS - begin;

    if (thread == 32 * WARPS) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&of_weight) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&of_x) : "memory");
    }
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            make_barrier(&full[s], 1);
            make_barrier(&empty[s], WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("griddepcontrol.launch_dependents;");
    __syncthreads();

    // Some rows of the tile are this block's to add up, eight results at a time.
    const int own_row = part * SLICE, own_rows = min(SLICE, ROWS - own_row);
    if (warp == WARPS) {
        if (lane == 0) {
#pragma unroll 1
            for (int n = 0; n < count && n < STAGES; n++) {
                expect(&full[n], X_BYTES + WEIGHT_BYTES);
                copy(ring + n * (X_BYTES + WEIGHT_BYTES) + X_BYTES, &of_weight,
                     (begin + n) * CHUNK, first_output, &full[n]);
            }
#pragma unroll 1
            for (int n = STAGES; n < count; n++)
                fetch(&of_weight, (begin + n) * CHUNK, first_output);
            await_inputs();
#pragma unroll 1
            for (int n = 0; n < count; n++) {
                const int s = n % STAGES;
                const u32 stage = ring + s * (X_BYTES + WEIGHT_BYTES);
                if (n >= STAGES) {
                    await(&empty[s], (n / STAGES - 1) & 1);
                    expect(&full[s], X_BYTES + WEIGHT_BYTES);
                    copy(stage + X_BYTES, &of_weight, (begin + n) * CHUNK, first_output, &full[s]);
                }
                copy(stage, &of_x, (begin + n) * CHUNK, first_row, &full[s]);
            }
        }
        __syncwarp();
    }
    await_inputs();
    const int first_unit_row = first_row + own_row + thread / UNITS;
    const int first_result = ACTIVATION == GATE ? first_output / 2 : first_output;
    const int first_unit_output = first_result + thread % UNITS * 8;
    uint4 residual = {};  // of the first unit: by the time it is added, it has arrived
    if (ONTO && thread < own_rows * UNITS && first_unit_row < given.n_rows
        && first_unit_output < given.n_out)
        residual = *(const uint4 *)(given.residual + (size_t)first_unit_row * given.n_out
                                    + first_unit_output);
    const int r = thread - 32 * (WARPS + 1);  // a thread for each row that finds its rate
    if (NORMED && r >= 0 && r < own_rows) {
        const int row = min(first_row + own_row + r, given.n_rows - 1);
        float total = 0.0f;
#pragma unroll 14
        for (int p = 0; p < given.n_squares; p++)
            total += given.squares[p * given.n_rows + row];
        rates[r] = rsqrtf(total * given.share + given.eps);
    }

    if (warp < WARPS) {
        float acc[OUTPUTS / 2] = {};
        const u32 rows_of_group = warp / 4 * 64 * CHUNK * 2;
#pragma unroll 1
        for (int n = 0; n < count; n++) {
            const int s = n % STAGES;
            const u32 stage = ring + s * (X_BYTES + WEIGHT_BYTES);
            await(&full[s], (n / STAGES) & 1);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++)
                multiply(acc, matrix(stage + rows_of_group + 32 * k), matrix(stage + X_BYTES + 32 * k));
            asm volatile("wgmma.commit_group.sync.aligned;\n"
                         "wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (n > 0 && lane == 0) arrive(&empty[(n - 1) % STAGES]);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < OUTPUTS / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");  // not before
        asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");  // the ring is free
        float *here = sums + (warp * 16 + lane / 4) * PITCH + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < OUTPUTS / 8; j++) {
            *(float2 *)(here + 8 * j) = make_float2(acc[4 * j], acc[4 * j + 1]);
            *(float2 *)(here + 8 * PITCH + 8 * j) = make_float2(acc[4 * j + 2], acc[4 * j + 3]);
        }
    }
    if (SPLITS > 1) meet_cluster(); else __syncthreads();

#pragma unroll 1
    for (int unit = thread; unit < own_rows * UNITS; unit += THREADS) {
        const int row = first_row + own_row + unit / UNITS;
        const int output = first_result + unit % UNITS * 8;
        float total[UNIT] = {}, result[8];
        const int here = (own_row + unit / UNITS) * PITCH + unit % UNITS * UNIT;
        float4 parts[SPLITS][UNIT / 4];  // all are on their way before the first is added
#pragma unroll
        for (int block = 0; block < SPLITS; block++)
#pragma unroll
            for (int i = 0; i < UNIT / 4; i++)
                parts[block][i] = SPLITS == 1 ? *(const float4 *)(sums + here + 4 * i)
                                              : load_from(block, ring + 4 * here + 16 * i);
#pragma unroll
        for (int block = 0; block < SPLITS; block++)
#pragma unroll
            for (int i = 0; i < UNIT / 4; i++) {
                total[4 * i] += parts[block][i].x, total[4 * i + 1] += parts[block][i].y;
                total[4 * i + 2] += parts[block][i].z, total[4 * i + 3] += parts[block][i].w;
            }
        const bool inside = row < given.n_rows && output < given.n_out;
        if (NORMED)
            for (int i = 0; i < UNIT; i++) total[i] *= rates[unit / UNITS];
        if (BIASED && inside) {
#pragma unroll
            for (int i = 0; i < UNIT; i++)
                total[i] += number(given.bias[first_output + unit % UNITS * UNIT + i]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (ACTIVATION == GATE) {  // gate and up of an output are neighbours
                const float gate = total[2 * i], up = total[2 * i + 1];
                result[i] = __fdividef(gate, 1.0f + __expf(-gate)) * up;
            } else {
                result[i] = activate(total[i]);
            }
        }
        if (ONTO) {
            float before[8];
            if (unit >= THREADS && inside)
                residual = *(const uint4 *)(given.residual + (size_t)row * given.n_out + output);
            unpack(residual, before);
#pragma unroll
            for (int i = 0; i < 8; i++) result[i] += before[i];
        }
        const uint4 made = pack(result);
        if (inside) *(uint4 *)(given.out + (size_t)row * given.n_out + output) = made;
        if (GAINED) {
            float shown[8], gain[8], squares = 0.0f;
            unpack(made, shown);
            if (inside) {
                unpack(*(const uint4 *)(given.gain + output), gain);
#pragma unroll
                for (int i = 0; i < 8; i++) squares += shown[i] * shown[i], shown[i] *= gain[i];
                *(uint4 *)(given.gained + (size_t)row * given.n_out + output) = pack(shown);
            }
            tile_squares[unit] = squares;
        }
    }
    if (GAINED) {
        __syncthreads();
        const int row = first_row + own_row + thread;
        if (thread < own_rows && row < given.n_rows) {
            float total = 0.0f;
            for (int unit = 0; unit < UNITS; unit++) total += tile_squares[thread * UNITS + unit];
            given.made[tile * given.n_rows + row] = total;
        }
    }
    if (SPLITS > 1)  // no block may end while another reads its sums
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
                     "barrier.cluster.wait.aligned;" ::: "memory");
}
