#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "capi.h"
#include "copy/packed.h"
#include "copy/strided.h"

namespace kvswap {

// A layout and its host pool: the layers of one kind of attention or state. A host page has
// `blocks_per_page` slots, each for one block.
struct Group {
  Slabs gpu, host;
  std::vector<int64_t> layers;  // of each slab, growing; counted through all groups
  int64_t num_blocks = 0, num_pages = 0, blocks_per_page = 1;
  // Groups with the same number share their blocks, or their slots: the same id is the same memory.
  int block_space = 0, slot_space = 0;
  const kvswap_usable_pages* usable = nullptr;  // of the pool
  bool host_is_pageable = false;
  uint64_t block_bytes = 0;          // in all slabs
  std::vector<SlabRun> runs;         // of slabs at one distance
  std::shared_ptr<SlabTable> table;  // for the kernels; null where none can be used

  // Those of these slabs.
  std::vector<SlabRun> runs_of(SlabRange slabs) const {
    std::vector<SlabRun> clipped;
    for (const SlabRun& run : runs) {
      const size_t first = std::max(run.first, slabs.begin);
      const size_t end = std::min(run.first + run.count, slabs.end);
      if (first < end) clipped.push_back({first, end - first});
    }
    return clipped;
  }

  // The slabs of part `part` of `parts`, of a model with `layers_in_all` layers.
  SlabRange slabs_of(int part, int parts, int64_t layers_in_all) const {
    const auto first_of = [&](int number) -> size_t {
      const auto is_before = [&](int64_t layer) { return layer * parts / layers_in_all < number; };
      return std::partition_point(layers.begin(), layers.end(), is_before) - layers.begin();
    };
    return {first_of(part), first_of(part + 1)};
  }
};

// Whether the driver copies some of the pages inside of the call.
inline bool any_is_pageable(const std::vector<Group>& groups) {
  for (const Group& group : groups) {
    if (group.host_is_pageable) return true;
  }
  return false;
}

// Reads what Python says of a group and asks the driver for the allocations. Throws for a cache
// that is not on `device`.
Group read_group(const kvswap_group& group, int device);

}  // namespace kvswap
