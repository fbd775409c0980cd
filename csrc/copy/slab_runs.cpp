#include "copy/slab_runs.h"

#include <algorithm>

namespace kvswap {
namespace {

// Pitches are limited to 2 GiB; a longer distance is given as a number of rows.
constexpr uint64_t kMaxPitch = 0x7fffffff, kMaxRows = 4096;

// Whether the next slab can be in one copy with `slab`, at this distance.
bool can_follow(const Slabs& side, size_t slab, uint64_t distance) {
  return side.allocations[slab + 1] == side.allocations[slab] &&
         side.sizes[slab + 1] == side.sizes[slab] && side.strides[slab + 1] == side.strides[slab] &&
         side.distance_at(slab) == distance && as_rows(distance, side.sizes[slab]).pitch != 0;
}

// Whether the next slab begins where this one ends, in each block.
bool is_continued(const Slabs& side, size_t slab) {
  return side.allocations[slab + 1] == side.allocations[slab] &&
         side.strides[slab + 1] == side.strides[slab] && side.distance_at(slab) == side.sizes[slab];
}

}  // namespace

RowDistance as_rows(uint64_t distance, uint64_t width) {
  for (uint64_t height = 1; height <= kMaxRows; ++height) {
    const uint64_t pitch = distance / height;
    if (pitch < width) break;
    if (pitch <= kMaxPitch && distance % height == 0) return {pitch, height};
  }
  return {};
}

std::vector<SlabRun> equidistant_runs(const Slabs& src, const Slabs& dst) {
  std::vector<SlabRun> runs;
  for (size_t s = 0; s < src.count(); ++s) {
    if (!runs.empty()) {
      SlabRun& run = runs.back();
      const uint64_t of_src = src.distance_at(run.first), of_dst = dst.distance_at(run.first);
      if (can_follow(src, s - 1, of_src) && can_follow(dst, s - 1, of_dst)) {
        ++run.count;
        continue;
      }
    }
    runs.push_back({s, 1});
  }
  return runs;
}

size_t num_fragments(const Slabs& src, const Slabs& dst) {
  size_t fragments = src.count();
  for (size_t s = 0; s + 1 < src.count(); ++s) {
    if (is_continued(src, s) && is_continued(dst, s)) --fragments;
  }
  return fragments;
}

std::vector<SlabRun> runs_among(const std::vector<SlabRun>& runs, SlabRange slabs) {
  std::vector<SlabRun> clipped;
  for (const SlabRun& run : runs) {
    const size_t first = std::max(run.first, slabs.begin);
    const size_t end = std::min(run.first + run.count, slabs.end);
    if (first < end) clipped.push_back({first, end - first});
  }
  return clipped;
}

}  // namespace kvswap
