#pragma once

#include "cuda/driver.h"

// The library's own kernels, in a module that the driver loads: no CUDA runtime takes part.
namespace kvswap::cuda {

struct Kernels {
  Function pack_bulk = nullptr;  // null on GPUs older than Hopper
  Function pack_words = nullptr;
  Function encode = nullptr, decode = nullptr;  // null on GPUs older than Ampere
  Function checksum = nullptr;
  Function expand_block_ids = nullptr;
};

// The kernels of `device`, whose context is current; loaded once in a process. Loads them
// completely: a kernel that is loaded lazily, at its first launch, blocks all streams while one of
// them waits. Throws if the library was built without nvcc or has no machine code for this GPU.
// Thread safe.
const Kernels& kernels(int device);

// Launches a kernel with these arguments, which the driver copies. what: of the launch, for errors.
template <typename Arguments, typename... What>
void launch(Function kernel, unsigned ctas, unsigned threads, unsigned shared_bytes, Stream stream,
            Arguments& arguments, const What&... what) {
  void* pointers[] = {&arguments};
  KVSWAP_DRIVER_CHECK(
      driver().launch(kernel, ctas, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, nullptr),
      "cuLaunchKernel", what...);
}

}  // namespace kvswap::cuda
