#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/fragment.h"

namespace kvswap {

// The slabs of one side of a copy, each with one layer's K or V of all blocks: block b of slab s
// has sizes[s] bytes at bases[s] + b * strides[s].
struct Slabs {
  std::vector<uint64_t> bases, strides, sizes;
  // The allocation of each slab, as a number. Copies are merged only within one allocation.
  std::vector<uint64_t> allocations;
  // How many blocks are registered in one piece; null: all of them. May get smaller at any time.
  const std::atomic<int64_t>* chunk_blocks = nullptr;

  size_t count() const { return bases.size(); }
  uint64_t address(size_t slab, int64_t block) const {
    return bases[slab] + static_cast<uint64_t>(block) * strides[slab];
  }
  // Whether two blocks were registered in one piece, so that one driver copy may span both.
  bool in_one_chunk(int64_t block, int64_t other) const {
    if (chunk_blocks == nullptr) return true;
    const int64_t blocks = chunk_blocks->load(std::memory_order_relaxed);
    return block / blocks == other / blocks;
  }
};

struct SlabRange {
  size_t begin, end;
};

// Blocks to copy from one side to the other: block src_blocks[i] becomes block dst_blocks[i].
struct BlockCopy {
  const Slabs* src;
  const Slabs* dst;
  const int64_t* src_blocks;
  const int64_t* dst_blocks;
  size_t count;
  bool src_on_host;
};

// Adds the fragments of these slabs, block after block. Merges neighbours.
void add_fragments(FragmentList& fragments, const BlockCopy& copy, SlabRange slabs);

}  // namespace kvswap
