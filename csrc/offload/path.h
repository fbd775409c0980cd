#pragma once

#include "../copy/strided.h"
#include "group.h"

namespace kvswap {

// Ways of copying. Python knows these numbers.
enum class Path : int { kHost = 0, kBatch = 1, kStrided = 2 };

// How blocks of some planes of a group are copied, and what that costs the host.
struct CopyPlan {
  Path path;
  std::vector<PlaneRun> runs;  // of a strided copy

  // Entries of the driver's queue, of which a stream has about 1,020, and seconds of the thread
  // that submits them (H200).
  size_t queue_entries(size_t blocks, size_t planes) const;
  double submit_seconds(size_t blocks, size_t planes) const;
};

// Strided copies move a block of many planes in one call; they run at two thirds of the link and
// more from 8 KiB on, where the batch call is bound by the host. Where hardly two planes lie at one
// distance, the batch call takes less of the host.
CopyPlan plan_copy(const Group& group, PlaneRange planes, int device);

}  // namespace kvswap
