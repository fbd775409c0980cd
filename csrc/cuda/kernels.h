#pragma once

#include "cuda/driver.h"

// The library's own kernels, in a module that the driver loads: no CUDA runtime takes part.
namespace kvswap::cuda {

struct Kernels {
  Function pack_bulk = nullptr;  // null on GPUs older than Hopper
  Function pack_words = nullptr;
  Function expand_block_ids = nullptr;
};

// Those of `device`, whose context is current; loaded once for the process. Loads them completely:
// a kernel that is loaded at its first launch holds up all streams behind one that waits. Throws
// where the library was built without nvcc or has no machine code for this GPU.
const Kernels& kernels(int device);

}  // namespace kvswap::cuda
