#pragma once

#include <cstddef>

namespace simulated {

// A side of CUDA_MEMCPY3D.
struct StridedSide {
  size_t x, y, z, level_of_detail;
  unsigned memory_type;
  void* host;
  unsigned long long device;
  void *array, *reserved;
  size_t pitch, height;

  unsigned long long address(size_t row, size_t slice) const {
    const auto base = memory_type == 1 ? reinterpret_cast<unsigned long long>(host) : device;
    return base + (slice * height + row) * pitch;
  }
};

// CUDA_MEMCPY3D.
struct StridedCopy {
  StridedSide src, dst;
  size_t width, height, depth;
};

}  // namespace simulated
