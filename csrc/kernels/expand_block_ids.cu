#include "kernels/expand_block_ids.h"

extern "C" __global__ void kvswap_expand_block_ids(kvswap::Expansion e) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < e.count;
       i += step) {
    const int64_t j = i + e.skip;
    const int64_t block = j / e.factor;
    e.out[i * e.out_stride] = e.ids[block * e.id_stride] * e.factor + (j - block * e.factor);
  }
}
