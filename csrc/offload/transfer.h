#pragma once

#include <list>
#include <memory>
#include <vector>

#include "cuda/driver.h"
#include "offload/job.h"

namespace kvswap {

// Blocks of one group that a transfer copies in one way, of all its jobs.
struct TransferPart {
  int group;
  Path path;
  std::vector<int64_t> blocks, slots;
  // Bytes of the same blocks' group in the parts around it: what is staged grows and shrinks with
  // them.
  uint64_t before = 0, after = 0;
  bool is_edge = false;  // keeps the link busy while what is staged is packed, or unpacked
};

// One copy on the device: of a job, or of several small ones. Whoever waits for its events holds it
// until the driver has been told, so that they are not recorded again in between.
struct Transfer {
  JobRow jobs;                      // in the order of submission
  std::vector<TransferPart> parts;  // in the order in which they are copied
  size_t later = 0;                 // those from here on are not enqueued by who submits
  double begun_at = 0;              // when the others had been
  double late_seconds = 0;          // from then until somebody went on with these
  cuda::Event start = nullptr;
  std::vector<cuda::Event> ends;  // one for each group of layers; the last is the end of all
  size_t entries = 0;             // of the driver's queue
  bool end_seen = false;

  int64_t first_id() const { return jobs.front().id; }
  int layer_groups() const { return jobs.front().layer_groups; }
};

// One is made as a list of its own, and spliced to where it belongs, which cannot fail.
using Transfers = std::list<std::shared_ptr<Transfer>>;

}  // namespace kvswap
