#include "offload/group.h"

#include <map>
#include <utility>

#include "check.h"
#include "copy/address_map.h"

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

// The slots of an encoded group.
void check_slots(const Slabs& host, const SlotFormat& format) {
  constexpr uint64_t kAlignment = 16;  // of what the kernels copy at a time
  for (size_t s = 0; s < host.count(); ++s) {
    if (host.bases[s] != host.bases[0] || host.strides[s] != host.strides[0]) {
      fail<ValueError>("slab ", s, " has host pages of its own, but an encoded slot has all slabs");
    }
  }
  if (host.strides[0] < format.slot_bytes()) {
    fail<ValueError>("the host pages have slots of ", host.strides[0],
                     " bytes; an encoded block takes ", format.slot_bytes());
  }
  if ((host.bases[0] | host.strides[0]) % kAlignment != 0) {
    fail<ValueError>("the host pages begin at ", hex(host.bases[0]), ", with slots of ",
                     host.strides[0], " bytes; encoded slots need multiples of ", kAlignment);
  }
}

}  // namespace

uint64_t Group::link_bytes(int layer_groups, int64_t num_layers) const {
  if (format == nullptr) return block_bytes;
  uint64_t bytes = 0;
  for (int layer_group = 0; layer_group < layer_groups; ++layer_group) {
    const SlabRange slabs = slabs_of(layer_group, layer_groups, num_layers);
    if (slabs.begin != slabs.end) bytes += format->metadata_bytes() + format->run_bytes(slabs);
  }
  return bytes;
}

Group read_group(const GroupLayout& from, Device& device) {
  Group group;
  group.number = from.number;
  group.gpu.bases = from.gpu_bases;
  group.gpu.strides = from.gpu_strides;
  group.host.bases = from.host_bases;
  group.host.strides = from.host_strides;
  group.gpu.sizes = group.host.sizes = from.sizes;
  group.layers = from.layers;
  group.num_blocks = from.num_blocks;
  group.num_pages = from.num_pages;
  group.blocks_per_page = from.blocks_per_page;
  group.block_space = from.block_space;
  group.slot_space = from.slot_space;
  group.ready_range = from.ready_range;
  group.host.chunk_blocks = &from.ready_range->chunk_blocks();
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
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> allocations;
  for (size_t s = 0; s < group.gpu.count(); ++s) {
    const bool joins_last = s > 0 && found.cache[s] == found.cache[s - 1] &&
                            follows_closely(group.gpu, s, group.num_blocks);
    const uint64_t number = joins_last ? group.gpu.allocations.back() : s;
    const std::pair allocation(found.cache[s], from.gpu_storages[s]);
    group.gpu.allocations.push_back(allocations.emplace(allocation, number).first->second);
  }
  for (const uint64_t size : group.gpu.sizes) group.block_bytes += size;
  if (from.width_eighths == 0) {
    group.runs = equidistant_runs(group.gpu, group.host);
  } else {
    group.format = std::make_shared<SlotFormat>(group.gpu.sizes, from.width_eighths);
    group.encoding_width_eighths = from.width_eighths;
    check_slots(group.host, *group.format);
  }
  return group;
}

}  // namespace kvswap
