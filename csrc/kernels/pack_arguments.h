#pragma once

#include <cstdint>

#include "kernels/host_device.h"

// The arguments of the kernels of pack.cu. Read by nvcc and by the C++ compiler, so it has nothing
// but numbers.
namespace kvswap {

// A slab of a paged cache on the GPU: block b has `bytes` bytes at base + b * stride. In a packed
// block these bytes begin at byte `offset`.
struct SlabEntry {
  uint64_t base, stride, offset, bytes;
};

// Blocks in one launch: the arguments of a kernel are limited to 4 KiB.
constexpr unsigned kPackBlocks = 496;

// Copies blocks between the slabs and packed memory: block blocks[i] and the bytes at
// packed + slots[i] * packed_stride.
struct PackArguments {
  uint64_t slabs;  // address of the SlabEntry of the first slab of `slab_count`
  uint64_t packed, packed_stride;
  // Copies only the bytes [begin, end), counted block after block: a piece may begin or end within
  // a block.
  uint64_t begin, end, block_bytes;
  uint32_t slab_count, block_count;
  uint32_t chunk_bytes, chunks_per_slab;  // what a thread or a warp copies at a time
  uint32_t to_packed;                     // 0: from packed memory to the slabs
  uint32_t word_bytes;                    // divides all addresses and sizes
  int32_t blocks[kPackBlocks];
  int32_t slots[kPackBlocks];
};
static_assert(sizeof(PackArguments) <= 4096);

// What a thread or a warp copies at a time.
struct PackChunk {
  uint64_t paged, packed, bytes;  // bytes: 0 if there is nothing to copy
};

// Chunk `number` of block_count * slab_count * chunks_per_slab. Within a block, consecutive numbers
// are neighbours in packed memory.
KVSWAP_HOST_DEVICE inline PackChunk pack_chunk(const PackArguments& a, uint32_t number) {
  const uint32_t fragment = number / a.chunks_per_slab;
  const uint32_t i = fragment / a.slab_count;
  const auto* slabs = reinterpret_cast<const SlabEntry*>(a.slabs);
  const SlabEntry slab = slabs[fragment - i * a.slab_count];
  const uint64_t offset = slab.offset - slabs[0].offset;  // in the part of the block that is moved
  const uint64_t first = i * a.block_bytes + offset;      // of all bytes
  uint64_t from = uint64_t{number - fragment * a.chunks_per_slab} * a.chunk_bytes;
  uint64_t to = from + a.chunk_bytes < slab.bytes ? from + a.chunk_bytes : slab.bytes;
  if (first + from < a.begin) from = a.begin > first ? a.begin - first : 0;
  if (first + to > a.end) to = a.end > first ? a.end - first : 0;
  if (from >= to) return {0, 0, 0};
  return {slab.base + static_cast<uint64_t>(a.blocks[i]) * slab.stride + from,
          a.packed + static_cast<uint64_t>(a.slots[i]) * a.packed_stride + offset + from,
          to - from};
}

}  // namespace kvswap
