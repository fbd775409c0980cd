#include "copy/pack_arguments.h"

// The kernels that pack blocks and unpack them, found by their names in the module that setup.py
// makes of this file.
namespace kvswap {
namespace {

template <typename Word>
__device__ void copy_words(uint64_t dst, uint64_t src, uint64_t bytes, unsigned lane) {
  auto* to = reinterpret_cast<Word*>(dst);
  const auto* from = reinterpret_cast<const Word*>(src);
  for (uint64_t i = lane; i < bytes / sizeof(Word); i += 32) to[i] = from[i];
}

}  // namespace

// Each thread moves chunks through shared memory of its own with the bulk copies of Hopper and
// later: no registers, and a few one-warp blocks have megabytes in flight. Addresses and sizes are
// multiples of 16 bytes. Dynamic shared memory: chunk_bytes for each thread.
extern "C" __global__ void kvswap_pack_bulk(const __grid_constant__ PackArguments a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char chunks[];
  __shared__ uint64_t barriers[32];
  const auto buffer =
      static_cast<unsigned>(__cvta_generic_to_shared(chunks + threadIdx.x * a.chunk_bytes));
  const auto barrier = static_cast<unsigned>(__cvta_generic_to_shared(&barriers[threadIdx.x]));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const uint32_t count = a.block_count * a.slab_count * a.chunks_per_slab;
  unsigned phase = 0;
  for (uint32_t n = blockIdx.x * blockDim.x + threadIdx.x; n < count; n += gridDim.x * blockDim.x) {
    const PackChunk chunk = pack_chunk(a, n);
    if (chunk.bytes == 0) continue;
    const uint64_t src = a.to_packed ? chunk.paged : chunk.packed;
    const uint64_t dst = a.to_packed ? chunk.packed : chunk.paged;
    const auto bytes = static_cast<unsigned>(chunk.bytes);
    // The chunk before has left the buffer.
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(buffer),
        "l"(src), "r"(bytes), "r"(barrier)
        : "memory");
    unsigned done = 0;
    while (done == 0) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
          "selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(barrier), "r"(phase)
          : "memory");
    }
    phase ^= 1;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
                 "r"(buffer), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#else
  static_cast<void>(a);
  __trap();
#endif
}

// Each warp moves chunks with loads and stores of word_bytes: for older GPUs and odd addresses.
extern "C" __global__ void kvswap_pack_words(const __grid_constant__ PackArguments a) {
  const uint32_t count = a.block_count * a.slab_count * a.chunks_per_slab;
  const unsigned lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32;
  for (uint32_t n = (blockIdx.x * blockDim.x + threadIdx.x) / 32; n < count; n += warps) {
    const PackChunk chunk = pack_chunk(a, n);
    const uint64_t src = a.to_packed ? chunk.paged : chunk.packed;
    const uint64_t dst = a.to_packed ? chunk.packed : chunk.paged;
    switch (a.word_bytes) {
      case 16:
        copy_words<uint4>(dst, src, chunk.bytes, lane);
        break;
      case 8:
        copy_words<uint2>(dst, src, chunk.bytes, lane);
        break;
      case 4:
        copy_words<uint32_t>(dst, src, chunk.bytes, lane);
        break;
      case 2:
        copy_words<uint16_t>(dst, src, chunk.bytes, lane);
        break;
      default:
        copy_words<uint8_t>(dst, src, chunk.bytes, lane);
    }
  }
}

}  // namespace kvswap
