#pragma once

// For the bindings, which include no header of torch.
namespace kvswap {

// Registers the native ops for torch's CUDA tensors. Once in a process. In a PyTorch for ROCm the
// same dispatch key means AMD's GPUs, for which the ops are made of PyTorch's operations.
void register_cuda_ops();

}  // namespace kvswap
