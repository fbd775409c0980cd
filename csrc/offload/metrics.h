#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "copy/copy_method.h"

namespace kvswap {

// Counts of durations: counts[0] up to 1 us, counts[i] up to 2^i us, the last one all others. sum:
// of all, in seconds.
struct Histogram {
  static constexpr int kBuckets = 26;

  uint64_t counts[kBuckets];
  double sum;

  void observe(double seconds) {
    int bucket = 0;
    for (double bound = 1e-6; seconds > bound && bucket < kBuckets - 1; bound *= 2) ++bucket;
    ++counts[bucket];
    sum += seconds;
  }
};

// The counters of a channel since the handler was made, and what it has to do now.
struct ChannelMetrics {
  uint64_t submitted, done, failed, cancelled;          // jobs
  uint64_t bytes, link_bytes;                           // of the jobs that are done
  std::vector<std::pair<int, uint64_t>> relayed_bytes;  // that relays were given, by device
  uint64_t exchanged_bytes = 0;                         // that came from other ranks
  // Blocks of the jobs that are done, or failed because some blocks were rejected. Encoded ones are
  // in groups with encoded pages. Corrupted ones do not count as rejected.
  uint64_t blocks, encoded_blocks, rejected_blocks, corrupted_blocks;
  uint64_t queued, running;                    // jobs: in software, on the device
  uint64_t transfers;                          // copies submitted to the device
  uint64_t streams, events;                    // that exist
  uint64_t jobs_by_copy_method[kCopyMethods];  // that are done
  Histogram submit, queue, copy;               // seconds
};

}  // namespace kvswap
