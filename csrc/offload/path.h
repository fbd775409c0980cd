#pragma once

#include <vector>

#include "capi.h"
#include "offload/group.h"

namespace kvswap {

// Ways of copying. Python knows these numbers.
enum class Path : int { kHost = 0, kBatch = 1, kStrided = 2, kStaged = 3, kKernel = 4 };

inline const char* path_name(Path path) {
  static constexpr const char* names[] = {"host", "batch", "strided", "staged", "kernel"};
  return names[static_cast<int>(path)];
}

// Entries of the driver's queue, of which a stream has about 1,020, and seconds of the thread that
// submits them (H200).
size_t queue_entries(Path path, const Group& group, size_t blocks);
double submit_seconds(Path path, const Group& group, size_t blocks);

// Says which way is taken: the one that is predicted to end first, of those that can be had.
class PathChooser {
 public:
  PathChooser(const kvswap_path_options& options, const std::vector<Group>& groups);

  struct Transfer {
    int group, channel;
    size_t blocks;
    bool may_launch = true;  // kernels
    bool may_stage = true;   // in a buffer that is there
  };
  Path choose(const Transfer& transfer) const;
  // Infinite for a path whose figures are not known.
  double seconds(Path path, const Transfer& transfer) const;

  // Whether any transfer would take this path.
  bool wants(Path path) const;
  bool forces(Path path) const { return forced_ == static_cast<int>(path); }

 private:
  struct Group {
    bool host_is_pageable;
    double block_bytes;
    kvswap_path_costs costs[2][KVSWAP_PATHS];  // block_seconds: of all fragments, too
  };

  int forced_;
  std::vector<Group> groups_;
};

}  // namespace kvswap
