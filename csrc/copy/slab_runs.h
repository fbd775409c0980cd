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

// How many pieces a block has when slabs that are neighbours on both sides count as one.
size_t num_fragments(const Slabs& src, const Slabs& dst);

// The runs, cut to some slabs.
std::vector<SlabRun> runs_among(const std::vector<SlabRun>& runs, SlabRange slabs);

// A distance in bytes, given as `height` rows of `pitch` bytes, as the driver's strided copy wants
// it.
struct RowDistance {
  uint64_t pitch = 0, height = 0;
};

// Divides the distance between slabs into rows of `width` bytes or more. pitch: 0 if that is not
// possible within the driver's limits.
RowDistance as_rows(uint64_t distance, uint64_t width);

}  // namespace kvswap
