#include "copy/strided.h"

#include "check.h"
#include "copy/address_map.h"

namespace kvswap {
namespace {

// Pitches are limited to 2 GiB; a longer distance is said as a number of rows.
constexpr uint64_t kMaxPitch = 0x7fffffff, kMaxRows = 4096;

struct Distance {
  uint64_t pitch = 0, height = 0;
};

// The distance between slabs as rows; a pitch of 0 where it cannot be said so.
Distance as_rows(uint64_t distance, uint64_t width) {
  for (uint64_t height = 1; height <= kMaxRows; ++height) {
    const uint64_t pitch = distance / height;
    if (pitch < width) break;
    if (pitch <= kMaxPitch && distance % height == 0) return {pitch, height};
  }
  return {};
}

uint64_t distance_at(const Slabs& slabs, size_t slab) {
  return slabs.bases[slab + 1] - slabs.bases[slab];
}

// Whether the next slab can be in one copy with `slab`, at this distance.
bool can_follow(const Slabs& side, size_t slab, uint64_t distance) {
  return side.allocations[slab + 1] == side.allocations[slab] &&
         side.sizes[slab + 1] == side.sizes[slab] && side.strides[slab + 1] == side.strides[slab] &&
         distance_at(side, slab) == distance && as_rows(distance, side.sizes[slab]).pitch != 0;
}

void fill(cuda::StridedSide& side, uint64_t address, uint64_t distance, uint64_t width,
          bool on_host) {
  const Distance rows = as_rows(distance, width);
  side.memory_type = on_host ? cuda::kHostMemory : cuda::kDeviceMemory;
  side.host = on_host ? reinterpret_cast<void*>(address) : nullptr;
  side.device = on_host ? 0 : address;
  side.pitch = rows.pitch;
  side.height = rows.height;
}

}  // namespace

std::vector<SlabRun> equidistant_runs(const Slabs& src, const Slabs& dst) {
  std::vector<SlabRun> runs;
  for (size_t s = 0; s < src.count(); ++s) {
    if (!runs.empty()) {
      SlabRun& run = runs.back();
      const uint64_t of_src = distance_at(src, run.first), of_dst = distance_at(dst, run.first);
      if (can_follow(src, s - 1, of_src) && can_follow(dst, s - 1, of_dst)) {
        ++run.count;
        continue;
      }
    }
    runs.push_back({s, 1});
  }
  return runs;
}

void copy_strided(const BlockCopy& copy, const std::vector<SlabRun>& runs, cuda::Stream stream) {
  for (const SlabRun& run : runs) {
    const size_t s = run.first;
    const uint64_t size = copy.src->sizes[s];
    const bool alone = run.count == 1;
    const uint64_t src_distance = alone ? size : distance_at(*copy.src, s);
    const uint64_t dst_distance = alone ? size : distance_at(*copy.dst, s);
    cuda::StridedCopy arguments{};
    arguments.width = size;
    arguments.height = 1;
    arguments.depth = run.count;
    for (size_t i = 0; i < copy.count; ++i) {
      const uint64_t src = copy.src->address(s, copy.src_blocks[i]);
      const uint64_t dst = copy.dst->address(s, copy.dst_blocks[i]);
      fill(arguments.src, src, src_distance, size, copy.src_on_host);
      fill(arguments.dst, dst, dst_distance, size, !copy.src_on_host);
      const cuda::Result result = cuda::driver().copy_strided_async(&arguments, stream);
      if (result == cuda::kSuccess) continue;
      fail("cuMemcpy3DAsync failed at block ", i, " of ", copy.count, ", from ", hex(src), " to ",
           hex(dst), ", ", run.count, " slabs of ", size, " bytes: ", cuda::describe(result));
    }
  }
}

}  // namespace kvswap
