#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvswap {

// How blocks are copied.
enum class CopyMethod : uint8_t { kHost = 0, kBatch = 1, kStrided = 2, kStaged = 3, kKernel = 4 };
constexpr int kCopyMethods = 5;

inline const char* copy_method_name(CopyMethod method) {
  static constexpr const char* names[] = {"host", "batch", "strided", "staged", "kernel"};
  return names[static_cast<int>(method)];
}

struct CopyMethodOptions {
  int copy_method = -1;          // for all transfers; -1: the one that the rule chooses
  bool without_kernels = false;  // kernels are not chosen
  // How the user has asked for it, for errors: copy_method='batch'.
  std::string copy_method_setting;
  uint64_t staging_bytes = 0;  // GPU memory; each relay has a part of as much
  // The thread that calls store() or load() submits a job itself if that takes no longer. 64 blocks
  // of 160 x 8 KiB are more: the call, which begins them, takes 0.08 ms, and would take 0.19 ms if
  // it submitted all of them (H200). Tests change it.
  double caller_seconds = 50e-6;
  std::vector<int> relays = {};  // GPUs whose links take part in large staged copies
  bool may_exchange = false;     // large loads are staged, to be exchanged with other ranks
};

}  // namespace kvswap
