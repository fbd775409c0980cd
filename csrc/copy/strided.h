#pragma once

#include <vector>

#include "copy/slab_runs.h"
#include "cuda/driver.h"

namespace kvswap {

// Makes one driver call for each block and run, on `stream`, whose device's context is current.
// Host memory must be pinned. A driver error names the call, the block, both addresses and the
// sizes. Copies submitted before the error still run.
void copy_strided(const BlockCopy& copy, const std::vector<SlabRun>& runs, cuda::Stream stream);

}  // namespace kvswap
