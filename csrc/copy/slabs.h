#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/fragment.h"

namespace kvswap {

// A store whose number is not known yet: see PagedCopy::stores.
constexpr uint64_t kUnknownStore = ~uint64_t{0};

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
  // From this slab to the next one.
  uint64_t distance_at(size_t slab) const { return bases[slab + 1] - bases[slab]; }
  // The largest power of two, up to 16, that divides all addresses and sizes.
  uint32_t alignment() const;
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

// Blocks of a group to copy, in some of its slabs, between a cache and host pages.
struct PagedCopy {
  const Slabs* gpu;
  const Slabs* host;
  SlabRange slabs;        // one or more
  const int64_t* blocks;  // in `gpu`
  const int64_t* slots;   // in `host`, the place of each block
  size_t count;
  bool to_host;
  // Bytes of the same group that the transfer copies just before and after these. The sizes of
  // staged pieces depend on them.
  uint64_t before, after;
  // If slots can be rejected: a zero for each block, which the copy overwrites for a rejected one.
  uint8_t* states;
  // If slots have checksums: of each block the number of the store that is copied, or
  // kUnknownStore. The first copy of the block sets it, and those of other layers compare with that
  // store.
  uint64_t* stores;

  BlockCopy block_copy() const {
    if (to_host) return {gpu, host, blocks, slots, count, false};
    return {host, gpu, slots, blocks, count, true};
  }
  uint64_t states_from(size_t first) const { return reinterpret_cast<uint64_t>(states + first); }
  uint64_t host_address(size_t i) const { return host->address(slabs.begin, slots[i]); }
  // Bytes of block i between a place on the GPU and its slot.
  Fragment fragment(size_t i, uint64_t on_gpu, uint64_t in_slot, uint64_t bytes) const {
    const auto index = static_cast<int64_t>(i);
    if (to_host) return {on_gpu, in_slot, bytes, index, false};
    return {in_slot, on_gpu, bytes, index, true};
  }
  // Whether one driver copy may span the slots of block i and of the block before it.
  bool can_merge(size_t i) const { return i > 0 && host->in_one_chunk(slots[i - 1], slots[i]); }
};

// Adds the fragments of these slabs, block after block. Merges neighbours.
void add_fragments(FragmentList& fragments, const BlockCopy& copy, SlabRange slabs);

}  // namespace kvswap
