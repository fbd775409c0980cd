#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/fragment.h"

namespace kvswap {

// Where the blocks of one side lie: block b has sizes[p] bytes at bases[p] + b * strides[p].
struct Planes {
  std::vector<uint64_t> bases, strides, sizes;
  // The allocation of each plane, as a number: copies are merged inside of one only.
  std::vector<uint64_t> allocations;
  // How many blocks were registered in one piece, which may get smaller; null: all.
  const int64_t* chunk_blocks = nullptr;

  size_t count() const { return bases.size(); }
  uint64_t address(size_t plane, int64_t block) const {
    return bases[plane] + static_cast<uint64_t>(block) * strides[plane];
  }
  // Whether two blocks were registered in one piece, so that one copy of the driver may have both.
  bool in_one_chunk(int64_t block, int64_t other) const {
    if (chunk_blocks == nullptr) return true;
    const int64_t blocks = __atomic_load_n(chunk_blocks, __ATOMIC_RELAXED);
    return block / blocks == other / blocks;
  }
};

struct PlaneRange {
  size_t begin, end;
};

// Blocks to copy between two sides: block src_blocks[i] becomes block dst_blocks[i].
struct BlockCopy {
  const Planes* src;
  const Planes* dst;
  const int64_t* src_blocks;
  const int64_t* dst_blocks;
  size_t count;
  bool src_on_host;
};

// The fragments of these planes, block after block, neighbours merged.
void add_fragments(FragmentList& fragments, const BlockCopy& copy, PlaneRange planes);

}  // namespace kvswap
