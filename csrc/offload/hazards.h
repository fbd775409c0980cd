#pragma once

#include <cstdint>
#include <vector>

#include "offload/group.h"
#include "offload/job.h"

namespace kvswap {

// The latest job of each channel at each GPU block and each slot of a host page.
//
// A store reads blocks and writes slots, a load reads slots and writes blocks; two jobs that share
// one, of which at least one writes it, must not overlap. The jobs of a channel run in the order of
// their numbers, so that waiting for the latest is waiting for all: one number is kept for each
// channel and block or slot, and a look-up does not cost more when more jobs are outstanding.
//
// Not thread safe: the handler has a lock.
class Hazards {
 public:
  explicit Hazards(const std::vector<Group>& groups);

  // The GPU blocks of a cache that has moved, made before rebind(), which cannot fail.
  struct Blocks {
    std::vector<int> spaces;                                   // by group
    std::vector<std::vector<int64_t>> latest[kChannels] = {};  // by space, then by id
  };
  // As many as the groups have.
  Blocks make_blocks(const std::vector<Group>& groups) const;
  void rebind(Blocks blocks) noexcept;

  // Sets `behind` of a new job.
  void order(Job& job) const noexcept;

  // Enters a job that was ordered.
  void note(const Job& job) noexcept;

  // The latest store into the slot of the work's i-th block; -1 for none.
  int64_t latest_store(const Work& work, size_t i) const noexcept;

  // The latest load of the work's i-th GPU block; -1 for none.
  int64_t latest_load(const Work& work, size_t i) const noexcept;

  // A number for the slot of the work's i-th block, of all slots of the handler.
  int64_t slot_key(const Work& work, size_t i) const noexcept;
  size_t num_slots() const { return first_key_.back(); }

 private:
  struct Latest {
    std::vector<std::vector<int64_t>> of_blocks, of_slots;  // by space, then by id
  };

  // Calls visit(block space, slot space, index) for each block.
  template <typename Visit>
  void for_each(const Work& work, const Visit& visit) const;
  static int group_of(const Work& work, size_t i);

  std::vector<int> block_space_, slot_space_;  // by group
  std::vector<int64_t> first_key_;             // by slot space
  Latest latest_[kChannels];
};

}  // namespace kvswap
