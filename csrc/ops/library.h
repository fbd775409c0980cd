#pragma once

#include <cstdint>

// What the bindings, which include no header of torch, call here.
namespace kvswap {

// Registers the native ops for torch's CUDA tensors. Once in a process. In a PyTorch for ROCm the
// same dispatch key means AMD's GPUs, for which the ops are made of PyTorch's operations.
void register_cuda_ops();

// Whether a tensor of the cache has other memory now. watched: what the op _watch_cache returns.
// Called with the GIL held, so that no tensor changes meanwhile.
bool cache_has_moved(int64_t watched);
void release_cache(int64_t watched);

}  // namespace kvswap
