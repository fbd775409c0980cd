#pragma once

#include <cstdint>
#include <vector>

#include "offload/group.h"
#include "offload/job.h"
#include "offload/transfer.h"

// Blocks that a transfer did not copy: their slot states say so.
namespace kvswap {

// A rejected block, by what it would have written: a slot of a store, a block of a load. A transfer
// writes each once.
struct RejectedBlock {
  int group;
  int64_t destination;
  SlotState state;

  bool operator<(const RejectedBlock& other) const {
    return group != other.group ? group < other.group : destination < other.destination;
  }
};

// Of a transfer that has ended; sorted. Allocates only if there are some.
std::vector<RejectedBlock> find_rejected(const Transfer& transfer);

// Sets Job::rejected and Job::corrupted, if some of these blocks are the job's. Returns why the job
// has failed then, or an empty reason. Corrupted blocks are named first.
Reason reject_blocks(Job& job, const std::vector<RejectedBlock>& rejected,
                     const std::vector<Group>& groups) noexcept;

}  // namespace kvswap
