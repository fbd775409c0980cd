#pragma once

#include <vector>

#include "../cuda_driver.h"
#include "job.h"

namespace kvswap {

// One copy on the device: of a job, or of several small ones. Whoever waits for its events holds it
// until the driver has been told, so that they are not recorded again in between.
struct Transfer {
  std::vector<JobRef> jobs;  // in the order of submission
  cuda::Event start = nullptr;
  std::vector<cuda::Event> ends;  // one for each group of layers; the last is the end of all
  size_t entries = 0;             // of the driver's queue
  bool end_seen = false;

  int64_t first_id() const { return jobs.front()->id; }
};

}  // namespace kvswap
