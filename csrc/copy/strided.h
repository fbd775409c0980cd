#pragma once

#include <cstddef>
#include <vector>

#include "copy/slabs.h"
#include "cuda/driver.h"

namespace kvswap {

// Slabs of one size at equal distances on both sides: a single strided copy of the driver moves a
// block of all of them.
struct SlabRun {
  size_t first, count;
};

std::vector<SlabRun> equidistant_runs(const Slabs& src, const Slabs& dst);

// One copy for each block and run, on `stream`, whose device's context is current. Host memory is
// pinned. A driver error names the call, the block, both addresses and the sizes; what was
// submitted before it may still be copied.
void copy_strided(const BlockCopy& copy, const std::vector<SlabRun>& runs, cuda::Stream stream);

}  // namespace kvswap
