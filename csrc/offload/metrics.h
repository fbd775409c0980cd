#pragma once

#include <cstdint>

#include "capi.h"

namespace kvswap {

// The counters of a channel, as Python reads them.
using ChannelMetrics = kvswap_metrics;

// Buckets of powers of two: up to 1 us, up to 2 us, up to 4 us and so on.
inline void observe(kvswap_histogram& histogram, double seconds) {
  int bucket = 0;
  for (double bound = 1e-6; seconds > bound && bucket < KVSWAP_BUCKETS - 1; bound *= 2) ++bucket;
  ++histogram.counts[bucket];
  histogram.sum += seconds;
}

}  // namespace kvswap
