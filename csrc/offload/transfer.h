#pragma once

#include <list>
#include <memory>
#include <vector>

#include "device/device.h"
#include "offload/job.h"
#include "offload/slot_states.h"

namespace kvswap {

// Blocks of one group that a transfer copies by one method, of all its jobs together.
struct TransferPart {
  int group;
  CopyMethod method;
  std::vector<int64_t> blocks, slots;
  // Bytes of the same group in the parts before and after this one. The sizes of staged pieces
  // depend on them.
  uint64_t before = 0, after = 0;
  // The head or tail of a staged transfer, which is copied without staging, to keep the link busy
  // while a kernel packs or unpacks.
  bool is_head_or_tail = false;
  uint8_t* states = nullptr;          // one for each block, if the group can reject blocks
  std::vector<uint64_t> stores = {};  // the same: see PagedCopy
};

// The copies of one job, or of several small ones that were joined: they start and end together. A
// thread that is about to wait for its events holds a shared_ptr until the wait is enqueued, so
// that the events are not reused before.
struct Transfer {
  JobList jobs;                     // in the order of submission
  std::vector<TransferPart> parts;  // in the order in which they are copied
  Event start = nullptr;
  std::vector<Event> ends;   // one for each layer group; the last is the end of all
  size_t entries = 0;        // of the driver's queue
  SlotStates::Range states;  // of all parts
  // The latest jobs that its jobs must not overlap with: it waits for them.
  JobNumbers runs_after = kNoJobs;
  bool has_begun = false;  // some of its bytes may have been copied
  bool is_relayed = false;
  uint64_t exchanged_load = 0;  // its number in the exchange
  int layer_group = 0;          // the first one that is not enqueued completely
  CopyPosition next;            // what to enqueue next of it
  bool end_seen = false;

  int64_t first_id() const { return jobs.front().id; }
  bool is_exchanged() const { return jobs.front().work->is_exchanged; }
  int layer_groups() const { return jobs.front().layer_groups; }
  bool is_enqueued() const { return layer_group == layer_groups(); }
};

// A new transfer is the only item of its list. Splicing moves it to another list and cannot fail.
using Transfers = std::list<std::shared_ptr<Transfer>>;

}  // namespace kvswap
