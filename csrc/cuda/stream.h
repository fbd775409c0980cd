#pragma once

#include <dlfcn.h>

#include "check.h"
#include "cuda/context.h"

// The current stream of PyTorch; the only place that knows libtorch_cuda.
namespace kvswap::cuda {

// libtorch_cuda is not a library of ours: a strong reference would not load with a CPU-only PyTorch
// and a weak one is null under --as-needed, so the symbol is looked up in the library that PyTorch
// has already loaded.
inline StreamRef current_stream(int device) {
  using GetStream = int (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  KVSWAP_CHECK(get_stream != nullptr, "an address on CUDA device ", device,
               " was given, but the installed PyTorch is built without CUDA and has no current "
               "stream; install a CUDA build of PyTorch");
  void* stream = nullptr;
  KVSWAP_CHECK(get_stream(device, &stream) == 0, "PyTorch has no current stream for CUDA device ",
               device);
  return {device, stream};
}

}  // namespace kvswap::cuda
