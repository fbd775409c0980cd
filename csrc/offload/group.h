#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy/slab_runs.h"
#include "device/device.h"
#include "encoding/encoding.h"
#include "offload/ready_range.h"

namespace kvswap {

// The layer group of a layer, if the model's `num_layers` layers are divided into `layer_groups`.
inline int64_t layer_group_of(int64_t layer, int layer_groups, int64_t num_layers) {
  return layer * layer_groups / num_layers;
}

// A layout and its host pool, for layers that share their blocks: those of one kind of attention or
// state. A layer group is something else: a range of the model's layers, of all groups. A host page
// has `blocks_per_page` slots, each for one block.
struct GroupLayout {
  Slabs gpu, host;                     // of a Group: with their allocations
  std::vector<uint64_t> gpu_storages;  // where the storage of each slab's tensor begins
  std::vector<int64_t> layers;         // the model's layer of each slab, ascending
  int64_t num_blocks = 0, num_pages = 0, blocks_per_page = 1;
  // Groups with equal block_space share their blocks: an id is the same memory in all of them. The
  // same holds for slot_space and slots.
  int block_space = 0, slot_space = 0;
  std::shared_ptr<const Encoding> encoding;       // of the slots of host pages
  std::shared_ptr<const ReadyRange> ready_range;  // of the pool
};

// A group as Python describes it, and what its device says of its addresses.
struct Group : GroupLayout {
  bool host_is_pageable = false;
  uint64_t block_bytes = 0;          // in all slabs
  std::vector<SlabRun> runs;         // of slabs at equal distances
  size_t fragments = 0;              // of a block
  std::shared_ptr<PackTable> table;  // for the kernels; null if they cannot be used

  // The slabs in a layer group, if the model's `num_layers` layers are divided into `layer_groups`.
  SlabRange slabs_of(int layer_group, int layer_groups, int64_t num_layers) const {
    const auto first_of = [&](int number) -> size_t {
      const auto is_before = [&](int64_t layer) {
        return layer_group_of(layer, layer_groups, num_layers) < number;
      };
      return std::partition_point(layers.begin(), layers.end(), is_before) - layers.begin();
    };
    return {first_of(layer_group), first_of(layer_group + 1)};
  }

  // Bytes that a block moves over the link when its layers are copied in `layer_groups` parts.
  uint64_t link_bytes(int layer_groups, int64_t num_layers) const;
};

// Asks the device for the allocations. Throws if the cache is not in the device's memory.
Group read_group(const GroupLayout& layout, Device& device);

}  // namespace kvswap
