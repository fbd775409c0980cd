#include "prefix/arc.h"

#include <algorithm>

namespace kvswap::prefix {

Arc::Arc(Table& table, size_t num_pages) : EvictionPolicy(table) {
  for (size_t i = num_pages; i < 2 * num_pages; ++i) {
    free_ghosts_.append(table.nodes, static_cast<uint32_t>(i));
  }
}

Admission Arc::admit(const Key& key) {
  const auto recent = static_cast<double>(ghosts_[kRecent].size());
  const auto frequent = static_cast<double>(ghosts_[kFrequent].size());
  const uint32_t ghost = table_.find(key);
  if (ghost != kNone) {
    const bool was_frequent = table_.nodes[ghost].list == kFrequent;
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
  if (orders_[side].num_idle() == 0) side = side == kRecent ? kFrequent : kRecent;
  const uint32_t page = orders_[side].take_oldest(table_.nodes);
  --sizes_[side];
  if (admission.leaves_no_ghost) {  // all pages are recent
    table_.erase(page);
  } else {
    add_ghost(page, side);
  }
  return page;
}

void Arc::forget(uint32_t page) {
  table_.erase(page);
  --sizes_[table_.nodes[page].list];
}

void Arc::use(uint32_t page) {
  uint8_t& side = table_.nodes[page].list;
  --sizes_[side];
  side = kFrequent;
  ++sizes_[side];
}

void Arc::drop_ghost(uint32_t ghost) {
  table_.erase(ghost);
  ghosts_[table_.nodes[ghost].list].remove(table_.nodes, ghost);
  free_ghosts_.append(table_.nodes, ghost);
}

void Arc::add_ghost(uint32_t page, uint8_t side) {
  // Without held pages there is always one; with them a side may be larger than it should.
  if (free_ghosts_.size() == 0) {
    const bool recent = ghosts_[kRecent].size() > ghosts_[kFrequent].size();
    drop_ghost(ghosts_[recent ? kRecent : kFrequent].oldest());
  }
  const uint32_t ghost = free_ghosts_.take_oldest(table_.nodes);
  table_.rename(page, ghost);
  table_.nodes[ghost].list = side;
  ghosts_[side].append(table_.nodes, ghost);
}

}  // namespace kvswap::prefix
