#pragma once

#include <cstddef>
#include <vector>

#include "copy/slabs.h"
#include "cuda/driver.h"

namespace kvswap {

// Planes of one size that lie at one distance from each other on both sides: a single copy of the
// driver moves a block of all of them.
struct PlaneRun {
  size_t first, count;
};

std::vector<PlaneRun> equidistant_runs(const Planes& src, const Planes& dst);

// One copy for each block and run, on `stream`, whose device's context is current. Host memory is
// pinned. A driver error names the call, the block, both addresses and the sizes; what was
// submitted before it may still be copied.
void copy_strided(const BlockCopy& copy, const std::vector<PlaneRun>& runs, cuda::Stream stream);

}  // namespace kvswap
