#include "prefix/arc.h"

#include <algorithm>

namespace kvswap::prefix {

Arc::Arc(std::vector<Node>& nodes) : EvictionPolicy(nodes, kFrequent), ghost_keys_(nodes.size()) {
  for (size_t i = 0; i < nodes.size(); ++i) {
    free_ghosts_.append(ghost_keys_.nodes, static_cast<uint32_t>(i));
  }
}

Admission Arc::admit(const Key& key) {
  const auto recent = static_cast<double>(ghosts_[kRecent].size());
  const auto frequent = static_cast<double>(ghosts_[kFrequent].size());
  const uint32_t ghost = ghost_keys_.find(key);
  if (ghost != kNone) {
    const bool was_frequent = ghost_keys_.nodes[ghost].list == kFrequent;
    if (was_frequent) {
      target_ = std::max(target_ - std::max(1.0, recent / frequent), 0.0);
    } else {
      target_ = std::min(target_ + std::max(1.0, frequent / recent), double(num_pages_));
    }
    drop_ghost(ghost);
    return {kFrequent, was_frequent, false};
  }
  Admission admission{kRecent, false, false};
  const size_t of_recent = sizes_[kRecent] + ghosts_[kRecent].size();
  const size_t of_frequent = sizes_[kFrequent] + ghosts_[kFrequent].size();
  if (of_recent >= num_pages_) {
    admission.leaves_no_ghost = ghosts_[kRecent].size() == 0;
    if (!admission.leaves_no_ghost) drop_ghost(ghosts_[kRecent].oldest());
  } else if (of_recent + of_frequent >= 2 * num_pages_) {
    drop_ghost(ghosts_[kFrequent].oldest());
  }
  return admission;
}

uint32_t Arc::evict(const Admission& admission) {
  const auto recent = static_cast<double>(sizes_[kRecent]);
  const bool too_many = recent > target_ || (admission.was_frequent && recent == target_);
  uint8_t side = too_many ? kRecent : kFrequent;
  if (num_idle_[side] == 0) side = side == kRecent ? kFrequent : kRecent;
  const uint32_t page = take_oldest_idle(side);
  if (!admission.leaves_no_ghost) add_ghost(nodes_[page].key, side);
  return page;
}

void Arc::drop_ghost(uint32_t ghost) {
  ghost_keys_.erase(ghost);
  ghosts_[ghost_keys_.nodes[ghost].list].remove(ghost_keys_.nodes, ghost);
  free_ghosts_.append(ghost_keys_.nodes, ghost);
}

void Arc::add_ghost(const Key& key, uint8_t side) {
  // Without held pages there is always one; with them a side may be larger than it should.
  if (free_ghosts_.size() == 0) {
    const bool recent = ghosts_[kRecent].size() > ghosts_[kFrequent].size();
    drop_ghost(ghosts_[recent ? kRecent : kFrequent].oldest());
  }
  const uint32_t ghost = free_ghosts_.take_oldest(ghost_keys_.nodes);
  ghost_keys_.insert(ghost, key);
  ghost_keys_.nodes[ghost].list = side;
  ghosts_[side].append(ghost_keys_.nodes, ghost);
}

}  // namespace kvswap::prefix
