#pragma once

#include <cstdint>
#include <string>

namespace kvswap {

// How blocks are copied.
enum class CopyMethod : int {
  kHost = 0,
  kBatch = 1,
  kStrided = 2,
  kStaged = 3,
  kKernel = 4,
  kGeneric = 5
};
constexpr int kCopyMethods = 6;

inline const char* copy_method_name(CopyMethod method) {
  static constexpr const char* names[] = {"host",   "batch",  "strided",
                                          "staged", "kernel", "generic"};
  return names[static_cast<int>(method)];
}

// Predicted seconds of a transfer: start + blocks * block + fragments * fragment, with
// fragment_seconds[i] for a fragment of 512 << i bytes. start_seconds < 0: not known, and the
// method is not chosen.
// Predicted seconds that the submitting thread takes to give it to the driver: submit_start +
// copies * submit_copy. A copy is a fragment (batch), a block's run of equidistant slabs (strided),
// or a block (other methods). Both are 0 if not known.
struct CopyMethodCosts {
  static constexpr int kFragmentSizes = 14;

  double start_seconds = -1, block_seconds = 0;
  double submit_start_seconds = 0, submit_copy_seconds = 0;
  double fragment_seconds[kFragmentSizes] = {};
};

struct CopyMethodOptions {
  int copy_method = -1;          // for all transfers; -1: the one predicted to be fastest
  bool without_kernels = false;  // kernels are not chosen
  // How the user has asked for it, for errors: copy_method='batch' or KVSWAP_COPY_METHOD='batch'.
  std::string copy_method_setting;
  uint64_t staging_bytes = 0;              // GPU memory
  CopyMethodCosts costs[2][kCopyMethods];  // of stores, of loads
};

}  // namespace kvswap
