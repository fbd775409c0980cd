#include "copy/strided.h"

#include "check.h"
#include "copy/address_map.h"

namespace kvswap {
namespace {

// Pitches are limited to 2 GiB; a longer distance is said as a number of rows.
constexpr uint64_t kMostPitch = 0x7fffffff, kMostRows = 4096;

struct Distance {
  uint64_t pitch = 0, height = 0;
};

// The distance between planes as rows; a pitch of 0 where it cannot be said so.
Distance as_rows(uint64_t distance, uint64_t width) {
  for (uint64_t height = 1; height <= kMostRows; ++height) {
    const uint64_t pitch = distance / height;
    if (pitch < width) break;
    if (pitch <= kMostPitch && distance % height == 0) return {pitch, height};
  }
  return {};
}

uint64_t distance_at(const Planes& planes, size_t plane) {
  return planes.bases[plane + 1] - planes.bases[plane];
}

// Whether the plane behind `plane` can be in one copy with it, at this distance.
bool can_follow(const Planes& side, size_t plane, uint64_t distance) {
  return side.allocations[plane + 1] == side.allocations[plane] &&
         side.sizes[plane + 1] == side.sizes[plane] &&
         side.strides[plane + 1] == side.strides[plane] && distance_at(side, plane) == distance &&
         as_rows(distance, side.sizes[plane]).pitch != 0;
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

std::vector<PlaneRun> equidistant_runs(const Planes& src, const Planes& dst) {
  std::vector<PlaneRun> runs;
  for (size_t p = 0; p < src.count(); ++p) {
    if (!runs.empty()) {
      PlaneRun& run = runs.back();
      const uint64_t of_src = distance_at(src, run.first), of_dst = distance_at(dst, run.first);
      if (can_follow(src, p - 1, of_src) && can_follow(dst, p - 1, of_dst)) {
        ++run.count;
        continue;
      }
    }
    runs.push_back({p, 1});
  }
  return runs;
}

void copy_strided(const BlockCopy& copy, const std::vector<PlaneRun>& runs, cuda::Stream stream) {
  for (const PlaneRun& run : runs) {
    const size_t p = run.first;
    const uint64_t size = copy.src->sizes[p];
    const bool alone = run.count == 1;
    const uint64_t src_distance = alone ? size : distance_at(*copy.src, p);
    const uint64_t dst_distance = alone ? size : distance_at(*copy.dst, p);
    cuda::StridedCopy arguments{};
    arguments.width = size;
    arguments.height = 1;
    arguments.depth = run.count;
    for (size_t i = 0; i < copy.count; ++i) {
      const uint64_t src = copy.src->address(p, copy.src_blocks[i]);
      const uint64_t dst = copy.dst->address(p, copy.dst_blocks[i]);
      fill(arguments.src, src, src_distance, size, copy.src_on_host);
      fill(arguments.dst, dst, dst_distance, size, !copy.src_on_host);
      const cuda::Result result = cuda::driver().copy_strided_async(&arguments, stream);
      if (result == cuda::kSuccess) continue;
      fail("cuMemcpy3DAsync failed at block ", i, " of ", copy.count, ", from ", hex(src), " to ",
           hex(dst), ", ", run.count, " planes of ", size, " bytes: ", cuda::describe(result));
    }
  }
}

}  // namespace kvswap
