#pragma once

namespace kvswap {

// How blocks are copied. Python knows these numbers.
enum class CopyMethod : int {
  kHost = 0,
  kBatch = 1,
  kStrided = 2,
  kStaged = 3,
  kKernel = 4,
  kGeneric = 5
};

inline const char* copy_method_name(CopyMethod method) {
  static constexpr const char* names[] = {"host",   "batch",  "strided",
                                          "staged", "kernel", "generic"};
  return names[static_cast<int>(method)];
}

}  // namespace kvswap
