#include "offload/group.h"

#include <map>
#include <utility>

namespace kvswap {
namespace {

// The least that PyTorch maps or unmaps at once in an expandable segment.
constexpr uint64_t kMappingBytes = 2 << 20;

// Whether no mapping fits between this slab and the one before it: what lies between them cannot be
// unmapped as long as both exist.
bool follows_closely(const Slabs& slabs, size_t slab, int64_t num_blocks) {
  const uint64_t end = slabs.address(slab - 1, num_blocks - 1) + slabs.sizes[slab - 1];
  return slabs.bases[slab] >= end && slabs.bases[slab] - end < kMappingBytes;
}

}  // namespace

uint64_t Group::link_bytes(int layer_groups, int64_t num_layers) const {
  if (layer_groups == 1) return encoding->packed_bytes({0, gpu.count()});
  uint64_t bytes = 0;
  for (int layer_group = 0; layer_group < layer_groups; ++layer_group) {
    const SlabRange slabs = slabs_of(layer_group, layer_groups, num_layers);
    if (slabs.begin != slabs.end) bytes += encoding->packed_bytes(slabs);
  }
  return bytes;
}

Group read_group(const GroupLayout& layout, Device& device) {
  Group group;
  static_cast<GroupLayout&>(group) = layout;
  group.host.chunk_blocks = &layout.ready_range->chunk_blocks();
  Allocations found = device.find_allocations(group.gpu.bases, group.host.bases);
  group.host.allocations = std::move(found.host);
  group.host_is_pageable = found.host_is_pageable;
  // Two storages in one range of addresses count as one allocation only if nothing between them can
  // be unmapped: the driver knows all expandable segments of a stream as one reservation, and
  // refuses a strided copy across a part of it that is not mapped, or is not any more.
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> allocations;
  for (size_t s = 0; s < group.gpu.count(); ++s) {
    const bool joins_last = s > 0 && found.cache[s] == found.cache[s - 1] &&
                            follows_closely(group.gpu, s, group.num_blocks);
    const uint64_t number = joins_last ? group.gpu.allocations.back() : s;
    const std::pair allocation(found.cache[s], layout.gpu_storages[s]);
    group.gpu.allocations.push_back(allocations.emplace(allocation, number).first->second);
  }
  for (const uint64_t size : group.gpu.sizes) group.block_bytes += size;
  group.runs = equidistant_runs(group.gpu, group.host);
  group.fragments = num_fragments(group.gpu, group.host);
  return group;
}

}  // namespace kvswap
