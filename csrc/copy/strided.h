#pragma once

#include <vector>

#include "copy/slab_runs.h"
#include "cuda/driver.h"

namespace kvswap {

// One copy for each block and run, on `stream`, whose device's context is current. Host memory is
// pinned. A driver error names the call, the block, both addresses and the sizes; what was
// submitted before it may still be copied.
void copy_strided(const BlockCopy& copy, const std::vector<SlabRun>& runs, cuda::Stream stream);

}  // namespace kvswap
