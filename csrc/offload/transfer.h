#pragma once

#include <vector>

#include "../cuda_driver.h"
#include "job.h"
#include "path.h"

namespace kvswap {

// What a transfer copies in one group, of all its jobs.
struct TransferPart {
  int group;
  Path path;
  std::vector<int64_t> blocks, slots;
};

// One copy on the device: of a job, or of several small ones. Whoever waits for its events holds it
// until the driver has been told, so that they are not recorded again in between.
struct Transfer {
  std::vector<JobRef> jobs;  // in the order of submission
  std::vector<TransferPart> parts;
  cuda::Event start = nullptr;
  std::vector<cuda::Event> ends;  // one for each group of layers; the last is the end of all
  size_t entries = 0;             // of the driver's queue
  bool end_seen = false;

  int64_t first_id() const { return jobs.front()->id; }
  int layer_groups() const { return jobs.front()->layer_groups; }
};

}  // namespace kvswap
