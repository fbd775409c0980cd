#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/slabs.h"

namespace kvswap {

// Slabs of one size at equal distances on both sides: a single strided copy of the driver moves a
// block of all of them.
struct SlabRun {
  size_t first, count;
};

std::vector<SlabRun> equidistant_runs(const Slabs& src, const Slabs& dst);

// The runs among some slabs.
std::vector<SlabRun> runs_among(const std::vector<SlabRun>& runs, SlabRange slabs);

// A distance in bytes as `height` rows of `pitch` bytes.
struct RowDistance {
  uint64_t pitch = 0, height = 0;
};

// The distance between slabs as rows of `width` bytes or more; a pitch of 0 where it cannot be said
// so.
RowDistance as_rows(uint64_t distance, uint64_t width);

}  // namespace kvswap
