#include "kernels/bulk_copy.h"
#include "kernels/pack_arguments.h"

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
  const unsigned buffer = shared_address(chunks + threadIdx.x * a.chunk_bytes);
  const unsigned barrier = shared_address(&barriers[threadIdx.x]);
  init_barrier(barrier);
  publish_barriers();
  const uint32_t count = a.block_count * a.slab_count * a.chunks_per_slab;
  unsigned phase = 0;
  for (uint32_t n = blockIdx.x * blockDim.x + threadIdx.x; n < count; n += gridDim.x * blockDim.x) {
    const PackChunk chunk = pack_chunk(a, n);
    if (chunk.bytes == 0) continue;
    const uint64_t src = a.to_packed ? chunk.paged : chunk.packed;
    const uint64_t dst = a.to_packed ? chunk.packed : chunk.paged;
    const auto bytes = static_cast<unsigned>(chunk.bytes);
    wait_for_reads<0>();  // the chunk before has left the buffer
    load_bulk(buffer, src, bytes, barrier);
    wait_for_load(barrier, phase);
    phase ^= 1;
    store_bulk(dst, buffer, bytes);
    commit_stores();
  }
  wait_for_stores();
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
