#pragma once

#include "../capi.h"
#include "group.h"

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
  explicit PathChooser(const kvswap_path_options& options) : options_(options) {}

  struct Transfer {
    int channel;
    size_t blocks;
    bool background = false;  // no kernels
    bool may_stage = true;    // there are kernels and a staging buffer
    bool may_launch = true;   // there are kernels
  };
  Path choose(const Group& group, const Transfer& transfer) const;

  // Whether any transfer of the group would take this path.
  bool wants(Path path, const Group& group) const;
  bool forces(Path path) const { return options_.path == static_cast<int>(path); }

 private:
  double seconds(Path path, const Group& group, const Transfer& transfer) const;

  const kvswap_path_options options_;
};

}  // namespace kvswap
