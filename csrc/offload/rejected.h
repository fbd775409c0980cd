#pragma once

#include <cstdint>
#include <memory>
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

  bool operator<(const RejectedBlock& other) const {
    return group != other.group ? group < other.group : destination < other.destination;
  }
};

// Of a transfer that has ended; sorted. Allocates only if there are some.
std::vector<RejectedBlock> find_rejected(const Transfer& transfer);

// Where these blocks are in the job's list of blocks, ascending. Null if none is.
std::unique_ptr<const std::vector<int64_t>> positions_in(
    const Job& job, const std::vector<RejectedBlock>& rejected);

// Why the job has failed: its blocks at these positions were rejected.
Reason rejection(const Job& job, const std::vector<int64_t>& positions,
                 const std::vector<Group>& groups) noexcept;

}  // namespace kvswap
