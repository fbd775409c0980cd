#include "offload/group.h"

#include <map>
#include <utility>

namespace kvswap {
namespace {

// The least that PyTorch maps or unmaps at once in an expandable segment.
constexpr uint64_t kMappingBytes = 2 << 20;

Slabs read_slabs(const int64_t* bases, const int64_t* strides, const int64_t* sizes,
                 int64_t count) {
  Slabs slabs;
  slabs.bases.assign(bases, bases + count);
  slabs.strides.assign(strides, strides + count);
  slabs.sizes.assign(sizes, sizes + count);
  return slabs;
}

// Whether no mapping fits between this slab and the one before it: what lies between them cannot be
// unmapped as long as both exist.
bool follows_closely(const Slabs& slabs, size_t slab, int64_t num_blocks) {
  const uint64_t end = slabs.address(slab - 1, num_blocks - 1) + slabs.sizes[slab - 1];
  return slabs.bases[slab] >= end && slabs.bases[slab] - end < kMappingBytes;
}

}  // namespace

Group read_group(const kvswap_group& from, Device& device) {
  Group group;
  group.number = from.number;
  group.gpu = read_slabs(from.gpu_bases, from.gpu_strides, from.sizes, from.num_slabs);
  group.host = read_slabs(from.host_bases, from.host_strides, from.sizes, from.num_slabs);
  group.layers.assign(from.layers, from.layers + from.num_slabs);
  group.num_blocks = from.num_blocks;
  group.num_pages = from.num_pages;
  group.blocks_per_page = from.blocks_per_page;
  group.block_space = from.block_space;
  group.slot_space = from.slot_space;
  group.ready_range = from.ready_range;
  group.host.chunk_blocks = &from.ready_range->chunk_blocks;
  const int64_t first_slot = from.ready_range->first_page * group.blocks_per_page;
  std::vector<uint64_t> first_pages;
  for (size_t s = 0; s < group.host.count(); ++s) {
    first_pages.push_back(group.host.address(s, first_slot));
  }
  Allocations found = device.find_allocations(group.gpu.bases, first_pages);
  group.host.allocations = std::move(found.host);
  group.host_is_pageable = found.host_is_pageable;
  // Two storages in one range of addresses count as one allocation only if nothing between them can
  // be unmapped: the driver knows all expandable segments of a stream as one reservation, and
  // refuses a strided copy across a part of it that is not mapped, or is not any more.
  std::map<std::pair<uint64_t, int64_t>, uint64_t> allocations;
  for (size_t s = 0; s < group.gpu.count(); ++s) {
    const bool joins_last = s > 0 && found.cache[s] == found.cache[s - 1] &&
                            follows_closely(group.gpu, s, group.num_blocks);
    const uint64_t number = joins_last ? group.gpu.allocations.back() : s;
    const std::pair allocation(found.cache[s], from.gpu_storages[s]);
    group.gpu.allocations.push_back(allocations.emplace(allocation, number).first->second);
  }
  for (const uint64_t size : group.gpu.sizes) group.block_bytes += size;
  group.runs = equidistant_runs(group.gpu, group.host);
  return group;
}

}  // namespace kvswap
