#include <cuda_runtime.h>

#include <algorithm>

#include "check.h"
#include "expand_block_ids.h"

namespace kvswap {
namespace {

__global__ void expand(Expansion e) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < e.count;
       i += step) {
    const int64_t j = i + e.skip;
    const int64_t block = j / e.factor;
    e.out[i * e.out_stride] = e.ids[block * e.id_stride] * e.factor + (j - block * e.factor);
  }
}

}  // namespace

void expand_block_ids_on_cuda(const Expansion& expansion, void* stream) {
  constexpr int64_t kThreads = 256;
  constexpr int64_t kMaxBlocks = 4096;
  const int64_t blocks = std::min((expansion.count + kThreads - 1) / kThreads, kMaxBlocks);
  expand<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      expansion);
  const cudaError_t result = cudaGetLastError();
  KVSWAP_CHECK(result != cudaErrorInsufficientDriver,
               "the NVIDIA driver is too old for the CUDA runtime ", CUDART_VERSION / 1000, ".",
               CUDART_VERSION % 1000 / 10,
               " that this library was built with; update the driver or build with an older nvcc");
  KVSWAP_CHECK(result != cudaErrorNoKernelImageForDevice,
               "this library was built without machine code for this GPU; build it again with the "
               "GPU's architecture in TORCH_CUDA_ARCH_LIST");
  KVSWAP_CHECK(result == cudaSuccess, "launching the kernel failed: ", cudaGetErrorName(result),
               ": ", cudaGetErrorString(result));
}

}  // namespace kvswap
