// What kernels for a Hopper GPU share: numbers of 16 bits, barriers, copies by the tensor memory
// accelerator, clusters. `program` in cuda_launch.py puts this before a kernel's own file. HALF is 1
// for float16, 0 for bfloat16.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int CHUNK = 64;  // inputs of a copy: 128 bytes, the width of a swizzled row

struct alignas(64) TensorMap { char bytes[128]; };

// --- numbers of 16 bits ---------------------------------------------------------------------------

__device__ __forceinline__ float number(u16 bits) {
#if HALF
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#else
    return __uint_as_float((u32)bits << 16);
#endif
}

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 both;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

__device__ __forceinline__ void unpack(const uint4 &bits, float (&x)[8]) {
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = number(words[i] & 0xffff);
        x[2 * i + 1] = number(words[i] >> 16);
    }
}

__device__ __forceinline__ uint4 pack(const float (&x)[8]) {
    return make_uint4(packed(x[0], x[1]), packed(x[2], x[3]), packed(x[4], x[5]), packed(x[6], x[7]));
}

// --- barriers and copies --------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void make_barrier(u64 *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ __forceinline__ void arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void expect(u64 *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void await(u64 *barrier, int phase) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const TensorMap *map, int input, int row, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(input), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// The same into the shared memory of all blocks of `blocks`, a bit for each, and to their barriers.
__device__ __forceinline__ void copy_to(
    u32 blocks, u32 to, const TensorMap *map, int input, int row, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(input), "r"(row), "r"(shared_address(barrier)),
                 "h"((u16)blocks) : "memory");
}

__device__ __forceinline__ u32 address_in(int block, u32 address) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

__device__ __forceinline__ void arrive_in(int block, u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
                 ::"r"(address_in(block, shared_address(barrier))) : "memory");
}

__device__ __forceinline__ void fetch(const TensorMap *map, int input, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];"
                 ::"l"(map), "r"(input), "r"(row) : "memory");
}

__device__ __forceinline__ void await_inputs() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A float4 of the shared memory of another block of the cluster.
__device__ __forceinline__ float4 load_from(int block, u32 address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address_in(block, address)));
    return x;
}

// A matrix in shared memory as the multiplication reads it: rows of 128 bytes, swizzled by eights.
__device__ __forceinline__ u64 matrix(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
